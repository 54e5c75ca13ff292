"""The connector's own counters in vLLM's /metrics and log: deltas from its processes, sums in the API server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter as PrometheusCounter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from hpkv_client.counters import ENGINE_COUNTERS

_UNIT = "_microseconds"


def metric_name(counter: str) -> str:
    """``vllm:hpkv_loads``; vLLM's client adds ``_total``. Times are told in seconds."""
    return f"vllm:hpkv_{counter.replace(_UNIT, '_seconds')}"


@dataclass
class CounterStats(KVConnectorStats):
    """What was counted since the last time. ``data``: name -> how much more."""

    def reset(self) -> None:
        """Nothing was counted."""
        self.data: dict[str, int] = {}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> CounterStats:
        """Both together."""
        total = dict(self.data)
        for name, count in other.data.items():
            total[name] = total.get(name, 0) + count
        return CounterStats(total)

    def reduce(self) -> dict[str, int | float]:
        """For the log, which has a line every few seconds."""
        return {f"HPKV {name.replace('_', ' ')}": count for name, count in sorted(self.data.items())}


class Changes:
    """What a process's counters grew by since the last time they were taken."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._taken: dict[str, int] = {}

    def take(self) -> CounterStats | None:
        """None when nothing was counted: asked in every step."""
        # Not Counter's own comparison, which is ten times slower.
        if dict.__eq__(self._counters, self._taken):
            return None
        taken, self._taken = self._taken, dict(self._counters)
        grown = {name: count - taken.get(name, 0) for name, count in self._taken.items()}
        return CounterStats({name: count for name, count in grown.items() if count})


class CounterMetrics(KVConnectorPromMetrics):
    """``vllm:hpkv_*``, labelled as vLLM labels its own."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = metric_types[PrometheusCounter]
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in ENGINE_COUNTERS.items():
            family = make(name=metric_name(name), documentation=f"HPKV: {text}.", labelnames=labelnames)
            self._counters[name] = {engine: family.labels(*values) for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: Mapping[str, int], engine_idx: int = 0) -> None:
        """Add what one engine counted."""
        for name, count in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(count / 1e6 if name.endswith(_UNIT) else count)
