"""What a benchmark found: measures beside their aims, as a table for people and as JSON for the plot."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.paired import Pairs, Spread
from benchmarks.placement import awake, go_first

RESULTS = Path(__file__).resolve().parent / "results"

console = Console(stderr=True, highlight=False)


class Unfit(Exception):
    """This machine cannot run the benchmark; the text says why."""


@dataclass(frozen=True)
class Aim:
    """A bound on a measure."""

    at_least: float | None = None
    at_most: float | None = None

    def met_by(self, value: float) -> bool:
        """Whether the value is within the bound."""
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    def __str__(self) -> str:
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return f"<= {self.at_most:g}" if self.at_most is not None else ""


@dataclass(frozen=True)
class Measure:
    """One line of the table. ``unit`` "x" marks a ratio to the floor that ``note`` names."""

    name: str
    value: float
    unit: str
    aim: Aim = Aim()
    low: float | None = None
    high: float | None = None
    note: str = ""
    context: dict[str, float] = field(default_factory=dict)
    """Absolute figures behind the value; the key names the unit."""

    @property
    def met(self) -> bool | None:
        """None without an aim."""
        return None if self.aim == Aim() else self.aim.met_by(self.value)


def ratio(name: str, spread: Spread, aim: Aim = Aim(), context: dict[str, float] | None = None) -> Measure:
    """A measure from paired samples."""
    return Measure(name, spread.median, "x", aim, spread.low, spread.high, context=context or {})


def speeds(pairs: Pairs, sample_bytes: int) -> dict[str, float]:
    """Medians of both sides, for samples of so many bytes each."""
    return {
        "gb_per_second": sample_bytes / Spread.of(pairs.samples).median / 1e9,
        "floor_gb_per_second": sample_bytes / Spread.of(pairs.floors).median / 1e9,
    }


def machine() -> dict[str, Any]:
    """What the numbers depend on; nothing that names the machine."""
    memory = {line.split(":")[0]: line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines()}
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = next((line.split(": ")[1] for line in cpuinfo.splitlines() if line.startswith("model name")), "")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model.strip(),
        "l3_cache": _l3_cache(),
        "memory_gib": round(int(memory["MemTotal"]) / 2**20, 1),
        "virtual": "hypervisor" in cpuinfo,
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _l3_cache() -> str:
    size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    return size.read_text().strip() if size.exists() else "unknown"


def table(name: str, measures: list[Measure]) -> Table:
    """The measures for people."""
    shown = Table(title=name, title_justify="left")
    for column in ("what", "value", "quartiles", "aim", "met", "absolute"):
        shown.add_column(column, justify="right" if column in ("value", "quartiles", "aim") else "left")
    for measure in measures:
        met = {None: "", True: "[green]yes", False: "[bold red]no"}[measure.met]
        quartiles = "" if measure.low is None else f"{measure.low:.3g} .. {measure.high:.3g}"
        absolute = ", ".join(f"{key} {value:.4g}" for key, value in measure.context.items())
        what = f"{measure.name}\n[dim]{measure.note}" if measure.note else measure.name
        value = (
            f"{measure.value:.3g} {measure.unit}" if measure.value < 1000 else f"{measure.value:,.0f} {measure.unit}"
        )
        shown.add_row(what, value, quartiles, str(measure.aim), met, absolute)
    return shown


def as_json(name: str, quick: bool, measures: list[Measure], conditions: dict[str, Any]) -> dict[str, Any]:
    """The measures for programs."""
    return {
        "benchmark": name,
        "quick": quick,
        "machine": machine(),
        "conditions": conditions,
        "measures": [{**asdict(measure), "aim": str(measure.aim), "met": measure.met} for measure in measures],
    }


Found = tuple[list[Measure], dict[str, Any]]
"""Measures, and the conditions they were taken under."""


def main(name: str, about: str | None, run: Callable[[bool], Found], urgent: bool = True) -> int:
    """The command line of one benchmark; the exit status (2: unfit machine). A missed aim is no failure.

    ``urgent`` raises the priority and keeps the cores awake, see ``benchmarks.placement``.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
    parser.add_argument("--json", type=Path, help=f"write the result here (default: {RESULTS.name}/{name}.json)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller samples: does it run at all?")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        # What was started is ended on the way out.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    target = arguments.json or RESULTS / f"{name}.json"
    try:
        with ExitStack() as stack:
            if urgent:
                go_first()
                stack.enter_context(awake())
            measures, conditions = run(arguments.quick)
    except Unfit as problem:
        console.print(f"{name}: not measured: {problem}")
        return 2
    target.parent.mkdir(parents=True, exist_ok=True)
    result = as_json(name, arguments.quick, measures, conditions)
    target.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=None if sys.stdout.isatty() else 150).print(table(name, measures))
    return 0


def say(text: str) -> None:
    """Progress, on stderr."""
    console.print(f"  {text}", style="dim")
