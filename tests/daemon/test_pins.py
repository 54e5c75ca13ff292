"""Pins of a real daemon: by hot prefix and by request, listed, bounded, and let go."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from tests.daemons import hpkvd, refusal
from tests.support import NOBODY, Child, Observed, Rank, hashes, observed_daemon, plain_shard

SIZE = 64 << 10
CHAIN = hashes(*(f"kept {i}" for i in range(10)))


@pytest.fixture(scope="module")
def live() -> Iterator[Observed]:
    with observed_daemon(HPKV_KV_MEM_POOL_SIZE="4m", HPKV_SOCKET_MODE="0666") as made:
        made.socket.parent.chmod(0o755)
        yield made


@pytest.fixture
def rank(live: Observed) -> Iterator[Rank]:
    """A ready rank, ten blocks of which were stored and found."""
    live.ask("clear")
    with Rank(live.socket, plain_shard(SIZE, 16), engine="e").hello().register(model="m").ready() as made:
        made.store(CHAIN, range(10))
        answer = made.call("match", keys=made.keys(CHAIN), request="cmpl-abc-0")
        made.call("release", lease=answer["lease"])
        yield made
    live.ask("clear")
    live.settle()


def flood(rank: Rank) -> None:
    for number in range(100):
        rank.store(hashes(f"flood {number}"), [0])


def found(rank: Rank) -> int:
    hit, lease = rank.match(CHAIN)
    if lease:
        rank.call("release", lease=lease)
    return hit


def told(live: Observed, *arguments: str) -> dict:
    done = hpkvd(*arguments, "--json", env=live.handle.env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_hot_prefix_that_is_pinned_outlives_a_flood_and_leaves_when_it_is_let_go(live: Observed, rank: Rank) -> None:
    flood(rank)
    assert found(rank) == 0
    rank.store(CHAIN, range(10))
    assert found(rank) == 10
    name = told(live, "hot", "-n", "1")["prefixes"][0]["prefix"]
    (pinned,) = told(live, "pin", name)["pins"]
    assert (pinned["prefix"], pinned["model"], pinned["blocks"], pinned["bytes"]) == (name, "m", 10, 10 * SIZE)
    assert told(live, "pin", name)["pins"] == [pinned]
    flood(rank)
    assert found(rank) == 10
    listed = told(live, "pins")
    assert (listed["pins"], listed["pinned_bytes"], listed["limit_bytes"]) == ([pinned], 10 * SIZE, 1 << 20)
    assert live.ask("check")["ok"]
    assert told(live, "unpin", name) == {"unpinned": 1}
    flood(rank)
    assert found(rank) == 0


def test_what_a_request_found_is_pinned_by_its_id(live: Observed, rank: Rank) -> None:
    shown = hpkvd("pin", "--request", "cmpl-abc", env=live.handle.env)
    assert shown.stdout.splitlines()[1].split()[1:] == ["m", "10", "640.0", "KiB"]
    flood(rank)
    assert found(rank) == 10
    said = hpkvd("pins", env=live.handle.env)
    assert "640.0 KiB of 1.0 MiB" in said.stderr
    assert told(live, "unpin", "--all") == {"unpinned": 1}
    assert "nothing is pinned" in hpkvd("pins", env=live.handle.env).stderr


def test_what_cannot_be_pinned_is_told_why(live: Observed, rank: Rank) -> None:
    env = live.handle.env
    assert "see 'hpkvd hot'" in refusal("pin", "0123456789abcdef", env=env, exit_code=2)
    assert "see 'hpkvd explain'" in refusal("pin", "--request", "nobody", env=env, exit_code=2)
    assert "either" in refusal("pin", env=env, exit_code=2)
    assert "see 'hpkvd pins'" in refusal("unpin", "0123456789abcdef", env=env, exit_code=2)
    names = hashes(*(f"long {i}" for i in range(20)))
    rank.store(names[:16], range(16))
    rank.store(names[16:], range(4), parent=names[15])
    answer = rank.call("match", keys=rank.keys(names), request="long")
    rank.call("release", lease=answer["lease"])
    assert answer["hit"] == 20
    assert "a quarter of the pool" in refusal("pin", "--request", "long", env=env, exit_code=75)


def test_clear_forgets_pins(live: Observed, rank: Rank) -> None:
    told(live, "pin", "--request", "cmpl-abc")
    assert live.ask("clear")["cleared_blocks"] == 10
    assert told(live, "pins")["pins"] == []
    assert found(rank) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.usefixtures("rank")
def test_another_user_pins_nothing(live: Observed) -> None:
    code = (
        f"os.setuid({NOBODY})\n"
        "channel = Channel(socket)\n"
        "for verb in ('pin', 'unpin'):\n"
        "    try: channel.call(verb, {'prefix': 'x'}, 30.0)\n"
        "    except NotPermitted as problem: say(problem.message)\n"
    )
    with Child(live.handle, code) as child:
        assert child.heard() == f"uid {NOBODY} may not pin prefixes"
        assert child.heard() == f"uid {NOBODY} may not unpin prefixes"
