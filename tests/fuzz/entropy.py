"""Bytes as decisions: how a fuzzing engine's input becomes frames and events, and how seeds are written down.

Every decision takes one byte from the front, so that a seed is a list of small numbers and a changed byte changes one
decision. Where the bytes end, every decision is 0.
"""

from __future__ import annotations

import copy
from typing import Any

from hpkv_client.wire import MAX_ECHO, MAX_INT, MAX_TEXT

STRANGE: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    8,
    4095,
    4096,
    4097,
    1 << 16,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    (1 << 40) + 1,
    1 << 50,
    (1 << 62) + 1,
    MAX_INT - 1,
    MAX_INT,
    MAX_INT + 1,
    (1 << 64) - 1,
    0.0,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "a",
    "cpu",
    "noop",
    "memfd",
    "cuda_ipc",
    "\x00\n🙂",
    "x" * MAX_TEXT,
    "x" * (MAX_TEXT + 1),
    b"",
    b"\x00",
    b"\xff" * 4,
    bytes(32),
    bytes(33),
    b"\x01" * 64,
    bytes(MAX_ECHO + 1),
    [],
    {},
    [[]],
    [0] * 8,
    [1] * 8,
    [["l", 4096, [[0, 0, 4096, 0, 4096, 1, 0, 0]]]],
    {"kind": "memfd", "size": 4096},
    {"code": 7, "message": [], "hint": None},
)
"""Values at the edges of what fields take, and of every other type."""


class Entropy:
    """The input, read once from front to back."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return len(self._data) - self._at

    def below(self, limit: int) -> int:
        """A number from 0 to below ``limit``, which is at most 256."""
        if not self.left:
            return 0
        self._at += 1
        return self._data[self._at - 1] % limit

    def number(self, width: int) -> int:
        """A little-endian number of ``width`` bytes."""
        return int.from_bytes(self.bytes(width), "little")

    def bytes(self, most: int) -> bytes:
        """The next bytes, as many as are there."""
        taken = self._data[self._at : self._at + most]
        self._at += len(taken)
        return taken

    def pick(self, choices: Any) -> Any:
        """One of a sequence that is not empty."""
        return choices[self.below(min(len(choices), 256))]

    def value(self, depth: int = 3) -> Any:
        """Any value that msgpack can write."""
        kind = self.below(8)
        if kind < 3 or not depth:
            return copy.deepcopy(self.pick(STRANGE))
        if kind == 3:
            return self.number(8)
        if kind == 4:
            return self.bytes(self.below(40))
        if kind == 5:
            return self.bytes(self.below(40)).decode("utf-8", "replace")
        if kind == 6:
            return [self.value(depth - 1) for _ in range(self.below(5))]
        return {str(self.value(0)): self.value(depth - 1) for _ in range(self.below(4))}

    def changed(self, value: Any) -> Any:
        """The value with one part of it replaced, removed, doubled or cut."""
        if isinstance(value, dict | list) and value and self.below(8):
            keys = sorted(value) if isinstance(value, dict) else range(len(value))
            key = self.pick(keys)
            how = self.below(8)
            if how == 0:
                del value[key]
            elif how == 1 and isinstance(value, list):
                value.append(copy.deepcopy(value[key]))
            else:
                value[key] = self.changed(value[key])
            return value
        if type(value) is int and self.below(2):
            return max(-(1 << 63), min((1 << 64) - 1, value + self.pick((-1, 1, 4096, -4096, 1 << 32))))
        if isinstance(value, bytes) and value and self.below(2):
            return value[: self.below(len(value) % 256 + 1)] + self.bytes(self.below(5))
        return self.value(2)
