"""The disk tier with its real process, on a real disk."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpkv_client.errors import Busy, ConfigError
from hpkv_client.types import typed_digest
from hpkv_daemon.tiers import host
from hpkv_daemon.tiers.base import BlockJob, Changed, Direction, Done, Outcome, Recovered, Scrubbed, State
from hpkv_daemon.tiers.disk import directory
from hpkv_daemon.tiers.disk.directory import LOCK_NAME, StorageDirectory
from hpkv_daemon.tiers.disk.format import PAGE, BadFormat
from hpkv_daemon.tiers.disk.process import judge
from hpkv_daemon.tiers.disk.table import Phase
from hpkv_daemon.tiers.noop import NoopTier
from tests.disks import BLOCK_BYTES, MIB, SEGMENT_BYTES, SPACE, Disk, name
from tests.support import is_gone, wait_until

OTHER = typed_digest("test", "other")
OK, BAD = Outcome.OK, Outcome.BAD
PER_SEGMENT = 14
"""Blocks that certainly fit."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    """``disk(budget=..., ...)``: a recovered tier in ``tmp_path``, or in ``path``."""
    opened: list[Disk] = []

    def open_disk(path: Path = tmp_path, **options: Any) -> Disk:
        opened.append(Disk(path, **options))
        return opened[-1].recovered()

    yield open_disk
    for each in opened:
        each.close()


def faults(tmp_path: Path, rules: str = "") -> Path:
    """A file with fault rules that can be changed."""
    path = tmp_path.parent / f"{tmp_path.name}-faults"
    path.write_text(rules)
    return path


# -- blocks -----------------------------------------------------------------------------------------------


def test_blocks_come_back_as_they_were(disk: Callable[..., Disk]) -> None:
    tier = disk()
    assert tier.write(range(40)) == (OK,) * 40
    assert tier.has(range(41)) == [True] * 40 + [False]
    assert tier.tier.match(SPACE, [name(n) for n in range(50)]) == 40
    assert tier.read(range(40)) == (OK,) * 40
    usage = tier.tier.usage()
    assert (usage.state, usage.blocks, usage.live_bytes) == (State.READY, 40, 40 * BLOCK_BYTES)
    assert usage.queued_bytes == 0
    assert (usage.counters["written_bytes"], usage.counters["read_blocks"]) == (40 * BLOCK_BYTES, 40)


def test_a_namespace_does_not_serve_the_keys_of_another(disk: Callable[..., Disk]) -> None:
    tier = disk()
    tier.write(range(5))
    tier.write(range(3), OTHER)
    assert tier.has(range(5), OTHER) == [True] * 3 + [False] * 2
    assert tier.read(range(5), OTHER) == (OK,) * 3 + (Outcome.MISSING,) * 2


@pytest.mark.parametrize("kill", [False, True], ids=["closed", "killed"])
def test_blocks_outlive_the_tier(disk: Callable[..., Disk], kill: bool) -> None:
    tier = disk()
    tier.write(range(40))
    tier.reopen(kill=kill)
    assert all(tier.has(range(40)))
    assert tier.read(range(40)) == (OK,) * 40
    tier.tier.check()


def test_a_restart_writes_on_in_the_segment_that_has_room(disk: Callable[..., Disk]) -> None:
    tier = disk()
    for number in range(6):
        tier.write([number])
        tier.reopen(kill=number % 2 == 1)
    assert all(tier.has(range(6)))
    assert tier.on_disk() == SEGMENT_BYTES


def test_a_block_that_is_there_or_on_its_way_is_not_written_twice(disk: Callable[..., Disk]) -> None:
    tier = disk()
    tickets = [tier.ask_write(range(20)) for _ in range(3)]
    assert [tier.done(ticket) for ticket in tickets] == [(OK,) * 20] * 3
    assert tier.write(range(20)) == (OK,) * 20
    assert tier.counter("written_blocks") == 20


def test_the_descriptor_is_readable_when_there_is_news_and_only_then(disk: Callable[..., Disk]) -> None:
    tier = disk()
    tier.write([1])
    tier.until(lambda: not tier.poll() and not select.select([tier.tier], [], [], 0.2)[0])
    assert tier.ask_write([1]) is not None
    assert select.select([tier.tier], [], [], 0)[0], "the end of a batch that needs no process"
    assert [type(event) for event in tier.poll()] == [Done]
    tier.ask_write([2])
    assert select.select([tier.tier], [], [], 5)[0]


def test_done_tells_what_was_moved(disk: Callable[..., Disk]) -> None:
    tier = disk()
    ticket = tier.ask_write(range(4))
    tier.done(ticket)
    (done,) = [event for event in tier.events if isinstance(event, Done)]
    assert (done.ticket, done.direction, done.bytes_moved, done.problem) == (
        ticket,
        Direction.WRITE,
        4 * BLOCK_BYTES,
        "",
    )
    assert 0 < done.seconds < 20


@pytest.mark.parametrize(
    "job",
    [
        BlockJob(b"short", name(1), None, 100, 0),
        BlockJob(SPACE, b"short", None, 100, 0),
        BlockJob(SPACE, name(1), b"short", 100, 0),
        BlockJob(SPACE, name(1), None, 0, 0),
        BlockJob(SPACE, name(1), None, 100, 17),
        BlockJob(SPACE, name(1), None, 100, -PAGE),
        BlockJob(SPACE, name(1), None, 100, 1 << 40),
        BlockJob(SPACE, name(1), None, BLOCK_BYTES - 1, 0),
    ],
)
def test_a_malformed_job_is_refused_with_an_error(disk: Callable[..., Disk], job: BlockJob) -> None:
    tier = disk()
    tier.write([0])
    with pytest.raises(ValueError, match=r"malformed|no slot|do not have"):
        tier.tier.write([job])
    with pytest.raises(ValueError, match=r"malformed|no slot|do not have"):
        tier.tier.read([job])


def test_a_batch_that_does_not_fit_into_the_queue_is_refused_at_once(disk: Callable[..., Disk]) -> None:
    tier = disk(queue_bytes=10 * BLOCK_BYTES)
    assert tier.ask_write(range(11)) is None
    first = tier.ask_write(range(8))
    assert tier.ask_write(range(20, 23), first=20) is None
    assert tier.counter("refused_writes") == 14
    tier.done(first)
    assert tier.write(range(20, 23)) == (OK,) * 3
    assert tier.tier.read(tier.jobs(range(11))) is None
    assert tier.counter("refused_reads") == 11


def test_a_block_larger_than_a_segment_is_refused(disk: Callable[..., Disk]) -> None:
    tier = disk()
    tier.block_bytes = tier.tier.largest_block
    assert tier.write([1]) == (OK,)
    assert tier.read([1]) == (OK,)
    tier.block_bytes += PAGE
    assert tier.ask_write([2], OTHER) is None


# -- damage -----------------------------------------------------------------------------------------------


def test_a_damaged_block_is_not_served_and_forgotten(disk: Callable[..., Disk]) -> None:
    tier = disk()
    tier.write(range(5))
    found = tier.tier._index.find(SPACE, name(2))
    assert found is not None
    with (tier.path / f"segment-{found[0].number:05}.hpkv").open("r+b") as file:
        file.seek(found[1].offset + PAGE + 1000)
        file.write(b"\xff\x00\xff")
    assert tier.read(range(5)) == (OK, OK, BAD, OK, OK)
    assert tier.has(range(5)) == [True, True, False, True, True]
    assert tier.counter("bad_records") == 1
    tier.tier.check()


def test_a_scrub_finds_what_nobody_reads(disk: Callable[..., Disk]) -> None:
    tier = disk()
    tier.write(range(40))
    found = tier.tier._index.find(SPACE, name(20))
    assert found is not None
    with (tier.path / f"segment-{found[0].number:05}.hpkv").open("r+b") as file:
        file.seek(found[1].offset + 10)
        file.write(b"\xff")
    assert tier.tier.scrub(1 << 30)
    assert not tier.tier.scrub(1 << 30)
    tier.until(lambda: any(isinstance(e, Scrubbed) and e.done == e.total for e in tier.events))
    progress = [event for event in tier.events if isinstance(event, Scrubbed)]
    assert [event.done for event in progress] == list(range(1, progress[-1].total + 1))
    assert (progress[-1].good, progress[-1].bad) == (39, 1)
    assert tier.has([20]) == [False]
    assert tier.tier.scrub(1 << 30)


def test_a_scrub_keeps_its_pace(disk: Callable[..., Disk]) -> None:
    tier = disk()
    tier.write(range(16))
    started = time.monotonic()
    tier.tier.scrub(2 * MIB)
    tier.until(lambda: any(isinstance(e, Scrubbed) and e.done == e.total for e in tier.events))
    assert time.monotonic() - started > 0.4


def test_files_that_were_removed_meanwhile_cost_only_their_blocks(disk: Callable[..., Disk]) -> None:
    tier = disk()
    tier.write(range(60))
    for file in sorted(tier.path.glob("segment-*.hpkv"))[:2]:
        file.unlink()
    tier.kill()
    tier.until(lambda: tier.counter("restarts") == 1 and tier.tier._recovery.settled)
    left = [n for n, there in enumerate(tier.has(range(60))) if there]
    assert 10 < len(left) < 50
    assert tier.read(left) == (OK,) * len(left)
    assert tier.write(range(100, 140)) == (OK,) * 40
    tier.tier.check()


# -- eviction ---------------------------------------------------------------------------------------------


def test_the_budget_holds_while_old_blocks_make_room_for_new_ones(disk: Callable[..., Disk]) -> None:
    tier = disk(budget=4 * MIB)
    for start in range(0, 200, 10):
        assert tier.write(range(start, start + 10)) == (OK,) * 10
        assert tier.on_disk() <= 4 * MIB
        tier.tier.check()
    there = tier.has(range(200))
    assert all(there[-2 * PER_SEGMENT :])
    assert not any(there[:100])
    assert tier.counter("evicted_blocks") == there.count(False)


def test_hot_blocks_stay_when_their_segment_goes(disk: Callable[..., Disk]) -> None:
    tier = disk(budget=4 * MIB)
    tier.write(range(10))
    for start in range(10, 200, 10):
        tier.pass_time(2)
        assert tier.read([3, 4]) == (OK, OK)
        tier.write(range(start, start + 10))
    assert tier.has(range(10)) == [number in (3, 4) for number in range(10)]
    assert tier.counter("reinserted_blocks") >= 4
    assert tier.read([3, 4]) == (OK, OK)
    tier.reopen()
    assert tier.read([3, 4]) == (OK, OK)


def test_touched_blocks_are_hot_as_well(disk: Callable[..., Disk]) -> None:
    tier = disk(budget=4 * MIB)
    tier.write(range(10))
    for start in range(10, 100, 10):
        tier.pass_time(2)
        tier.tier.touch(SPACE, [name(7), name("unknown")])
        tier.write(range(start, start + 10))
    assert tier.has([7, 8]) == [True, False]


def test_a_smaller_budget_holds_from_the_first_moment(disk: Callable[..., Disk]) -> None:
    tier = disk(budget=10 * MIB)
    tier.write(range(100))
    tier.reopen(budget=4 * MIB)
    assert tier.on_disk() <= 4 * MIB
    there = tier.has(range(100))
    assert 2 * PER_SEGMENT <= there.count(True) <= 4 * 16
    assert there == sorted(there), "the oldest went first"
    for start in range(200, 260, 10):
        tier.write(range(start, start + 10))
        assert tier.on_disk() <= 4 * MIB
    assert tier.read(range(250, 260)) == (OK,) * 10


def test_other_sizes_of_segments_are_replaced_in_time(disk: Callable[..., Disk]) -> None:
    tier = disk(budget=8 * MIB)
    tier.write(range(60))
    tier.reopen(budget=8 * MIB, segment_bytes=2 * MIB)
    assert all(tier.has(range(60)))
    for start in range(100, 300, 10):
        assert tier.write(range(start, start + 10)) == (OK,) * 10
        assert tier.on_disk() <= 8 * MIB
    assert {file.stat().st_size for file in tier.path.glob("segment-*.hpkv")} == {2 * MIB}


def test_the_life_of_a_file_is_never_given_twice(disk: Callable[..., Disk]) -> None:
    """Records of its earlier life would check out."""
    tier = disk(budget=4 * MIB)
    for start in range(0, 60, 10):
        tier.write(range(start, start + 10))
    tier.until(lambda: tier.tier._writer.eviction._departure is None)
    # The latest segment is forgotten as a whole, so it is the first to leave, and the tier ends then.
    index = tier.tier._index
    tier.is_durable(tier.tier.forget(SPACE, [name(n) for n in range(60)]))
    last = max(life for life in (segment.life for segment in index.segments.values()))
    while index.segments:
        segment = next(iter(index.segments.values()))
        if segment is index.open:
            index.seal()
        segment.phase = Phase.LEAVING
        tier.tier._writer.eviction._retire(segment, SEGMENT_BYTES)
        tier.until(lambda segment=segment: index.segments.get(segment.number) is not segment)
    tier.reopen()
    tier.write([1])
    assert [segment.life for segment in tier.tier._index.segments.values()] == [last + 1]


# -- forgetting -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kill", [False, True], ids=["closed", "killed"])
def test_what_is_forgotten_stays_forgotten(disk: Callable[..., Disk], kill: bool) -> None:
    tier = disk()
    tier.write(range(30))
    tier.write(range(30), OTHER)
    tickets = [tier.tier.forget(SPACE, [name(3), name(4), name("unknown")]), tier.tier.forget_namespace(OTHER)]
    assert tier.has([2, 3, 4]) == [True, False, False]
    assert not any(tier.has(range(30), OTHER))
    for ticket in tickets:
        tier.is_durable(ticket)
    tier.write([4])
    tier.write([7], OTHER)
    tier.reopen(kill=kill)
    assert tier.has([2, 3, 4]) == [True, False, True]
    assert tier.has(range(30), OTHER) == [number == 7 for number in range(30)]
    tier.tier.check()


def test_what_is_on_its_way_when_it_is_forgotten_does_not_arrive(disk: Callable[..., Disk]) -> None:
    tier = disk()
    ticket = tier.ask_write(range(40))
    forgotten = tier.tier.forget(SPACE, [name(5)])
    assert tier.done(ticket) == tuple(Outcome.VOID if number == 5 else OK for number in range(40))
    ticket = tier.ask_write(range(100, 140))
    again = tier.tier.forget_namespace(SPACE)
    assert set(tier.done(ticket)) == {Outcome.VOID}
    tier.is_durable(forgotten)
    tier.is_durable(again)
    assert not any(tier.has(range(140)))
    tier.reopen()
    assert not any(tier.has(range(140)))


def test_nor_does_what_the_process_is_writing_already(disk: Callable[..., Disk]) -> None:
    tier = disk()
    tier.write([0])
    ticket = tier.ask_write([5, 6])
    assert not tier.tier._writer._queue, "it was ordered at once"
    tier.is_durable(tier.tier.forget(SPACE, [name(5)]))
    assert tier.done(ticket) == (Outcome.VOID, OK)
    assert tier.has([0, 5, 6]) == [True, False, True]
    tier.reopen(kill=True)
    assert tier.has([0, 5, 6]) == [True, False, True]


def test_a_tombstone_outlives_its_segment_while_older_ones_are_there(disk: Callable[..., Disk]) -> None:
    tier = disk(budget=5 * MIB)
    tier.write(range(PER_SEGMENT))
    tier.write(range(50, 58))
    tier.is_durable(tier.tier.forget(SPACE, [name(n) for n in range(10)]))
    # The oldest segment is kept by the use of what is left in it; the one with the tombstones goes.
    for start in range(100, 300, 10):
        tier.pass_time(2)
        tier.tier.touch(SPACE, [name(n) for n in range(10, PER_SEGMENT)])
        tier.write(range(start, start + 10))
    lives = {segment.life for segment in tier.tier._index.segments.values()}
    assert 1 in lives
    assert 2 not in lives
    assert not any(tier.has(range(10)))
    tier.reopen(kill=True)
    assert tier.has(range(PER_SEGMENT)) == [number >= 10 for number in range(PER_SEGMENT)]


def test_a_namespace_can_be_forgotten_before_it_is_recovered(tmp_path: Path) -> None:
    tier = Disk(tmp_path)
    try:
        tier.recovered().write(range(30))
        tier.tier.close(5)
        tier.tier = tier._open(16 * MIB, {})
        ticket = tier.tier.forget_namespace(SPACE)
        tier.recovered().is_durable(ticket)
        assert not any(tier.has(range(30)))
        tier.reopen(kill=True)
        assert not any(tier.has(range(30)))
    finally:
        tier.close()


# -- what goes wrong --------------------------------------------------------------------------------------


def test_a_killed_process_is_replaced_and_its_jobs_fail(disk: Callable[..., Disk], tmp_path: Path) -> None:
    rules = faults(tmp_path)
    tier = disk(faults=f"@{rules}")
    tier.write(range(20))
    rules.write_text("disk_write=delay:0.3;disk_read=delay:0.3")
    tickets = [tier.ask_write(range(50, 60)), tier.tier.read(tier.jobs(range(10), first=100))]
    pid = tier.tier.usage().pid
    tier.kill()
    written, read = [tier.done(ticket) for ticket in tickets]
    assert set(read) == {Outcome.DIED}
    # Those that had not been ordered yet were the next process' work.
    assert written[0] is Outcome.DIED
    assert tier.has(range(50, 60)) == [outcome is OK for outcome in written]
    assert is_gone(pid)
    rules.write_text("")
    tier.until(lambda: tier.counter("restarts") == 1 and tier.tier._recovery.settled)
    assert all(tier.has(range(20)))
    assert tier.read(range(20)) == (OK,) * 20
    assert tier.write(range(50, 60)) == (OK,) * 10
    tier.tier.check()


def test_writes_wait_while_there_is_no_process(disk: Callable[..., Disk]) -> None:
    tier = disk()
    tier.write(range(5))
    tier.kill()
    tier.until(lambda: not tier.tier._process.alive)
    ticket = tier.ask_write(range(5, 10))
    assert tier.tier.read(tier.jobs(range(5))) is None
    assert tier.done(ticket) == (OK,) * 5
    assert tier.read(range(10)) == (OK,) * 10


def test_a_process_that_does_not_answer_is_replaced(disk: Callable[..., Disk]) -> None:
    tier = disk()
    tier.write(range(5))
    os.kill(tier.tier.usage().pid, signal.SIGSTOP)
    ticket = tier.tier.read(tier.jobs(range(5)))
    tier.poll()
    tier.skew += host.ANSWER_SECONDS + 1
    assert set(tier.done(ticket)) == {Outcome.DIED}
    tier.until(lambda: tier.counter("restarts") == 1 and tier.tier._recovery.settled)
    assert tier.read(range(5)) == (OK,) * 5


def test_a_process_that_dies_again_and_again_is_restarted_ever_later(
    disk: Callable[..., Disk],
) -> None:
    tier = disk()
    pauses = []
    for _ in range(3):
        tier.kill()
        tier.until(lambda: not tier.tier._process.alive)
        pauses.append(tier.tier._process._restart_at - tier.tier._clock())
        tier.skew += pauses[-1]
        tier.until(lambda: tier.tier._recovery.settled)
    assert pauses[0] < pauses[1] < pauses[2] <= host.LAST_RESTART_SECONDS


def test_a_full_file_system_costs_blocks_and_then_writes_but_no_reads(
    disk: Callable[..., Disk], tmpfs: Callable[[str], Path]
) -> None:
    path = tmpfs("6m")
    tier = disk(path=path / "storage", budget=64 * MIB)
    for start in range(0, 120, 10):
        assert tier.write(range(start, start + 10)) == (OK,) * 10
    assert tier.state() is State.READY
    assert tier.read(range(110, 120)) == (OK,) * 10
    # Somebody else takes the rest, and what is evicted.
    tier.reopen()
    squatter = path / "squatter"
    with squatter.open("wb") as file:
        for victim in path.glob("storage/segment-*.hpkv"):
            victim.unlink()
        tier.kill()
        tier.until(lambda: not tier.tier._process.alive)
        os.posix_fallocate(file.fileno(), 0, 5 * MIB + 600_000)
    tier.until(lambda: tier.tier._recovery.settled)
    assert set(tier.write(range(500, 510))) == {Outcome.NO_SPACE}
    tier.poll()
    assert Changed(State.DEGRADED, "No space left on device") in tier.events
    assert tier.ask_write(range(10)) is None
    squatter.unlink()
    tier.pass_time(70)
    tier.until(lambda: tier.state() is State.READY)
    assert tier.write(range(500, 510)) == (OK,) * 10
    assert tier.read(range(500, 510)) == (OK,) * 10


def test_no_room_in_the_middle_evicts_and_tries_once_more(
    disk: Callable[..., Disk], tmpfs: Callable[[str], Path]
) -> None:
    path = tmpfs("5m")
    tier = disk(path=path / "storage", budget=64 * MIB)
    for start in range(0, 200, 10):
        assert tier.write(range(start, start + 10)) == (OK,) * 10
    assert tier.counter("failed_writes") == 0
    assert tier.counter("evicted_blocks") > 100
    assert tier.state() is State.READY
    tier.tier.check()


def test_a_write_that_finds_no_room_evicts_and_is_tried_once_more(
    disk: Callable[..., Disk], tmpfs: Callable[[str], Path]
) -> None:
    path = tmpfs("8m")
    tier = disk(path=path / "storage", budget=7 * MIB)
    for start in range(0, 50, 10):
        tier.write(range(start, start + 10))
    segment = tier.tier._index.open
    assert segment is not None
    # The space that was allocated for the open segment is gone after all, as on file systems that only promise it.
    os.truncate(tier.path / f"segment-{segment.number:05}.hpkv", segment.end)
    os.truncate(tier.path / f"segment-{segment.number:05}.hpkv", SEGMENT_BYTES)
    usage = os.statvfs(path)
    with (path / "squatter").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, usage.f_bavail * usage.f_frsize)
    assert tier.write(range(100, 102)) == (OK, OK)
    assert tier.counter("evicted_blocks") >= PER_SEGMENT
    assert tier.counter("failed_writes") == 0
    assert tier.state() is State.READY
    assert tier.read(range(100, 102)) == (OK, OK)
    tier.tier.check()


def test_writes_that_fail_degrade_it_until_one_succeeds(disk: Callable[..., Disk], tmp_path: Path) -> None:
    rules = faults(tmp_path)
    tier = disk(faults=f"@{rules}")
    tier.write(range(10))
    rules.write_text("disk_write=fail")
    assert set(tier.write(range(20, 25))) == {Outcome.IO_ERROR}
    tier.poll()
    assert tier.state() is State.DEGRADED
    assert "fault hook" in tier.tier.usage().reason
    assert tier.ask_write(range(30, 40)) is None
    assert tier.read(range(10)) == (OK,) * 10
    health = tier.tier._shared.health
    for _ in range(3):
        # Every try that fails makes the next one later.
        delay = health._delay
        tier.pass_time(delay)
        tier.until(lambda delay=delay: health._delay == 2 * delay)
        assert tier.state() is State.DEGRADED
    rules.write_text("")
    tier.pass_time(70)
    tier.until(lambda: tier.state() is State.READY)
    assert tier.write(range(30, 40)) == (OK,) * 10
    assert tier.read(range(10)) == (OK,) * 10
    tier.tier.check()


def test_a_read_that_fails_says_so_and_keeps_the_block(disk: Callable[..., Disk], tmp_path: Path) -> None:
    rules = faults(tmp_path)
    tier = disk(faults=f"@{rules}")
    tier.write(range(4))
    rules.write_text("disk_read@2=fail")
    outcomes = tier.read(range(4))
    assert sorted(outcomes) == [OK, OK, OK, Outcome.IO_ERROR]
    assert tier.state() is State.READY
    rules.write_text("")
    assert tier.read(range(4)) == (OK,) * 4


def test_a_tombstone_that_cannot_be_written_waits(disk: Callable[..., Disk], tmp_path: Path) -> None:
    rules = faults(tmp_path)
    tier = disk(faults=f"@{rules}")
    tier.write(range(10))
    rules.write_text("disk_write=fail")
    ticket = tier.tier.forget_namespace(SPACE)
    tier.until(lambda: tier.state() is State.DEGRADED)
    assert not any(tier.has(range(10)))
    rules.write_text("")
    tier.pass_time(2)
    tier.is_durable(ticket)
    tier.reopen(kill=True)
    assert not any(tier.has(range(10)))


def test_a_reader_in_the_way_delays_an_eviction(disk: Callable[..., Disk], tmp_path: Path) -> None:
    rules = faults(tmp_path)
    tier = disk(budget=3 * MIB, faults=f"@{rules}")
    tier.write(range(14))
    rules.write_text("disk_read@1=delay:0.5")
    ticket = tier.tier.read(tier.jobs(range(1), first=200))
    for start in range(100, 160, 10):
        tier.ask_write(range(start, start + 10), first=start - 100)
    assert tier.done(ticket) == (OK,)
    tier.until(lambda: tier.tier._writer.idle)
    tier.tier.check()


@pytest.mark.parametrize(
    ("problem", "outcome"),
    [
        (OSError(errno.ENOSPC, "full"), Outcome.NO_SPACE),
        (OSError(errno.EDQUOT, "quota"), Outcome.NO_SPACE),
        (OSError(errno.EROFS, "read-only"), Outcome.READ_ONLY),
        (OSError(errno.EIO, "broken"), Outcome.IO_ERROR),
        (OSError(errno.ENOENT, "gone"), Outcome.MISSING),
        (BadFormat("torn"), Outcome.BAD),
        (RuntimeError("a mistake of ours"), Outcome.IO_ERROR),
    ],
)
def test_every_failure_has_an_outcome(problem: Exception, outcome: Outcome) -> None:
    assert judge(problem)[0] is outcome
    assert str(problem.args[-1]) in judge(problem)[1]


# -- the directory ----------------------------------------------------------------------------------------


def test_one_daemon_at_a_time_has_a_directory(tmp_path: Path, disk: Callable[..., Disk]) -> None:
    tier = disk()
    with pytest.raises(Busy, match=f"pid {os.getpid()}"):
        StorageDirectory.open(tmp_path)
    tier.tier.close(1)
    StorageDirectory.open(tmp_path).close()
    assert not (tmp_path / LOCK_NAME).exists()


def test_a_lock_that_a_killed_daemon_left_does_not_keep_others_out(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from hpkv_daemon.tiers.disk.directory import StorageDirectory\n"
        "storage = StorageDirectory.open(Path(sys.argv[1])); print(storage.identity.hex(), flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert (tmp_path / LOCK_NAME).exists()
    storage = StorageDirectory.open(tmp_path)
    assert storage.identity.hex() == done.stdout.strip()
    storage.close()


def test_the_disk_process_ends_with_its_daemon(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.disks import Disk\n"
        "disk = Disk(Path(sys.argv[1])).recovered(); print(disk.tier.usage().pid, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
    wait_until(lambda: is_gone(pid))
    StorageDirectory.open(tmp_path).close()


def test_without_a_size_it_takes_four_fifths_of_what_is_free(tmpfs: Callable[[str], Path]) -> None:
    path = tmpfs("200m")
    storage = StorageDirectory.open(path / "storage")
    try:
        free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
        assert storage.budget(None) == int(free * 0.8)
        (path / "storage" / "segment-00000.hpkv").write_bytes(bytes(100 * MIB))
        assert storage.budget(None) == pytest.approx(free * 0.8, rel=0.01), "what is ours counts as free"
        assert storage.budget(150 * MIB) == 150 * MIB
        with pytest.raises(ConfigError, match="does not fit"):
            storage.budget(250 * MIB)
        with pytest.raises(ConfigError, match="less than"):
            storage.budget(10 * MIB)
    finally:
        storage.close()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"version": 1, "identity": "ab"}', '{"version": 9, "identity": "' + "ab" * 16 + '"}']
)
def test_a_directory_with_a_damaged_or_foreign_identity_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / directory.IDENTITY_NAME).write_text(text)
    with pytest.raises(ConfigError, match=r"damaged|format"):
        StorageDirectory.open(tmp_path)
    assert not (tmp_path / LOCK_NAME).exists()


@pytest.mark.parametrize("budget", [48 * MIB, 1 << 30, 100 << 30, 100 << 40])
def test_segments_are_a_power_of_two_and_there_are_at_least_three(budget: int) -> None:
    size = directory.segment_bytes(budget)
    assert size & (size - 1) == 0
    assert budget // size >= 3
    assert 16 * MIB <= size <= 4 << 30


# -- no tier ----------------------------------------------------------------------------------------------


def test_the_tier_that_keeps_nothing_refuses_everything_and_answers() -> None:
    tier = NoopTier()
    tier.recover()
    job = BlockJob(SPACE, name(1), None, 100, 0)
    assert (tier.write([job]), tier.read([job]), tier.scrub(1)) == (None, None, False)
    assert tier.match(SPACE, [name(1)]) == 0
    assert tier.contains(SPACE, [name(1)]) == [False]
    ticket = tier.forget_namespace(SPACE)
    assert select.select([tier], [], [], 0)[0]
    events = tier.poll()
    assert events[0] == Recovered(0, 0, 0)
    assert events[1].ticket == ticket  # type: ignore[union-attr]
    assert not select.select([tier], [], [], 0)[0]
    assert tier.usage().counters["refused_writes"] == 1
    tier.close(1)
    tier.close(1)
