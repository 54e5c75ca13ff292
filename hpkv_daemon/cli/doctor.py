"""``hpkvd doctor``: what is wrong with this machine, and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from hpkv_client.errors import HpkvError
from hpkv_daemon.cli.options import as_json, client_settings, reply_timeout, setting_options
from hpkv_daemon.cli.output import emit

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hpkv_daemon.doctor.findings import Finding

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def diagnose(flags: Mapping[str, object], from_engine: bool, timeout: float) -> list[Finding]:
    """Gather the facts and judge them."""
    from hpkv_client.settings import load
    from hpkv_daemon.config import load_settings
    from hpkv_daemon.doctor.checks import ENGINE, NODE, examine
    from hpkv_daemon.doctor.gather import gather

    problem = ""
    try:
        settings = load_settings(os.environ, flags)[0]
    except HpkvError as found:
        problem = str(found)
        try:
            settings = client_settings(flags)
        except HpkvError:
            settings = load({})[0]
    return examine(gather(settings, problem, os.environ, timeout), ENGINE if from_engine else NODE)


def report(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings as data."""
    levels = [str(finding.level) for finding in findings]
    return {
        "ok": "fail" not in levels,
        "failed": levels.count("fail"),
        "warned": levels.count("warn"),
        "findings": [
            {"check": finding.check, "level": str(finding.level), "seen": finding.seen, "advice": finding.advice}
            for finding in findings
        ],
    }


def layout(findings: Sequence[Finding]) -> RenderableType:
    """The findings as lines, what to do under each that is not well."""
    from rich.text import Text

    lines = []
    for finding in findings:
        level = str(finding.level)
        lines.append(Text.assemble((f"{level:<4}", _STYLES[level]), f"  {finding.check}: {finding.seen}"))
        if finding.advice:
            lines.append(Text(f"      -> {finding.advice}"))
    return Text("\n").join(lines)


@click.command()
@as_json
@reply_timeout(5.0)
@click.option("--from-engine", is_flag=True, help="Look from where an engine runs: run it in the engine's container.")
@setting_options()
def doctor(as_json: bool, timeout: float, from_engine: bool, **flags: Any) -> int:
    """Check machine, settings, socket, storage and drivers. Exit 1 if something does not work."""
    from hpkv_daemon.cli.tables import console

    findings = diagnose(flags, from_engine, timeout)
    found = report(findings)
    if as_json:
        emit(found, as_json)
    else:
        console().print(layout(findings), soft_wrap=True)
    return 0 if found["ok"] else HpkvError.exit_code
