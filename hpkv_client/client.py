"""A block cache for plain programs: blocks of bytes in and out by key, shared by every process of the node.

The bytes never travel through the socket and nothing is pickled: a cache owns a piece of shared memory (its
arena), and the daemon's mover copies between the arena and the pool.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from hpkv_client.control import PAGE_BYTES, ControlPage
from hpkv_client.errors import NotRegistered, UnknownSession, Unreachable, UsageError
from hpkv_client.memory import SharedMemory
from hpkv_client.session import SessionKeeper
from hpkv_client.settings import from_environment
from hpkv_client.transport import Channel, require_socket
from hpkv_client.types import Keys, Layer, RankShard, Run, block_key, typed_digest
from hpkv_client.wire import Body, handle_to_wire, pack_blocks, shard_to_wire

Buffer = bytes | bytearray | memoryview


class BlockCache:
    """Put and get blocks of exactly ``block_bytes`` bytes by key.

    ``namespace`` separates applications; caches with the same namespace and block size share blocks.
    ``arena_blocks`` bounds one batch of copies (longer calls are cut). A miss is None, never an error. Not thread-safe; use as a
    context manager or ``close`` it. Raises ``NotRunning``, ``Unreachable`` and ``NotPermitted`` from the
    constructor, ``Unreachable`` when the daemon stops answering within ``timeout`` seconds.
    """

    def __init__(
        self,
        namespace: str,
        block_bytes: int,
        *,
        arena_blocks: int = 64,
        socket: Path | None = None,
        timeout: float = 10.0,
    ) -> None:
        if block_bytes < 1 or arena_blocks < 1:
            raise UsageError("block_bytes and arena_blocks must be positive")
        path = socket or Path(from_environment(os.environ).socket)
        self.block_bytes = block_bytes
        self.arena_blocks = arena_blocks
        self._timeout = timeout
        self._fingerprint = typed_digest("hpkv-blocks", namespace, block_bytes)
        self._memory = SharedMemory(block_bytes * arena_blocks)
        self._control_memory = SharedMemory(PAGE_BYTES)
        self._control = ControlPage(self._control_memory.mapping)
        self._arena = memoryview(self._memory.mapping)
        self._job = 0
        engine = f"blocks-{uuid.uuid4()}"
        self._channel = Channel(path)
        self._keeper = SessionKeeper(path, {"name": "blocks", "engine": engine}, self._registration(namespace))
        self._keeper.start()
        self._connect()

    def _registration(self, namespace: str) -> Body:
        run = Run(0, 0, self.block_bytes, 0, self.block_bytes)
        shard = RankShard((Layer("block", self.block_bytes, (run,)),), self.arena_blocks)
        return {
            "rank": 0,
            "world": 1,
            "namespace": self._fingerprint,
            "model": namespace[:1024],
            "device": "cpu",
            "regions": [handle_to_wire(self._memory.handle)],
            "control": handle_to_wire(self._control_memory.handle),
            **shard_to_wire(shard),
        }

    def _connect(self) -> None:
        link = self._keeper.wait(self._timeout, lambda link: link.usable or bool(link.problem))
        if not link.usable:
            problem = link.problem
            self.close()
            require_socket(self._channel.socket_path)
            raise Unreachable(problem or "hpkvd did not answer", "see 'hpkvd status'")

    # -- blocks as bytes ----------------------------------------------------------------------------------

    def put(self, blocks: Mapping[bytes, Buffer]) -> int:
        """Store blocks; how many the cache keeps (all of them unless it is full of blocks in use)."""
        kept = 0
        for batch in _batches(list(blocks), self.arena_blocks):
            for index, key in enumerate(batch):
                if len(blocks[key]) != self.block_bytes:
                    raise UsageError(f"a block has {self.block_bytes} bytes, not {len(blocks[key])}")
                self.block(index)[:] = blocks[key]
            kept += self.put_arena(batch, range(len(batch)))
        return kept

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The blocks, None for each that is not cached."""
        found: list[bytes | None] = []
        for batch in _batches(keys, self.arena_blocks):
            for index, here in enumerate(self.get_arena(batch, range(len(batch)))):
                found.append(bytes(self.block(index)) if here else None)
        return found

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which blocks are cached right now."""
        return [bool(flag) for flag in self._call("contains", {"keys": self._keys(keys)})["found"]]

    # -- blocks in the arena, without a copy in this process -----------------------------------------------

    def block(self, index: int) -> memoryview:
        """The ``index``-th block of the arena, to fill before ``put_arena`` or to read after ``get_arena``."""
        if not 0 <= index < self.arena_blocks:
            raise UsageError(f"block {index} of an arena of {self.arena_blocks}")
        return self._arena[index * self.block_bytes : (index + 1) * self.block_bytes]

    def put_arena(self, keys: Sequence[bytes], indices: Iterable[int]) -> int:
        """Store arena blocks under keys; how many are kept. Returns when the arena may be overwritten."""
        answer = self._move("put", keys, indices)
        return int(answer["kept"])

    def get_arena(self, keys: Sequence[bytes], indices: Iterable[int]) -> list[bool]:
        """Fill arena blocks from the cache; which of them were found. The others are left as they were."""
        answer = self._move("get", keys, indices)
        return [bool(flag) for flag in answer["found"]]

    def _move(self, verb: str, keys: Sequence[bytes], indices: Iterable[int]) -> Body:
        self._job += 1
        body = {"job": self._job, "keys": self._keys(keys), "blocks": pack_blocks(list(indices))}
        return self._call(verb, body)

    def _keys(self, keys: Sequence[bytes]) -> bytes:
        return Keys.of([block_key(self._fingerprint, 0, key) for key in keys]).blob

    def _call(self, verb: str, body: Body) -> Body:
        self._channel.session = self._keeper.link.session
        try:
            return self._channel.call(verb, body, self._timeout)
        except (UnknownSession, NotRegistered):
            # The daemon restarted: wait for the keeper to register again, then ask once more.
            before = self._channel.session
            self._keeper.suspect()
            self._keeper.wait(self._timeout, lambda link: link.usable and link.session != before)
            self._channel.session = self._keeper.link.session
            return self._channel.call(verb, body, self._timeout)

    def close(self) -> None:
        """Leave the daemon and free the arena. Views from ``block`` must not be used afterwards."""
        self._keeper.stop()
        self._channel.close()
        self._control.close()
        self._control_memory.close()
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _batches(keys: Sequence[bytes], size: int) -> list[Sequence[bytes]]:
    return [keys[start : start + size] for start in range(0, len(keys), size)]
