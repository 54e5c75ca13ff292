"""The file of an exported namespace: what is written is read, and what is damaged is not."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpkv_client.namespace import NamespaceId
from hpkv_daemon.archive import ArchiveReader, ArchiveWriter, Damaged, chains_first
from tests.support import hashes

SIZE = 64
NAMESPACE = NamespaceId(b"\x07" * 32, SIZE, "m", 16, {"weights": "abc"})
A, B, C, D, E = hashes("a", "b", "c", "d", "e")
TREE = [(A, None), (B, A), (C, A), (D, None)]
NONE = bytes(32)


def content(key: bytes) -> bytes:
    return (key * 2)[:SIZE]


def written() -> bytes:
    stream = io.BytesIO()
    writer = ArchiveWriter(stream, NAMESPACE)
    for key, parent in TREE:
        writer.add(key, parent, memoryview(content(key)))
    writer.finish()
    return stream.getvalue()


def read(data: bytes) -> list[tuple[bytes, bytes | None, bytes]]:
    reader = ArchiveReader(io.BytesIO(data))
    assert reader.namespace == NAMESPACE
    return [(block.key, block.parent, bytes(block.payload)) for block in reader]


def test_what_is_written_is_read() -> None:
    assert read(written()) == [(key, parent, content(key)) for key, parent in TREE]


@given(st.integers(0, len(written()) - 1), st.integers(1, 255))
def test_no_changed_byte_goes_unnoticed(position: int, change: int) -> None:
    data = bytearray(written())
    data[position] ^= change
    header = len(written()) - len(TREE) * (69 + 16 + SIZE) - 28
    if 12 <= position < header:
        # What people know about a namespace has no checksum; which one it is is in every key.
        return
    with pytest.raises(Damaged):
        read(bytes(data))


@given(st.integers(0, len(written()) - 1))
def test_a_file_that_was_cut_off_is_noticed(length: int) -> None:
    with pytest.raises(Damaged):
        read(written()[:length])


def test_a_block_that_was_cut_out_is_noticed() -> None:
    data, record = written(), 69 + 16 + SIZE
    with pytest.raises(Damaged, match="behind block 3"):
        read(data[: -28 - record] + data[-28:])


def test_parents_come_first_and_chains_in_one_piece() -> None:
    keys, parents = [C, B, E, D, A], [A, A, D, B, NONE]
    assert list(chains_first(keys, parents)) == [(A, None), (C, A), (B, A), (D, B), (E, D)]
    assert list(chains_first([B, C], [A, NONE])) == [(C, None)]
