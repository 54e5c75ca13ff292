"""Fault hooks for tests: delay, fail or die at the n-th pass of a point. Off unless the settings turn them on twice.

A specification is a list of rules separated by ``;``: ``POINT[@N]=ACTION``. Points: ``load``, ``store`` (one block
copied by a mover), ``disk_read``, ``disk_write`` (one block moved by the disk process), and in the daemon ``match``,
``reserve`` (a rank asks to store), ``release``, ``commit`` and ``reply`` (to a load). ``@N`` limits the rule to the
N-th pass, counted from when the rule was read. Actions: ``fail``, ``delay:SECONDS`` or ``die`` (the process kills
itself). ``@/path`` names a file that holds the specification and may change while the daemon runs; each fault that
strikes adds its point to a file beside it.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hpkv_client.errors import ConfigError

POINTS = ("load", "store", "disk_read", "disk_write", "match", "reserve", "release", "commit", "reply")
ACTIONS = ("fail", "delay", "die")


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one pass of a point."""

    fail: bool = False
    delay: float = 0.0
    die: bool = False


_NOTHING = Fault()


@dataclass(frozen=True, slots=True)
class _Rule:
    point: str
    only: int | None
    fault: Fault


def _parse(specification: str) -> list[_Rule]:
    rules = []
    for text in filter(None, (part.strip() for part in specification.split(";"))):
        where, _, action = text.partition("=")
        point, _, nth = where.partition("@")
        name, _, seconds = action.partition(":")
        try:
            only = int(nth) if nth else None
            delay = float(seconds) if seconds else 0.0
        except ValueError:
            raise ConfigError(f"fault rule {text!r} holds a malformed number") from None
        if point not in POINTS or name not in ACTIONS:
            raise ConfigError(f"unknown fault rule {text!r}", f"points: {', '.join(POINTS)}")
        rules.append(_Rule(point, only, Fault(name == "fail", delay, name == "die")))
    return rules


class Faults:
    """Counts passes and answers what goes wrong with each."""

    def __init__(self, specification: str = "") -> None:
        self._file = Path(specification[1:]) if specification.startswith("@") else None
        self._stamp: int | None = None
        self._passes: Counter[str] = Counter()
        self._rules = [] if self._file else _parse(specification)

    @property
    def possible(self) -> bool:
        """Whether any pass can ever go wrong."""
        return bool(self._rules) or self._file is not None

    def at(self, point: str) -> Fault:
        """The fault of this pass. Does not return from one that is to die."""
        fault = self._next(point)
        if fault is not _NOTHING and self._file is not None:
            with self._file.with_suffix(".fired").open("a") as fired:
                fired.write(f"{point}\n")
        if fault.die:
            os.kill(os.getpid(), signal.SIGKILL)
        return fault

    def _next(self, point: str) -> Fault:
        if self._file is not None:
            self._reread()
        if not self._rules:
            return _NOTHING
        self._passes[point] += 1
        for rule in self._rules:
            if rule.point == point and rule.only in (None, self._passes[point]):
                return rule.fault
        return _NOTHING

    def _reread(self) -> None:
        assert self._file is not None
        try:
            stamp = self._file.stat().st_mtime_ns
        except FileNotFoundError:
            self._rules, self._stamp = [], None
            return
        if stamp != self._stamp:
            self._stamp = stamp
            self._passes.clear()
            self._rules = _parse(self._file.read_text())
