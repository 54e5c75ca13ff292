"""``hpkvd export`` and ``hpkvd restore``: the blocks of a namespace in a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpkv_client.errors import UsageError
from hpkv_client.namespace import NamespaceCache, NamespaceId
from hpkv_client.types import BlockKey, Keys
from hpkv_daemon.cli.figures import count, size
from hpkv_daemon.cli.options import (
    CLIENT_SETTINGS,
    Connection,
    as_json,
    client_settings,
    connected,
    reply_timeout,
    setting_options,
)
from hpkv_daemon.cli.output import emit, note

if TYPE_CHECKING:
    from hpkv_daemon.archive import ArchivedBlock, ArchiveReader, ArchiveWriter

_ARENA_BYTES = 32 << 20


def _arena_blocks(block_bytes: int) -> int:
    return max(1, min(4096, _ARENA_BYTES // block_bytes))


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@as_json
@reply_timeout(30.0)
@click.option("--namespace", metavar="HEX", required=True, help="As 'hpkvd info' names it; its beginning will do.")
@setting_options(*CLIENT_SETTINGS)
def export(file: Path, as_json: bool, timeout: float, namespace: str, **flags: Any) -> None:
    """Copy the blocks of a namespace that are in memory to a new FILE, while the daemon serves.

    Blocks that leave meanwhile are left out. What is on disk only is not in it.
    """
    from hpkv_daemon.archive import ArchiveWriter

    if file.exists():
        raise UsageError(f"{file} is there already", "name a new file")
    socket = client_settings(flags).socket
    with connected(socket, timeout) as connection:
        known, keys, parents = _listed(connection, _named(connection, namespace))
    with tempfile.NamedTemporaryFile(dir=file.absolute().parent, prefix=f".{file.name}.") as stream:
        writer = ArchiveWriter(stream.file, known)
        with NamespaceCache(
            known, arena_blocks=_arena_blocks(known.block_bytes), socket=socket, timeout=timeout
        ) as cache:
            _copy_out(cache, keys, parents, writer)
        writer.finish()
        stream.flush()
        os.fsync(stream.fileno())
        # It has its name when it is whole, and takes it from nobody.
        os.link(stream.name, file)
    left_out, written_bytes = len(keys) - writer.blocks, file.stat().st_size
    found = {
        "file": str(file.absolute()),
        "namespace": known.fingerprint.hex(),
        "model": known.model,
        "blocks": writer.blocks,
        "left_out_blocks": left_out,
        "size_bytes": written_bytes,
    }
    if as_json:
        emit(found, as_json)
    else:
        note(f"wrote {count(writer.blocks)} blocks to {file}, {size(written_bytes)}")
        if left_out:
            note(f"{count(left_out)} blocks left the memory meanwhile")


def _named(connection: Connection, beginning: str) -> bytes:
    ids = [row["id"] for row in connection.call("info")["namespaces"] if row["id"].startswith(beginning.lower())]
    if len(ids) != 1:
        problem = f"{len(ids)} namespaces begin with {beginning!r}" if ids else f"no namespace {beginning!r}"
        raise UsageError(problem, "see 'hpkvd info'")
    return bytes.fromhex(ids[0])


def _listed(connection: Connection, fingerprint: bytes) -> tuple[NamespaceId, list[BlockKey], list[BlockKey]]:
    keys: list[BlockKey] = []
    parents: list[BlockKey] = []
    after = 0
    while True:
        page = connection.call("blocks", {"namespace": fingerprint, "after": after})
        keys.extend(Keys(page["keys"]))
        parents.extend(Keys(page["parents"]))
        after = page["after"]
        if not after:
            known = NamespaceId(
                fingerprint, page["block_bytes"], page["model"], page["block_tokens"], dict(page["fields"])
            )
            return known, keys, parents


def _copy_out(cache: NamespaceCache, keys: list[BlockKey], parents: list[BlockKey], writer: ArchiveWriter) -> None:
    from hpkv_daemon.archive import chains_first

    written: set[BlockKey] = set()
    for batch in _batches(chains_first(keys, parents), cache.arena_blocks):
        here = cache.get_arena([key for key, _ in batch], range(len(batch)))
        for index, (key, parent) in enumerate(batch):
            if here[index] and (parent is None or parent in written):
                writer.add(key, parent, cache.block(index))
                written.add(key)


def _batches(entries: Iterable[tuple[BlockKey, BlockKey | None]], most: int) -> Iterator[list[Any]]:
    left = iter(entries)
    while batch := list(islice(left, most)):
        yield batch


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@as_json
@reply_timeout(30.0)
@setting_options(*CLIENT_SETTINGS)
def restore(file: Path, as_json: bool, timeout: float, **flags: Any) -> None:
    """Bring the blocks of an exported FILE into the daemon, each verified. Exit 1 at the first that is damaged.

    Engines of the same model, weights and layout find them. In a full pool they take the place of others.
    """
    from hpkv_daemon.archive import ArchiveReader

    socket = client_settings(flags).socket
    with file.open("rb") as stream, connected(socket, timeout):
        reader = ArchiveReader(stream)
        known = reader.namespace
        with NamespaceCache(
            known, arena_blocks=_arena_blocks(known.block_bytes), socket=socket, timeout=timeout
        ) as cache:
            kept = _copy_in(cache, reader)
    found = {
        "file": str(file.absolute()),
        "namespace": known.fingerprint.hex(),
        "model": known.model,
        "blocks": reader.blocks,
        "kept_blocks": kept,
    }
    if as_json:
        emit(found, as_json)
    else:
        note(f"{count(kept)} of {count(reader.blocks)} blocks of {known.model or 'the file'} are in memory")


def _copy_in(cache: NamespaceCache, reader: ArchiveReader) -> int:
    """Store the blocks in pieces that form one chain, or are all without a parent; how many are kept."""
    kept = 0
    keys: list[BlockKey] = []
    chained, above = False, None

    def store() -> int:
        if not keys:
            return 0
        indices = range(len(keys))
        return cache.store_arena(above, keys, indices) if chained else cache.put_arena(keys, indices)

    def goes_on(block: ArchivedBlock) -> bool:
        if not keys or len(keys) == cache.arena_blocks:
            return False
        if block.parent is None:
            return not chained
        return block.parent == keys[-1] and (chained or len(keys) == 1)

    try:
        for block in reader:
            if goes_on(block):
                chained = chained or block.parent is not None
            else:
                kept += store()
                keys.clear()
                chained, above = block.parent is not None, block.parent
            cache.block(len(keys))[:] = block.payload
            keys.append(block.key)
    finally:
        # Also of a file that is damaged further on: each of these was verified.
        kept += store()
    return kept
