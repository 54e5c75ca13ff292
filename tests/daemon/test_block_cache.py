"""``BlockCache`` as a program uses it, against real daemons that live, sleep, die and come back."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from hpkv_client.client import BlockCache
from hpkv_client.errors import (
    ConfigError,
    HpkvError,
    LayoutRefused,
    NotPermitted,
    NotRunning,
    Unreachable,
    UsageError,
)
from hpkv_client.transport import Channel
from tests.support import (
    ROOT,
    Child,
    Observed,
    content,
    hashes,
    observed_daemon,
    wait_until,
)

SIZE = 4096


@pytest.fixture(scope="module")
def shared() -> Iterator[Observed]:
    """The daemon of this module."""
    with observed_daemon() as observed:
        yield observed


@pytest.fixture(scope="module")
def resting(shared: Observed) -> Iterator[BlockCache]:
    """A cache that keeps the mover."""
    with BlockCache("resting", SIZE, socket=shared.socket) as cache:
        yield cache


@pytest.fixture
def live(shared: Observed, resting: BlockCache) -> Iterator[Observed]:
    """The shared daemon, empty before the test and clean after it."""
    assert resting.contains([b"x"]) == [False]
    shared.ask("clear")
    yield shared
    shared.faults("")
    shared.settle(sessions=1, engines=1)
    assert shared.stats()["internal_errors"] == 0
    assert "Traceback" not in shared.handle.text()


def blocks(*names: object, size: int = SIZE) -> dict[bytes, bytes]:
    """Some blocks with the content that belongs to their keys."""
    return {key: content(key, size) for key in hashes(*names)}


# -- putting and getting ------------------------------------------------------------------------------------


def test_what_was_put_is_got_by_every_cache_of_the_namespace(live: Observed) -> None:
    with (
        BlockCache("one", SIZE, socket=live.socket) as cache,
        BlockCache("one", SIZE, arena_blocks=2, socket=live.socket) as same,
        BlockCache("two", SIZE, socket=live.socket) as other,
        BlockCache("one", SIZE + 1, socket=live.socket) as larger,
    ):
        mine = blocks(*range(5))
        assert cache.put(mine) == 5
        for reader in (cache, same):
            assert reader.get(list(mine)) == list(mine.values())
            assert reader.contains([*mine, b"none"]) == [True] * 5 + [False]
        for stranger in (other, larger):
            assert stranger.get(list(mine)) == [None] * 5
            assert stranger.contains(list(mine)) == [False] * 5


def test_keys_may_be_anything_and_are_compared_in_full(live: Observed) -> None:
    digest = hashlib.sha256(b"key").digest()
    flipped = bytes([255 - digest[0]])
    keys = [b"", b"\x00", b"a/b\n", b"k" * (1 << 20), digest, flipped + digest[1:], digest[:-1] + flipped, digest[:8]]
    with BlockCache("keys", SIZE, socket=live.socket) as cache:
        for number, key in enumerate(keys):
            assert cache.get(keys[number:]) == [None] * (len(keys) - number)
            assert cache.put({key: content(bytes([number]), SIZE)}) == 1
        assert cache.get(keys) == [content(bytes([number]), SIZE) for number in range(len(keys))]


def test_names_of_namespaces_may_be_anything(live: Observed) -> None:
    names = [
        "../../x",
        "/abs",
        "a/b",
        "x" * 3000,
        "x" * 3001,
        "nul\0",
        "line\nline",
        ".",
        "",
        "\ud800",
        "?",
        "ü",
        "u\u0308",
    ]
    caches = [BlockCache(name, SIZE, arena_blocks=1, socket=live.socket) for name in names]
    for number, cache in enumerate(caches):
        assert cache.get([b"k"]) == [None]
        assert cache.put({b"k": bytes([number]) * SIZE}) == 1
    for number, cache in enumerate(caches):
        assert cache.get([b"k"]) == [bytes([number]) * SIZE]
        cache.close()
    assert sorted(path.name for path in live.handle.pool_directory.iterdir()) == ["index", "pool", "pool.lock"]


def test_blocks_are_immutable_and_the_first_writer_wins(live: Observed) -> None:
    with BlockCache("first", SIZE, socket=live.socket) as cache:
        assert cache.put({b"k": b"1" * SIZE}) == 1
        assert cache.put({b"k": b"2" * SIZE}) == 1
        assert cache.get([b"k", b"k"]) == [b"1" * SIZE] * 2


def test_long_calls_are_cut_into_batches(live: Observed) -> None:
    with BlockCache("long", SIZE, arena_blocks=7, socket=live.socket) as cache:
        many = blocks(*range(100))
        assert cache.put(many) == 100
        wanted = [key for pair in zip(many, hashes(*range(1000, 1100)), strict=True) for key in pair]
        found = cache.get(wanted)
        assert found[::2] == list(many.values())
        assert found[1::2] == [None] * 100
        assert cache.put({}) == 0
        assert cache.get([]) == []
        assert cache.contains([]) == []


def test_every_kind_of_buffer_is_taken(live: Observed) -> None:
    with BlockCache("buffers", SIZE, socket=live.socket) as cache:
        data = content(b"data", SIZE)
        assert cache.put({b"1": data, b"2": bytearray(data), b"3": memoryview(data)}) == 3
        assert cache.get([b"1", b"2", b"3"]) == [data] * 3


def test_the_arena_is_used_without_a_copy(live: Observed) -> None:
    with BlockCache("arena", SIZE, arena_blocks=4, socket=live.socket) as cache:
        cache.block(3)[:] = content(b"a", SIZE)
        cache.block(1)[:] = content(b"b", SIZE)
        assert cache.put_arena([b"a", b"b"], [3, 1]) == 2
        cache.block(0)[:] = cache.block(2)[:] = b"\xee" * SIZE
        assert cache.get_arena([b"b", b"none", b"a"], [2, 0, 3]) == [True, False, True]
        assert bytes(cache.block(2)) == content(b"b", SIZE)
        assert bytes(cache.block(0)) == b"\xee" * SIZE
        for index in (-1, 4):
            with pytest.raises(UsageError, match="of an arena of 4"):
                cache.block(index)
        with pytest.raises(UsageError, match="of an engine with 4 blocks"):
            cache.get_arena([b"a"], [4])


def test_wrong_use_is_refused_before_anything_moves(live: Observed) -> None:
    with BlockCache("wrong", SIZE, socket=live.socket) as cache:
        for size in (0, SIZE - 1, SIZE + 1):
            with pytest.raises(UsageError, match=f"a block has {SIZE} bytes, not {size}"):
                cache.put({b"k": bytes(size)})
        assert cache.contains([b"k"]) == [False]
    for size, arena in ((0, 1), (-1, 1), (1, 0)):
        with pytest.raises(UsageError, match="must be positive"):
            BlockCache("wrong", size, arena_blocks=arena, socket=live.socket)


def test_threads_with_a_cache_each_do_not_disturb_one_another(live: Observed) -> None:
    problems: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with BlockCache(f"thread-{number % 2}", SIZE, arena_blocks=8, socket=live.socket) as cache:
                for round_number in range(20):
                    some = blocks(*((number, round_number, i) for i in range(8)))
                    assert cache.put(some) == 8
                    assert cache.get(list(some)) == list(some.values())
        except BaseException as problem:  # noqa: BLE001  (raised by the test's own thread)
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_a_cache_finds_the_daemon_of_its_environment(live: Observed) -> None:
    code = "say(BlockCache('env', 4096).put({b'k': bytes(4096)}))"
    with Child(live.handle, code) as child:
        assert child.heard() == "1"


def test_what_a_program_imports_is_small(live: Observed) -> None:
    heavy = {"numpy", "torch", "uvloop", "rich", "click", "hpkv_daemon"}
    code = f"import sys, hpkv_client.client; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=live.handle.env, capture_output=True, text=True)
    assert done.stdout == "[]\n"


# -- daemons that are not there -----------------------------------------------------------------------------


def test_without_a_daemon_the_constructor_says_so_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(NotRunning, match="hpkvd start"):
        BlockCache("none", SIZE, socket=tmp_path / "none.sock")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a socket"):
        BlockCache("none", SIZE, socket=tmp_path / "file")
    with pytest.raises(ConfigError, match="107"):
        BlockCache("none", SIZE, socket=tmp_path / ("x" * 107))
    assert time.monotonic() - started < 10.0


@pytest.mark.skipif(os.geteuid() != 0, reason="acting as another user needs root")
def test_without_permission_the_constructor_says_so_at_once(live: Observed) -> None:
    live.socket.parent.chmod(0o755)
    code = (
        "import tomllib; os.setgroups([]); os.setgid(65534); os.setuid(65534); started = time.monotonic()\n"
        "try: BlockCache('denied', 4096)\n"
        "except NotPermitted as problem: say(problem.message, time.monotonic() - started < 10)\n"
    )
    with Child(live.handle, code) as child:
        assert child.heard() == f"no access to {live.socket} True"


def test_a_cache_that_could_not_be_opened_leaves_nothing(live: Observed) -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        with pytest.raises(LayoutRefused):
            BlockCache("large", 1 << 30, arena_blocks=1, socket=live.socket)
    wait_until(lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) <= before)
    live.settle(sessions=1, engines=1)


def test_closing_gives_everything_back_and_may_be_repeated(live: Observed) -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(10):
        cache = BlockCache("closed", SIZE, socket=live.socket)
        assert cache.put({b"k": bytes(SIZE)}) == 1
        cache.close()
        # A descriptor that takes the number of one that was closed must survive the second close.
        with open(os.devnull) as first, open(os.devnull) as second:
            cache.close()
            os.fstat(first.fileno())
            os.fstat(second.fileno())
    wait_until(lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) <= before)
    live.settle(sessions=1, engines=1)


# -- daemons that come back ---------------------------------------------------------------------------------


@pytest.fixture
def mortal() -> Iterator[Observed]:
    """A daemon of this test's own."""
    with observed_daemon() as observed:
        yield observed


def test_a_cache_works_again_by_itself_when_its_daemon_was_killed(mortal: Observed) -> None:
    with BlockCache("again", SIZE, socket=mortal.socket) as cache:
        epochs = set()
        for round_number in range(2):
            some = blocks(round_number)
            assert cache.put(some) == 1
            assert cache.get(list(some)) == list(some.values())
            epochs.add(mortal.ask("ping")["epoch"])
            mortal.handle.kill()
            mortal.handle.restart()
            started = time.monotonic()
            # A get may fail once, as misses may, while client and daemon find to each other.
            wait_until(lambda wanted=some: cache.get(list(wanted)) == list(wanted.values()))
            assert time.monotonic() - started < 15.0
        assert len(epochs) == 2


def test_a_call_that_a_dying_daemon_swallowed_is_asked_again(mortal: Observed) -> None:
    with BlockCache("swallowed", SIZE, socket=mortal.socket) as cache:
        before = blocks("before")
        assert cache.put(before) == 1
        mortal.faults("commit=delay:30")
        kept: list[int] = []
        thread = threading.Thread(target=lambda: kept.append(cache.put(blocks("during"))))
        thread.start()
        wait_until(lambda: mortal.stats()["pool_reserved_blocks"] == 1)
        mortal.faults("")
        mortal.handle.kill()
        mortal.handle.restart()
        started = time.monotonic()
        thread.join(30)
        assert kept == [1]
        assert time.monotonic() - started < 15.0
        # A load may fail once, as misses may, while client and daemon find to each other; a kept block stays.
        right = [*before.values(), content(hashes("during")[0], SIZE)]
        wait_until(lambda: cache.get(hashes("before", "during")) == right, 30, mortal.handle.text()[-3000:])


def test_while_the_daemon_is_down_calls_end_in_time_and_later_ones_work(mortal: Observed) -> None:
    with BlockCache("down", SIZE, socket=mortal.socket, timeout=2.0) as cache:
        assert cache.put(blocks("a")) == 1
        assert mortal.handle.stop() == 0
        for _ in range(2):
            started = time.monotonic()
            with pytest.raises(Unreachable):
                cache.get(hashes("a"))
            assert 0.2 < time.monotonic() - started < 10.0
        mortal.handle.restart()

        def put() -> int:
            try:
                return cache.put(blocks("a"))
            except Unreachable:
                return 0

        assert wait_until(put) == 1
        assert cache.get(hashes("a")) == list(blocks("a").values())


def test_a_frozen_daemon_costs_one_time_out_and_its_late_answers_are_dropped(mortal: Observed) -> None:
    with BlockCache("frozen", SIZE, socket=mortal.socket, timeout=2.0) as cache:
        assert cache.put(blocks("a", "b")) == 2
        mortal.handle.process.send_signal(signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(Unreachable, match="did not answer"):
                cache.get(hashes("a"))
            assert time.monotonic() - started < 10.0
        finally:
            mortal.handle.process.send_signal(signal.SIGCONT)
        found = wait_until(lambda: get_or_none(cache, hashes("b")))
        assert found == list(blocks("b").values())
        assert cache.get(hashes("none", "a")) == [None, *blocks("a").values()]


def get_or_none(cache: BlockCache, keys: list[bytes]) -> list[bytes | None] | None:
    """What the cache finds, or None while it is cut off."""
    try:
        return cache.get(keys)
    except Unreachable:
        return None


def test_a_load_that_comes_too_late_spoils_nothing(live: Observed) -> None:
    size = 1 << 20
    with (
        BlockCache("late", size, arena_blocks=16, socket=live.socket, timeout=2.0) as cache,
        BlockCache("late", size, arena_blocks=16, socket=live.socket) as reader,
    ):
        old, new = blocks(*range(16), size=size), blocks(*range(100, 116), size=size)
        assert reader.put(old) == 16
        live.faults("load=delay:0.3")
        with pytest.raises(Unreachable):
            cache.get(list(old))
        # The mover still has a slice of that load in hand, for the same arena.
        wait_until(lambda: put_or_none(cache, new))
        live.faults("")
        assert reader.get(list(new)) == list(new.values())


def put_or_none(cache: BlockCache, some: dict[bytes, bytes]) -> int | None:
    """How many blocks the cache keeps, or None while it is cut off."""
    try:
        return cache.put(some)
    except Unreachable:
        return None


def test_a_store_that_was_given_up_by_its_client_does_not_appear_later(live: Observed) -> None:
    size = 1 << 22
    with BlockCache("given-up", size, arena_blocks=8, socket=live.socket, timeout=2.0) as cache:
        live.faults("store=delay:0.3")
        with pytest.raises(Unreachable):
            cache.put(blocks(*range(8), size=size))
        live.faults("")
        wait_until(lambda: live.stats()["pool_reserved_blocks"] == 0)
        assert wait_until(lambda: get_or_none(cache, hashes(*range(8)))) == [None] * 8


def test_a_reply_that_gets_lost_costs_one_time_out(live: Observed) -> None:
    with BlockCache("lost", SIZE, socket=live.socket, timeout=2.0) as cache:
        assert cache.put(blocks("a")) == 1
        live.faults("reply@1=fail")
        with pytest.raises(Unreachable, match="did not answer"):
            cache.get(hashes("a"))
        assert cache.get(hashes("a")) == list(blocks("a").values())


def test_a_copy_that_fails_is_a_miss_and_not_an_error(live: Observed) -> None:
    with BlockCache("miss", SIZE, socket=live.socket) as cache:
        some = blocks("a", "b")
        live.faults("store=fail")
        assert cache.put(some) == 0
        live.faults("")
        assert cache.put(some) == 2
        live.faults("load@2=fail")
        assert cache.get(list(some)) == [None, None]
        assert cache.get(list(some)) == list(some.values())


def test_a_dead_mover_costs_a_moment_and_no_error(mortal: Observed) -> None:
    with BlockCache("mover", SIZE, socket=mortal.socket) as cache:
        some = blocks("a", "b")
        assert cache.put(some) == 2
        os.kill(mortal.mover(), signal.SIGKILL)
        started = time.monotonic()
        wait_until(lambda: cache.get(list(some)) == list(some.values()))
        assert time.monotonic() - started < 15.0
        assert cache.put(blocks("c")) == 1


@pytest.mark.parametrize("politely", [False, True])
def test_replies_never_meet_other_requests_across_a_restart(mortal: Observed, politely: bool) -> None:
    with ExitStack() as stack:
        channels = [stack.enter_context(closing(Channel(mortal.socket))) for _ in range(5)]
        asked: list[dict[int, bytes]] = [{} for _ in channels]

        def ask(number: int, what: str) -> None:
            echo = f"{number} {what}".encode()
            asked[number][channels[number].send("ping", {"echo": echo})] = echo

        for number in range(len(channels)):
            for i in range(200):
                ask(number, f"before {i}")
        if politely:
            assert mortal.handle.stop() == 0
            assert "Traceback" not in mortal.handle.text()
        else:
            mortal.handle.kill()
        mortal.handle.restart()
        served = set()

        def everyone_is_served() -> bool:
            for number, channel in enumerate(channels):
                ask(number, "after")
                for reply in channel.replies(0.01):
                    echo = asked[number].pop(reply.id)
                    assert reply.body["echo"] == echo
                    if b"after" in echo:
                        served.add(number)
            return len(served) == len(channels)

        wait_until(everyone_is_served)


def test_a_stop_with_stores_under_way_ends_in_time(mortal: Observed) -> None:
    problems: list[HpkvError] = []
    kept: list[int] = []

    def put(number: int) -> None:
        try:
            with BlockCache("stop", 1 << 20, arena_blocks=8, socket=mortal.socket, timeout=1.0) as cache:
                kept.append(cache.put(blocks(*((number, i) for i in range(8)), size=1 << 20)))
        except HpkvError as problem:
            problems.append(problem)

    mortal.faults("store=delay:0.2")
    threads = [threading.Thread(target=put, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: mortal.stats()["pool_reserved_blocks"] >= 8)
    started = time.monotonic()
    assert mortal.handle.stop() == 0
    assert time.monotonic() - started < 5.0
    for thread in threads:
        thread.join()
    assert len(problems) + len(kept) == 4
    assert problems
    assert all(isinstance(problem, Unreachable | NotRunning) for problem in problems)
    assert "Traceback" not in mortal.handle.text()
    assert sorted(path.name for path in mortal.handle.pool_directory.iterdir()) == ["index", "pool"]
    assert NotPermitted not in map(type, problems)
