"""The mover of a GPU: a process with a context of its own that copies between an engine's memory and the pool."""
