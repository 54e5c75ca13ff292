"""Writes on their way to the store: a bounded queue, a window of orders, and the bandwidth that they may take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hpkv_daemon.tiers.base import BlockJob, Outcome
from hpkv_daemon.tiers.host import Reply
from hpkv_daemon.tiers.remote.patience import Throttle
from hpkv_daemon.tiers.remote.shared import Batch, Shared, for_each

ORDER_BYTES = 8 << 20
"""Written by one order; a single block may be larger."""
WINDOW_BYTES = 32 << 20
"""Ordered and not yet written."""


@dataclass(slots=True, eq=False)
class _Item:
    """One block to write."""

    job: BlockJob
    batch: Batch
    number: int
    void: bool = False
    """Forgotten meanwhile."""


class Writer:
    """Not thread-safe: the control loop is its only user."""

    def __init__(self, shared: Shared, throttle: Throttle) -> None:
        self._shared = shared
        self._throttle = throttle
        self._queue: deque[_Item] = deque()
        self._orders: dict[int, list[_Item]] = {}
        self._flying_bytes = 0
        self.queued_bytes = 0
        """Payloads of blocks that are not over."""

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return not self._queue and not self._orders

    def spaces(self) -> set[bytes]:
        """Namespaces of which something is being written right now."""
        return {item.job.fingerprint for order in self._orders.values() for item in order}

    def _items(self) -> list[_Item]:
        return [*self._queue, *(item for order in self._orders.values() for item in order)]

    def put(self, batch: Batch, number: int, job: BlockJob) -> None:
        """Queue a block; ``pump`` afterwards."""
        self._queue.append(_Item(job, batch, number))
        self.queued_bytes += job.length

    def void(self, fits: Callable[[BlockJob], bool]) -> None:
        """Blocks on their way that fit are not to be found afterwards."""
        for item in self._items():
            item.void = item.void or fits(item.job)

    def pump(self) -> None:
        """Order as much as window and bandwidth allow."""
        now = self._shared.clock()
        if self._shared.writing.is_open(now):
            waiting, self._queue = self._queue, deque()
            for item in waiting:
                self._over(item, Outcome.IO_ERROR, self._shared.writing.reason)
            return
        while self._queue and self._shared.process.alive and self._flying_bytes < WINDOW_BYTES:
            if not self._throttle.is_open(now):
                return
            items, size = self._next()
            if items:
                self._throttle.take(size, now)
                self._order(items, size, now)

    def _next(self) -> tuple[list[_Item], int]:
        items: list[_Item] = []
        size = 0
        while self._queue and size < ORDER_BYTES:
            item = self._queue.popleft()
            if item.void:
                self._over(item, Outcome.VOID, "")
            else:
                items.append(item)
                size += item.job.length
        return items, size

    def _order(self, items: list[_Item], size: int, now: float) -> None:
        order = self._shared.ticket()
        self._orders[order] = items
        self._flying_bytes += size
        blocks = [(job.fingerprint, job.key, job.length, job.offset) for job in (item.job for item in items)]
        self._shared.process.ask(lambda reply: self._written(order, size, now, reply), "write", blocks)

    def _written(self, order: int, size: int, started: float, reply: Reply) -> None:
        now, counters, items = self._shared.clock(), self._shared.counters, self._orders.pop(order)
        self._flying_bytes -= size
        self._shared.judge(self._shared.writing, reply)
        existed = set(reply.result or ())
        counters["write_microseconds"] += int((now - started) * 1e6)
        for index, (item, outcome) in enumerate(zip(items, for_each(reply, len(items)), strict=True)):
            if outcome is Outcome.OK:
                if index in existed:
                    counters["existing_blocks"] += 1
                else:
                    counters["written_blocks"] += 1
                    counters["written_bytes"] += item.job.length
                if not item.void:
                    self._shared.presence.learn(item.job.fingerprint, item.job.key, True, now)
            self._over(item, Outcome.VOID if item.void else outcome, reply.problem)
        self.pump()

    def _over(self, item: _Item, outcome: Outcome, problem: str) -> None:
        self.queued_bytes -= item.job.length
        if outcome not in (Outcome.OK, Outcome.VOID):
            self._shared.counters["failed_writes"] += 1
        self._shared.end(item.batch, item.number, outcome, problem)

    def check(self) -> None:
        """Raise ``AssertionError`` naming the first broken invariant."""
        queued = sum(item.job.length for item in self._items())
        assert queued == self.queued_bytes, f"{queued} bytes are queued, {self.queued_bytes} are counted"
        flying = sum(item.job.length for order in self._orders.values() for item in order)
        assert flying == self._flying_bytes, f"{flying} bytes are ordered, {self._flying_bytes} are counted"
