"""Sockets of the daemon."""
