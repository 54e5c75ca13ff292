"""What comes into the pool and leaves it, as a stream of vLLM's KV-cache events; for late joiners all that is there.

A batch is ``[seconds since 1970, [event, ...]]`` in msgpack; events are maps with the fields of vLLM's own
(``vllm.distributed.kv_events``). Blocks are named by their keys. See ``docs/events.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import msgpack

from hpkv_client.types import BlockKey
from hpkv_daemon.core.blocks import Blocks
from hpkv_daemon.core.index import NONE, State
from hpkv_daemon.service.sessions import Reactor

FLUSH_SECONDS = 0.02
"""Changes are gathered for so long: a prefix goes out as one event."""
MOST_IN_BATCH = 1024
"""Changes in one batch: about a millisecond of the control loop."""
MOST_PENDING = 1 << 16
"""With more waiting, none of them is told: a gap in the sequence tells subscribers to ask for all that is here."""
SNAPSHOT_SLOTS = 4096
"""Slots that one part of a snapshot looks at."""

MEDIUM = "CPU"
"""vLLM's word for memory of the node."""

Send = Callable[[int, bytes], None]
"""Takes a sequence number and a batch; never waits."""


@dataclass(frozen=True, slots=True)
class _Change:
    came: bool
    namespace: int
    key: BlockKey
    parent: BlockKey | None = None


class EventStream:
    """Told of every block that becomes resident or stops being so. Control loop only.

    ``now`` is the wall clock, which the events' format wants.
    """

    def __init__(self, blocks: Blocks, reactor: Reactor, now: Callable[[], float], send: Send) -> None:
        self._blocks = blocks
        self._reactor = reactor
        self._now = now
        self._send = send
        self._pending: list[_Change] = []
        self._scheduled = False
        self.sequence = 0
        """Of the last batch; the first one has 1."""

    def came(self, slot: int) -> None:
        """The block in this slot is resident now."""
        self._note(self._arrival(slot))

    def left(self, slot: int) -> None:
        """The block in this slot is about to be resident no more."""
        self._note(_Change(False, self._blocks.table.namespace[slot], self._blocks.key_of(slot)))

    def _arrival(self, slot: int) -> _Change:
        above = self._blocks.table.parent[slot]
        parent = None if above == NONE else self._blocks.key_of(above)
        return _Change(True, self._blocks.table.namespace[slot], self._blocks.key_of(slot), parent)

    def _note(self, change: _Change) -> None:
        if len(self._pending) >= MOST_PENDING:
            self._pending.clear()
            self.sequence += 1
        self._pending.append(change)
        if not self._scheduled:
            self._scheduled = True
            self._reactor.call_later(FLUSH_SECONDS, self._flush)

    def _flush(self) -> None:
        batch, self._pending = self._pending[:MOST_IN_BATCH], self._pending[MOST_IN_BATCH:]
        self.sequence += 1
        self._send(self.sequence, self._packed(list(self._events(batch))))
        self._scheduled = bool(self._pending)
        if self._scheduled:
            self._reactor.call_later(0.0, self._flush)

    def _events(self, changes: Sequence[_Change]) -> Iterator[dict[str, object]]:
        """Neighbours together: a chain of blocks that came, or blocks of a namespace that left."""
        first = 0
        for position in range(1, len(changes) + 1):
            if position == len(changes) or not _goes_on(changes[position - 1], changes[position]):
                yield self._event(changes[first], [change.key for change in changes[first:position]])
                first = position

    def _event(self, change: _Change, keys: list[BlockKey]) -> dict[str, object]:
        home = self._blocks.namespaces[change.namespace]
        common = {"block_hashes": keys, "medium": MEDIUM, "locality": "LOCAL", "ownership": home.fingerprint.hex()}
        if not change.came:
            return {"type": "BlockRemoved", **common}
        return {
            "type": "BlockStored",
            **common,
            "parent_block_hash": change.parent,
            "token_ids": [],
            "block_size": home.block_tokens,
            "group_idx": home.group,
            "lora_id": None,
            "lora_name": None,
        }

    def _packed(self, events: list[dict[str, object]]) -> bytes:
        packed = msgpack.packb([self._now(), events], use_bin_type=True)
        assert isinstance(packed, bytes)
        return packed

    def snapshot(self) -> Iterator[tuple[int, bytes]]:
        """All that is resident, in batches that begin with ``AllBlocksCleared``; the loop may do other work in between.

        All have the number of the last batch that came before: what changes meanwhile is told by those that follow it.
        Parents may come after their children.
        """
        sequence = self.sequence
        yield sequence, self._packed([{"type": "AllBlocksCleared"}])
        table, first = self._blocks.table, 0
        while first < len(table.state):
            slots = range(first, min(first + SNAPSHOT_SLOTS, len(table.state)))
            found = (slot for slot in slots if table.state[slot] == State.RESIDENT)
            while changes := [self._arrival(slot) for slot in islice(found, MOST_IN_BATCH)]:
                yield sequence, self._packed(list(self._events(changes)))
            first += SNAPSHOT_SLOTS


def _goes_on(before: _Change, change: _Change) -> bool:
    """Whether both fit into one event."""
    alike = (before.came, before.namespace) == (change.came, change.namespace)
    return alike and (not change.came or change.parent == before.key)
