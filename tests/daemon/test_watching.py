"""Commands that watch a real daemon: clients, leases, latency, top."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Iterator

import pytest

from tests import samples
from tests.daemons import HPKVD, hpkvd
from tests.outputs import shape
from tests.support import Observed, Rank, hashes, observed_daemon, plain_shard, wait_until


@pytest.fixture(scope="module")
def live() -> Iterator[Observed]:
    with observed_daemon() as made:
        yield made


@pytest.fixture
def rank(live: Observed) -> Iterator[Rank]:
    """A ready rank with two blocks stored and leased."""
    with Rank(live.socket, plain_shard(64 << 10, 4), engine="e1").hello().register(model="m").ready() as made:
        made.store(hashes("a", "b"), [0, 1])
        _, lease = made.match(hashes("a", "b"))
        yield made
        made.call("release", lease=lease)


def told(live: Observed, *arguments: str) -> dict:
    done = hpkvd(*arguments, "--json", env=live.handle.env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.usefixtures("rank")
def test_the_made_up_answers_are_shaped_like_real_ones(live: Observed) -> None:
    real, made = live.ask("info"), samples.INFO
    for part in ("pool", "storage", "leases"):
        assert shape(made[part]).items() <= shape(real[part]).items(), part
    for part in ("namespaces", "engines", "sessions", "quotas"):
        assert made[part][0].keys() <= real[part][0].keys(), part
    assert samples.stats(1).keys() <= live.stats().keys()
    assert shape(samples.LEASES) == shape(live.ask("leases"))


@pytest.mark.usefixtures("rank")
def test_clients_are_listed_with_their_rank(live: Observed) -> None:
    rows = told(live, "clients")["clients"]
    assert [(row["engine"], row["rank"], row["model"], row["pid"], row["ready"]) for row in rows] == [
        ("e1", 0, "m", os.getpid(), True)
    ]
    head, line = hpkvd("clients", env=live.handle.env).stdout.splitlines()
    assert head.split()[:3] == ["NAME", "ENGINE", "MODEL"]
    assert line.split()[:5] == ["rank", "e1", "m", "0", str(os.getpid())]


@pytest.mark.usefixtures("rank")
def test_leases_are_listed_with_what_is_left_of_them(live: Observed) -> None:
    (row,) = told(live, "leases")["leases"]
    assert (row["engine"], row["model"], row["blocks"], row["loads"]) == ("e1", "m", 2, 0)
    assert 0 < row["seconds_left"] <= 30
    assert hpkvd("leases", env=live.handle.env).stdout.splitlines()[1].split()[:4] == ["e1", "m", "2", "0"]


def test_nobody_and_nothing_is_said_on_stderr(live: Observed) -> None:
    for command, words in (("clients", "nobody is connected"), ("leases", "no leases")):
        done = hpkvd(command, env=live.handle.env)
        assert (done.returncode, done.stdout) == (0, "")
        assert words in done.stderr


def test_latency_is_measured_once_or_again_and_again(live: Observed) -> None:
    found = told(live, "latency", "--once", "-n", "20", "-i", "0")
    assert found["pings"] == 20
    assert 0 < found["min_microseconds"] <= found["p50_microseconds"] <= found["max_microseconds"]
    assert "us of 5 pings" in hpkvd("latency", "--once", "-n", "5", "-i", "0", env=live.handle.env).stdout


@pytest.mark.usefixtures("rank")
def test_top_counts_what_happens_between_its_looks(live: Observed) -> None:
    found = told(live, "top", "--once", "-i", "0.05")
    assert found["requests_per_second"] > 0
    assert found["tiers"][0]["blocks"] == 2
    assert found["namespaces"][0]["bytes"] == 2 * (64 << 10)
    shown = hpkvd("top", "-n", "2", "-i", "0.05", env=live.handle.env).stdout
    assert shown.count("hpkvd pid") == 2
    assert "\x1b" not in shown


@pytest.mark.usefixtures("rank")
def test_top_on_a_terminal_takes_keys_and_gives_the_terminal_back(live: Observed) -> None:
    ours, theirs = pty.openpty()
    env = live.handle.env | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen([*HPKVD, "top", "-i", "0.1"], env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.set_blocking(ours, False)
    said = bytearray()

    def shows(words: bytes) -> bool:
        try:
            said.extend(os.read(ours, 1 << 16))
        except BlockingIOError:
            return words in said
        return words in said

    try:
        wait_until(lambda: shows(b"sorted by size"), 20)
        os.write(ours, b"s")
        wait_until(lambda: shows(b"sorted by blocks"), 20)
        os.write(ours, b"h")
        wait_until(lambda: shows(b"this line"), 20)
        os.write(ours, b"q")
        wait_until(lambda: shows(b"\x1b[?1049l") and process.poll() is not None, 20)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
