"""Look-ups under way: what the store holds is asked for in rounds, each of a few questions, and within a time limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hpkv_client.types import BlockKey
from hpkv_daemon.tiers.base import Known, Outcome
from hpkv_daemon.tiers.host import Reply
from hpkv_daemon.tiers.remote.presence import ChainSearch, EachSearch, Search
from hpkv_daemon.tiers.remote.shared import Shared

LOOKUP_SECONDS = 2.0
"""Whoever asks does not wait longer: then what was asked for counts as absent."""
MOST_LOOKUPS = 64
"""Look-ups under way; of more, nothing is asked."""
MOST_EACH = 512
"""Keys that form no chain, of one look-up."""


@dataclass(slots=True, eq=False)
class _Lookup:
    """One search under way."""

    fingerprint: bytes
    search: Search
    deadline: float
    asked: list[int] = field(default_factory=list)

    def names(self) -> list[bytes]:
        """Fingerprint and key of what is being asked for."""
        return [self.fingerprint + self.search.keys[index] for index in self.asked]


class Lookups:
    """Not thread-safe: the control loop is its only user."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._under_way: list[_Lookup] = []
        self._asked: set[bytes] = set()

    def inquire(self, fingerprint: bytes, keys: Sequence[BlockKey], chain: bool) -> bool:
        """See ``Tier``."""
        shared, now = self._shared, self._shared.clock()
        if shared.unreadable(fingerprint):
            return False
        if not chain:
            unknown = [key for key in keys if shared.presence.find(fingerprint, key, now) is None][:MOST_EACH]
            fresh = [key for key in unknown if fingerprint + key not in self._asked]
            begun = bool(fresh) and self._begin(fingerprint, EachSearch(fresh), now)
            return begun or len(fresh) < len(unknown)
        leading = shared.presence.match(fingerprint, keys, now)
        if leading == len(keys) or shared.presence.find(fingerprint, keys[leading], now) is not None:
            return False
        if fingerprint + keys[leading] in self._asked:
            return True
        return self._begin(fingerprint, ChainSearch(list(keys), leading), now)

    def _begin(self, fingerprint: bytes, search: Search, now: float) -> bool:
        if len(self._under_way) == MOST_LOOKUPS:
            return False
        lookup = _Lookup(fingerprint, search, now + LOOKUP_SECONDS)
        self._under_way.append(lookup)
        self._shared.counters["lookups"] += 1
        self._ask(lookup)
        return True

    def _ask(self, lookup: _Lookup) -> None:
        lookup.asked = lookup.search.questions()
        if not lookup.asked or not self._shared.process.alive:
            self._over(lookup)
            return
        self._asked.update(lookup.names())
        self._shared.counters["lookup_questions"] += len(lookup.asked)
        keys = [lookup.search.keys[index] for index in lookup.asked]
        self._shared.process.ask(lambda reply: self._answered(lookup, keys, reply), "exists", lookup.fingerprint, keys)

    def _answered(self, lookup: _Lookup, keys: list[BlockKey], reply: Reply) -> None:
        now = self._shared.clock()
        works = self._shared.judge(self._shared.reading, reply)
        found = dict(zip(keys, reply.outcomes, strict=False)) if len(reply.outcomes) == len(keys) else {}
        here = {key: one is Outcome.OK for key, one in found.items() if one in (Outcome.OK, Outcome.MISSING)}
        for key, there in here.items():
            self._shared.presence.learn(lookup.fingerprint, key, there, now)
        if lookup not in self._under_way:
            # Nobody waits for it any more; what it says is of use all the same.
            return
        if not works or len(here) < len(keys):
            self._give_up(lookup, now)
            return
        self._asked.difference_update(lookup.names())
        lookup.search.answer({index: here[lookup.search.keys[index]] for index in lookup.asked})
        for key in lookup.search.keys[: lookup.search.presumed()]:
            if self._shared.presence.find(lookup.fingerprint, key, now) is None:
                self._shared.presence.learn(lookup.fingerprint, key, True, now)
        self._ask(lookup)

    def _give_up(self, lookup: _Lookup, now: float) -> None:
        """What was not answered counts as absent for now."""
        presence = self._shared.presence
        for index in lookup.asked:
            key = lookup.search.keys[index]
            if presence.find(lookup.fingerprint, key, now) is None:
                presence.learn(lookup.fingerprint, key, False, now)
        self._asked.difference_update(lookup.names())
        self._over(lookup)

    def _over(self, lookup: _Lookup) -> None:
        self._under_way.remove(lookup)
        self._shared.tell(Known())

    def look_after(self) -> None:
        """Give up those that take too long."""
        now = self._shared.clock()
        for lookup in [lookup for lookup in self._under_way if now >= lookup.deadline]:
            self._shared.counters["lookup_timeouts"] += 1
            self._shared.reading.fail(f"no answer to a look-up within {LOOKUP_SECONDS:.0f} s", now)
            self._give_up(lookup, now)
