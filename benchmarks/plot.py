"""One picture of all results: how far each measure is from its aim.

python -m benchmarks.plot [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from benchmarks.all import NAMES
from benchmarks.report import RESULTS

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.png"
_MET, _MISSED, _WITHOUT = "#2a7f4f", "#b3372f", "#8a8f98"
_SMALLEST, _LARGEST = 0.1, 10.0


def headroom(value: float, aim: str) -> float:
    """How many times better than its aim a value is; 1 is just met."""
    kind, bound = aim.split()
    if kind == ">=":
        found = value / float(bound)
    else:
        found = float(bound) / value if value else _LARGEST
    return min(_LARGEST, max(_SMALLEST, found))


def rows(results: list[dict[str, Any]]) -> list[tuple[str, float, str, str]]:
    """Label, length of the bar, its text and its colour, for everything that has an aim or is a ratio."""
    found = []
    for result in results:
        for measure in result["measures"]:
            label = f"{result['benchmark']}: {measure['name']}"
            value, unit = measure["value"], measure["unit"]
            text = f"{value:,.0f}{unit}" if value >= 1000 else f"{value:.3g} {unit}".rstrip()
            if measure["aim"]:
                colour = _MET if measure["met"] else _MISSED
                found.append((label, headroom(value, measure["aim"]), f"{text}  (aim {measure['aim']})", colour))
            elif unit == "x":
                found.append((label, min(_LARGEST, max(_SMALLEST, value)), f"{text}  (no aim)", _WITHOUT))
    return found


def draw(results: list[dict[str, Any]], output: Path) -> None:
    """Write the picture."""
    shown = rows(results)[::-1]
    figure, axes = pyplot.subplots(figsize=(12, 1.2 + 0.26 * len(shown)))
    axes.barh(range(len(shown)), [length for _, length, _, _ in shown], color=[colour for *_, colour in shown])
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(_SMALLEST, _LARGEST * 6)
    axes.set_xticks([0.1, 0.2, 0.5, 1, 2, 5, 10], ["0.1", "0.2", "0.5", "1", "2", "5", "10"])
    axes.minorticks_off()
    axes.set_yticks(range(len(shown)), [label for label, *_ in shown], fontsize=7)
    for position, (_, length, text, _) in enumerate(shown):
        axes.text(length * 1.06, position, text, va="center", fontsize=7)
    axes.set_xlabel("times better than the aim (green: met, red: missed); grey: the ratio itself, which has no aim")
    machine = results[0]["machine"]
    axes.set_title(f"HPKV benchmarks, {machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    output.parent.mkdir(exist_ok=True)
    figure.savefig(output, dpi=110, bbox_inches="tight")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    files = [path for name in NAMES if (path := RESULTS / f"{name}.json").exists()]
    if not files:
        print("no results yet: run python -m benchmarks.all", file=sys.stderr)
        return 1
    draw([json.loads(path.read_text()) for path in files], arguments.output)
    print(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
