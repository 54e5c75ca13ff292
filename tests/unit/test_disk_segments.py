"""Segment files on a real disk: whatever happened to them, only what was written is found in them."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpkv_daemon.faults import Faults
from hpkv_daemon.tiers.disk import format as layout
from hpkv_daemon.tiers.disk.format import PAGE, BadFormat, Kind, Place, Record
from hpkv_daemon.tiers.disk.segments import FileState, Found, SegmentFiles, file_name
from tests.disks import SPACE, name
from tests.support import content

SIZE = 64 * PAGE
IDENTITY = b"i" * 16
LENGTH = 2 * PAGE - 100
WHOLE = 1 << 40
"""A limit that nothing reaches."""


def buffer(size: int, filling: bytes = b"") -> memoryview:
    """Aligned as slots are."""
    view = memoryview(mmap.mmap(-1, layout.aligned(size)))
    view[: len(filling)] = filling
    return view


def live(number: int, life: int) -> Found:
    return Found(number, life, SIZE, FileState.LIVE)


def spare(number: int, life: int) -> Found:
    return Found(number, life, SIZE, FileState.SPARE)


def foreign(number: int) -> Found:
    return Found(number, 0, 0, FileState.FOREIGN)


class Files:
    """Segment files of a directory, opened as often as a test likes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self.files = self.reopen()

    def reopen(self, faults: str = "", identity: bytes = IDENTITY) -> SegmentFiles:
        self.files = SegmentFiles(self.path, identity, Faults(faults), self.notes.append)
        return self.files

    def path_of(self, number: int) -> Path:
        return self.path / file_name(number)

    def fill(self, number: int, life: int, count: int, seal: bool = False) -> tuple[Place, list[Record]]:
        """A segment with so many records, one call each."""
        place = self.files.place(number, life, SIZE)
        self.files.begin(place)
        records = [self.record(life, i) for i in range(count)]
        for record in records:
            self.files.append(place, [record], [buffer(LENGTH, content(record.key, LENGTH))])
        if seal:
            self.files.seal(place)
        return place, records

    def record(self, life: int, number: int) -> Record:
        offset = PAGE + number * layout.record_bytes(LENGTH)
        parent = name("parent") if number else b""
        return Record(Kind.BLOCK, number, offset, SPACE, name((life, number)), parent, LENGTH, 0)

    def read(self, place: Place, record: Record) -> bytes:
        target = buffer(record.length)
        self.files.fetch(place, record, target)
        return bytes(target[: record.length])

    def change(self, number: int, offset: int, filling: bytes) -> None:
        with self.path_of(number).open("r+b") as file:
            file.seek(offset)
            file.write(filling)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
def test_what_was_written_is_found_and_read(files: Files, sealed: bool) -> None:
    place, records = files.fill(0, 1, 5, sealed)
    fresh = files.reopen()
    assert fresh.survey(WHOLE, 0) == [live(0, 1)]
    assert fresh.load(place) == (records, sealed)
    assert [files.read(place, record) for record in records] == [content(r.key, LENGTH) for r in records]


def test_records_written_with_one_call_are_found_one_by_one(files: Files) -> None:
    place = files.files.place(0, 1, SIZE)
    files.files.begin(place)
    records = [files.record(1, i) for i in range(8)]
    # A hole: the fifth was given a place and failed.
    del records[4]
    files.files.append(place, records, [buffer(LENGTH, content(r.key, LENGTH)) for r in records])
    assert files.reopen().load(place) == (records, False)
    assert all(files.read(place, record) == content(record.key, LENGTH) for record in records)


def test_blocks_go_around_the_page_cache_where_they_can(files: Files, tmpfs: Callable[[str], Path]) -> None:
    files.fill(0, 1, 1)
    assert not files.notes
    old = Files(tmpfs("4m"))
    real = os.open

    def refuse(path: str, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(path, flags, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refuse)
        place, records = old.fill(0, 1, 3)
        old.fill(1, 2, 3)
    assert len(old.notes) == 1
    assert "page cache" in old.notes[0]
    assert old.reopen().load(place) == (records, False)


@pytest.mark.parametrize("cut", range(0, layout.record_bytes(LENGTH), 512))
def test_a_torn_record_is_not_found_and_hides_no_other(files: Files, cut: int) -> None:
    place, records = files.fill(0, 1, 4)
    torn = records[2]
    with files.path_of(0).open("rb") as file:
        whole = file.read()[torn.offset : torn.offset + layout.record_bytes(LENGTH)]
    # Only the first sectors of it arrived; beyond its payload's end there is nothing to lose.
    files.change(0, torn.offset, (whole[:cut] + b"\xee" * len(whole))[: len(whole)])
    expected = [record for record in records if record is not torn or cut >= PAGE + LENGTH]
    assert files.reopen().load(place) == (expected, False)
    if torn not in expected:
        with pytest.raises(BadFormat):
            files.read(place, torn)


def test_no_flipped_bit_of_a_payload_goes_unseen(files: Files) -> None:
    place, (record,) = files.fill(0, 1, 1)
    good = content(record.key, LENGTH)
    for byte in (0, 1, 511, 4095, 4096, LENGTH - 1):
        for bit in range(8):
            files.change(0, record.offset + PAGE + byte, bytes([good[byte] ^ 1 << bit]))
            with pytest.raises(BadFormat, match="payload"):
                files.read(place, record)
        files.change(0, record.offset + PAGE + byte, good[byte : byte + 1])
    assert files.read(place, record) == good


def test_only_what_was_asked_for_is_served(files: Files) -> None:
    place, records = files.fill(0, 1, 3)
    wanted = records[1]
    for changed in (
        wanted._replace(key=name("other")),
        wanted._replace(fingerprint=name("other")),
        wanted._replace(length=LENGTH - 1),
        wanted._replace(number=7),
        wanted._replace(kind=Kind.FORGET_KEY),
    ):
        with pytest.raises(BadFormat, match="another record"):
            files.read(place, changed)
    with pytest.raises(BadFormat):
        files.read(place, wanted._replace(offset=records[2].offset))
    with pytest.raises(BadFormat, match="earlier life"):
        files.read(files.files.place(0, 2, SIZE), wanted)


def test_a_file_that_lives_again_shows_nothing_of_its_earlier_life(files: Files) -> None:
    first, records = files.fill(0, 1, 9, seal=True)
    assert files.files.retire(first, SIZE)
    assert files.files.survey(WHOLE, SIZE) == [spare(0, 1)]
    again, fresh = files.fill(0, 2, 2)
    assert files.reopen().load(again) == (fresh, False)
    with pytest.raises(BadFormat, match="earlier life"):
        files.read(again, records[5])


def test_a_resumed_segment_is_not_sealed_until_it_is_again(files: Files) -> None:
    place, records = files.fill(0, 1, 3, seal=True)
    fresh = files.reopen()
    fresh.resume(place)
    assert files.reopen().load(place) == (records, False)
    fresh.append(place, [files.record(1, 3)], [buffer(LENGTH, content(name((1, 3)), LENGTH))])
    fresh.seal(place)
    assert files.reopen().load(place) == ([*records, files.record(1, 3)], True)


def test_a_damaged_footer_costs_a_full_read_and_nothing_else(files: Files) -> None:
    place, records = files.fill(0, 1, 5, seal=True)
    for offset in (SIZE - PAGE + 70, SIZE - layout.footer_bytes(5) + 200):
        with files.path_of(0).open("rb") as file:
            file.seek(offset)
            good = file.read(1)
        files.change(0, offset, bytes([good[0] ^ 4]))
        assert files.reopen().load(place) == (records, False)
        files.change(0, offset, good)
        assert files.reopen().load(place) == (records, True)


def test_swapped_truncated_and_damaged_files_are_removed_and_said_so(files: Files) -> None:
    for number in range(6):
        files.fill(number, number + 1, 2)
    os.rename(files.path_of(0), files.path / "other")
    os.rename(files.path_of(1), files.path_of(0))
    os.rename(files.path / "other", files.path_of(1))
    os.truncate(files.path_of(2), SIZE - PAGE)
    os.truncate(files.path_of(3), 0)
    files.change(4, 40, b"\xff")
    assert files.reopen().survey(WHOLE, 0) == [live(5, 6)]
    assert sorted(os.listdir(files.path)) == [file_name(5)]
    assert len(files.notes) == 5


def test_what_is_not_ours_is_left_alone(files: Files) -> None:
    files.fill(0, 1, 2)
    files.path_of(1).mkdir()
    files.path_of(2).symlink_to("/etc/passwd")
    (files.path / "notes.txt").write_text("mine")
    (files.path / "segment-1.hpkv").write_text("mine, too")
    stranger = Files(files.path)
    stranger.reopen(identity=b"s" * 16)
    stranger.fill(7, 1, 2)
    before = sorted(os.listdir(files.path))
    assert files.reopen().survey(SIZE, 0) == [live(0, 1), foreign(1), foreign(2), foreign(7)]
    assert sorted(os.listdir(files.path)) == before


def test_a_segment_of_another_directory_is_not_believed(files: Files, tmp_path: Path) -> None:
    files.fill(0, 1, 2)
    (tmp_path / "elsewhere").mkdir()
    elsewhere = Files(tmp_path / "elsewhere")
    elsewhere.reopen(identity=b"e" * 16)
    shutil.copy(files.path_of(0), elsewhere.path_of(0))
    assert elsewhere.files.survey(WHOLE, 0) == [foreign(0)]


def test_a_smaller_limit_takes_the_oldest_first_and_keeps_room_for_one_more(files: Files) -> None:
    for number, life in enumerate((3, 1, 4, 2)):
        files.fill(number, life, 1)
    assert files.reopen().survey(4 * SIZE, SIZE) == [live(3, 2), live(0, 3), live(2, 4)]
    assert files.files.retire(files.files.place(0, 3, SIZE), SIZE)
    assert files.reopen().survey(3 * SIZE, SIZE) == [live(3, 2), live(2, 4), spare(0, 3)]
    assert files.reopen().survey(2 * SIZE, SIZE) == [live(2, 4), spare(0, 3)]


def test_a_new_file_that_does_not_fit_leaves_nothing_behind(tmpfs: Callable[[str], Path]) -> None:
    files = Files(tmpfs("1m"))
    place = files.files.place(0, 1, 2 << 20)
    with pytest.raises(OSError, match="No space") as problem:
        files.files.begin(place)
    assert problem.value.errno == errno.ENOSPC
    assert os.listdir(files.path) == []


def test_fault_hooks_fail_one_block(files: Files) -> None:
    place, records = files.fill(0, 1, 2)
    files.reopen("disk_read@2=fail;disk_write@1=fail")
    assert files.read(place, records[0])
    with pytest.raises(OSError, match="fault hook"):
        files.read(place, records[0])
    with pytest.raises(OSError, match="fault hook"):
        files.files.append(place, [files.record(1, 2)], [buffer(LENGTH)])
