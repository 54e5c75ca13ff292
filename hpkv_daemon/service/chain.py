"""Memory, disk, remote: what one tier lacks is looked for in the next one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from hpkv_client.types import BlockKey
from hpkv_client.wire import Body
from hpkv_daemon.core.counts import Histogram
from hpkv_daemon.service.tiering import Tiering


class TierChain:
    """The tiers beyond memory, nearest first. Each writes what it admits, behind everybody's back. Control loop only.

    ``disk`` is what drains, scrubs and imports are about. ``remote`` is shared with other nodes; None: there is none.
    """

    def __init__(self, disk: Tiering, remote: Tiering | None) -> None:
        self.disk = disk
        self._remote = remote
        self._all = [disk] if remote is None else [disk, remote]

    def used(self, namespace: int, keys: Sequence[BlockKey]) -> None:
        """These blocks were found in memory."""
        for tiering in self._all:
            tiering.used(namespace, keys)

    def bring(self, namespace: int, parent: BlockKey | None, keys: Sequence[BlockKey]) -> int:
        """Bring a chain back of which ``parent`` is resident; how many leading keys are on their way, or may be."""
        coming = 0
        for tiering in self._all:
            if coming < len(keys):
                coming += tiering.bring(namespace, keys[coming - 1] if coming else parent, keys[coming:])
        return coming

    def bring_each(self, namespace: int, keys: Sequence[BlockKey]) -> int:
        """The same for blocks that form no chain."""
        coming, left = 0, keys
        for tiering in self._all:
            coming += tiering.bring_each(namespace, left) if left else 0
            left = tiering.left(namespace, left)
        return coming

    def when_here(self, namespace: int, keys: Sequence[BlockKey], then: Callable[[], None]) -> None:
        """Call ``then`` as soon as none of these is on its way any more, or might be."""
        if self._remote is None:
            self.disk.when_here(namespace, keys, then)
        else:
            remote = self._remote
            self.disk.when_here(namespace, keys, lambda: remote.when_here(namespace, keys, then))

    def tick(self) -> None:
        """A few times a second."""
        for tiering in self._all:
            tiering.tick()

    def forget(self, namespace: int | None, everywhere: bool) -> None:
        """Everything of a namespace is forgotten, of all with None; ``everywhere``: what other nodes can read, too."""
        self.disk.forget(namespace)
        if everywhere and self._remote is not None:
            self._remote.forget(namespace)

    def describe(self) -> dict[str, Body]:
        """What each tier holds, for ``info``."""
        return {"storage": self.disk.describe(), "remote": describe_remote(self._remote)}

    def count(self) -> Counter[str]:
        """Counters, under names of their own."""
        total: Counter[str] = Counter()
        for tiering in self._all:
            total.update(tiering.count())
        return total

    @property
    def durations(self) -> dict[tuple[str, str], Histogram]:
        """How long batches took, by tier and direction."""
        return {which: taken for tiering in self._all for which, taken in tiering.durations.items()}

    @property
    def pins(self) -> int:
        """Slots that are pinned because they are being written, once for each tier."""
        return sum(tiering.pins for tiering in self._all)

    def check(self) -> None:
        """Raise ``AssertionError`` naming the first broken invariant."""
        for tiering in self._all:
            tiering.check()

    def close(self, seconds: float, forget: Callable[[int], object]) -> None:
        """Let the tiers write what they have, for so long at most. ``forget`` ends the watch over a descriptor."""
        for tiering in self._all:
            tiering.close(seconds / len(self._all), forget)


def describe_remote(remote: Tiering | None) -> Body:
    """The remote tier for ``info``; how much the store holds is known to itself only."""
    if remote is None:
        return {"state": "off", "reason": "", "queued_blocks": 0, "queued_bytes": 0, "pid": 0}
    known = remote.describe()
    return {name: known[name] for name in ("state", "reason", "queued_blocks", "queued_bytes", "pid")}
