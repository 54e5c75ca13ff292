"""What operators see, on made-up answers: golden files of both forms."""

from __future__ import annotations

from datetime import datetime

import pytest

from hpkv_daemon.cli import figures
from hpkv_daemon.cli.bench import lines as bench_lines
from hpkv_daemon.cli.hot import PREFIXES
from hpkv_daemon.cli.latency import line, summary
from hpkv_daemon.cli.monitor import line as monitor_line
from hpkv_daemon.cli.overview import ORDERS, Sample, layout, overview
from hpkv_daemon.cli.pins import PINS
from hpkv_daemon.cli.sessions import CLIENTS, LEASES, clients_in
from hpkv_daemon.cli.tables import table
from tests import samples
from tests.outputs import assert_golden, assert_golden_json, rendered

BEFORE, NOW = Sample(10.0, samples.stats(4), samples.INFO), Sample(12.0, samples.stats(6), samples.INFO)


def test_clients() -> None:
    rows = clients_in(samples.INFO)
    assert_golden_json("clients.json", rows)
    assert_golden("clients.txt", rendered(table(CLIENTS, rows)))


def test_leases() -> None:
    assert_golden("leases.txt", rendered(table(LEASES, samples.LEASES["leases"])))


def test_top() -> None:
    found = overview(BEFORE, NOW)
    assert_golden_json("top.json", found)
    assert_golden("top.txt", rendered(layout(found, "q: end")))


def test_top_on_a_terminal_is_bold_where_titles_are() -> None:
    shown = rendered(layout(overview(BEFORE, NOW)), terminal=True)
    assert "\x1b[1mTIER" in shown


@pytest.mark.parametrize(("order", "first"), [("size", "llama [8b]"), ("blocks", "tiny"), ("model", "llama [8b]")])
def test_top_sorts_namespaces(order: str, first: str) -> None:
    assert set(ORDERS) == {"size", "blocks", "model"}
    assert overview(BEFORE, NOW, order)["namespaces"][0]["model"] == first


def test_top_after_a_restart_of_the_daemon_counts_from_its_start() -> None:
    restarted = Sample(12.0, samples.stats(0) | {"uptime_seconds": 2.0, "requests": 10}, samples.INFO | {"epoch": "x"})
    found = overview(BEFORE, restarted)
    assert (found["interval_seconds"], found["requests_per_second"]) == (2.0, 5.0)
    assert found["hit_percent"] is None


def test_latency() -> None:
    found = summary([i / 1e6 for i in range(1000, 0, -1)])
    assert_golden_json("latency.json", found)
    assert_golden("latency.txt", line(found) + "\n")
    assert summary([0.5])["p99_microseconds"] == 500_000


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (figures.size(1023), "1023 B"),
        (figures.size(3 << 29), "1.5 GiB"),
        (figures.size(1 << 55), "32768.0 TiB"),
        (figures.duration(59.96), "60.0s"),
        (figures.duration(187), "3m07s"),
        (figures.duration(7500), "2h05m"),
        (figures.duration(273600), "3d04h"),
        (figures.share(1, 3), "33.3%"),
        (figures.share(1, 0), "-"),
        (figures.speed(2.5e9), "2.50 GB/s"),
    ],
)
def test_figures(shown: str, text: str) -> None:
    assert shown == text


def test_hot() -> None:
    assert_golden("hot.txt", rendered(table(PREFIXES, samples.HOT["prefixes"])))


def test_pins() -> None:
    assert_golden("pins.txt", rendered(table(PINS, samples.PINS["pins"])))


def test_monitor() -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, 600_000)
    assert_golden("monitor.txt", "".join(f"{monitor_line(event, now)}\n" for event in samples.EVENTS))


def test_bench() -> None:
    assert_golden("bench.txt", bench_lines(samples.BENCH) + "\n")
