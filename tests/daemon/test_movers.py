"""The process that copies: it may die or freeze at any moment, and nothing but its own copies fails."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from hpkv_client.client import BlockCache
from hpkv_client.errors import CopyFailed
from tests.support import (
    ImpatientDaemon,
    Observed,
    Rank,
    content,
    hashes,
    is_gone,
    observed_daemon,
    plain_shard,
    processor_seconds,
    wait_until,
)

SIZE = 1 << 18
BLOCKS = 16
PREFIX = hashes(*range(BLOCKS))


@pytest.fixture(scope="module")
def shared() -> Iterator[Observed]:
    """The daemon of this module."""
    with observed_daemon(ImpatientDaemon) as observed:
        yield observed


@pytest.fixture
def live(shared: Observed) -> Iterator[Observed]:
    """The shared daemon, empty before the test and clean after it."""
    shared.ask("clear")
    yield shared
    shared.assert_sound()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Whoever is entered here leaves before the daemon is looked at."""
    with ExitStack() as stack:
        yield stack


def two_engines(stack: ExitStack, live: Observed) -> tuple[Rank, Rank]:
    """A writer whose memory holds the contents of the prefix, and a reader."""
    writer, reader = (
        stack.enter_context(Rank(live.socket, plain_shard(SIZE, BLOCKS), engine=name)).register().ready()
        for name in ("writer", "reader")
    )
    for number, key in enumerate(PREFIX):
        writer.block(number)[:] = np.frombuffer(content(key, SIZE), np.uint8)
    return writer, reader


def assert_all_works(writer: Rank, reader: Rank) -> None:
    """A prefix that one stores, the other loads."""
    assert writer.store(PREFIX, range(BLOCKS)) == BLOCKS
    hit, lease = reader.match(PREFIX)
    assert hit == BLOCKS
    reader.memory[:] = 0
    assert reader.load(lease, range(BLOCKS)) == BLOCKS
    assert [reader.block(n).tobytes() for n in range(BLOCKS)] == [content(key, SIZE) for key in PREFIX]
    assert reader.call("release", lease=lease)["released"]


def test_a_mover_starts_with_the_first_rank_and_ends_with_the_last(live: Observed) -> None:
    assert live.ask("info")["movers"] == []
    one = Rank(live.socket, plain_shard(4096, 1), engine="one").register().ready()
    pid = live.mover()
    children = Path(f"/proc/{live.handle.pid}/task/{live.handle.pid}/children")
    assert children.read_text().split() == [str(pid)]
    other = Rank(live.socket, plain_shard(4096, 1), engine="other").register().ready()
    assert live.mover() == pid
    one.close()
    assert live.mover() == pid
    other.call("unregister")
    wait_until(lambda: is_gone(pid))
    assert live.ask("info")["movers"] == []
    # Reaped, too.
    wait_until(lambda: not children.read_text().split())
    other.register().ready()
    assert live.mover() != pid
    other.close()


def test_a_mover_outlives_its_last_rank_by_no_running_copy(live: Observed) -> None:
    rank = Rank(live.socket, plain_shard(SIZE, 4)).register().ready()
    pid = live.mover()
    live.faults("store=delay:0.1")
    rank.ask_store(PREFIX[:4], range(4))
    wait_until(lambda: not rank.control.quiet())
    rank.close()
    wait_until(lambda: is_gone(pid))
    live.settle(2.0)
    assert live.stats()["pool_resident_blocks"] == 0


def kill_idle(live: Observed, writer: Rank, reader: Rank) -> None:
    """No copy under way."""
    os.kill(live.mover(), signal.SIGKILL)
    del writer, reader


def kill_in_a_store(live: Observed, writer: Rank, reader: Rank) -> None:
    """Half of a store copied: nothing of it may be seen."""
    live.faults("store=delay:0.1")
    request = writer.ask_store(PREFIX, range(BLOCKS))
    wait_until(lambda: not writer.control.quiet())
    os.kill(live.mover(), signal.SIGKILL)
    assert writer.reply(request, 15.0).result()["kept"] == 0
    del reader


def kill_in_a_load(live: Observed, writer: Rank, reader: Rank) -> None:
    """Half of a load copied: it must be told as failed, and leave no pin."""
    assert writer.store(PREFIX, range(BLOCKS)) == BLOCKS
    _, lease = reader.match(PREFIX)
    live.faults("load=delay:0.1")
    request = reader.ask_load(lease, range(BLOCKS))
    wait_until(lambda: not reader.control.quiet())
    os.kill(live.mover(), signal.SIGKILL)
    with pytest.raises(CopyFailed, match=r"mover cpu ended.*recompute"):
        reader.reply(request, 15.0).result()
    assert reader.call("release", lease=lease)["released"]


@pytest.mark.parametrize("kill", [kill_idle, kill_in_a_store, kill_in_a_load])
def test_a_killed_mover_fails_its_copies_and_is_replaced(
    live: Observed, stack: ExitStack, kill: Callable[[Observed, Rank, Rank], None]
) -> None:
    writer, reader = two_engines(stack, live)
    before = live.stats()
    pid = live.mover()
    kill(live, writer, reader)
    live.faults("")
    wait_until(lambda: "mover cpu ended" in writer.call("heartbeat")["problem"])
    assert live.gauges()["pool_reserved_blocks"] == 0
    assert live.gauges()["pool_pinned_blocks"] == 0
    for rank in (writer, reader):
        rank.ready()
        assert rank.call("heartbeat")["problem"] == ""
    assert live.mover() != pid
    stats = live.stats()
    assert stats["mover_restarts"] - before["mover_restarts"] == 1
    in_vain = {kill_in_a_store: "store_failures", kill_in_a_load: "load_failures"}.get(kill)
    for name in ("store_failures", "load_failures"):
        assert stats[name] - before[name] == (name == in_vain)
    assert_all_works(writer, reader)


def test_a_mover_frozen_in_store_and_load_is_replaced(live: Observed, stack: ExitStack) -> None:
    writer, reader = two_engines(stack, live)
    assert writer.store(PREFIX[:8], range(8)) == 8
    _, lease = reader.match(PREFIX[:8])
    # So slow that none of it is over before the mover is stopped, however busy the machine is.
    live.faults("store=delay:0.3;load=delay:0.3")
    pid = live.mover()
    load = reader.ask_load(lease, range(8))
    store = writer.ask_store(PREFIX[8:], range(8, BLOCKS), parent=PREFIX[7])
    wait_until(lambda: not reader.control.quiet())
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    assert writer.reply(store, 15.0).result()["kept"] == 0
    with pytest.raises(CopyFailed, match="it did not answer"):
        reader.reply(load, 10.0).result()
    assert 1.0 < time.monotonic() - started < 15.0
    assert is_gone(pid)
    live.faults("")
    for rank in (writer, reader):
        rank.ready()
    assert_all_works(writer, reader)


def test_a_frozen_mover_that_does_not_confirm_a_cancel_is_replaced_sooner(live: Observed, stack: ExitStack) -> None:
    writer, reader = two_engines(stack, live)
    assert writer.store(PREFIX[:4], range(4)) == 4
    _, lease = reader.match(PREFIX[:4])
    live.faults("load=delay:0.1")
    pid = live.mover()
    job = reader.next_job()
    load = reader.ask_load(lease, range(4), job=job)
    wait_until(lambda: not reader.control.quiet())
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    assert reader.call("cancel", job=job)["running"]
    with pytest.raises(CopyFailed, match="it did not confirm a cancelled copy"):
        reader.reply(load, 10.0).result()
    assert time.monotonic() - started < 10.0
    live.faults("")
    for rank in (writer, reader):
        rank.ready()
    assert_all_works(writer, reader)


def test_a_frozen_mover_keeps_no_memory_of_the_dead_for_long(live: Observed, stack: ExitStack) -> None:
    writer, reader = two_engines(stack, live)
    pid = live.mover()
    assert reader.shared.handle.name in live.maps()
    # It has just been heard of: silence alone would not do yet.
    assert writer.store(PREFIX[:1], [0]) == 1
    os.kill(pid, signal.SIGSTOP)
    reader.call("unregister")
    wait_until(lambda: is_gone(pid))
    writer.ready()
    assert reader.shared.handle.name not in live.maps()
    assert writer.shared.handle.name in live.maps()
    assert writer.store(PREFIX, range(BLOCKS)) == BLOCKS


def test_a_frozen_daemon_does_not_blame_the_mover(live: Observed, stack: ExitStack) -> None:
    writer, reader = two_engines(stack, live)
    pid = live.mover()
    live.handle.process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(2.0)
    finally:
        live.handle.process.send_signal(signal.SIGCONT)
    time.sleep(0.6)
    assert live.mover() == pid
    assert_all_works(writer, reader)


def test_a_mover_ends_when_its_daemon_is_killed() -> None:
    with (
        observed_daemon() as live,
        Rank(live.socket, plain_shard(SIZE, BLOCKS), engine="idle").register() as idle,
    ):
        idle.ready()
        busy = Rank(live.socket, plain_shard(SIZE, BLOCKS), engine="busy").register().ready()
        pid = live.mover()
        live.faults("store=delay:0.05")
        busy.ask_store(PREFIX, range(BLOCKS))
        wait_until(lambda: not busy.control.quiet())
        live.handle.kill()
        wait_until(lambda: is_gone(pid))
        idle.channel.session = 0
        busy.drop()


def test_a_daemon_that_stops_takes_its_mover_along() -> None:
    with observed_daemon() as live:
        rank = Rank(live.socket, plain_shard(SIZE, BLOCKS)).register().ready()
        pid = live.mover()
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
        assert rank.store(PREFIX, range(BLOCKS)) == BLOCKS
        assert live.handle.stop() == 0
        assert is_gone(pid)
        assert "Traceback" not in live.handle.text()
        rank.drop()


def rests(pid: int) -> bool:
    """Whether a process uses less than a tenth of a processor."""
    before = processor_seconds(pid)
    time.sleep(0.2)
    return processor_seconds(pid) - before < 0.02


def test_idle_processes_cost_next_to_nothing(live: Observed) -> None:
    with BlockCache("idle", 4096, socket=live.socket) as cache:
        assert cache.put({b"k": bytes(4096)}) == 1
        pids = (live.handle.pid, live.mover())
        # The mover still touches the pool's pages, for a moment.
        wait_until(lambda: rests(pids[1]))
        # Wake-ups are counted, not time: what one costs is the machine's affair.
        before = sum(map(wake_ups, pids))
        time.sleep(2.0)
        assert sum(map(wake_ups, pids)) - before < 2 * 20


def wake_ups(pid: int) -> int:
    """How often the threads of a process went to sleep so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    found = [re.search(r"\nvoluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text()) for task in tasks]
    return sum(int(match[1]) for match in found if match)
