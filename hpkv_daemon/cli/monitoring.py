"""``hpkvd dashboard`` and ``hpkvd alerts``: what comes with the package for Grafana and Prometheus."""

from __future__ import annotations

from importlib.resources import files

import click


def _print_asset(name: str) -> None:
    click.echo((files("hpkv_daemon") / "assets" / name).read_text(encoding="utf-8"), nl=False)


@click.command()
def dashboard() -> None:
    """Print a Grafana dashboard as JSON, to import it: its data source is the Prometheus that scrapes /metrics."""
    _print_asset("dashboard.json")


@click.command()
def alerts() -> None:
    """Print alert rules for Prometheus as YAML; docs/operations.md says what to do about each."""
    _print_asset("alerts.yml")
