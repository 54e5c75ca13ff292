"""Weights that change while the engine runs: noticed where they are loaded, and never mixed with what was cached.

``watch`` runs in every rank and counts loads of weights; ``Epoch`` runs beside the scheduler and decides what may be
cached under which salt. Blocks of changed weights are the engine's own: nobody else can know what they are.
"""

from __future__ import annotations

import functools
import secrets
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from vllm.logger import init_logger

log = init_logger("vllm.hpkv.reloads")

_WORKER_METHODS = ("reload_weights", "start_weight_update", "update_weights", "load_model")
_SALT_BYTES = 16


def watch(changed: Callable[[], None]) -> None:
    """Call ``changed`` before the weights of this rank change. To be called while the rank registers its KV.

    vLLM tells connectors nothing about it, so the ways in are wrapped: those of the worker, and ``load_weights`` of
    the model, which trainers call through extensions of the worker. Both are found above us on the stack.
    """
    frame: FrameType | None = sys._getframe(1)
    found = set()
    while frame is not None:
        owner = frame.f_locals.get("self")
        for name in _WORKER_METHODS if hasattr(owner, "model_runner") else ():
            _wrap(owner, name, changed)
            found.add("worker")
        model = getattr(owner, "model", None)
        if hasattr(model, "load_weights"):
            _wrap(model, "load_weights", changed)
            found.add("model")
        frame = frame.f_back
    if len(found) < 2:
        log.warning("HPKV: changes of the weights while the engine runs cannot be noticed on this version of vLLM")


def _wrap(owner: Any, name: str, changed: Callable[[], None]) -> None:
    original = getattr(owner, name, None)
    if original is None or getattr(original, "tells_hpkv", False):
        return

    @functools.wraps(original)
    def telling(*arguments: Any, **options: Any) -> Any:
        changed()
        return original(*arguments, **options)

    telling.tells_hpkv = True  # type: ignore[attr-defined]
    setattr(owner, name, telling)


class Epoch:
    """Which weights the engine computes with, as its scheduler knows. One thread.

    After a change nothing is cached until the engine's own prefix cache has been emptied, because it may hold KV of
    the weights before. One that was emptied before the change, with nothing computed in between, is as good.
    """

    def __init__(self) -> None:
        self.changes = 0
        """As many changes as the ranks have told."""
        self.salt = b""
        """Enters the key of every block; empty for the weights that the engine was started with."""
        self.settled = True
        """Whether the engine's own cache holds KV of the present weights only."""
        self._empty = True
        """Whether it is known to have been empty, before the step below or until now."""
        self._first_step = 0
        """The first step that computed anything after that; 0: none did yet."""

    def computes(self, step: int) -> None:
        """Step number ``step`` (from 1) is planned, and computes something."""
        self._first_step = self._first_step or step

    def told(self, changes: int, step: int) -> bool:
        """The ranks count ``changes`` and noticed the last one at ``step``, before they computed. Whether it is new."""
        if changes <= self.changes:
            return False
        self.changes = changes
        self.salt = secrets.token_bytes(_SALT_BYTES)
        self.settled = self._empty and (not self._first_step or step <= self._first_step)
        self._empty = self.settled
        return True

    def emptied(self) -> None:
        """The engine's own cache is empty now."""
        self.settled = self._empty = True
        self._first_step = 0

    def forget(self) -> bool:
        """Whether this alone forgets all that was cached: what has a salt of its own is never asked for again."""
        if not self.salt:
            return False
        self.salt = secrets.token_bytes(_SALT_BYTES)
        return True
