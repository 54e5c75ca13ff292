"""Another daemon's storage is copied into this one's: read there, verified, written here."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator

from hpkv_client.errors import HpkvError
from hpkv_client.types import KEY_BYTES, BlockKey
from hpkv_client.wire import Body
from hpkv_daemon.core.store import BlockStore, Reservation
from hpkv_daemon.service.sessions import Reactor
from hpkv_daemon.service.write_behind import BATCH_BYTES
from hpkv_daemon.tiers import base
from hpkv_daemon.tiers.base import BlockJob, Done, Inventory, Outcome, Recovered, Tier

log = logging.getLogger(__name__)

OWNER = "(import)"
_STAGED_SHARE = 16
"""At most about one part in this many of the pool holds blocks on their way from there to here."""

IMPORT_COUNTS = ("imported_blocks", "known_blocks", "bad_blocks", "skipped_blocks")
"""Written here; here before; damaged there; of no use here, as those larger than a segment."""

Batch = list[tuple[bytes, BlockKey, int]]
"""Fingerprint, key and payload bytes of blocks of one size."""


class Import:
    """One copy. Control loop only. Owns ``source`` until ``close``.

    Blocks pass through slots of the pool that nobody else can see: each has a key of its own in a namespace of its own.
    What is here already, and what the source reads as damaged, is left out.
    """

    def __init__(self, path: str, store: BlockStore, tier: Tier, source: Inventory, reactor: Reactor) -> None:
        self.path = path
        self._store = store
        self._tier = tier
        self._source = source
        self._reactor = reactor
        self._steps: Iterator[Batch] | None = None
        self._found: list[tuple[bytes, BlockKey, int]] = []
        """Known to be there, not looked at yet."""
        self._batch: Batch = []
        self._staged: list[Reservation] = []
        self._ticket: int | None = None
        self._writes = False
        """Whether the batch is being written here, or read there."""
        self._keys = 0
        self.over = False
        self._problem = ""
        self._counts = dict.fromkeys(IMPORT_COUNTS, 0)
        reactor.add_reader(source.fileno(), self.poll)
        source.recover()

    def progress(self) -> Body:
        """How far it is."""
        return {"over": self.over, "problem": self._problem, **self._counts}

    def poll(self) -> None:
        """What the source has to say, and the next step."""
        if self.over:
            return
        for event in self._source.poll():
            if isinstance(event, Recovered) and event.done == event.total:
                self._steps = self._source.inventory()
            elif isinstance(event, Done):
                self._have_read(event)
        usage = self._source.usage()
        if self._steps is None and usage.state is base.State.DEGRADED:
            self._end(f"{self.path}: {usage.reason}")
        self._go_on()

    def tick(self) -> None:
        """A few times a second."""
        if not self.over:
            self._source.flush()
            self.poll()

    def _go_on(self) -> None:
        """Begin the next batch, or try again what was refused, unless something is under way."""
        if self.over or self._steps is None or self._ticket is not None:
            return
        usage = self._tier.usage()
        if usage.state is base.State.DEGRADED:
            self._end(usage.reason)
        elif self._batch and self._writes:
            self._write()
        elif not self._batch and not self._fill():
            self._end("")
        elif self._batch:
            self._read()

    def _fill(self) -> bool:
        """Choose blocks of one size that are not here; False when there are none left."""
        assert self._steps is not None
        size, slots = 0, self._store.blocks.slots
        most = min(BATCH_BYTES, slots.extents * slots.extent_bytes // _STAGED_SHARE)
        while True:
            if not self._found:
                more = next(self._steps, None)
                if more is None:
                    return bool(self._batch)
                self._found = list(reversed(more))
                continue
            fingerprint, key, length = self._found[-1]
            if self._batch and (length != self._batch[0][2] or size + length > most):
                return True
            self._found.pop()
            if self._tier.match(fingerprint, (key,)):
                self._counts["known_blocks"] += 1
            elif length > self._tier.largest_block:
                self._counts["skipped_blocks"] += 1
            else:
                self._batch.append((fingerprint, key, length))
                size += length

    def _read(self) -> None:
        """Into slots of our own; if there are none now, the next tick tries again."""
        length = self._batch[0][2]
        try:
            namespace = self._store.open_namespace(hashlib.sha256(b"hpkv import %d" % length).digest(), length, OWNER)
        except HpkvError:
            self._skip()
            return
        while len(self._staged) < len(self._batch):
            self._keys += 1
            staged = self._store.reserve_each(namespace, (self._keys.to_bytes(KEY_BYTES, "big"),), OWNER)
            if staged.slots[0] < 0:
                self._store.abort(staged)
                break
            self._staged.append(staged)
        if self._staged:
            # What does not fit now comes with a later batch.
            self._found.extend(reversed(self._batch[len(self._staged) :]))
            del self._batch[len(self._staged) :]
            self._ticket = self._source.read(self._jobs())
            if self._ticket is None:
                # Refused for now: the same once more, later.
                self._found.extend(reversed(self._batch))
                self._give_back()

    def _jobs(self) -> list[BlockJob]:
        slots = [self._store.offset(staged.slots[0]) for staged in self._staged]
        pairs = zip(self._batch, slots, strict=True)
        return [BlockJob(fingerprint, key, None, length, offset) for (fingerprint, key, length), offset in pairs]

    def _have_read(self, done: Done) -> None:
        if done.ticket != self._ticket:
            return
        self._ticket = None
        good = [outcome is Outcome.OK for outcome in done.outcomes]
        self._counts["bad_blocks"] += good.count(False)
        for staged, fine in zip(self._staged, good, strict=True):
            if not fine:
                self._store.abort(staged)
        self._staged = [staged for staged, fine in zip(self._staged, good, strict=True) if fine]
        self._batch = [block for block, fine in zip(self._batch, good, strict=True) if fine]
        self._writes = bool(self._batch)

    def _write(self) -> None:
        try:
            self._ticket = self._tier.write(self._jobs())
        except ValueError as problem:
            log.warning("storage does not take blocks of %s: %s", self.path, problem)
            self._skip()

    def written(self, done: Done) -> bool:
        """A batch of the tier is over; False if it is none of these."""
        if not self._writes or done.ticket != self._ticket:
            return False
        self._ticket = None
        kept = done.outcomes.count(Outcome.OK)
        self._counts["imported_blocks"] += kept
        self._counts["skipped_blocks"] += len(done.outcomes) - kept
        self._give_back()
        # Not from here: whoever calls is in the middle of the tier's events.
        self._reactor.call_later(0.0, self.poll)
        return True

    def _skip(self) -> None:
        self._counts["skipped_blocks"] += len(self._batch)
        self._give_back()
        self._reactor.call_later(0.0, self.poll)

    def _give_back(self) -> None:
        for staged in self._staged:
            self._store.abort(staged)
        self._staged, self._batch, self._writes = [], [], False

    def _end(self, problem: str) -> None:
        self._problem = problem
        self.over = True
        self._reactor.remove_reader(self._source.fileno())
        self._source.close(0.0)
        self._give_back()
        log.info("import of %s: %s, %s", self.path, problem or "over", self._counts)

    def close(self) -> None:
        """The daemon is about to end. Slots that are being written stay as they are."""
        if not self.over:
            self.over = True
            self._reactor.remove_reader(self._source.fileno())
            self._source.close(0.0)


Opener = Callable[[str, Callable[[Inventory | HpkvError], None]], None]
"""Opens the storage in a directory apart from the control loop, then calls back in it."""
