"""The remote tier with its real process, on a shared directory and on a real S3 server."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import obstore
import pytest

from hpkv_client.types import typed_digest
from hpkv_daemon.tiers.base import Forgotten, Outcome, State
from hpkv_daemon.tiers.remote.format import object_name
from hpkv_daemon.tiers.remote.lookups import LOOKUP_SECONDS
from hpkv_daemon.tiers.remote.presence import ABSENT_SECONDS, FANOUT
from tests.stores import BLOCK_BYTES, SPACE, Folder, Remote, S3Server, name, names_in, overwrite

OTHER = typed_digest("test", "other")
OK, MISSING, BAD = Outcome.OK, Outcome.MISSING, Outcome.BAD


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    made = S3Server()
    yield made
    made.close()


@pytest.fixture
def s3(server: S3Server) -> S3Server:
    """The server, empty."""
    for path in names_in(server.objects):
        obstore.delete(server.objects, path)
    return server


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    path = tmp_path / "shared"
    path.mkdir()
    return Folder(path)


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest) -> Folder | S3Server:
    found = request.getfixturevalue("folder" if request.param == "file" else "s3")
    assert isinstance(found, Folder | S3Server)
    return found


@pytest.fixture
def remote() -> Iterator[Callable[..., Remote]]:
    """``remote(store, ...)``: a tier that is open on it."""
    opened: list[Remote] = []

    def open_on(store: Folder | S3Server, **options: object) -> Remote:
        opened.append(Remote(store.url, store.variables, **options))
        return opened[-1]

    yield open_on
    for each in opened:
        each.close()


def test_what_one_node_writes_another_one_finds_and_reads(
    store: Folder | S3Server, remote: Callable[..., Remote]
) -> None:
    one, other = remote(store), remote(store)
    assert one.write(range(40)) == (OK,) * 40
    assert other.find(range(60)) == 40
    assert other.read(range(40)) == (OK,) * 40
    assert other.find(range(40), OTHER) == 0
    assert other.read([99]) == (MISSING,)
    assert len(names_in(store.objects)) == 40
    assert other.counter("read_bytes") == 40 * BLOCK_BYTES
    assert other.counter("missing_blocks") == 1


def test_the_end_of_a_chain_is_found_with_few_questions(folder: Folder, remote: Callable[..., Remote]) -> None:
    one, other = remote(folder), remote(folder)
    one.write(range(100))
    assert other.find(range(2000)) == 100
    assert other.counter("lookup_questions") <= 3 * FANOUT
    before = other.counter("lookup_questions")
    assert other.find(range(2000)) == 100
    assert other.counter("lookup_questions") == before


def test_blocks_that_form_no_chain_are_asked_for_one_by_one(folder: Folder, remote: Callable[..., Remote]) -> None:
    one, other = remote(folder), remote(folder)
    one.write([1, 3])
    assert other.find_each(range(5)) == [False, True, False, True, False]


def test_a_block_that_was_absent_is_found_soon_after_it_was_written(
    folder: Folder, remote: Callable[..., Remote]
) -> None:
    one, other = remote(folder), remote(folder)
    assert other.find([1]) == 0
    one.write([1])
    assert other.find([1]) == 0
    other.skew += ABSENT_SECONDS + 0.1
    assert other.find([1]) == 1


def test_a_block_is_never_written_twice(store: Folder | S3Server, remote: Callable[..., Remote]) -> None:
    one, other = remote(store), remote(store)
    one.write([1])
    before = obstore.head(store.objects, object_name(SPACE, name(1)))
    assert other.write([1, 2]) == (OK, OK)
    assert other.counter("existing_blocks") == 1
    assert other.counter("written_blocks") == 1
    assert obstore.head(store.objects, object_name(SPACE, name(1))) == before


def test_writers_of_the_same_blocks_at_once_do_not_fight(
    store: Folder | S3Server, remote: Callable[..., Remote]
) -> None:
    nodes = [remote(store) for _ in range(3)]
    tickets = [node.ask_write(range(30)) for node in nodes]
    for node, ticket in zip(nodes, tickets, strict=True):
        assert node.done(ticket).outcomes == (OK,) * 30
    assert sum(node.counter("written_blocks") for node in nodes) == 30
    assert nodes[0].read(range(30)) == (OK,) * 30


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda before: before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :]


@pytest.mark.parametrize(
    "change",
    [
        flipped(20),
        flipped(250),
        flipped(256),
        flipped(BLOCK_BYTES + 255),
        lambda before: before[: len(before) // 2],
        lambda before: before + b"more",
        lambda before: bytes(len(before)),
        lambda _before: b"",
    ],
    ids=["header", "its checksum", "payload", "last byte", "half", "longer", "zeros", "empty"],
)
def test_what_is_not_the_block_is_a_miss_and_can_be_written_anew(
    folder: Folder, remote: Callable[..., Remote], change: Callable[[bytes], bytes]
) -> None:
    node = remote(folder)
    node.write([1, 2])
    overwrite(folder.objects, 1, change)
    assert node.read([1, 2]) == (BAD, OK)
    assert node.counter("bad_blocks") == 1
    assert node.find([1]) == 0
    assert node.write([1]) == (OK,)
    assert node.read([1]) == (OK,)


def test_a_block_under_the_name_of_another_is_a_miss(s3: S3Server, remote: Callable[..., Remote]) -> None:
    node = remote(s3)
    node.write([1, 2])
    node.write([3], OTHER)
    for number, space in ((2, SPACE), (3, OTHER)):
        stolen = bytes(obstore.get(s3.objects, object_name(space, name(number))).bytes())
        overwrite(s3.objects, 1, lambda _before, stolen=stolen: stolen)
        assert node.read([1]) == (BAD,)
        node.write([1])


def test_a_block_that_a_lifecycle_rule_took_away_is_a_miss(folder: Folder, remote: Callable[..., Remote]) -> None:
    node = remote(folder)
    node.write(range(3))
    obstore.delete(folder.objects, object_name(SPACE, name(1)))
    assert node.read(range(3)) == (OK, MISSING, OK)
    assert node.find(range(3)) == 1


# -- failures -----------------------------------------------------------------------------------------------


def test_a_server_that_is_killed_costs_misses_and_is_used_again(remote: Callable[..., Remote]) -> None:
    server = S3Server()
    try:
        node = remote(server)
        node.write(range(4))
        server.kill()
        started = time.monotonic()
        assert all(outcome is not OK for outcome in node.read(range(4)))
        assert node.find([7], seconds=10) == 0
        assert node.state() is State.DEGRADED
        assert node.ask_write([8]) is None or node.write([9])[0] is not OK
        assert time.monotonic() - started < 30
        server.restart()
        node.until(lambda: (node.find([1]) == 0 and node.tier.usage().reason == "") or pass_time(node), 60)
        assert node.write(range(4)) == (OK,) * 4
        assert node.read(range(4)) == (OK,) * 4
        assert node.state() is State.READY
    finally:
        server.close()


def pass_time(node: Remote) -> bool:
    """A retry may be due; ask for a write, since only that tells whether writes work."""
    node.hasten()
    if node.tier.usage().reason:
        node.ask_write(["probe"])
    return False


def test_a_server_that_is_frozen_costs_a_look_up_its_time_limit_and_then_nothing(
    remote: Callable[..., Remote],
) -> None:
    server = S3Server()
    try:
        node = remote(server)
        node.write(range(4))
        server.freeze()
        started = time.monotonic()
        assert node.find([7]) == 0
        assert time.monotonic() - started < LOOKUP_SECONDS + 5
        started = time.monotonic()
        assert [node.find([number]) for number in range(8, 12)] == [0] * 4
        assert node.find(range(4)) == 0
        assert node.tier.read(node.jobs(range(4))) is None
        assert time.monotonic() - started < 5
        assert node.state() is State.DEGRADED
        server.thaw()
        node.until(lambda: node.state() is State.READY, 60)
        assert node.find(range(6)) == 4
        assert node.read(range(4)) == (OK,) * 4
    finally:
        server.close()


def test_wrong_credentials_are_misses_and_no_secret_is_told(s3: S3Server, remote: Callable[..., Remote]) -> None:
    node = remote(s3)
    node.write([1])
    s3.deny()
    try:
        assert node.write([2])[0] is Outcome.READ_ONLY
        assert node.read([1])[0] is not OK
        usage = node.tier.usage()
        assert usage.state is State.DEGRADED
        assert "403" in usage.reason
        assert s3.variables["AWS_SECRET_ACCESS_KEY"] not in repr(usage)
    finally:
        s3.deny(False)
    node.until(lambda: node.state() is State.READY or pass_time(node), 60)
    assert node.find([1]) == 1
    assert node.read([1]) == (OK,)


def test_a_bucket_that_is_not_there_is_no_miss_without_a_word(s3: S3Server) -> None:
    elsewhere = Remote("s3://no-such-bucket", s3.variables)
    try:
        assert elsewhere.write([1])[0] is Outcome.IO_ERROR
        assert elsewhere.state() is State.DEGRADED
        assert elsewhere.tier.usage().reason == "the store answers 404 Not Found (NoSuchBucket)"
    finally:
        elsewhere.close()


def test_a_full_file_system_takes_no_writes_and_still_gives(
    tmpfs: Callable[[str], Path], remote: Callable[..., Remote]
) -> None:
    folder = Folder(tmpfs("1m"))
    node = remote(folder)
    outcomes = node.write(range(40))
    kept = outcomes.count(OK)
    assert 5 < kept < 16
    # The queue was written in one order of which some blocks went through: the next finds nothing to be had.
    assert set(node.write(range(100, 120))) == {Outcome.NO_SPACE}
    assert node.state() is State.DEGRADED
    good = [number for number, outcome in zip(range(40), outcomes, strict=True) if outcome is OK]
    assert node.read(good) == (OK,) * kept
    for path in names_in(folder.objects):
        obstore.delete(folder.objects, path)
    node.until(lambda: node.state() is State.READY or pass_time(node), 60)
    assert node.write([1000]) == (OK,)


def test_a_file_system_that_is_not_mounted_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "mount"
    node = Remote(path.as_uri(), {})
    try:
        assert node.find([1]) == 0
        assert node.state() is State.DEGRADED
        assert not path.exists()
        path.mkdir()
        node.until(lambda: node.state() is State.READY or pass_time(node), 60)
        assert node.write([1]) == (OK,)
    finally:
        node.close()


def test_a_process_that_dies_is_replaced_and_every_batch_has_an_end(
    folder: Folder, remote: Callable[..., Remote]
) -> None:
    node = remote(folder)
    node.write(range(8))
    ticket = node.tier.read(node.jobs(range(8)))
    node.kill()
    assert set(node.done(ticket).outcomes) <= {OK, Outcome.DIED}
    node.until(lambda: node.counter("restarts") == 1 and node.state() is State.READY)
    assert node.read(range(8)) == (OK,) * 8


def test_a_half_written_object_of_a_writer_that_was_killed_is_no_object(
    folder: Folder, remote: Callable[..., Remote]
) -> None:
    node, other = remote(folder), remote(folder)
    for round_ in range(2):
        node.ask_write(range(round_ * 50, round_ * 50 + 50))
        node.kill()
        node.until(lambda: node.tier.usage().queued_bytes == 0 and node.state() is State.READY)
        found = [number for number in range(round_ * 50, round_ * 50 + 50) if other.find_each([number]) == [True]]
        assert not found or set(other.read(found)) == {OK}


# -- bandwidth, forgetting, encryption ------------------------------------------------------------------------


def test_writes_take_no_more_than_their_bandwidth(folder: Folder, remote: Callable[..., Remote]) -> None:
    node = remote(folder, bytes_per_second=16 << 20)
    started = time.monotonic()
    for start in range(0, 480, 160):
        node.write(range(start, start + 160))
    # 30 MiB at 16 MiB/s, of which half a second's worth and the last order go ahead.
    assert time.monotonic() - started > 0.75


def test_a_namespace_that_was_forgotten_is_deleted_for_all(
    store: Folder | S3Server, remote: Callable[..., Remote]
) -> None:
    one, other = remote(store), remote(store)
    one.write(range(20))
    one.write([1], OTHER)
    ticket = one.tier.forget_namespace(SPACE)
    assert one.tier.match(SPACE, [name(0)]) == 0
    one.until(lambda: Forgotten(ticket) in one.events)
    assert one.find(range(20)) == other.find(range(20)) == 0
    assert names_in(store.objects) == [object_name(OTHER, name(1))]
    ticket = one.tier.forget(OTHER, [name(1)])
    one.until(lambda: Forgotten(ticket) in one.events)
    assert names_in(store.objects) == []


def test_a_namespace_that_cannot_be_deleted_is_not_served_meanwhile(
    s3: S3Server, remote: Callable[..., Remote]
) -> None:
    node = remote(s3)
    node.write(range(4))
    s3.deny()
    try:
        ticket = node.tier.forget_namespace(SPACE)
        node.until(lambda: node.state() is State.DEGRADED)
        assert node.find(range(4)) == 0
        assert node.tier.read(node.jobs(range(4))) is None
    finally:
        s3.deny(False)
    node.until(lambda: Forgotten(ticket) in node.events or pass_time(node), 60)
    assert node.find(range(4)) == 0


def key_file(path: Path) -> Path:
    path.write_bytes(base64.b64encode(os.urandom(32)))
    path.chmod(0o600)
    return path


def test_encrypted_blocks_are_read_with_their_key_only(
    folder: Folder, remote: Callable[..., Remote], tmp_path: Path
) -> None:
    mine, theirs = key_file(tmp_path / "mine"), key_file(tmp_path / "theirs")
    one, other = remote(folder, key_file=mine), remote(folder, key_file=mine)
    stranger, plain = remote(folder, key_file=theirs), remote(folder)
    assert one.write(range(8)) == (OK,) * 8
    assert other.find(range(8)) == 8
    assert other.read(range(8)) == (OK,) * 8
    assert stranger.find(range(8)) == plain.find(range(8)) == 0
    stored = b"".join(bytes(obstore.get(folder.objects, path).bytes()) for path in names_in(folder.objects))
    clear = bytes(one.memory.mapping[:64])
    assert clear not in stored
    # The same block under the other key lies beside it, and neither is taken for the other.
    assert stranger.write([0]) == (OK,)
    assert stranger.read([0]) == (OK,)
    assert len(names_in(folder.objects)) == 9


@pytest.mark.parametrize("at", [60, 150, 256, 256 + BLOCK_BYTES, 256 + BLOCK_BYTES + 15])
def test_an_encrypted_block_that_was_changed_is_a_miss(
    folder: Folder, remote: Callable[..., Remote], tmp_path: Path, at: int
) -> None:
    node = remote(folder, key_file=key_file(tmp_path / "key"))
    node.write([1])
    (path,) = names_in(folder.objects)
    before = bytes(obstore.get(folder.objects, path).bytes())
    obstore.put(folder.objects, path, flipped(at)(before), use_multipart=False)
    assert node.read([1]) == (BAD,)
