"""What the documents name is there, and what is there is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpkv_client.settings import FAULTS_CONFIRMATION, SETTINGS
from hpkv_client.wire import VERBS, version_text
from hpkv_daemon.cli import hpkvd
from hpkv_daemon.faults import ACTIONS, POINTS
from hpkv_daemon.service.metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]


def text(name: str) -> str:
    return (ROOT / name).read_text()


def test_every_test_that_guards_against_a_failure_exists() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    there = set(re.findall(r"def (test_\w+)\(", sources)) | {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    named = set(re.findall(r"`(test_\w+?)(?:\.py)?`", text("docs/field-failures.md")))
    assert len(named) > 100
    assert named <= there, named - there


@pytest.mark.parametrize("command", [name for name in hpkvd.list_commands(None) if name != "config"])  # type: ignore[arg-type]
def test_every_command_is_in_the_readme(command: str) -> None:
    assert re.search(rf"\| `hpkvd {command}\b", text("README.md"))


@pytest.mark.parametrize("setting", [setting for setting in SETTINGS.values() if setting.name != "faults"])
def test_every_setting_is_in_the_readme_with_its_flag(setting) -> None:
    row = re.search(rf"^\| `{setting.env}` \|([^|]*)\|", text("README.md"), re.M)
    assert row, setting.env
    assert row[1].strip() == (f"`{setting.flag}`" if setting.flag else "")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_in_the_protocol(verb: str) -> None:
    assert re.search(rf"^\| `{verb}` \|", text("docs/protocol.md"), re.M)


def test_the_protocol_is_that_of_this_version() -> None:
    assert text("docs/protocol.md").startswith(f"# The HPKV protocol, version {version_text().partition('/')[2]}\n")


def test_fault_hooks_are_explained_in_full() -> None:
    section = text("CONTRIBUTING.md").partition("### Fault hooks")[2]
    for word in (*POINTS, *ACTIONS, FAULTS_CONFIRMATION):
        assert word in section, word


def test_the_table_of_metrics_is_that_of_the_code() -> None:
    rows = [f"| `{one.name}` | {one.kind} | {', '.join(one.labels)} | {one.help} |" for one in METRICS]
    assert [line for line in text("docs/metrics.md").splitlines() if line.startswith("| `hpkv_")] == rows
