"""Blocks of bytes, kept by hpkvd, shared by every process of the node: ``BlockCache`` from a plain program.

hpkvd start
python examples/block_cache.py      # computes everything
python examples/block_cache.py      # computes nothing
"""

from __future__ import annotations

import hashlib
import sys
import time

from hpkv_client.client import BlockCache
from hpkv_client.errors import HpkvError

BLOCK_BYTES = 1 << 20
DOCUMENTS = [f"document {number}" for number in range(32)]


def expensive(document: str) -> bytes:
    """Stands for the work whose result is worth keeping."""
    time.sleep(0.02)
    return hashlib.sha256(document.encode()).digest() * (BLOCK_BYTES // 32)


def main() -> int:
    """Take what the cache has, compute the rest, keep it for the next process."""
    keys = [hashlib.sha256(document.encode()).digest() for document in DOCUMENTS]
    try:
        # The namespace keeps applications apart; every block of a cache has the same size.
        with BlockCache("example", BLOCK_BYTES) as cache:
            started = time.perf_counter()
            found = dict(zip(keys, cache.get(keys), strict=True))
            missing = {
                key: expensive(document) for key, document in zip(keys, DOCUMENTS, strict=True) if found[key] is None
            }
            kept = cache.put(missing)
            elapsed = time.perf_counter() - started
    except HpkvError as problem:
        print(f"block_cache: {problem}", file=sys.stderr)
        return problem.exit_code
    print(f"{len(keys) - len(missing)} blocks came from the cache, {kept} are new; {elapsed:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
