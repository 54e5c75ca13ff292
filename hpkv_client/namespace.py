"""One namespace as the daemon names it, for its owner: blocks of others by their keys, chained as they were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpkv_client.client import BlockCache
from hpkv_client.types import BlockKey, Keys
from hpkv_client.wire import Body


@dataclass(frozen=True, slots=True)
class NamespaceId:
    """What names a namespace, and what people know about it."""

    fingerprint: bytes
    block_bytes: int
    model: str = ""
    block_tokens: int = 0
    fields: Mapping[str, str] = field(default_factory=dict)


class NamespaceCache(BlockCache):
    """A ``BlockCache`` on the blocks of somebody else. Raises ``NotPermitted`` for others than root and the owner.

    Keys are those of the daemon. Reading a block counts as its use.
    """

    def __init__(self, namespace: NamespaceId, *, arena_blocks: int, socket: Path, timeout: float = 30.0) -> None:
        self._namespace = namespace
        super().__init__("", namespace.block_bytes, arena_blocks=arena_blocks, socket=socket, timeout=timeout)

    def _registration(self, namespace: str) -> Body:  # noqa: ARG002  (this one has a name of its own)
        known = self._namespace
        return super()._registration(known.model) | {
            "namespace": known.fingerprint,
            "archive": True,
            "block_tokens": known.block_tokens,
            "fields": dict(known.fields),
        }

    def _keys(self, keys: Sequence[bytes]) -> bytes:
        return Keys.of(keys).blob

    def store_arena(self, parent: BlockKey | None, keys: Sequence[BlockKey], indices: Iterable[int]) -> int:
        """Store arena blocks as a chain under ``parent``; how many are kept."""
        return int(self._move("store", keys, indices, parent=parent)["kept"])
