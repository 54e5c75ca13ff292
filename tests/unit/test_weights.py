"""Weights are their content: whatever their files are called, and whenever they were written."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path

import pytest
from hpkv_vllm.weights import files_digest, model_digest, signature, weight_files

from hpkv_client.errors import ConfigError

TENSORS = {"embed": 70_000, "layers.0.q": 9000, "layers.0.norm": 16, "layers.1.q": 4096}


def write_safetensors(path: Path, tensors: dict[str, int], fill: int = 1) -> Path:
    """A file in the format of safetensors; each tensor of so many equal bytes."""
    header, start = {"__metadata__": {"format": "pt"}}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    data = b"".join(bytes([fill + i]) * size for i, size in enumerate(tensors.values()))
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def digest(directory: Path) -> bytes:
    return model_digest(str(directory), None, "")


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """In place, and the times of the file are set back."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_equal_files_are_equal_weights_wherever_they_are(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for directory in (one, other):
        directory.mkdir()
        write_safetensors(directory / "model.safetensors", TENSORS)
    (other / "README.md").write_text("not weights")
    os.utime(other / "model.safetensors", (1, 1))
    assert digest(one) == digest(other)


@pytest.mark.parametrize("name", list(TENSORS))
@pytest.mark.parametrize("where", ["first", "last", "all"])
def test_an_overwrite_of_equal_size_inside_any_tensor_is_seen(tmp_path: Path, name: str, where: str) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", TENSORS)
    before, mark = digest(tmp_path), signature([path])
    names = list(TENSORS)
    start = path.stat().st_size - sum(TENSORS.values()) + sum(TENSORS[n] for n in names[: names.index(name)])
    size = TENSORS[name]
    if where == "all":
        overwrite(path, start, bytes(size))
    else:
        overwrite(path, start if where == "first" else start + size - 1, b"\xff")
    assert digest(tmp_path) != before
    assert signature([path]) != mark


def test_names_sizes_and_numbers_of_files_count(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-1.safetensors", TENSORS)
    digests = {digest(tmp_path)}
    write_safetensors(tmp_path / "model-2.safetensors", TENSORS)
    digests.add(digest(tmp_path))
    (tmp_path / "model-2.safetensors").rename(tmp_path / "model-3.safetensors")
    digests.add(digest(tmp_path))
    write_safetensors(tmp_path / "model-3.safetensors", TENSORS | {"more": 1})
    digests.add(digest(tmp_path))
    assert len(digests) == 4


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 1 << 60) + b"x" * 100,
        struct.pack("<Q", 4) + b"nope" + b"x" * 100,
        struct.pack("<Q", 2) + b"[]" + b"x" * 100,
        struct.pack("<Q", 11) + b'{"a": true}' + b"x" * 100,
        struct.pack("<Q", 32) + b'{"a": {"data_offsets": [-5, 3]}}' + b"x" * 100,
        struct.pack("<Q", 33) + b'{"a": {"data_offsets": [0, 9999]}}'[:33] + b"x" * 100,
        struct.pack("<Q", 34) + b'{"a": {"data_offsets": [0, 9999]}}' + b"x" * 100,
        b"x" * 300_000,
    ],
)
def test_files_of_any_content_have_a_digest_that_follows_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    before = digest(tmp_path)
    assert digest(tmp_path) == before
    path.write_bytes(content + b"y")
    assert digest(tmp_path) != before


def test_a_single_file_may_be_a_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" * 5000)
    assert weight_files(path) == [path]
    assert digest(path) == files_digest([path])


def test_weights_that_are_nowhere_need_a_name(tmp_path: Path) -> None:
    for model in (str(tmp_path), str(tmp_path / "missing"), "nobody/has-this-model"):
        with pytest.raises(ConfigError, match="HPKV_WEIGHTS_ID"):
            model_digest(model, None, "")
    assert model_digest("nobody/has-this-model", None, "a") == model_digest(str(tmp_path), None, "a")
    assert model_digest("nobody/has-this-model", None, "a") != model_digest("nobody/has-this-model", None, "b")


def test_of_a_hundred_gigabytes_only_some_megabytes_are_read(tmp_path: Path) -> None:
    sizes = {f"layers.{i}.weight": 100 << 20 for i in range(1024)}
    header, start = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + start)
    before = bytes_read()
    digest(tmp_path)
    assert bytes_read() - before < 64 << 20


def bytes_read() -> int:
    found = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    assert found
    return int(found[1])
