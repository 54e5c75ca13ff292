"""Stores of blocks that were filled token by token wait for each other: each store wakes daemon and mover."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpkv_vllm.metadata import Store

MOST_BLOCKS = 16
"""So many go at once, however young."""
HOLD_SECONDS = 2.0
PROMPT_TOKENS = 64
"""A step that computes so many works at some prompt."""


class Holdback:
    """Planned stores that were not handed to the ranks yet. Their blocks are pinned. Pure; the clock is passed in."""

    def __init__(self) -> None:
        self._stores: list[Store] = []
        self._requests: set[str] = set()
        """Those whose blocks they are."""
        self._blocks = 0
        self._since = 0.0
        self._due = False

    def add(self, request_id: str, store: Store, now: float) -> None:
        """Hold a store back."""
        if not self._stores:
            self._since = now
        self._stores.append(store)
        self._requests.add(request_id)
        self._blocks += len(store.blocks)

    def hurry(self, request_id: str) -> None:
        """This request is over, or loses its blocks: somebody may ask for what it leaves at any moment."""
        self._due = self._due or request_id in self._requests

    def take(self, now: float, due: bool) -> list[Store]:
        """What is to be handed over now; all of it if ``due``."""
        late = now - self._since >= HOLD_SECONDS or self._blocks >= MOST_BLOCKS
        return self.drop() if due or late or self._due else []

    def drop(self) -> list[Store]:
        """All of it, in the order in which it came, and nothing is held any more."""
        stores, self._stores = self._stores, []
        self._requests.clear()
        self._blocks, self._due = 0, False
        return stores
