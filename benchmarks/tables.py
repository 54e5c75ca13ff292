"""The results as Markdown, for ``docs/benchmarks.md``.

python -m benchmarks.tables
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.all import NAMES
from benchmarks.report import RESULTS

_MET = {None: "", True: "yes", False: "**no**"}


def number(value: float) -> str:
    """Three digits, and thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def row(measure: dict[str, Any]) -> str:
    """One line of a table."""
    spread = "" if measure["low"] is None else f"{number(measure['low'])} - {number(measure['high'])}"
    absolute = ", ".join(f"{name} {number(value)}" for name, value in measure["context"].items())
    value = f"{number(measure['value'])} {measure['unit']}".strip()
    cells = (measure["name"], value, spread, measure["aim"], _MET[measure["met"]], absolute)
    return f"| {' | '.join(cells)} |"


def table(result: dict[str, Any]) -> str:
    """The measures of one benchmark."""
    conditions = ", ".join(f"{name} {value}" for name, value in result["conditions"].items())
    head = "| what | value | quartiles | aim | met | absolute |\n|---|---:|---:|---:|---|---|"
    rows = "\n".join(row(measure) for measure in result["measures"])
    load = result["machine"]["load_average"]
    return f"### {result['benchmark']}\n\n{conditions or 'No parameters'}; load average {load}.\n\n{head}\n{rows}\n"


def main() -> int:
    """The command line."""
    for name in NAMES:
        path = RESULTS / f"{name}.json"
        if path.exists():
            print(table(json.loads(path.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
