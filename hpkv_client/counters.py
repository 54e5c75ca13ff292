"""What engines count themselves, told with their heartbeats: name -> what it means. Integers that only grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

ENGINE_COUNTERS = {
    "lookups": "Look-ups that engines sent",
    "lookup_timeouts": "Look-ups without an answer in time",
    "loads": "Loads that engines asked for",
    "load_failures": "Loads that failed or came too late, and were asked for again or computed",
    "load_wait_microseconds": "Time from the plan of a load until all ranks had it, summed over loads that succeeded",
    "hit_tokens_loaded": "Tokens of hits that engines asked for",
    "hit_tokens_failed": "Tokens of hits whose load failed",
    "hits_recomputed": "Hits that were computed, because that was faster lately",
    "hit_tokens_recomputed": "Tokens of hits that were computed, because that was faster lately",
    "saved_prefill_microseconds": "Time that computing the loaded tokens would have taken, at the speed measured last",
    "stores": "Store jobs that engines offered",
    "late_jobs": "Jobs of ranks that missed their deadline",
    "breaker_opened": "Times that a process of an engine took the daemon for down",
}


class EngineTotals:
    """Sums of what engines count, by model, that do not fall when an engine leaves. ``most``: models told apart."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.by_model: dict[str, Counter[str]] = {}
        """The model with the empty name stands for all that are not told apart."""

    def told(self, model: str, before: Mapping[str, int], now: Mapping[str, int]) -> None:
        """A process told its counters, as it did ``before``. Names that mean nothing here are left out."""
        if model not in self.by_model and len(self.by_model) >= self._most:
            model = ""
        totals = self.by_model.setdefault(model, Counter())
        for name, value in now.items():
            if value != before.get(name, 0) and name in ENGINE_COUNTERS:
                totals[name] += max(0, value - before.get(name, 0))
