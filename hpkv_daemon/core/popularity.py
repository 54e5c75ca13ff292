"""Which prefixes are found most. Pure, and bounded."""

from __future__ import annotations

from hpkv_client.types import BlockKey

REMEMBERED = 4096
"""Prefixes at most. About 200 bytes each."""


class Popularity:
    """Counts how often each prefix was the longest one found.

    When there are more prefixes than are remembered, the half of them that is used more stays, with half its counts:
    what is used again and again stays, what was used long ago fades. Plain dicts of bytes and integers, because the
    garbage collector does not walk those.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._uses: dict[tuple[int, BlockKey], int] = {}
        """Namespace and key of the prefix's last block -> uses."""

    def __len__(self) -> int:
        return len(self._uses)

    def used(self, namespace: int, key: BlockKey) -> None:
        """The prefix that ends with this block was found."""
        prefix = namespace, key
        known = self._uses.get(prefix)
        if known is None:
            if len(self._uses) >= self._remembered:
                self._fade()
            known = 0
        self._uses[prefix] = known + 1

    def _fade(self) -> None:
        ranked = sorted(self._uses.items(), key=lambda entry: entry[1])
        # Of those used equally often the ones seen last are kept: sorting leaves them in their order.
        self._uses = {prefix: max(1, uses // 2) for prefix, uses in ranked[-(self._remembered // 2) :]}

    def most(self, count: int) -> list[tuple[int, BlockKey, int]]:
        """(namespace, key, uses) of those used most, the most used first."""
        ranked = sorted(self._uses.items(), key=lambda entry: -entry[1])[:count]
        return [(namespace, key, uses) for (namespace, key), uses in ranked]
