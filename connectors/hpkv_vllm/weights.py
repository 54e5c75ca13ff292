"""What weights are, by their content: a model's and an adapter's files, sampled inside every tensor."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpkv_client.errors import ConfigError
from hpkv_client.types import typed_digest

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_HEAD_BYTES = 1 << 16
_SAMPLE_BYTES = 4096
_TENSOR_SAMPLES = 4
"""Of each tensor: at its start, its end, and in between."""
_FILE_SAMPLES = 4096
"""Most of one file; one with more tensors is sampled once in each of them."""
_MOST_HEADER_BYTES = 100 << 20

Signature = tuple[tuple[str, int, int, int, int], ...]


def model_digest(model: str, revision: str | None, weights_id: str) -> bytes:
    """The weights of a model: ``weights_id`` if someone gave them a name, else the contents of its local files.

    Raises ``ConfigError`` when there are no files to look at, or they cannot be read.
    """
    if weights_id:
        return typed_digest("named", weights_id)
    files = weight_files(_local(model, revision))
    if not files:
        raise ConfigError(
            f"the weights of {model!r} are not in local files, so they cannot be told from others",
            "set HPKV_WEIGHTS_ID to a name that belongs to exactly these weights",
        )
    try:
        return files_digest(files)
    except OSError as problem:
        raise ConfigError(f"cannot read the weights of {model!r}: {problem}", "check the files' permissions") from None


def _local(model: str, revision: str | None) -> Path:
    """The directory or file of a model; for a name on a hub, where its snapshot was downloaded to."""
    path = Path(model)
    if path.exists():
        return path
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:
        # Not a name of the hub either.
        return path
    return Path(config).parent if isinstance(config, str) else path


def weight_files(path: Path) -> list[Path]:
    """The files with weights in a directory, or the one that is named."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        return []
    return sorted(entry for entry in path.iterdir() if entry.suffix in _SUFFIXES and entry.is_file())


def files_digest(files: list[Path]) -> bytes:
    """Names, sizes, headers and samples. Of 100 GB some thousand small pieces are read."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(typed_digest(path.name, size))
            for start, length in _samples(file, size):
                file.seek(start)
                digest.update(file.read(length))
    return digest.digest()


def _samples(file: Any, size: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of what is looked at in a file."""
    tensors, data = _tensors(file, size)
    yield 0, max(_HEAD_BYTES, min(data, _MOST_HEADER_BYTES))
    each = _TENSOR_SAMPLES if len(tensors) * _TENSOR_SAMPLES <= _FILE_SAMPLES else 1
    if tensors == [(0, size)]:
        each = _FILE_SAMPLES // 16
    for start, end in tensors:
        room = max(0, end - start - _SAMPLE_BYTES)
        for i in range(each):
            yield data + start + room * i // max(1, each - 1), min(_SAMPLE_BYTES, end - start)


def _tensors(file: Any, size: int) -> tuple[list[tuple[int, int]], int]:
    """(start, end) of each tensor of a safetensors file and where its data begins; else the file as one."""
    file.seek(0)
    head = file.read(8)
    if len(head) == 8:
        (length,) = struct.unpack("<Q", head)
        if length <= min(size - 8, _MOST_HEADER_BYTES):
            try:
                header = json.loads(file.read(length))
                found = [tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__"]
                tensors = sorted((int(start), int(end)) for start, end in found)
            except (ValueError, KeyError, TypeError, AttributeError):
                # Another format that begins alike: it is sampled as one piece.
                tensors = []
            if tensors and all(0 <= start <= end <= size - 8 - length for start, end in tensors):
                return tensors, 8 + length
    return [(0, size)], 0


def signature(files: list[Path]) -> Signature:
    """Changes with every write to the files, also with one that sets their time of modification back."""
    stats = [(path, path.stat()) for path in files]
    return tuple((path.name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in stats)
