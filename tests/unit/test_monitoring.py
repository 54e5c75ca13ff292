"""Dashboard and alert rules: complete, explained, and each rule raised by what it is for, and by nothing less."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hpkv_daemon.cli import hpkvd
from tests.support import ROOT

ASSETS = ROOT / "hpkv_daemon" / "assets"
RULES = (ASSETS / "alerts.yml").read_text()
ALERTS = re.findall(r"- alert: (\w+)", RULES)

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="there is no promtool (package prometheus)")

A = 'instance="a"'
SLOW = ("0.5", "1", "2", "+Inf")


def _histogram(*growth: int) -> dict[str, str]:
    labels = f'tier="memory",direction="load",{A}'
    name = "hpkv_transfer_duration_seconds_bucket"
    return {f'{name}{{{labels},le="{le}"}}': f"0+{more}x90" for le, more in zip(SLOW, growth, strict=True)}


RAISED: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "HpkvDown": ({'up{job="hpkvd"}': "0x90"}, {'up{job="hpkvd"}': "1x90", 'up{job="vllm"}': "0x90"}),
    "HpkvInternalErrors": (
        {f"hpkv_internal_errors_total{{{A}}}": "0x80 1x10"},
        {f"hpkv_internal_errors_total{{{A}}}": "3x90"},
    ),
    "HpkvEngineNotCached": (
        {f'hpkv_engines{{state="waiting",{A}}}': "1x90"},
        {f'hpkv_engines{{state="waiting",{A}}}': "0x85 1x5", f'hpkv_engines{{state="ready",{A}}}': "4x90"},
    ),
    "HpkvDaemonSlow": (
        {f'hpkv_engine_breaker_opened_total{{model="m",{A}}}': "0x80 4x10"},
        {f'hpkv_engine_breaker_opened_total{{model="m",{A}}}': "0x80 1x10"},
    ),
    "HpkvJobsFail": (
        {
            f'hpkv_failed_jobs_total{{kind="load",{A}}}': "0+5x90",
            f'hpkv_failed_jobs_total{{kind="store",{A}}}': "0+5x90",
        },
        {f'hpkv_failed_jobs_total{{kind="load",{A}}}': "0+1x90"},
    ),
    "HpkvMoverRestarts": (
        {f"hpkv_mover_restarts_total{{{A}}}": "0x80 4x10"},
        {f"hpkv_mover_restarts_total{{{A}}}": "0x80 1x10"},
    ),
    "HpkvLoadsSlow": (_histogram(90, 90, 100, 100), _histogram(90, 100, 100, 100)),
    "HpkvNoRoom": (
        {f'hpkv_dropped_blocks_total{{reason="full",{A}}}': "0+10x90", f"hpkv_offered_blocks_total{{{A}}}": "0+100x90"},
        {
            f'hpkv_dropped_blocks_total{{reason="full",{A}}}': "0+1x90",
            f'hpkv_dropped_blocks_total{{reason="orphan",{A}}}': "0+50x90",
            f"hpkv_offered_blocks_total{{{A}}}": "0+100x90",
        },
    ),
    "HpkvPoolTooSmall": (
        {
            f'hpkv_evicted_blocks_total{{tier="memory",{A}}}': "0+100x180",
            f"hpkv_stored_blocks_total{{{A}}}": "0+100x180",
            f'hpkv_lookup_blocks_total{{result="hit",{A}}}': "0+1x180",
            f'hpkv_lookup_blocks_total{{result="miss",{A}}}': "0+99x180",
        },
        {
            f'hpkv_evicted_blocks_total{{tier="memory",{A}}}': "0+100x180",
            f"hpkv_stored_blocks_total{{{A}}}": "0+100x180",
            f'hpkv_lookup_blocks_total{{result="hit",{A}}}': "0+50x180",
            f'hpkv_lookup_blocks_total{{result="miss",{A}}}': "0+50x180",
        },
    ),
    "HpkvStorageDegraded": (
        {f'hpkv_storage_state{{state="degraded",{A}}}': "1x90"},
        {f'hpkv_storage_state{{state="degraded",{A}}}': "0x90", f'hpkv_storage_state{{state="ready",{A}}}': "1x90"},
    ),
    "HpkvStorageDamaged": (
        {f"hpkv_storage_bad_records_total{{{A}}}": "0x80 2x10"},
        {f"hpkv_storage_bad_records_total{{{A}}}": "2x90"},
    ),
    "HpkvRemoteDegraded": (
        {f'hpkv_remote_state{{state="degraded",{A}}}': "1x90"},
        {f'hpkv_remote_state{{state="degraded",{A}}}': "0x90", f'hpkv_remote_state{{state="ready",{A}}}': "1x90"},
    ),
    "HpkvRemoteDamaged": (
        {f"hpkv_remote_bad_blocks_total{{{A}}}": "0x80 2x10"},
        {f"hpkv_remote_bad_blocks_total{{{A}}}": "2x90"},
    ),
}
"""Alert -> series that raise it within 90 minutes (180 for the one that looks at hours), and some that must not."""


def _case(alert: str, series: dict[str, str], raised: bool) -> dict[str, Any]:
    values = [{"series": name, "values": points} for name, points in series.items()]
    firing = {"labels": "{}", "value": 1}
    expression = {
        "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
        "eval_time": "180m" if "180" in str(series) else "85m",
        "exp_samples": [firing] if raised else [],
    }
    return {"interval": "1m", "input_series": values, "promql_expr_test": [expression]}


@needs_promtool
def test_each_alert_is_raised_by_what_it_is_for_and_by_nothing_less(tmp_path: Path) -> None:
    assert RAISED.keys() == set(ALERTS)
    (tmp_path / "alerts.yml").write_text(RULES)
    cases = []
    for alert, (enough, less) in RAISED.items():
        cases += [_case(alert, enough, raised=True), _case(alert, less, raised=False)]
    # JSON is YAML.
    (tmp_path / "test.yml").write_text(json.dumps({"rule_files": ["alerts.yml"], "tests": cases}))
    done = subprocess.run(["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_explained_and_each_explanation_has_an_alert() -> None:
    section = (ROOT / "docs" / "operations.md").read_text().partition("## Alerts")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(Hpkv\w+)`", section, re.M) == ALERTS


def test_the_commands_print_what_grafana_and_prometheus_read() -> None:
    printed = CliRunner().invoke(hpkvd, ["dashboard"])
    assert printed.exit_code == 0
    board = json.loads(printed.stdout)
    assert board["title"] == "HPKV"
    assert CliRunner().invoke(hpkvd, ["alerts"]).stdout == RULES


def test_panels_are_told_apart_have_queries_and_do_not_overlap() -> None:
    panels = json.loads((ASSETS / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] == "row" or all(target["expr"] for target in panel["targets"])
