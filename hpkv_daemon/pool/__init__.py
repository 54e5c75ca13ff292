"""The memory of the pool: a fully allocated file that the daemon and its movers map."""
