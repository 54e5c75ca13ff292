"""Blocks beyond the node: in a store that others run."""
