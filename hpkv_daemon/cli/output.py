"""Results on stdout: tables on a terminal, ``key value`` lines in a pipe, one line of JSON on demand."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from hpkv_client.values import format_size


def note(text: str) -> None:
    """Something for people, on stderr."""
    click.echo(f"hpkvd: {text}", err=True)


def emit(data: Mapping[str, Any], as_json: bool) -> None:
    """Print a result. Nested maps become sections, lists of maps become tables of one row each."""
    if as_json:
        click.echo(json.dumps(data, default=_plain))
    elif sys.stdout.isatty():
        _emit_tables(data)
    else:
        for key, value in flatten(data):
            click.echo(f"{key} {_text(value)}")


def _plain(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _plain(value) if not isinstance(value, float) else f"{value:g}"


def flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Leaves of nested maps and lists, under dotted names."""
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{name}.")
        elif isinstance(value, list | tuple):
            yield from flatten(dict(enumerate(value)), f"{name}.")  # type: ignore[arg-type]
        else:
            yield name, value


def _cell(key: str, value: object) -> str:
    if key.endswith("_bytes") and isinstance(value, int) and not isinstance(value, bool):
        return format_size(value)
    if isinstance(value, list | tuple | Mapping):
        return f"{len(value)}"
    return _text(value)


def _emit_tables(data: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    simple = {key: value for key, value in data.items() if not isinstance(value, list | tuple | Mapping)}
    sections = {"": simple} | {key: value for key, value in data.items() if isinstance(value, Mapping)}
    for title, section in sections.items():
        table = Table(title=title or None, title_justify="left", show_header=False, box=None)
        for key, value in section.items():
            table.add_row(str(key), _cell(str(key), value), style=None)
        if table.row_count:
            console.print(table)
    for title, rows in _lists(data):
        console.print(_rows(title, rows) if rows else f"{title}: none")


def _lists(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Sequence[Any]]]:
    """The lists in a map, and those in the maps they hold, each with its title."""
    for key, value in data.items():
        if isinstance(value, list | tuple):
            yield f"{prefix}{key}", value
            for number, row in enumerate(value):
                if isinstance(row, Mapping):
                    yield from _lists(row, f"{prefix}{key} {number}, ")


def _rows(title: str, rows: Sequence[Any]) -> Any:
    from rich.table import Table

    table = Table(title=f"{title}: {len(rows)}", title_justify="left")
    rows = [row if isinstance(row, Mapping) else {"value": row} for row in rows]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(str(column))
    for row in rows:
        table.add_row(*(_cell(str(column), row.get(column)) for column in columns))
    return table
