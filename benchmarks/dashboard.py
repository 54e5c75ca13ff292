"""Draws the panels of the Grafana dashboard from a running Prometheus, for those who have no Grafana at hand.

    python -m benchmarks.dashboard http://127.0.0.1:9090 docs/dashboard.png --minutes 5

Every panel of ``hpkvd dashboard`` with its own queries; only the looks are matplotlib's.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

ASSET = Path(__file__).resolve().parent.parent / "hpkv_daemon" / "assets" / "dashboard.json"
POINTS = 120
_SCALES = {"bytes": (1 << 20, "MiB"), "Bps": (1 << 20, "MiB/s"), "percentunit": (0.01, "%"), "s": (1, "s")}


def query(prometheus: str, expression: str, start: float, end: float, interval: str) -> list[dict[str, Any]]:
    """The series of a range query, with the variables of the dashboard filled in."""
    filled = expression.replace("$__rate_interval", interval).replace("$instance", ".*")
    parameters = {"query": filled, "start": start, "end": end, "step": max(1.0, (end - start) / POINTS)}
    with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{urllib.parse.urlencode(parameters)}") as answer:
        found = json.load(answer)["data"]["result"]
    assert isinstance(found, list)
    return found


def name_of(legend: str, labels: dict[str, str]) -> str:
    """The legend of a series."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend)


def draw(axes: Axes, panel: dict[str, Any], prometheus: str, start: float, end: float, interval: str) -> None:
    """One panel."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    scale, suffix = _SCALES.get(unit, (1, ""))
    last = None
    for target in panel["targets"]:
        for series in query(prometheus, target["expr"], start, end, interval):
            points = [(float(at) - start, float(value) / scale) for at, value in series["values"]]
            last = points[-1][1]
            axes.plot(*zip(*points, strict=True), label=name_of(target["legendFormat"], series["metric"]), linewidth=1)
    shown = f" ({suffix})" if suffix else ""
    if panel["type"] == "stat":
        axes.clear()
        axes.axis("off")
        text = "no data" if last is None else f"{last:.3g} {suffix}"
        axes.text(0.5, 0.4, text, ha="center", va="center", fontsize=16)
        axes.set_title(panel["title"], fontsize=9)
        return
    axes.set_title(f"{panel['title']}{shown}", fontsize=9, loc="left")
    axes.tick_params(labelsize=7)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=6, loc="upper left")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prometheus")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--interval", default="20s", help="what rates are taken over: at least four scrapes")
    arguments = parser.parse_args()
    end = time.time()
    panels = [panel for panel in json.loads(ASSET.read_text())["panels"] if panel["type"] != "row"]
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = pyplot.figure(figsize=(15, bottom * 0.32))
    for panel in panels:
        place = panel["gridPos"]
        low = 1 - (place["y"] + place["h"]) / bottom
        box = (place["x"] / 24 + 0.02, low + 0.012, place["w"] / 24 - 0.035, place["h"] / bottom - 0.04)
        axes = figure.add_axes(box)
        draw(axes, panel, arguments.prometheus, end - 60 * arguments.minutes, end, arguments.interval)
    figure.savefig(arguments.picture, dpi=80)


if __name__ == "__main__":
    main()
