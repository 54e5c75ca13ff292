"""A block cache for plain programs: blocks of bytes in and out by key, shared by every process of the node.

The bytes never travel through the socket and nothing is pickled: a cache owns a piece of shared memory (its
arena), and the daemon's mover copies between the arena and the pool.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from hpkv_client.control import PAGE_BYTES, ControlPage
from hpkv_client.errors import CopyFailed, NotRegistered, UnknownSession, Unreachable, UsageError
from hpkv_client.memory import SharedMemory
from hpkv_client.session import Link, SessionKeeper
from hpkv_client.settings import from_environment
from hpkv_client.transport import Channel
from hpkv_client.types import Keys, Layer, RankShard, Run, block_key, typed_digest
from hpkv_client.wire import Body, handle_to_wire, pack_blocks, shard_to_wire

Buffer = bytes | bytearray | memoryview

_LINK_POLL_SECONDS = 0.2
_QUIET_POLL_SECONDS = 0.001


class BlockCache:
    """Put and get blocks of exactly ``block_bytes`` bytes by key.

    ``namespace`` separates applications; caches with the same namespace and block size share blocks.
    ``arena_blocks`` bounds one batch of copies (longer calls are cut). A miss is None, never an error, and so
    is a copy that failed. Not thread-safe; use as a context manager or ``close`` it. The constructor raises what
    the daemon says (``LayoutRefused`` for a block that fits no pool, ``VersionMismatch``) or ``NotRunning``,
    ``NotPermitted``, ``Unreachable``; every call raises ``Unreachable`` when there is no answer within
    ``timeout`` seconds, and works again by itself once the daemon does.
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
        self._channel = Channel(path)
        self._memory = SharedMemory(block_bytes * arena_blocks)
        self._control_memory = SharedMemory(PAGE_BYTES)
        self._control = ControlPage(self._control_memory.mapping)
        self._arena = memoryview(self._memory.mapping)
        self._job = 0
        self._withdrawn = False
        engine = f"blocks-{uuid.uuid4()}"
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
            "model": namespace[:1024].encode(errors="replace").decode(),
            "device": "cpu",
            "regions": [handle_to_wire(self._memory.handle)],
            "control": handle_to_wire(self._control_memory.handle),
            **shard_to_wire(shard),
        }

    def _connect(self) -> None:
        link = self._keeper.wait(self._timeout, lambda link: link.usable or bool(link.problem))
        if not link.usable:
            error = self._keeper.error
            self.close()
            raise error or Unreachable(link.problem or "hpkvd did not answer", "see 'hpkvd status'")

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

    def clear(self) -> int:
        """Forget every block of this namespace and block size, also those of other caches; how many were there."""
        return int(self._call("reset", {})["cleared_blocks"])

    # -- blocks in the arena, without a copy in this process -----------------------------------------------

    def block(self, index: int) -> memoryview:
        """The ``index``-th block of the arena, to fill before ``put_arena`` or to read after ``get_arena``."""
        if not 0 <= index < self.arena_blocks:
            raise UsageError(f"block {index} of an arena of {self.arena_blocks}")
        self._require_quiet()
        return self._arena[index * self.block_bytes : (index + 1) * self.block_bytes]

    def put_arena(self, keys: Sequence[bytes], indices: Iterable[int]) -> int:
        """Store arena blocks under keys; how many are kept. Returns when the arena may be overwritten."""
        answer = self._move("put", keys, indices)
        return int(answer["kept"])

    def get_arena(self, keys: Sequence[bytes], indices: Iterable[int]) -> list[bool]:
        """Fill arena blocks from the cache; which of them were found. The content of the others is undefined."""
        try:
            answer = self._move("get", keys, indices)
        except CopyFailed:
            return [False] * len(keys)
        return [bool(flag) for flag in answer["found"]]

    def _move(self, verb: str, keys: Sequence[bytes], indices: Iterable[int], **more: Any) -> Body:
        self._require_quiet()
        self._job += 1
        body = {"job": self._job, "keys": self._keys(keys), "blocks": pack_blocks(list(indices)), **more}
        try:
            return self._call(verb, body)
        except Unreachable:
            # A daemon that only sleeps may still copy when it wakes up.
            self._control.withdraw_through(self._job)
            self._withdrawn = True
            raise

    def _require_quiet(self) -> None:
        """The arena may be touched once no copy that was withdrawn still runs."""
        if not self._withdrawn:
            return
        deadline = time.monotonic() + self._timeout
        while not self._control.quiet():
            if time.monotonic() > deadline:
                raise Unreachable("a mover of hpkvd holds the arena", "see the daemon's log")
            time.sleep(_QUIET_POLL_SECONDS)
        self._withdrawn = False

    def _keys(self, keys: Sequence[bytes]) -> bytes:
        return Keys.of([block_key(self._fingerprint, 0, key) for key in keys]).blob

    def _call(self, verb: str, body: Body) -> Body:
        """Ask, and ask again when the daemon or its mover was replaced meanwhile; one deadline over all."""
        deadline = time.monotonic() + self._timeout
        while True:
            link = self._keeper.wait(deadline - time.monotonic(), lambda link: link.usable)
            if not link.usable:
                raise Unreachable(link.problem or "hpkvd is not ready", "see 'hpkvd status'")
            self._channel.session = link.session
            request = self._channel.send(verb, body)
            try:
                reply = self._reply(request, link, deadline)
            except (UnknownSession, NotRegistered):
                # It restarted, or its mover did: the keeper finds out and registers again.
                self._keeper.suspect()
                continue
            if reply is not None:
                return reply

    def _reply(self, request: int, link: Link, deadline: float) -> Body | None:
        """The answer, or None if the daemon that was asked is gone."""
        while (left := deadline - time.monotonic()) > 0:
            for reply in self._channel.replies(min(left, _LINK_POLL_SECONDS)):
                if reply.id == request:
                    return reply.result()
            now = self._keeper.link
            if now.usable and now.session != link.session:
                return None
        raise Unreachable(
            f"hpkvd on {self._channel.address} did not answer within {self._timeout:g} s",
            "see 'hpkvd status' and the daemon's log",
        )

    def close(self) -> None:
        """Leave the daemon and free the arena. Views from ``block`` must not be used afterwards.

        May be called again.
        """
        self._keeper.stop()
        self._channel.close()
        self._control.close()
        self._control_memory.close()
        self._arena.release()
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _batches(keys: Sequence[bytes], size: int) -> list[Sequence[bytes]]:
    return [keys[start : start + size] for start in range(0, len(keys), size)]
