"""A recorder of what a disk tier acknowledged, against what it has after deaths, faults and restarts.

Nothing is found that was not written, nothing has other bytes than were written, nothing that was acknowledged is lost
unless it was evicted, and nothing that was forgotten for good comes back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpkv_client.types import typed_digest
from hpkv_daemon.tiers.base import Done, Forgotten, Outcome, State
from tests.disks import BLOCK_BYTES, MIB, POOL_BYTES, Disk, name

REOPENINGS = 10
STEPS = 45
SPACES = [typed_digest("oracle", number) for number in range(2)]
NUMBERS = range(400)
SLOTS = POOL_BYTES // BLOCK_BYTES
FAULTS = (
    "",
    "disk_write@3=fail",
    "disk_read@2=fail",
    "disk_write@5=die",
    "disk_read@4=die",
    "disk_write=delay:0.01",
    "disk_write@2=fail;disk_write@9=die",
)

Name = tuple[int, int]
"""Namespace and block."""


class Recorder:
    """Does random things to a tier, and writes down what it answers."""

    def __init__(self, path: Path, seed: int, budget: int) -> None:
        self.random = random.Random(seed)
        self.rules = path.parent / f"{path.name}-faults"
        self.rules.write_text("")
        self.disk = Disk(path, budget, faults=f"@{self.rules}").recovered()
        self.possible: set[Name] = set()
        """Written at some time, and not forgotten for good since."""
        self.certain: dict[Name, int] = {}
        """Acknowledged, and not forgotten since: the step in which it was."""
        self.step = 0
        self.slot = 0
        self.writes: dict[int, tuple[list[Name], int]] = {}
        self.reads: dict[int, list[Name]] = {}
        self.forgets: dict[int, tuple[list[Name], int]] = {}
        self.written_at: dict[Name, int] = {}
        self.forgotten_at: dict[Name, int] = {}
        self.evicted = 0
        self.acknowledged = 0
        self.reopenings = 0
        self.stamp = 0

    def some(self, count: int) -> list[Name]:
        space = self.random.randrange(len(SPACES))
        return [(space, number) for number in self.random.sample(NUMBERS, count)]

    def slots(self, count: int) -> int:
        """A range of slots that nothing else uses for the moment: they go round."""
        first = self.slot if self.slot + count <= SLOTS else 0
        self.slot = first + count
        return first

    # -- what may happen ----------------------------------------------------------------------------------

    def write(self) -> None:
        names = self.some(self.random.randint(1, 12))
        first = self.slots(len(names))
        space = SPACES[names[0][0]]
        if self.busy():
            return
        ticket = self.disk.ask_write([number for _, number in names], space, first)
        if ticket is not None:
            self.writes[ticket] = names, self.step
            self.possible.update(names)
            self.written_at.update(dict.fromkeys(names, self.step))

    def busy(self) -> bool:
        """So much is under way that the slots could meet."""
        written = sum(len(names) for names, _ in self.writes.values())
        return written + sum(len(names) for names in self.reads.values()) > SLOTS // 3

    def read(self) -> None:
        if self.busy():
            return
        names = self.some(self.random.randint(1, 8))
        jobs = self.disk.jobs([number for _, number in names], SPACES[names[0][0]], self.slots(len(names)))
        ticket = self.disk.tier.read(jobs)
        if ticket is not None:
            self.reads[ticket] = names

    def forget(self) -> None:
        names = self.some(self.random.randint(1, 5))
        space = names[0][0]
        if self.random.random() < 0.1:
            names = [(space, number) for number in NUMBERS]
            ticket = self.disk.tier.forget_namespace(SPACES[space])
        else:
            ticket = self.disk.tier.forget(SPACES[space], [name(number) for _, number in names])
        for each in names:
            self.certain.pop(each, None)
        assert not any(self.disk.has([number for _, number in names], SPACES[space]))
        self.forgets[ticket] = (names, self.step)
        self.forgotten_at.update(dict.fromkeys(names, self.step))

    def touch(self) -> None:
        names = self.some(20)
        self.disk.tier.touch(SPACES[names[0][0]], [name(number) for _, number in names])
        self.disk.skew += self.random.choice((0, 1, 5))

    def fault(self) -> None:
        self.stamp += 1
        self.rules.write_text(self.random.choice(FAULTS) + ";" * self.stamp)

    def kill(self) -> None:
        self.disk.kill()

    def go_on(self) -> None:
        """Let it work for a moment."""
        for _ in range(self.random.randint(1, 8)):
            self.disk.until(lambda: True)
            self.disk.poll()
        self.note()

    # -- what it answers ----------------------------------------------------------------------------------

    def note(self) -> None:
        for event in self.disk.events:
            if isinstance(event, Done):
                if event.ticket in self.writes:
                    names, step = self.writes.pop(event.ticket)
                    for each, outcome in zip(names, event.outcomes, strict=True):
                        # The answer comes with the last block of the batch: this one may be forgotten meanwhile.
                        stays = self.forgotten_at.get(each, -1) < step and not self.is_being_forgotten(each)
                        if outcome is Outcome.OK and stays:
                            self.certain[each] = self.step
                            self.acknowledged += 1
                for each, outcome in zip(self.reads.pop(event.ticket, []), event.outcomes, strict=False):
                    assert outcome is not Outcome.OK or each in self.possible, f"{each} was never written"
                    assert outcome is not Outcome.BAD, f"{each} is damaged"
            if isinstance(event, Forgotten):
                names, step = self.forgets.pop(event.ticket)
                # What was written again meanwhile may be there.
                self.possible -= {each for each in names if self.written_at.get(each, -1) < step}
        self.disk.events.clear()

    def is_being_forgotten(self, each: Name) -> bool:
        """A write that began before it was forgotten is answered OK if it is there a second time."""
        return any(each in names for names, _ in self.forgets.values())

    def settle(self) -> None:
        """No more faults; everything under way ends."""
        self.rules.write_text("")
        self.disk.pass_time(70)
        self.disk.until(lambda: self.disk.state() is State.READY and self.disk.tier._recovery.settled)

        def quiet() -> bool:
            self.note()
            leaving = self.disk.tier._writer.eviction._departure is not None
            return not self.writes and not self.reads and not self.forgets and not leaving

        self.disk.until(quiet)

    def compare(self) -> None:
        """All of it, against what was written down."""
        self.disk.tier.check()
        there = [
            (space, number)
            for space, fingerprint in enumerate(SPACES)
            for number, found in zip(NUMBERS, self.disk.has(NUMBERS, fingerprint), strict=True)
            if found
        ]
        assert set(there) <= self.possible, f"phantoms: {set(there) - self.possible}"
        for space, fingerprint in enumerate(SPACES):
            numbers = [number for where, number in there if where == space]
            for start in range(0, len(numbers), 100):
                outcomes = self.disk.read(numbers[start : start + 100], fingerprint)
                assert set(outcomes) <= {Outcome.OK}, outcomes
        self.disk.events.clear()
        lost = self.certain.keys() - set(there)
        assert len(lost) <= self.evicted + self.disk.counter("evicted_blocks") + self.dropped_files(), f"lost: {lost}"
        for each in lost:
            del self.certain[each]

    def dropped_files(self) -> int:
        """Blocks that reopening with a full budget may have cost: one segment each time."""
        return 0 if self.disk.tier.usage().budget_bytes > 32 * MIB else 16 * self.reopenings

    def reopen(self) -> None:
        """Polite or not, with whatever is under way."""
        self.disk.until(lambda: True)
        self.note()
        self.reopenings += 1
        closed = self.disk.tier
        self.disk.reopen(kill=self.random.random() < 0.6)
        # A polite end writes what is queued, and that may cost more than all that was there.
        self.evicted += closed.usage().counters["evicted_blocks"]
        self.writes.clear()
        self.reads.clear()
        self.forgets.clear()
        self.disk.events.clear()

    def run(self, enough: Callable[[], bool]) -> None:
        """All of it so many times; more often where a busy machine lets little of it end."""
        acts = [self.write] * 6 + [self.read] * 3 + [self.go_on] * 5 + [self.forget, self.touch, self.fault, self.kill]
        while self.reopenings < REOPENINGS or not (enough() or self.reopenings == 8 * REOPENINGS):
            for _ in range(STEPS):
                self.step += 1
                self.random.choice(acts)()
            if self.random.random() < 0.5:
                self.settle()
                self.compare()
            self.rules.write_text("")
            self.reopen()
            self.compare()


@pytest.fixture
def recorder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Recorder]:
    made = Recorder(tmp_path / "storage", *request.param)
    yield made
    made.disk.close()


@pytest.mark.parametrize("recorder", [(seed, 64 * MIB) for seed in range(3)], ids=str, indirect=True)
def test_what_was_acknowledged_is_there_and_nothing_else(recorder: Recorder) -> None:
    recorder.run(lambda: recorder.acknowledged > 20)
    assert recorder.evicted == 0
    assert recorder.acknowledged > 20


@pytest.mark.parametrize("recorder", [(seed, 6 * MIB) for seed in range(2)], ids=str, indirect=True)
def test_and_while_blocks_are_evicted_nothing_false_is_there(recorder: Recorder) -> None:
    recorder.run(lambda: recorder.evicted > 50)
    assert recorder.evicted > 50
