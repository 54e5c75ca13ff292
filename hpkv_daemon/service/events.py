"""What happens in the daemon, for who follows it. Nothing is kept while nobody does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from hpkv_client.wire import Body

KEPT_EVENTS = 4096
"""With more between two questions the oldest are lost, and counted."""
FOLLOWED_SECONDS = 10.0
"""Who asks again within this time follows."""

_SUMS = {"evicted": ("evicted_blocks", "evicted_bytes"), "expired": ("expired_leases",), "moved": ("moved_spans",)}
"""Kind -> counters whose growth between two ticks is one event: a full pool evicts too often for one each."""


class EventLog:
    """A ring of numbered events. Control loop only; ``clock`` is monotonic seconds.

    ``followed`` is to be asked before an event is put together: without anybody who follows that is all it costs.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._events: deque[tuple[int, float, Body]] = deque(maxlen=KEPT_EVENTS)
        self._latest = 0
        self._asked = 0.0
        self._sums: dict[str, int] = {}
        self.followed = False

    def tell(self, kind: str, **fields: object) -> None:
        """It happened now."""
        if self.followed:
            self._latest += 1
            self._events.append((self._latest, self._clock(), {"kind": kind, **fields}))

    def follow(self, after: int, most: int) -> Body:
        """The events behind number ``after`` (below 0: those that come from now on), at most so many.

        ``latest`` is what to ask for next, ``lost`` how many in between are not there any more.
        """
        now = self._clock()
        self.followed, self._asked = True, now
        if not 0 <= after <= self._latest:
            # A number of an earlier daemon, too.
            return {"latest": self._latest, "lost": 0, "events": []}
        here = [event for event in self._events if event[0] > after]
        lost = self._latest - after - len(here)
        chosen = here[:most]
        return {
            "latest": chosen[-1][0] if chosen else self._latest,
            "lost": lost,
            "events": [{"age_seconds": round(now - moment, 6), **event} for _, moment, event in chosen],
        }

    def tick(self, counters: Mapping[str, int]) -> None:
        """Sum up what happens too often to be told one by one; stop when nobody has asked for long."""
        if not self.followed:
            return
        if self._clock() - self._asked > FOLLOWED_SECONDS:
            self.followed = False
            self._events.clear()
            self._sums.clear()
            return
        for kind, names in _SUMS.items():
            gained = {name: counters[name] - self._sums.get(name, counters[name]) for name in names}
            self._sums.update({name: counters[name] for name in names})
            if any(gained.values()):
                self.tell(kind, **gained)
