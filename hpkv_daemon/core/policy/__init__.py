"""Eviction policies behind one seam. A policy only names victims; the store evicts."""

from __future__ import annotations

from collections.abc import Callable

from hpkv_daemon.core.policy.base import Policy
from hpkv_daemon.core.policy.lru import Lru
from hpkv_daemon.core.policy.s3fifo import S3Fifo

POLICIES: dict[str, Callable[[], Policy]] = {"lru": Lru, "s3fifo": S3Fifo}
"""Name in the configuration -> constructor."""

__all__ = ["POLICIES", "Lru", "Policy", "S3Fifo"]
