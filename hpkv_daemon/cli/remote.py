"""``hpkvd remote``: look at the store that nodes share, with the settings and credentials of this shell."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import click

from hpkv_client.errors import HpkvError, NotPermitted, Unreachable, UsageError
from hpkv_client.settings import Settings
from hpkv_client.types import KEY_BYTES
from hpkv_daemon.cli.options import as_json, client_settings, setting_options
from hpkv_daemon.cli.output import emit, note
from hpkv_daemon.tiers.remote.backend import Answer, Backend, BackendError, Fate, Piece
from hpkv_daemon.tiers.remote.format import HEADER_BYTES, ROOT, check_object, object_name, pack_header, parse_name
from hpkv_daemon.tiers.remote.opening import open_backend
from hpkv_daemon.tiers.remote.sealing import Seal, read_secret

_SETTINGS = ("config", "instance", "remote", "remote_key_file")
_PROBE_BYTES = 64 << 10


def _opened(flags: dict[str, Any]) -> tuple[Settings, Backend, Seal | None]:
    settings = client_settings(flags)
    if settings.remote is None:
        raise UsageError("no remote store is named", "set HPKV_REMOTE, or give --remote")
    seal = None if settings.remote_key_file is None else Seal(read_secret(settings.remote_key_file))
    return settings, open_backend(settings.remote), seal


@click.group()
def remote() -> None:
    """Look at the store that nodes share (HPKV_REMOTE). No daemon is needed."""


@remote.command()
@as_json
@setting_options(*_SETTINGS)
def check(as_json: bool, **flags: Any) -> None:
    """Write, find, read, verify and delete one block. Exit 69 if the store does not answer, 77 if it refuses."""
    settings, backend, _ = _opened(flags)
    fingerprint, key, payload = bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES), secrets.token_bytes(_PROBE_BYTES)
    name, header = object_name(fingerprint, key), pack_header(fingerprint, key, _PROBE_BYTES, payload)
    found = Piece(name, memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(_PROBE_BYTES)))
    took: dict[str, Any] = {"remote": settings.remote}
    steps: dict[str, Callable[[], list[Answer]]] = {
        "put": lambda: backend.put([Piece(name, memoryview(header), memoryview(payload))]),
        "exists": lambda: backend.exists([name]),
        "get": lambda: backend.get([found]),
        "delete": lambda: backend.delete([name]),
    }
    try:
        for step, attempt in steps.items():
            started = time.monotonic()
            _require(step, attempt()[0])
            took[f"{step}_seconds"] = round(time.monotonic() - started, 4)
    finally:
        backend.close()
    check_object(fingerprint, key, _PROBE_BYTES, found.header, found.payload)
    emit(took, as_json)


def _require(step: str, answer: Answer) -> None:
    if answer.fate is Fate.OK:
        return
    what = f"{step} does not work: {answer.problem or answer.fate.name.lower()}"
    if answer.fate is Fate.DENIED:
        raise NotPermitted(what, "give this user the right to read, write and delete there")
    if answer.fate is Fate.FAILED:
        raise Unreachable(what, "see that the URL is right and the store is up")
    raise HpkvError(what, "see the store's own log")


@remote.command()
@as_json
@setting_options(*_SETTINGS)
def ls(as_json: bool, **flags: Any) -> None:
    """List the namespaces in the store with their blocks and bytes. Reads the names of all objects."""
    settings, backend, _ = _opened(flags)
    blocks: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    try:
        for name, size in backend.listing(""):
            parsed = parse_name(name)
            if parsed is not None:
                root = name.partition("/")[0]
                space = parsed[0].hex(), root.partition("-")[2]
                blocks[space] += 1
                sizes[space] += size
    except BackendError as problem:
        raise Unreachable(f"the store cannot be listed: {problem}", "run 'hpkvd remote check'") from None
    finally:
        backend.close()
    rows = [
        {"namespace": space, "key_id": key_id, "blocks": count, "stored_bytes": sizes[space, key_id]}
        for (space, key_id), count in sorted(blocks.items())
    ]
    emit({"remote": settings.remote, "namespaces": rows}, as_json)


@remote.command()
@as_json
@click.option("--namespace", required=True, help="Fingerprint in hex, as 'hpkvd remote ls' shows it; or 'all'.")
@setting_options(*_SETTINGS)
def rm(as_json: bool, namespace: str, **flags: Any) -> None:
    """Delete a namespace's blocks from the store, for all nodes. Daemons find out when they look."""
    if namespace != "all":
        try:
            right = len(bytes.fromhex(namespace)) == KEY_BYTES
        except ValueError:
            right = False
        if not right:
            raise UsageError(f"{namespace!r} is no namespace", "'hpkvd remote ls' lists them")
    settings, backend, seal = _opened(flags)
    try:
        roots = _roots(backend, [ROOT, *([f"{ROOT}-{seal.key_id.hex()}"] if seal else [])])
        deleted = sum(backend.clear(root if namespace == "all" else f"{root}/{namespace.lower()}") for root in roots)
    except BackendError as problem:
        raise Unreachable(f"not everything was deleted: {problem}", "run it again") from None
    finally:
        backend.close()
    if not deleted:
        note("there was nothing to delete")
    emit({"remote": settings.remote, "deleted_blocks": deleted}, as_json)


def _roots(backend: Backend, known: list[str]) -> list[str]:
    """The folders under which blocks lie: one, and one more for each key that they are encrypted with."""
    try:
        found = {name.partition("/")[0] for name, _ in backend.listing("") if parse_name(name) is not None}
    except BackendError:
        # Not every store can tell.
        return known
    return sorted(found | set(known))
