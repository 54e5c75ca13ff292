"""A snapshot in the text formats that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from hpkv_daemon.core.counts import Histogram
from hpkv_daemon.service.metrics import METRICS, Sample
from hpkv_daemon.service.snapshot import Snapshot

_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


class SnapshotCollector(Collector):
    """Tells what is in one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Metric]:
        """Names need not be known before."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One family for each metric that has a value."""
        for metric in METRICS:
            samples = list(metric.read(self._snapshot))
            if samples:
                yield _family(metric.name, metric.kind, metric.help, metric.labels, samples)


def _family(name: str, kind: str, text: str, labels: tuple[str, ...], samples: Iterable[Sample]) -> Metric:
    if kind == "histogram":
        histograms = HistogramMetricFamily(name, text, labels=labels)
        for values, taken in samples:
            assert isinstance(taken, Histogram)
            histograms.add_metric(values, _buckets(taken), taken.sum)
        return histograms
    family: CounterMetricFamily | GaugeMetricFamily = _FAMILIES[kind](name, text, labels=labels)
    for values, value in samples:
        assert not isinstance(value, Histogram)
        family.add_metric(values, value)
    return family


def _buckets(taken: Histogram) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*taken.bounds, inf), taken.counts, strict=True):
        total += count
        found.append((f"{bound:g}" if bound != inf else "+Inf", total))
    return found


def registry_of(snapshot: Snapshot) -> CollectorRegistry:
    """A registry of all metrics of the daemon, and those of its process (memory, processor time, descriptors)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(snapshot))
    ProcessCollector(registry=registry)
    return registry
