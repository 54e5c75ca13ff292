"""Commands that watch a real daemon: clients, leases, latency, top, hot, monitor; bench and support-bundle."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import samples
from tests.daemons import HPKVD, DaemonFactory, hpkvd, refusal
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


def test_hot_names_the_prefix_that_was_found_most(live: Observed, rank: Rank) -> None:
    for names in (("a",), ("a", "b"), ("a", "b"), ("a", "b", "c")):
        _, lease = rank.match(hashes(*names))
        rank.call("release", lease=lease)
    first, second = told(live, "hot", "-n", "2")["prefixes"]
    assert (first["blocks"], first["model"], first["resident"]) == (2, "m", True)
    assert first["uses"] > second["uses"] >= 1
    assert second["blocks"] == 1
    assert first["bytes"] == 2 * (64 << 10)
    assert shape(samples.HOT["prefixes"][0]) == shape(first)
    shown = hpkvd("hot", env=live.handle.env).stdout
    assert first["prefix"] in shown
    key = bytes(rank.keys(hashes("b"))).hex()
    assert key[:16] not in shown
    live.ask("clear")
    assert told(live, "hot", "-n", "1")["prefixes"][0]["resident"] is False


def test_monitor_tells_what_happens_while_it_follows(live: Observed) -> None:
    follower = subprocess.Popen(
        [*HPKVD, "monitor", "--json", "-n", "6"], env=live.handle.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert follower.stderr.readline() == b"hpkvd: following\n"
        with Rank(live.socket, plain_shard(64 << 10, 4), engine="e2").hello().register(model="m2").ready() as rank:
            rank.store(hashes("x", "y"), [0, 1])
            _, lease = rank.match(hashes("x", "y", "z"))
            rank.load(lease, [2, 3])
            rank.call("release", lease=lease)
        live.ask("clear")
        said, _ = follower.communicate(timeout=30)
    except BaseException:
        follower.kill()
        follower.communicate()
        raise
    events = [json.loads(line) for line in said.splitlines()]
    assert follower.returncode == 0
    kinds = [event["kind"] for event in events]
    assert kinds == ["opened", "ready", "stored", "lookup", "loaded", "closed"]
    stored, lookup, loaded = events[2:5]
    assert (stored["engine"], stored["asked"], stored["blocks"], stored["failed"]) == ("e2", 2, 2, False)
    assert (lookup["asked"], lookup["hit"], lookup["reason"]) == (3, 2, "never stored here, or too long ago to tell")
    assert (loaded["rank"], loaded["blocks"], loaded["bytes"], loaded["problem"]) == (0, 2, 2 * (64 << 10), "")


def test_bench_measures_and_leaves_nothing(live: Observed) -> None:
    before = live.stats()["pool_resident_blocks"]
    found = told(live, "bench", "--size", "4m", "--block-size", "256k", "--seconds", "0.3")
    assert shape(found) == shape(samples.BENCH)
    assert (found["blocks"], found["block_bytes"]) == (16, 256 << 10)
    assert min(found["put_bytes_per_second"], found["get_bytes_per_second"]) > 1e6
    assert live.stats()["pool_resident_blocks"] == before
    assert "from one block" in refusal("bench", "--size", "1k", env=live.handle.env, exit_code=2)


@pytest.mark.usefixtures("rank")
def test_a_support_bundle_has_what_helps_and_no_secrets(live: Observed, tmp_path: Path) -> None:
    key_file = tmp_path / "cluster.key"
    assert hpkvd("keygen", str(key_file), env=live.handle.env).returncode == 0
    env = live.handle.env | {"HPKV_KEY_FILE": str(key_file), "HPKV_LOG_FILE": str(live.handle.log)}
    bundle = tmp_path / "bundle.tar.gz"
    done = hpkvd("support-bundle", str(bundle), "--json", env=env)
    assert json.loads(done.stdout)["size_bytes"] == bundle.stat().st_size
    assert bundle.stat().st_mode & 0o077 == 0
    with tarfile.open(bundle) as archive:
        files = {Path(name).name: archive.extractfile(name).read().decode() for name in archive.getnames()}
    assert json.loads(files["info.json"])["engines"][0]["engine"] == "e1"
    assert "hpkvd" in files["log.txt"]
    assert {"about.json", "doctor.json", "stats.json", "config.json", "leases.json", "check.json"} < files.keys()
    secret = next(line for line in key_file.read_text().splitlines() if line and not line.startswith("#"))
    whole = "".join(files.values())
    assert secret not in whole
    assert hashes("a")[0].hex() not in whole
    assert refusal("support-bundle", str(bundle), env=env, exit_code=1)


def test_a_support_bundle_without_a_daemon_says_so(daemon: DaemonFactory, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.tar.gz"
    assert hpkvd("support-bundle", str(bundle), env=daemon.environment()).returncode == 0
    with tarfile.open(bundle) as archive:
        said = archive.extractfile("hpkvd-support/unanswered.json").read().decode()
    assert "no hpkvd on" in said
