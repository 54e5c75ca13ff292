"""How clients come and go: whatever way they end, the daemon gets everything back, and only from them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpkv_client.client import BlockCache
from hpkv_client.errors import (
    LayoutRefused,
    NoSuchDevice,
    NotPermitted,
    NotRegistered,
    UnknownSession,
)
from hpkv_client.session import SessionKeeper
from tests.support import (
    NOBODY,
    BlindDaemon,
    Child,
    ImpatientDaemon,
    Observed,
    Rank,
    Victim,
    content,
    hashes,
    is_gone,
    observed_daemon,
    open_descriptors,
    plain_shard,
    strange_handle,
    wait_until,
)

BLOCK = 1 << 18
BLOCKS = 8
DEATH_SECONDS = 2.0
"""By then everything of a dead client is back."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="acting as another user needs root")


@pytest.fixture(scope="module")
def shared() -> Iterator[Observed]:
    """The daemon of this module, whose socket everybody may use."""
    with observed_daemon(HPKV_SOCKET_MODE="0666") as observed:
        observed.socket.parent.chmod(0o755)
        yield observed


@pytest.fixture(scope="module")
def neighbour(shared: Observed) -> Iterator[BlockCache]:
    """A client that stays, so that the mover does; it is never to be harmed."""
    with BlockCache("neighbour", 4096, socket=shared.socket) as cache:
        yield cache


@pytest.fixture
def live(shared: Observed, neighbour: BlockCache) -> Iterator[Observed]:
    """The shared daemon; the neighbour and its mover must have lived through the test."""
    mover = shared.mover()
    yield shared
    shared.faults("")
    shared.settle(sessions=1, engines=1)
    assert shared.mover() == mover
    block = {b"neighbour": content(b"neighbour", 4096)}
    assert neighbour.put(block) == 1
    assert neighbour.get(list(block)) == list(block.values())
    assert shared.stats()["internal_errors"] == 0
    assert "Traceback" not in shared.handle.text()


def client(live: Observed, code: str) -> Child:
    """A process with a block cache named ``cache``; it says the name of its memory before it runs the code."""
    opened = f"cache = BlockCache('child', {BLOCK}, arena_blocks={BLOCKS}, socket=socket)\n"
    return Child(live.handle, opened + "say(cache._memory.handle.name)\n" + code)


def assert_all_is_back(live: Observed, child: Child, memory: str, killed: float) -> None:
    """Sessions, leases, reservations and the mapping of the dead client, in time."""
    left = killed + DEATH_SECONDS - time.monotonic()
    live.settle(max(left, 0.05), sessions=1, engines=1)
    wait_until(lambda: memory not in live.maps(), killed + DEATH_SECONDS - time.monotonic() + 0.1)
    assert child.pid not in [session["pid"] for session in live.ask("info")["sessions"]]


PUT = "keys = hashes(*range(8)); wait(); say('putting'); say(cache.put({key: content(key, 1 << 18) for key in keys}))\n"


def test_a_client_that_dies_right_after_it_registered_leaves_nothing(live: Observed) -> None:
    with client(live, "wait()") as child:
        memory = child.heard()
        assert memory in live.maps()
        child.signal(signal.SIGKILL)
        assert_all_is_back(live, child, memory, time.monotonic())


def test_a_client_that_leaves_politely_leaves_nothing(live: Observed) -> None:
    with client(live, PUT + "cache.close(); say('closed'); wait()") as child:
        memory = child.heard()
        child.tell()
        assert [child.heard(), child.heard(), child.heard()] == ["putting", "8", "closed"]
        assert_all_is_back(live, child, memory, time.monotonic())
        assert not is_gone(child.pid)


def test_a_client_that_exits_without_a_word_leaves_nothing(live: Observed) -> None:
    with client(live, "os._exit(0)") as child:
        memory = child.heard()
        child.ended()
        assert_all_is_back(live, child, memory, time.monotonic())


def test_a_store_whose_client_dies_never_becomes_visible(live: Observed) -> None:
    live.ask("clear")
    live.faults("store=delay:0.1")
    with client(live, PUT) as child, BlockCache("child", BLOCK, socket=live.socket) as reader:
        memory = child.heard()
        child.tell()
        assert child.heard() == "putting"
        wait_until(lambda: live.stats()["pool_reserved_blocks"] == BLOCKS)
        assert reader.contains(hashes(*range(BLOCKS))) == [False] * BLOCKS
        child.signal(signal.SIGSTOP)
        assert reader.get(hashes(*range(BLOCKS))) == [None] * BLOCKS
        child.signal(signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: live.stats()["pool_reserved_blocks"] == 0, DEATH_SECONDS)
        wait_until(lambda: memory not in live.maps(), killed + DEATH_SECONDS - time.monotonic())
        live.faults("")
        assert reader.get(hashes(*range(BLOCKS))) == [None] * BLOCKS
        again = {key: content(key, BLOCK) for key in hashes(*range(BLOCKS))}
        assert reader.put(again) == BLOCKS
        assert reader.get(list(again)) == list(again.values())


def test_a_load_whose_client_dies_is_given_up(live: Observed) -> None:
    live.faults("")
    with client(live, PUT + "wait(); say('getting'); cache.get(keys)") as child:
        memory = child.heard()
        child.tell()
        assert [child.heard(), child.heard()] == ["putting", "8"]
        live.faults("load=delay:0.1")
        child.tell()
        assert child.heard() == "getting"
        wait_until(lambda: live.stats()["pool_pinned_blocks"] == BLOCKS)
        child.signal(signal.SIGKILL)
        assert_all_is_back(live, child, memory, time.monotonic())


def test_clients_killed_at_random_moments_leave_nothing(live: Observed) -> None:
    code = (
        "blocks = {key: content(key, 1 << 18) for key in hashes(*range(8))}; say('on')\n"
        "while cache.put(blocks): cache.get(list(blocks))"
    )
    before = open_descriptors(live.handle.pid)
    for delay in (0.0, 0.003, 0.007, 0.011, 0.017):
        with client(live, code) as child:
            assert [child.heard()[:5], child.heard()] == ["hpkv-", "on"]
            time.sleep(delay)
            child.signal(signal.SIGKILL)
            live.settle(DEATH_SECONDS, sessions=1, engines=1)
    wait_until(lambda: open_descriptors(live.handle.pid) <= before)


def test_many_who_come_and_go_leave_nothing(live: Observed) -> None:
    code = (
        "for number in range(300):\n"
        "    rank = Rank(socket, plain_shard(4096, 1), engine=f'e-{number % 7}').hello()\n"
        "    rank.drop() if number % 3 == 0 else rank.close()\n"
        "say('done'); wait()\n"
    )
    before = open_descriptors(live.handle.pid)
    with Child(live.handle, code) as child:
        assert child.heard() == "done"
        assert live.gauges()["sessions"] == 101
        wait_until(lambda: open_descriptors(live.handle.pid) <= before + 1)
    live.settle(sessions=1, engines=1)
    for _ in range(10):
        with BlockCache("comes-and-goes", 4096, socket=live.socket) as cache:
            assert cache.put({b"k": bytes(4096)}) == 1
    wait_until(lambda: open_descriptors(live.handle.pid) <= before)


def test_a_process_with_too_many_sessions_loses_its_most_silent_idle_one(live: Observed) -> None:
    with Rank(live.socket, plain_shard(4096, 1), engine="first").register() as rank:
        rank.ready()
        silent = Rank(live.socket, plain_shard(4096, 1)).hello()
        many = [Rank(live.socket, plain_shard(4096, 1)).hello() for _ in range(300)]
        # Those of this process; the neighbour's is one of them.
        assert live.gauges()["sessions"] == 256
        assert rank.call("heartbeat")["ready"]
        with pytest.raises(UnknownSession):
            silent.call("heartbeat")
        assert many[-1].call("heartbeat")
        silent.drop()
        for other in many:
            with contextlib.suppress(UnknownSession):
                other.call("bye")
            other.drop()


def test_a_cleanup_of_many_mappings_holds_nobody_up(live: Observed) -> None:
    code = (
        "rank = Rank(socket, plain_shard(4096, 2), engine='wide').hello()\n"
        "parts = [SharedMemory(1 << 20) for _ in range(400)]\n"
        "for part in parts: part.mapping[:] = bytes(1 << 20)\n"
        "handles = [handle_to_wire(part.handle) for part in parts]\n"
        "rank.register(regions=handles).ready(); say('ready'); wait()\n"
    )
    with Child(live.handle, code) as child, Victim(live.socket, patience=1.5) as victim:
        assert child.heard() == "ready"
        victim.check()
        child.signal(signal.SIGKILL)
        victim.check()
        live.settle(DEATH_SECONDS, sessions=2, engines=2)
        victim.check()


# -- silence is not death -----------------------------------------------------------------------------------


def test_a_stopped_client_is_not_taken_for_dead() -> None:
    code = (
        "cache = BlockCache('child', 4096, socket=socket); say(cache.put({b'k': bytes(4096)})); wait()\n"
        "say(cache.get([b'k']) == [bytes(4096)]); say(cache._keeper.link.session)"
    )
    with observed_daemon(ImpatientDaemon) as impatient, Child(impatient.handle, code) as child:
        assert child.heard() == "1"
        child.signal(signal.SIGSTOP)
        time.sleep(1.5)
        assert impatient.gauges()["sessions"] == 1
        assert impatient.mover()
        child.signal(signal.SIGCONT)
        child.tell()
        assert child.heard() == "True"
        child.signal(signal.SIGKILL)
        impatient.settle(DEATH_SECONDS)


@needs_root
def test_of_clients_in_another_pid_namespace_only_heartbeats_tell() -> None:
    with observed_daemon(BlindDaemon) as blind:
        speaking, silent = (Rank(blind.socket, plain_shard(4096, 1), engine=name) for name in "ab")
        speaking.hello()
        silent.hello()
        assert {session["pid"] for session in blind.ask("info")["sessions"]} == {0}
        with pytest.raises(NotPermitted, match="PID namespace"):
            speaking.register()
        wait_until(lambda: speaking.call("heartbeat") and blind.gauges()["sessions"] == 1)
        with pytest.raises(UnknownSession):
            silent.call("heartbeat")
        silent.drop()
        # Its own sleep is not the clients' silence: what they said meanwhile is heard first.
        outside = children_of(blind.handle.pid)[0]
        os.kill(outside, signal.SIGSTOP)
        try:
            beats = []
            for _ in range(8):
                time.sleep(0.4)
                beats.append(speaking.ask("heartbeat"))
        finally:
            os.kill(outside, signal.SIGCONT)
        assert all(speaking.reply(beat).ok for beat in beats)
        speaking.close()


def children_of(pid: int) -> list[int]:
    """The processes it started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@needs_root
def test_two_clients_that_both_are_process_1_are_two(live: Observed) -> None:
    code = (
        "rank = Rank(socket, plain_shard(4096, 1), engine='e-' + wait()).hello()\n"
        "try: rank.register()\n"
        "except NotPermitted as problem: say(problem.message, '/', problem.hint)\n"
        "say(os.getpid(), bool(rank.call('heartbeat'))); wait(); say(bool(rank.call('heartbeat'))); wait()\n"
    )
    with Child(live.handle, code, alone=True) as one, Child(live.handle, code, alone=True) as other:
        for name, child in (("one", one), ("other", other)):
            child.tell(name)
            refusal = child.heard()
            assert "belongs to another process than the sender" in refusal
            assert "in the daemon's PID namespace" in refusal
            assert child.heard() == "1 True"
        assert live.gauges()["sessions"] == 3
        one.signal(signal.SIGKILL)
        live.settle(DEATH_SECONDS, sessions=2, engines=1)
        other.tell()
        assert other.heard() == "True"


# -- what belongs to whom -----------------------------------------------------------------------------------

AS_NOBODY = "import hpkv_client.launch; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"


@needs_root
def test_another_user_cannot_use_a_session_or_join_an_engine(live: Observed) -> None:
    code = AS_NOBODY + (
        "rank = Rank(socket, plain_shard(4096, 1), engine='theirs')\n"
        "rank.channel.session = int(wait())\n"
        "for verb in ('heartbeat', 'bye', 'reset'):\n"
        "    try: rank.call(verb)\n"
        "    except UnknownSession: say('unknown')\n"
        "rank.channel.session = 0\n"
        "try: rank.hello()\n"
        "except NotPermitted as problem: say(problem.message)\n"
        "try: rank.call('clear')\n"
        "except NotPermitted as problem: say(problem.message)\n"
        "rank.hello(engine='mine'); say(rank.call('release', lease=int(wait()))['released'])\n"
    )
    with Rank(live.socket, plain_shard(4096, 2), engine="theirs").register() as rank:
        rank.ready()
        assert rank.store(hashes("a"), [0]) == 1
        hit, lease = rank.match(hashes("a"))
        assert hit == 1
        with Child(live.handle, code) as stranger:
            stranger.tell(str(rank.channel.session))
            assert [stranger.heard() for _ in range(3)] == ["unknown"] * 3
            assert stranger.heard() == "engine 'theirs' belongs to another user"
            assert stranger.heard() == f"uid {NOBODY} may not clear the cache"
            stranger.tell(str(lease))
            assert stranger.heard() == "False"
        assert rank.load(lease, [1]) == 1


@needs_root
def test_another_user_works_beside_us(live: Observed) -> None:
    code = AS_NOBODY + (
        "cache = BlockCache('theirs', 4096, socket=socket)\n"
        "say(cache.put({b'k': content(b'k', 4096)}), cache.get([b'k']) == [content(b'k', 4096)])\n"
    )
    with Child(live.handle, code) as other:
        assert other.heard() == "1 True"


def test_two_processes_cannot_be_the_same_rank(live: Observed) -> None:
    code = (
        "rank = Rank(socket, plain_shard(4096, 1), engine='shared')\n"
        "try: rank.register()\n"
        "except Busy as problem: say(problem.message)\n"
    )
    with Rank(live.socket, plain_shard(4096, 1), engine="shared").register() as rank:
        rank.ready()
        with Child(live.handle, code) as other:
            assert other.heard() == f"rank 0 of 'shared' is registered by pid {os.getpid()}"
        assert rank.call("heartbeat")["ready"]


def test_a_process_may_register_anew_and_its_old_session_ends(live: Observed) -> None:
    old = Rank(live.socket, plain_shard(4096, 1), engine="again").register().ready()
    assert old.store(hashes("w"), [0], job=1) == 1
    with Rank(live.socket, plain_shard(4096, 1), engine="again").register() as new:
        new.ready()
        assert live.gauges()["sessions"] == 2
        with pytest.raises(UnknownSession):
            old.call("heartbeat")
        assert new.store(hashes("x"), [0], job=1) == 1
    old.drop()


def test_a_session_is_one_rank(live: Observed) -> None:
    with Rank(live.socket, plain_shard(4096, 1), engine="two", world=2).register() as rank:
        rank.call("register", **rank.registration(rank=1))
        ranks = live.ask("info")["engines"][-1]["ranks"]
        assert [entry["rank"] for entry in ranks] == [1]


# -- memory that is not what it seems -----------------------------------------------------------------------


def refused_memory(live: Observed, **changes: Any) -> str:
    """Why the daemon does not map a handle that differs from a right one like this."""
    with Rank(live.socket, plain_shard(4096, 1), engine="strange").hello() as rank:
        try:
            rank.register(regions=[strange_handle(rank, **changes)])
        except LayoutRefused as problem:
            return problem.message
        problem = rank.problem()
        with pytest.raises(NotRegistered, match="not ready: rank 0"):
            rank.call("match", keys=b"")
        return problem


@pytest.mark.parametrize("pid", [0, 1, os.getppid()])
def test_memory_of_another_process_is_not_permitted(live: Observed, pid: int) -> None:
    with Rank(live.socket, plain_shard(4096, 1)).hello() as rank:
        with pytest.raises(NotPermitted, match=f"another process than the sender .pid {os.getpid()}."):
            rank.register(regions=[strange_handle(rank, pid=pid)])
        with pytest.raises(NotPermitted):
            rank.register(control=strange_handle(rank, pid=pid))


def test_descriptors_that_are_not_the_memory_are_refused(live: Observed, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    reader, writer = os.pipe()
    with (tmp_path / "file").open("r+b") as file:
        for fd in (file.fileno(), reader, writer, 0, 1_000_000):
            assert f"/proc/{os.getpid()}/fd/{fd}" in refused_memory(live, fd=fd)
    os.close(reader)
    os.close(writer)
    assert "is not the memory" in refused_memory(live, name="hpkv-guess")
    assert "is not the memory" in refused_memory(live, name="")


def memfd(name: str, size: int, seals: int) -> int:
    """A memfd made by hand."""
    fd = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


SHRINK_GROW = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.mark.parametrize(
    ("size", "seals", "message"),
    [
        (4096, 0, "not sealed or smaller"),
        (4096, fcntl.F_SEAL_GROW, "not sealed or smaller"),
        (4095, SHRINK_GROW, "not sealed or smaller than 4096 bytes"),
        (0, SHRINK_GROW, "not sealed or smaller than 4096 bytes"),
        (4096, SHRINK_GROW | fcntl.F_SEAL_WRITE, "Operation not permitted"),
    ],
)
def test_memory_that_could_vanish_is_refused(live: Observed, size: int, seals: int, message: str) -> None:
    fd = memfd("hpkv-by-hand", size, seals)
    assert message in refused_memory(live, fd=fd, name="hpkv-by-hand")
    os.close(fd)


def test_a_memfd_that_was_not_made_for_this_is_refused(live: Observed) -> None:
    fd = memfd("secrets-of-another-library", 4096, SHRINK_GROW)
    assert "is not the memory" in refused_memory(live, fd=fd, name="secrets-of-another-library")
    os.close(fd)


@pytest.mark.parametrize("size", [1, 16, 23, 4095])
def test_a_control_page_that_is_none_is_refused(live: Observed, size: int) -> None:
    with Rank(live.socket, plain_shard(4096, 1), engine="strange").hello() as rank:
        rank.register(control=strange_handle(rank, size=size))
        assert f"a control page of {size} bytes" in rank.problem()


def test_a_rank_whose_memory_is_refused_may_try_again(live: Observed) -> None:
    with Rank(live.socket, plain_shard(4096, 2), engine="strange").hello() as rank:
        rank.register(regions=[strange_handle(rank, name="hpkv-guess")])
        rank.problem()
        rank.register().ready()
        assert rank.store(hashes("y"), [0]) == 1


@pytest.mark.parametrize("device", ["cuda:0", "cuda:GPU-8f6d2a54-2f5e", "rocm:1", "", "c" * 900])
def test_a_device_that_is_not_here_is_named(live: Observed, device: str) -> None:
    with Rank(live.socket, plain_shard(4096, 1)).hello() as rank:
        gpu = {"kind": "cuda_ipc", "size": 4096, "token": bytes(64), "offset": 0, "event": bytes(64)}
        with pytest.raises(NoSuchDevice) as caught:
            rank.register(device=device, regions=[gpu], control=None)
        if device.startswith("cuda:"):
            assert f"device {device!r} names no GPU by its UUID" in str(caught.value)
        else:
            assert f"no mover for device {device[:64]!r} on this node (there is: cpu, cuda:UUID)" in str(caught.value)
        with pytest.raises(NoSuchDevice, match="'cpu' maps memory of kind memfd, not cuda_ipc"):
            rank.register(regions=[gpu])


# -- the keeper ---------------------------------------------------------------------------------------------


def test_what_is_refused_for_good_is_asked_ever_more_rarely(live: Observed) -> None:
    before = live.stats()["refused_requests"]
    rank = Rank(live.socket, plain_shard(4096, 1))
    keeper = SessionKeeper(live.socket, {"name": "n", "engine": "e"}, rank.registration(device="tpu"))
    keeper.start()
    link = keeper.wait(5, lambda link: bool(link.problem))
    assert "no mover for device 'tpu'" in link.problem
    assert isinstance(keeper.error, NoSuchDevice)
    time.sleep(1.3)
    keeper.stop()
    assert 1 <= live.stats()["refused_requests"] - before <= 2
    rank.drop()


def test_a_slow_daemon_does_not_cost_the_session(live: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpkv_client.session.ANSWER_SECONDS", 0.5)
    rank = Rank(live.socket, plain_shard(4096, 2), engine="kept")
    keeper = SessionKeeper(live.socket, {"name": "n", "engine": "kept"}, rank.registration())
    keeper.start()
    session = keeper.wait(10, lambda link: link.usable).session
    assert session
    live.handle.process.send_signal(signal.SIGSTOP)
    try:
        keeper.suspect()
        assert keeper.wait(5, lambda link: "did not answer" in link.problem).problem
    finally:
        live.handle.process.send_signal(signal.SIGCONT)
    assert keeper.wait(10, lambda link: link.usable).session == session
    assert live.gauges()["sessions"] == 2
    keeper.stop()
    rank.drop()


def test_a_keeper_that_is_not_connected_says_goodbye_too(live: Observed) -> None:
    rank = Rank(live.socket, plain_shard(4096, 2), engine="left")
    keeper = SessionKeeper(live.socket, {"name": "n", "engine": "left"}, rank.registration())
    keeper.start()
    assert keeper.wait(10, lambda link: link.usable).usable
    keeper.suspect()
    keeper.stop()
    live.settle(1.0, sessions=1, engines=1)
    rank.drop()


def test_the_hello_of_a_process_that_is_gone_opens_nothing(live: Observed) -> None:
    code = (
        "rank = Rank(socket, plain_shard(4096, 1)); rank.call('ping'); say('ready'); wait()\n"
        "rank.ask('hello', major=1, minor=0, name='n'); time.sleep(0.2); os._exit(0)\n"
    )
    with Child(live.handle, code) as child:
        assert child.heard() == "ready"
        live.handle.process.send_signal(signal.SIGSTOP)
        try:
            child.tell()
            child.ended()
        finally:
            live.handle.process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        assert live.gauges()["sessions"] == 1
