"""Long lives, many lives and strange lives: nothing is left of those who are gone, and time itself may jump."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hpkv_client.client import BlockCache
from tests.support import (
    Child,
    Observed,
    Rank,
    content,
    hashes,
    is_gone,
    observed_daemon,
    open_descriptors,
    plain_shard,
    resident_memory,
    wait_until,
)

SIZE = 4096
LITTLE = 2 << 20
"""Bytes that private memory may grow by over a thousand lives."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="choosing the number of a process needs root")


@pytest.fixture(scope="module")
def shared() -> Iterator[Observed]:
    """The daemon of this module."""
    with observed_daemon() as observed:
        yield observed


@pytest.fixture(scope="module")
def neighbour(shared: Observed) -> Iterator[BlockCache]:
    """A client that stays, so that the mover does; it is never to be harmed."""
    with BlockCache("neighbour", SIZE, socket=shared.socket) as cache:
        yield cache


@pytest.fixture
def live(shared: Observed, neighbour: BlockCache) -> Iterator[Observed]:
    """The shared daemon, empty before the test; the neighbour and its mover must have lived through it."""
    shared.ask("clear")
    mover = shared.mover()
    yield shared
    shared.faults("")
    shared.settle(sessions=1, engines=1)
    assert shared.mover() == mover
    block = {b"neighbour": content(b"neighbour", SIZE)}
    assert neighbour.put(block) == 1
    assert neighbour.get(list(block)) == list(block.values())
    assert shared.stats()["internal_errors"] == 0
    assert "Traceback" not in shared.handle.text()


# -- a thousand lives ---------------------------------------------------------------------------------------

BATCHES, POLITE, SILENT = 20, 35, 15

LEAVES_SILENTLY = f"""
ranks = []
for number in range({SILENT}):
    rank = Rank(socket, plain_shard({SIZE}, 8), engine=f"silent-{{number}}").hello()
    if number % 3 == 0:
        rank.register().ready()
        assert rank.store(hashes(*range(4)), range(4)) == 4
        assert rank.match(hashes(*range(4)))[0] == 4
    ranks.append(rank)
# What it has under way when it ends: a copy, reservations and leases.
say("slow"); wait()
for rank in ranks[::3]:
    rank.ask_store(hashes(*(f"{{os.getpid()}}-{{number}}" for number in range(4))), range(4, 8))
for rank in ranks[1::2]: rank.drop()
say("gone"); wait()
"""


def traces(live: Observed) -> dict[str, object]:
    """What a client that is gone may have left in daemon and mover."""
    daemon, mover = live.handle.pid, live.mover()
    mapped = Path(f"/proc/{mover}/maps").read_text().splitlines()
    return live.gauges() | {
        "descriptors of the daemon": open_descriptors(daemon),
        "descriptors of the mover": open_descriptors(mover),
        "files mapped by the mover": sorted(line.split()[5] for line in mapped if len(line.split()) > 5),
        "children": Path(f"/proc/{daemon}/task/{daemon}/children").read_text(),
    }


def live_once(live: Observed, number: int) -> None:
    """Come, maybe store something, and say goodbye."""
    with Rank(live.socket, plain_shard(SIZE, 2), engine=f"polite-{number % 7}").hello() as rank:
        if number % 4 == 0:
            rank.register().ready()
            keys, blocks = rank.keys(hashes(number)), b"\1\0\0\0"
            assert rank.call("put", job=rank.next_job(), keys=keys, blocks=blocks)["kept"] == 1


def test_a_thousand_clients_that_come_and_go_leave_nothing(live: Observed) -> None:
    def batch(first: int) -> None:
        for number in range(first, first + POLITE):
            live_once(live, number)
        live.faults("")
        with Child(live.handle, LEAVES_SILENTLY) as child:
            assert child.heard() == "slow"
            live.faults("store=delay:0.02")
            child.tell()
            assert child.heard() == "gone"
            wait_until(lambda: live.stats()["pool_reserved_blocks"])
            assert live.gauges()["leases"] == SILENT // 3
            child.signal(signal.SIGKILL)
        live.faults("")
        live.settle(sessions=1, engines=1)

    # The first ones make what stays: buffers, namespaces, code that is loaded when it is needed.
    batch(0)
    batch(0)
    before = traces(live)
    assert "/memfd:hpkv-" in str(before["files mapped by the mover"])
    memory = resident_memory(live.handle.pid), resident_memory(live.mover())
    for number in range(BATCHES):
        batch(number * POLITE)
    wait_until(lambda: traces(live) == before, 30, f"{traces(live)} is left, not {before}")
    assert resident_memory(live.handle.pid) - memory[0] < LITTLE
    assert resident_memory(live.mover()) - memory[1] < LITTLE


# -- one number, two processes ------------------------------------------------------------------------------

FIRST = f"""
rank = Rank(socket, plain_shard({SIZE}, 8), engine="reused").register().ready()
assert rank.store(hashes("a"), [0]) == 1
assert rank.match(hashes("a"))[0] == 1
say(rank.channel.session, rank.shared.handle.name); wait()
"""

SECOND = f"""
rank = Rank(socket, plain_shard({SIZE}, 8), engine="reused")
theirs = int(wait())
said = rank.ask("hello", major=1, minor=0, name="second", engine="reused")
say("hello")
own = rank.reply(said).result()["session"]
rank.channel.session = theirs
try: rank.call("heartbeat"); say("its session")
except UnknownSession: say("not its session")
rank.channel.session = own
wait(); rank.register().ready(); say("ready")
rank.block(1)[:] = 7
say(rank.store(hashes("b"), [1]), rank.match(hashes("b"))[0]); wait()
"""


@needs_root
def test_a_process_that_gets_the_number_of_a_dead_client_is_another_client(live: Observed) -> None:
    with Child(live.handle, FIRST) as first:
        session, memory = first.heard().split()
        assert memory in live.maps()
        first.close()
        with Child(live.handle, SECOND, pid=first.pid) as second:
            assert second.pid == first.pid
            second.tell(session)
            assert [second.heard(), second.heard()] == ["hello", "not its session"]
            live.settle(sessions=2, engines=1)
            wait_until(lambda: memory not in live.maps())
            second.tell()
            assert [second.heard(), second.heard()] == ["ready", "1 1"]
            assert live.gauges()["sessions"] == 2


@needs_root
def test_a_number_that_is_reused_before_the_death_was_noticed_takes_nobody_along(live: Observed) -> None:
    # The daemon is amid a batch of long requests when one process dies and the next one says hello. Only on a machine
    # so slow that the batch ends before the hello arrives does this show no more than the test above.
    with (
        Child(live.handle, FIRST) as first,
        Rank(live.socket, plain_shard(SIZE, 2), engine="busy").register() as busy,
        ExitStack() as stack,
    ):
        session, _ = first.heard().split()
        busy.ready()
        keys = busy.keys(hashes(*range(1 << 16)))
        requests = [busy.ask("contains", keys=keys) for _ in range(40)]
        busy.reply(requests[0])
        live.handle.process.send_signal(signal.SIGSTOP)
        try:
            first.close()
            second = stack.enter_context(Child(live.handle, SECOND, pid=first.pid))
            second.tell(session)
            assert second.heard() == "hello"
        finally:
            live.handle.process.send_signal(signal.SIGCONT)
        assert second.heard() == "not its session"
        second.tell()
        assert [second.heard(), second.heard()] == ["ready", "1 1"]
        live.settle(sessions=3, engines=3, leases=1, pool_pinned_blocks=1)
        assert second.pid in [session["pid"] for session in live.ask("info")["sessions"]]


# -- forks --------------------------------------------------------------------------------------------------

FORKS = f"""
cache = BlockCache("forks", {SIZE}, socket=socket)
some = {{key: content(key, {SIZE}) for key in hashes("a", "b")}}
assert cache.put(some) == 2
say(cache._keeper.link.session, cache._memory.handle.name)
forked = os.fork()
"""


@pytest.mark.parametrize("last", ["", "cache.close();"], ids=["does nothing", "closes what it inherited"])
def test_the_end_of_a_forked_child_is_not_the_end_of_its_parent(live: Observed, last: str) -> None:
    code = FORKS + (
        f"if forked == 0: {last} os._exit(0)\n"
        "os.waitpid(forked, 0); say('childless'); wait()\n"
        "say(cache.get(list(some)) == list(some.values()), cache._keeper.link.session); wait()\n"
    )
    with Child(live.handle, code) as parent:
        session, memory = parent.heard().split()
        assert parent.heard() == "childless"
        # What the daemon would do about it, it would have done before it answers this.
        assert live.gauges()["sessions"] == 2
        assert memory in live.maps()
        parent.tell()
        assert parent.heard() == f"True {session}"
        parent.signal(signal.SIGKILL)
        live.settle(sessions=1, engines=1)
        wait_until(lambda: memory not in live.maps())


def test_a_session_ends_with_the_process_that_registered_though_a_child_of_it_lives_on(live: Observed) -> None:
    code = FORKS + (
        "if forked:\n"
        "    say(forked); wait()\n"
        "wait(); own = BlockCache('forks', 4096, socket=socket)\n"
        "say(own.get(list(some)) == list(some.values()), own.put({b'c': bytes(4096)}), own._memory.handle.name)\n"
        "wait()\n"
    )
    before = open_descriptors(live.handle.pid)
    with Child(live.handle, code) as parent:
        _, memory = parent.heard().split()
        orphan = int(parent.heard())
        try:
            assert memory in live.maps()
            parent.signal(signal.SIGKILL)
            parent.ended()
            live.settle(sessions=1, engines=1)
            wait_until(lambda: memory not in live.maps())
            assert not is_gone(orphan)
            # The child has no part in its parent's session, but may have one of its own.
            parent.tell()
            found, kept, own = parent.heard().split()
            assert (found, kept) == ("True", "1")
            assert own in live.maps()
            assert [session["pid"] for session in live.ask("info")["sessions"]].count(orphan) == 1
        finally:
            os.kill(orphan, signal.SIGKILL)
    wait_until(lambda: open_descriptors(live.handle.pid) <= before)


# -- clocks -------------------------------------------------------------------------------------------------

JUMPING_CLOCK = """
import itertools, time
def jumping(clock, unit):
    days = itertools.cycle((0, 40, -400, 3, -7))
    return lambda *which: clock(*which) + next(days) * 86400 * unit if which in ((), (0,)) else clock(*which)
time.time, time.time_ns = jumping(time.time, 1), jumping(time.time_ns, 10**9)
time.clock_gettime, time.clock_gettime_ns = jumping(time.clock_gettime, 1), jumping(time.clock_gettime_ns, 10**9)
"""


def test_nothing_ends_or_stands_still_because_the_wall_clock_jumps(tmp_path: Path) -> None:
    # Read by every Python process that the daemon is or starts.
    (tmp_path / "sitecustomize.py").write_text(JUMPING_CLOCK)
    with observed_daemon(PYTHONPATH=tmp_path, HPKV_LEASE_SECONDS=4) as live:
        with (
            Rank(live.socket, plain_shard(SIZE, 8)).register() as rank,
            BlockCache("cache", SIZE, socket=live.socket) as cache,
        ):
            rank.ready()
            pid, some = live.mover(), {key: content(key, SIZE) for key in hashes("x", "y")}
            assert rank.store(hashes(*range(4)), range(4)) == 4
            _, lease = rank.match(hashes(*range(4)))
            _, forgotten = rank.match(hashes(*range(4)))
            assert cache.put(some) == 2
            started = time.monotonic()
            while time.monotonic() < started + 1.5:
                # The clock jumps with every look at it, in every tick.
                assert rank.load(lease, range(4, 8)) == 4
                assert cache.get(list(some)) == list(some.values())
                time.sleep(0.1)
            assert live.gauges()["leases"] == 2
            assert live.stats()["expired_leases"] == 0
            assert live.stats()["mover_restarts"] == 0
            assert live.mover() == pid
            # And time goes on: what nobody uses ends when it should.
            wait_until(lambda: live.stats()["expired_leases"] == 1)
            assert rank.call("release", lease=forgotten)["released"] is False
            assert rank.call("release", lease=lease)["released"] is True
            # Each of these lines looks at the clock, too.
            days = {line[:10] for line in live.handle.text().splitlines() if line[:2] == "20"}
            assert len(days) > 3, live.handle.text()
        live.settle()
        assert live.stats()["internal_errors"] == 0
