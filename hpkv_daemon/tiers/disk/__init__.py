"""Blocks on a disk: log-structured segment files, written and read by a process of their own."""
