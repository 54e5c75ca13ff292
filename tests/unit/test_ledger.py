"""The index beside the pool: what it says after a death, when it is not believed, and what it costs."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import random
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpkv_client.errors import ConfigError, NotPermitted
from hpkv_client.types import Keys, typed_digest
from hpkv_daemon.core.ledger import NONE, RecordedNamespace, parents_first
from hpkv_daemon.core.policy import Lru
from hpkv_daemon.core.slots import ALIGNMENT
from hpkv_daemon.core.store import BlockStore
from hpkv_daemon.pool.ledger import MAX_NAMESPACES, RECORD_BYTES, RECORDS_AT, PoolLedger
from tests.ledgers import PoolFile, placed, put, reopened

EXTENT = 16 * ALIGNMENT
SIZE = 32 * EXTENT
NOBODY = 65534


def keys(name: str, count: int) -> list[bytes]:
    return [typed_digest(name, number) for number in range(count)]


@pytest.fixture
def pool(tmp_path: Path) -> PoolFile:
    """A pool without an index."""
    return PoolFile(tmp_path / "pool", SIZE)


@pytest.fixture
def opened() -> Iterator[Callable[..., tuple[BlockStore, PoolLedger]]]:
    """``reopened`` whose ledgers are closed with the test."""
    ledgers: list[PoolLedger] = []

    def open_store(pool: PoolFile, extent_bytes: int = EXTENT, **more: object) -> tuple[BlockStore, PoolLedger]:
        store, ledger = reopened(pool, extent_bytes, **more)
        ledgers.append(ledger)
        return store, ledger

    yield open_store
    for ledger in ledgers:
        ledger.close()


Open = Callable[..., tuple[BlockStore, PoolLedger]]


def filled(pool: PoolFile, opened: Open) -> BlockStore:
    """A store with a chain of ten blocks, whose ledger is closed again."""
    store, ledger = opened(pool)
    put(store, store.open_namespace(b"m" * 32, ALIGNMENT), keys("chain", 10))
    ledger.close()
    return store


def test_everything_about_a_block_is_recorded(pool: PoolFile) -> None:
    ledger = pool.open(EXTENT)
    ledger.opened(0, b"a" * 32, 100, "one")
    ledger.opened(1, b"b" * 32, 200, "two \u00fc")
    ledger.kept(5, 1, b"k" * 32, 3 * ALIGNMENT, NONE, 11)
    ledger.kept(6, 1, b"c" * 32, 4 * ALIGNMENT, 5, 12)
    ledger.kept(7, 0, b"g" * 32, 5 * ALIGNMENT, NONE, 13)
    ledger.used(5, 99)
    ledger.gone(7)
    ledger.close()
    found = pool.open(EXTENT).recorded()
    assert [found.namespaces[home] for home in found.homes] == [RecordedNamespace(b"b" * 32, 200, "two \u00fc")] * 2
    assert list(found.slots) == [5, 6]
    assert list(found.offsets) == [3 * ALIGNMENT, 4 * ALIGNMENT]
    assert list(found.parents) == [NONE, 5]
    assert list(found.ticks) == [99, 12]
    assert [found.key(0), found.key(1)] == [b"k" * 32, b"c" * 32]


def test_only_what_is_resident_has_a_record(pool: PoolFile, opened: Open) -> None:
    store, ledger = opened(pool)
    namespace = store.open_namespace(b"m" * 32, ALIGNMENT)
    above, below, lost = (keys(name, 1) for name in ("above", "below", "lost"))
    first = store.reserve(namespace, None, above, "one")
    second = store.reserve(namespace, above[0], below, "two")
    third = store.reserve(namespace, None, lost, "three")
    assert store.commit(second) == 0
    ledger.close()
    assert len(pool.open(EXTENT).recorded().slots) == 0
    store, ledger = opened(pool)
    namespace = store.open_namespace(b"m" * 32, ALIGNMENT)
    first = store.reserve(namespace, None, above, "one")
    second = store.reserve(namespace, above[0], below, "two")
    third = store.reserve(namespace, None, lost, "three")
    store.commit(second)
    assert store.commit(first) == 2
    store.abort(third)
    ledger.close()
    assert set(placed(opened(pool)[0])) == {(b"m" * 32, key) for key in above + below}


def test_a_block_comes_back_in_its_place_under_its_parent_and_can_be_used(pool: PoolFile, opened: Open) -> None:
    before = filled(pool, opened)
    store, _ = opened(pool)
    store.check()
    assert store.blocks.restored_blocks == 10
    assert placed(store) == placed(before)
    namespace = store.open_namespace(b"m" * 32, ALIGNMENT)
    chain = keys("chain", 12)
    assert store.match(namespace, Keys.of(chain)) == 10
    lease = store.acquire(namespace, Keys.of(chain), "reader", 1.0)
    assert lease is not None
    assert lease.length == 10
    assert put(store, namespace, chain[10:], chain[9]) == 2
    assert store.match(namespace, Keys.of(chain)) == 12
    store.check()


def test_clear_and_eviction_leave_no_records(pool: PoolFile, opened: Open) -> None:
    store, ledger = opened(pool)
    namespace = store.open_namespace(b"m" * 32, ALIGNMENT)
    total = SIZE // ALIGNMENT
    for number in range(total + 10):
        put(store, namespace, keys(f"loner {number}", 1))
    ledger.close()
    assert opened(pool)[0].blocks.restored_blocks == total
    again, ledger = opened(pool)
    assert again.clear() == total
    ledger.close()
    assert opened(pool)[0].blocks.restored_blocks == 0


def test_a_check_of_the_store_notices_an_index_that_tells_something_else(pool: PoolFile, opened: Open) -> None:
    store, ledger = opened(pool)
    put(store, store.open_namespace(b"m" * 32, ALIGNMENT), keys("chain", 10))
    store.check()
    slot = store.blocks.find(0, keys("chain", 10)[3])
    record = RECORDS_AT + slot * RECORD_BYTES
    for at in (record, record + 40, record + 44, record + 48, record + 52):
        before = os.pread(ledger._fd, 1, at)
        change(pool.index, at, bytes([before[0] ^ 1]))
        with pytest.raises(AssertionError, match=f"something else of slot {slot}"):
            store.check()
        change(pool.index, at, before)
    store.check()
    ledger.kept(200, 0, b"k" * 32, 200 * ALIGNMENT, NONE, 1)
    with pytest.raises(AssertionError, match="tells of 11 blocks, not of 10"):
        store.check()


# -- when the index is not believed -------------------------------------------------------------------------


def change(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


@pytest.mark.parametrize(
    ("at", "content", "reason"),
    [
        (0, b"X", "is not one"),
        (8, struct.pack("@I", 99), "another format"),
        (12, struct.pack("@I", 8192), "another format"),
        (16, struct.pack("@Q", 2 * SIZE), "another size"),
        (24, struct.pack("@Q", 2 * EXTENT), "another size"),
        (32, struct.pack("@Q", 8), "another pool file"),
        (40, bytes(16), "restarted"),
        (56, struct.pack("@I", MAX_NAMESPACES + 1), "damaged"),
        (60, struct.pack("@I", SIZE // ALIGNMENT + 1), "damaged"),
    ],
)
def test_an_index_of_another_kind_is_refused_and_begun_anew(
    pool: PoolFile, opened: Open, at: int, content: bytes, reason: str
) -> None:
    filled(pool, opened)
    change(pool.index, at, content)
    store, ledger = opened(pool)
    assert reason in ledger.cold
    assert store.blocks.restored_blocks == 0
    put(store, store.open_namespace(b"m" * 32, ALIGNMENT), keys("new", 3))
    ledger.close()
    assert opened(pool)[0].blocks.restored_blocks == 3


@pytest.mark.parametrize("length", [0, 1, 63, 64, 4096, RECORDS_AT - 1, RECORDS_AT, RECORDS_AT + 640])
def test_a_truncated_index_is_refused(pool: PoolFile, opened: Open, length: int) -> None:
    filled(pool, opened)
    os.truncate(pool.index, length)
    store, ledger = opened(pool)
    assert ledger.cold
    assert store.blocks.restored_blocks == 0
    put(store, store.open_namespace(b"m" * 32, ALIGNMENT), keys("new", 3))
    ledger.close()
    assert opened(pool)[0].blocks.restored_blocks == 3


def test_an_index_for_a_pool_that_was_begun_anew_is_emptied(pool: PoolFile, opened: Open) -> None:
    filled(pool, opened)
    pool.cold = "the pool was begun anew"
    assert opened(pool)[1].cold == "the pool was begun anew"
    pool.cold = ""
    assert opened(pool)[0].blocks.restored_blocks == 0


@pytest.mark.parametrize("seed", range(20))
def test_garbage_behind_a_good_header_harms_nobody(pool: PoolFile, opened: Open, seed: int) -> None:
    before = filled(pool, opened)
    generator = random.Random(seed)
    state = struct.pack("@I", 0x48504B56)
    for slot in range(200):
        if generator.random() < 0.8:
            record = bytearray(generator.randbytes(RECORD_BYTES))
            small = struct.pack("@QIII", *(generator.randrange(-1, 200) % (1 << 32) for _ in range(4)))
            record[32:52] = small if generator.random() < 0.7 else record[32:52]
            record[52:56] = state if generator.random() < 0.9 else record[52:56]
            change(pool.index, RECORDS_AT + slot * RECORD_BYTES, bytes(record))
    change(pool.index, 60, struct.pack("@I", 200))
    store, ledger = opened(pool)
    assert ledger.cold == ""
    store.check()
    places = [offset for _, offset in placed(store).values()]
    assert len(places) == len(set(places))
    namespace = store.open_namespace(b"m" * 32, ALIGNMENT)
    for number in range(SIZE // ALIGNMENT + 10):
        put(store, namespace, keys(f"later {number}", 1))
    store.check()
    assert placed(store) != placed(before)
    now = placed(store)
    ledger.close()
    store, _ = opened(pool)
    store.check()
    assert placed(store) == now


def test_an_index_in_the_way_is_refused_and_left(pool: PoolFile, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    pool.index.symlink_to(victim)
    with pytest.raises(ConfigError, match="is a link"):
        pool.open(EXTENT)
    pool.index.unlink()
    pool.index.mkdir()
    with pytest.raises(ConfigError, match="index"):
        pool.open(EXTENT)
    assert victim.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_another_users_index_is_refused_and_left(pool: PoolFile) -> None:
    pool.index.write_text("theirs")
    os.chown(pool.index, NOBODY, NOBODY)
    with pytest.raises(NotPermitted, match="belongs to uid"):
        pool.open(EXTENT)
    assert pool.index.read_text() == "theirs"


# -- what it costs, and where it ends -----------------------------------------------------------------------


def test_it_is_private_and_small(tmp_path: Path) -> None:
    pool = PoolFile(tmp_path / "pool", 8 << 30)
    ledger = pool.open(128 << 20)
    ledger.opened(0, b"n" * 32, 128 << 10, "model")
    for slot in range(65_536):
        ledger.kept(slot, 0, b"k" * 32, slot * (128 << 10), NONE, slot)
    assert stat.S_IMODE(pool.index.stat().st_mode) == 0o600
    assert ledger.allocated_bytes < 5 << 20
    ledger.close()


def test_on_a_full_file_system_the_rest_does_not_survive_and_that_is_all(
    tmpfs: Callable[[str], Path], opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmpfs("300k")
    pool = PoolFile(directory / "pool", 16384 * ALIGNMENT)
    extent = 1024 * ALIGNMENT
    with caplog.at_level(logging.WARNING):
        store, ledger = opened(pool, extent)
        namespace = store.open_namespace(b"n" * 32, ALIGNMENT)
        many = keys("many", 5000)
        assert put(store, namespace, many) == 5000
        (directory / "filler").write_bytes(bytes(os.statvfs(directory).f_bavail * 4096))
        assert store.open_namespace(b"p" * 32, ALIGNMENT) == 1
        assert put(store, 1, keys("unrecorded", 2)) == 2
    assert len(caplog.records) == 1
    assert "cannot grow" in caplog.text
    ledger.close()
    store, _ = opened(pool, extent)
    store.check()
    assert store.match(store.open_namespace(b"n" * 32, ALIGNMENT), Keys.of(many)) == 4096


def test_without_room_for_a_single_page_nothing_survives_and_nobody_dies(
    tmpfs: Callable[[str], Path], opened: Open
) -> None:
    directory = tmpfs("16k")
    (directory / "filler").write_bytes(bytes(16 << 10))
    pool = PoolFile(directory / "pool", SIZE)
    store, ledger = opened(pool)
    namespace = store.open_namespace(b"n" * 32, ALIGNMENT)
    assert put(store, namespace, keys("chain", 10)) == 10
    assert store.clear() == 10
    ledger.close()
    assert opened(pool)[0].blocks.restored_blocks == 0


def test_an_index_that_cannot_be_kept_up_is_emptied(
    pool: PoolFile, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(pool, opened)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        store, ledger = opened(pool)
        assert "cannot be mapped" in ledger.cold
        # Other bytes lie now where the index said.
        put(store, store.open_namespace(b"m" * 32, ALIGNMENT), keys("other", 10))
        store.check()
        ledger.close()
    assert opened(pool)[0].blocks.restored_blocks == 0


def test_a_hole_where_records_should_be_is_filled_before_it_is_touched(
    tmpfs: Callable[[str], Path], opened: Open
) -> None:
    directory = tmpfs("600k")
    pool = PoolFile(directory / "pool", SIZE)
    filled(pool, opened)
    with pool.index.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        file.truncate(RECORDS_AT)
        file.truncate(size)
    (directory / "filler").write_bytes(bytes(os.statvfs(directory).f_bavail * 4096))
    store, ledger = opened(pool)
    assert "cannot be mapped" in ledger.cold
    assert put(store, store.open_namespace(b"m" * 32, ALIGNMENT), keys("other", 10)) == 10


def test_namespaces_beyond_the_table_and_endless_names_are_served_but_not_recorded(
    pool: PoolFile, opened: Open
) -> None:
    store, ledger = opened(pool)
    long = store.open_namespace(b"l" * 32, ALIGNMENT, "x" * 4096)
    assert put(store, long, keys("long", 1)) == 1
    numbers = [store.open_namespace(typed_digest(n), ALIGNMENT, f"tenant {n}") for n in range(MAX_NAMESPACES + 5)]
    for number in (numbers[0], numbers[-1]):
        assert put(store, number, keys("one", 1)) == 1
    ledger.close()
    store, ledger = opened(pool)
    assert [namespace.tenant for namespace in store.blocks.namespaces] == ["tenant 0"]
    assert store.blocks.restored_blocks == 1
    # Those without a block gave their place back.
    fresh = store.open_namespace(b"f" * 32, ALIGNMENT)
    assert put(store, fresh, keys("fresh", 1)) == 1
    ledger.close()
    assert opened(pool)[0].blocks.restored_blocks == 2


def test_parents_come_before_their_children_and_nobody_without_ancestors_comes() -> None:
    #        root a <- b <- c;  d and e are each other's parent;  f hangs under nothing;  g under an unusable one
    slots = [3, 2, 1, 10, 11, 20, 30, 31]
    parents = [2, 1, NONE, 11, 10, 99, NONE, 30]
    usable = [1, 1, 1, 1, 1, 1, 0, 1]
    assert parents_first(slots, parents, usable) == [2, 1, 0]


def test_a_long_chain_in_the_wrong_order_is_sorted_without_recursion() -> None:
    count = 50_000
    slots = list(range(count))
    parents = [slot + 1 for slot in range(count - 1)] + [NONE]
    assert parents_first(slots, parents, bytes([1]) * count) == slots[::-1]


def test_a_pool_without_a_ledger_is_as_it_was() -> None:
    store = BlockStore(SIZE, Lru, EXTENT)
    assert put(store, store.open_namespace(b"m" * 32, ALIGNMENT), keys("chain", 10)) == 10
    store.check()
