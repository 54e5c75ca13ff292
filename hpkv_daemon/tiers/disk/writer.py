"""Writes on their way to the disk: a bounded queue, the open segment, and what happens when there is no room."""

from __future__ import annotations

from collections import deque

from hpkv_daemon.tiers.base import Outcome
from hpkv_daemon.tiers.disk.eviction import Eviction
from hpkv_daemon.tiers.disk.format import Kind, Record
from hpkv_daemon.tiers.disk.shared import Item, Shared, place_of
from hpkv_daemon.tiers.disk.table import Segment
from hpkv_daemon.tiers.host import Reply

ORDER_BYTES = 8 << 20
"""Written by one order; a single block may be larger."""
WINDOW_BYTES = 64 << 20
"""Ordered and not yet written: the process never runs out of work, and little is lost with it."""


class Writer:
    """Not thread-safe: the control loop is its only user. Begins to order with ``enable``."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._index = shared.index
        self._queue: deque[Item] = deque()
        self._blocks: dict[bytes, Item] = {}
        """Fingerprint and key -> block on its way."""
        self._under_way = 0
        self._beginning = False
        self._begun_again = False
        self._enabled = False
        self.queued_bytes = 0
        """Payloads of blocks that are not over."""
        self.eviction = Eviction(shared, self.put_first, self.pump)

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return not self._queue and not self._under_way and not self._beginning

    def enable(self, enabled: bool) -> None:
        """Whether there is a process that takes orders, and it is known where they may write."""
        self._enabled = enabled
        self.pump()

    def on_its_way(self, fingerprint: bytes, key: bytes) -> Item | None:
        """The block, if it is about to be written."""
        return self._blocks.get(fingerprint + key)

    def put(self, item: Item) -> None:
        """Queue a record; ``pump`` afterwards."""
        self._queue.append(item)
        if item.kind is Kind.BLOCK:
            self._blocks[item.fingerprint + item.key] = item
            self.queued_bytes += item.length

    def put_first(self, item: Item) -> None:
        """Queue a tombstone before everything else."""
        self._queue.appendleft(item)

    def void(self, fingerprint: bytes, key: bytes | None = None) -> None:
        """A block on its way, or all of a namespace, must not be found any more."""
        if key is not None:
            item = self._blocks.pop(fingerprint + key, None)
            if item is not None:
                item.void = True
            return
        for name, item in list(self._blocks.items()):
            if item.fingerprint == fingerprint:
                item.void = True
                del self._blocks[name]

    def fail_queue(self) -> None:
        """Writes make no sense now: end what is queued. Tombstones wait."""
        health = self._shared.health
        waiting, self._queue = self._queue, deque(item for item in self._queue if item.kind is not Kind.BLOCK)
        for item in waiting:
            if item.kind is Kind.BLOCK:
                self._over(item, health.outcome, health.reason)

    def probe(self) -> None:
        """Try whether writes work again."""
        segment = self._index.open
        if not self._enabled or self._beginning:
            return
        if segment is None:
            self._index.limit_bytes = self._index.budget_bytes
            self._begin()
        else:
            # The same header once more: whether it arrives is the answer.
            self._shared.process.ask(self._probed, "begin", place_of(segment))
        self.eviction.retry()

    def _probed(self, reply: Reply) -> None:
        if reply.ok:
            self._shared.health.heal()
            self.pump()
        elif reply.outcome is not Outcome.DIED:
            self._fail(reply)

    def pump(self) -> None:
        """Order as much as the window takes."""
        while self._enabled and not self._beginning and self._queue and self._under_way < WINDOW_BYTES:
            if self._shared.health.reason:
                self.fail_queue()
                return
            item, segment = self._queue[0], self._index.open
            if item.void:
                self._queue.popleft()
                self._over(item, Outcome.VOID)
            elif segment is None:
                if not self._begin():
                    return
            elif not segment.fits(item.length):
                self._seal()
            else:
                self._order(segment)

    # -- the open segment ---------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Open a segment; False when there is no file for it yet."""
        index = self._index
        if index.spares:
            number, spare = min(index.spares), True
        elif index.may_grow():
            number, spare = index.free_number(), False
        else:
            self.eviction.begin()
            return False
        segment = index.begin(number)
        self._beginning = True
        self._shared.process.ask(lambda reply: self._begun(segment, spare, reply), "begin", place_of(segment))
        return True

    def _begun(self, segment: Segment, spare: bool, reply: Reply) -> None:
        self._beginning = False
        if reply.ok:
            self._begun_again = False
            self._shared.health.heal()
            self.eviction.keep_ahead()
            self.pump()
            return
        self._index.open = None
        self._index.retired(segment.number, spare)
        if reply.outcome is Outcome.NO_SPACE and not self._begun_again:
            self._begun_again = True
            self._index.limit_bytes = self._index.used_bytes
            if self.eviction.give_room():
                self.pump()
                return
        self._begun_again = False
        if reply.outcome is not Outcome.DIED:
            self._fail(reply)

    def _seal(self) -> None:
        segment = self._index.seal()
        self._shared.process.ask(self._sealed, "seal", place_of(segment))

    def _sealed(self, reply: Reply) -> None:
        # Without its footer it is read in full by the next recovery; nothing is lost.
        if not reply.ok and reply.outcome is not Outcome.DIED:
            self._fail(reply)

    def _fail(self, reply: Reply) -> None:
        self._shared.health.fail(reply.outcome, reply.problem, self._shared.clock())
        self.fail_queue()

    # -- records ------------------------------------------------------------------------------------------

    def _order(self, segment: Segment) -> None:
        items: list[Item] = []
        records: list[Record] = []
        size = 0
        while self._queue:
            item = self._queue[0]
            if item.void or not segment.fits(item.length) or (items and size + item.length > ORDER_BYTES):
                break
            items.append(self._queue.popleft())
            records.append(
                self._index.place(item.kind, item.fingerprint, item.key, item.parent, item.length, item.before)
            )
            size += item.length
        self._under_way += size
        segment.pins += 1
        self._shared.process.ask(
            lambda reply: self._written(segment, items, records, size, reply),
            "write",
            place_of(segment),
            records,
            [item.offset for item in items],
        )

    def _written(self, segment: Segment, items: list[Item], records: list[Record], size: int, reply: Reply) -> None:
        self._under_way -= size
        segment.pins -= 1
        if reply.ok:
            self._arrived(segment, items, records)
        else:
            self._failed(items, reply)
        self.pump()

    def _arrived(self, segment: Segment, items: list[Item], records: list[Record]) -> None:
        shared, tick = self._shared, self._shared.tick()
        for item, record in zip(items, records, strict=True):
            if item.kind is not Kind.BLOCK:
                self._index.commit(segment, record, tick)
                item.end(Outcome.OK)
            elif not item.void and self._index.commit(segment, record, tick):
                shared.counters["written_blocks"] += 1
                shared.counters["written_bytes"] += item.length
                self._over(item, Outcome.OK)
            else:
                self._over(item, Outcome.VOID)

    def _failed(self, items: list[Item], reply: Reply) -> None:
        again = reply.outcome is Outcome.NO_SPACE and not items[0].retried and self.eviction.give_room()
        for item in reversed(items):
            if again or item.kind is not Kind.BLOCK:
                item.retried = True
                self._queue.appendleft(item)
            else:
                self._over(item, reply.outcome, reply.problem)
        if not again and reply.outcome in (Outcome.NO_SPACE, Outcome.IO_ERROR, Outcome.READ_ONLY):
            self._fail(reply)

    def _over(self, item: Item, outcome: Outcome, problem: str = "") -> None:
        self.queued_bytes -= item.length
        name = item.fingerprint + item.key
        if self._blocks.get(name) is item:
            del self._blocks[name]
        if outcome not in (Outcome.OK, Outcome.VOID):
            self._shared.counters["failed_writes"] += 1
        item.end(outcome, problem)
