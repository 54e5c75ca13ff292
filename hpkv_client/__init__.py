"""Client side of HPKV: the protocol, the topology rules and a block cache for plain programs."""
