"""Client side of HPKV: the protocol, the topology rules and a block cache for plain programs."""

import logging

# A program that does not configure logging hears of errors by exceptions, not twice.
logging.getLogger(__name__).addHandler(logging.NullHandler())
