"""The remote tier on a real master of Mooncake Store and a process that lends memory, over TCP."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpkv_client.types import typed_digest
from hpkv_daemon.tiers.base import Forgotten, Outcome, State
from hpkv_daemon.tiers.remote.backend import Fate, Piece
from hpkv_daemon.tiers.remote.format import HEADER_BYTES, object_name, pack_header
from tests.mooncakes import MooncakeCluster
from tests.stores import BLOCK_BYTES, SPACE, Remote, name

OTHER = typed_digest("test", "other")
OK, MISSING, BAD = Outcome.OK, Outcome.MISSING, Outcome.BAD

try:
    import mooncake.store  # noqa: F401
except ImportError as problem:
    pytest.skip(f"Mooncake Store does not load here: {problem}", allow_module_level=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[MooncakeCluster]:
    made = MooncakeCluster()
    yield made
    made.close()


@pytest.fixture
def remote() -> Iterator[Callable[..., Remote]]:
    """``remote(cluster, ...)``: a tier that is open on it."""
    opened: list[Remote] = []

    def open_on(cluster: MooncakeCluster, **options: object) -> Remote:
        opened.append(Remote(cluster.url, cluster.variables, **options))
        return opened[-1]

    yield open_on
    for each in opened:
        each.close()


def test_what_one_node_writes_another_one_finds_reads_and_forgets(
    cluster: MooncakeCluster, remote: Callable[..., Remote]
) -> None:
    one, other = remote(cluster), remote(cluster)
    assert one.write(range(100)) == (OK,) * 100
    assert other.find(range(200)) == 100
    assert other.read(range(100)) == (OK,) * 100
    assert other.read([999]) == (MISSING,)
    assert other.write([1, 1000]) == (OK, OK)
    assert (other.counter("existing_blocks"), other.counter("written_blocks")) == (1, 1)
    assert one.write([7], OTHER) == (OK,)
    ticket = other.tier.forget_namespace(SPACE)
    other.until(lambda: Forgotten(ticket) in other.events)
    assert other.find(range(100)) == 0
    assert other.read([7], OTHER) == (OK,)


@pytest.mark.parametrize("kind", ["flipped", "shorter", "of another block"])
def test_what_is_not_the_block_is_a_miss_and_can_be_written_anew(
    cluster: MooncakeCluster, remote: Callable[..., Remote], kind: str
) -> None:
    node = remote(cluster)
    space = typed_digest("test", kind)
    payload = bytes(BLOCK_BYTES)
    header = pack_header(space, name(1), BLOCK_BYTES, payload)
    bad = {
        "flipped": (header, payload[:-1] + b"\1"),
        "shorter": (header, payload[:-1]),
        "of another block": (pack_header(space, name(2), BLOCK_BYTES, payload), payload),
    }[kind]
    put_beside(cluster, object_name(space, name(1)), *bad)
    assert node.find([1], space) == 1
    assert node.read([1], space) == (BAD,)
    assert node.find([1], space) == 0
    assert node.write([1], space) == (OK,)
    assert node.read([1], space) == (OK,)


def put_beside(cluster: MooncakeCluster, path: str, header: bytes, payload: bytes) -> None:
    """As another client would."""
    from hpkv_daemon.tiers.remote.mooncake import MooncakeBackend

    backend = MooncakeBackend(cluster.url, None)
    try:
        (answer,) = backend.put([Piece(path, memoryview(header), memoryview(payload))])
        assert answer.fate is Fate.OK
        assert len(header) == HEADER_BYTES
    finally:
        backend.close()


def test_encrypted_blocks_are_read_with_their_key(
    cluster: MooncakeCluster, remote: Callable[..., Remote], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_bytes(base64.b64encode(os.urandom(32)))
    key.chmod(0o600)
    one, other, plain = remote(cluster, key_file=key), remote(cluster, key_file=key), remote(cluster)
    assert one.write(range(2000, 2004)) == (OK,) * 4
    assert other.find(range(2000, 2004)) == 4
    assert other.read(range(2000, 2004)) == (OK,) * 4
    assert plain.find(range(2000, 2004)) == 0


def test_a_master_that_is_frozen_or_killed_costs_misses_and_is_used_again(remote: Callable[..., Remote]) -> None:
    cluster = MooncakeCluster()
    try:
        node = remote(cluster)
        node.write(range(4))
        cluster.freeze()
        started = time.monotonic()
        assert node.find([7]) == 0
        assert node.find([8]) == 0
        assert node.tier.read(node.jobs(range(4))) is None
        assert time.monotonic() - started < 10
        assert node.state() is State.DEGRADED
        cluster.thaw()
        node.until(lambda: node.state() is State.READY or node.hasten(), 90)
        assert node.read(range(4)) == (OK,) * 4
        cluster.kill()
        assert node.find([9], seconds=10) == 0
        assert node.state() is State.DEGRADED
        cluster.restart()
        node.until(lambda: node.state() is State.READY or node.hasten(), 90)
        node.until(lambda: node.write([1]) == (OK,) or node.hasten(), 60)
        assert node.read([1]) == (OK,)
    finally:
        cluster.close()
