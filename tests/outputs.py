"""Golden files of what commands print. ``UPDATE_GOLDEN=1`` writes them anew; look at the difference then."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console

_DIRECTORY = Path(__file__).with_name("outputs")


def rendered(view: Any, width: int = 120, terminal: bool = False) -> str:
    """A table, or whatever rich can print, as text without blanks at the ends of lines."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        highlight=False,
        force_terminal=terminal,
        color_system="standard" if terminal else None,
    )
    console.print(view)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def assert_golden(name: str, text: str) -> None:
    """The text is that of the file."""
    path = _DIRECTORY / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs"


def assert_golden_json(name: str, data: Any) -> None:
    """The same for JSON, laid out to be read."""
    assert_golden(name, json.dumps(data, indent=1) + "\n")


def shape(data: Any) -> Any:
    """Names and kinds of a JSON value, without its figures; lists by their first entry."""
    if isinstance(data, dict):
        return {key: shape(value) for key, value in data.items()}
    if isinstance(data, list):
        return [shape(data[0])] if data else []
    return type(data).__name__
