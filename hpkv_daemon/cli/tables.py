"""Rows of figures: a table on a terminal, the same columns as plain text in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PIPE_COLUMNS = 400
"""Wide enough that nothing is cut off where no terminal says how wide it is."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its title, and how a row's cell is read. Figures go to the right."""

    title: str
    cell: Callable[[Mapping[str, Any]], str]
    figure: bool = False


def text(title: str, key: str) -> Column:
    """A column of words; ``-`` where there is none."""
    return Column(title, lambda row: str(row.get(key) or "-"))


def figure(title: str, key: str, shown: Callable[[Any], str]) -> Column:
    """A column of figures; ``-`` where there is none."""
    return Column(title, lambda row: "-" if row.get(key) is None else shown(row[key]), figure=True)


def table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> Table:
    """The rows under the columns' titles."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column.title, justify="right" if column.figure else "left", overflow="ellipsis", no_wrap=True)
    for row in rows:
        # As text: a name with brackets in it is not markup.
        made.add_row(*(Text(column.cell(row)) for column in columns))
    return made


def console() -> Console:
    """Standard output: colours and its own width on a terminal, neither in a pipe, no colours with NO_COLOR."""
    from rich.console import Console

    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=_PIPE_COLUMNS)


def show(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], nothing: str) -> None:
    """Print the rows, or ``nothing`` on stderr if there are none."""
    from hpkv_daemon.cli.output import note

    if rows:
        console().print(table(columns, rows))
    else:
        note(nothing)
