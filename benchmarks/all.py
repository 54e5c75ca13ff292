"""Every benchmark in turn, each in a process of its own, then the plot.

A benchmark that this machine cannot run is left out, and said so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.report import RESULTS, console

NAMES = ("mover", "disk", "transfer", "control", "start", "engine", "peers", "remote")
_UNFIT = 2


def run(name: str, quick: bool) -> int:
    """Exit status of one benchmark."""
    console.print(f"==> {name}")
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(RESULTS / f"{name}.json")]
    return subprocess.run(command + (["--quick"] if quick else []), check=False).returncode


def main() -> int:
    """The command line; 1 if a benchmark failed. A missed aim is no failure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all", description=__doc__)
    parser.add_argument("--json", type=Path, help="write all results here too, as one list")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller samples: does it run at all?")
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], default=[], help="only these")
    arguments = parser.parse_args()
    names = arguments.names or NAMES
    status = {name: run(name, arguments.quick) for name in names}
    if arguments.json:
        results = [json.loads((RESULTS / f"{name}.json").read_text()) for name in names if not status[name]]
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no plot: matplotlib is not installed")
    elif not arguments.quick:
        subprocess.run([sys.executable, "-m", "benchmarks.plot"], check=False)
    failed = [name for name, code in status.items() if code not in (0, _UNFIT)]
    for name in failed:
        console.print(f"{name} failed with status {status[name]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
