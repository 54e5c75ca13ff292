"""Block keys of prompts: the engine's prefix hashes under the namespace, the adapter and the present weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpkv_client.types import KeyMaker, typed_digest
from hpkv_vllm.metadata import Part


class PrefixKeys:
    """``hash_tokens``: tokens under each hash that the engine makes. ``adapter``: a digest, empty without one."""

    def __init__(self, namespace: bytes, hash_tokens: int) -> None:
        self._namespace = namespace
        self._hash_tokens = hash_tokens
        self._salt = b""
        self._makers: dict[tuple[int, bytes], KeyMaker] = {}

    def salt(self, salt: bytes) -> None:
        """Keys from now on are those of other weights."""
        self._salt = salt
        self._makers.clear()

    def extend(self, keys: list[list[bytes]], parts: Iterable[Part], hashes: Sequence[bytes], adapter: bytes) -> None:
        """Add the keys of blocks that the prompt has filled since; ``keys`` and ``parts`` go together."""
        for part, mine in zip(parts, keys, strict=True):
            step = part.block_tokens // self._hash_tokens
            maker = self._maker(part.group, adapter)
            for i in range(len(mine), len(hashes) // step):
                mine.append(maker(bytes(hashes[(i + 1) * step - 1])))

    def _maker(self, group: int, adapter: bytes) -> KeyMaker:
        maker = self._makers.get((group, adapter))
        if maker is None:
            namespace = self._namespace
            if self._salt:
                namespace = typed_digest("changed weights", namespace, self._salt)
            if adapter:
                namespace = typed_digest("adapter", namespace, adapter)
            maker = self._makers[group, adapter] = KeyMaker(namespace, group)
        return maker
