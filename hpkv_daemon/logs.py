"""Where log lines go, and what they look like there: text, JSON, or entries of the journal with their priority."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

_TEXT = "%(asctime)s hpkvd[%(process)d] %(levelname)s %(message)s"
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.DEBUG, 7))
"""Levels and what they are to syslog(3), the gravest first."""


def goes_to_journal(fd: int, environ: Mapping[str, str]) -> bool:
    """Whether what is written to ``fd`` becomes entries of the journal (JOURNAL_STREAM in systemd.exec(5))."""
    device, _, inode = environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        info = os.fstat(fd)
    except OSError:
        return False
    return (device, inode) == (str(info.st_dev), str(info.st_ino))


def with_priority(level: int, text: str) -> str:
    """Lines as the journal reads them: each with the prefix of its priority (sd-daemon(3))."""
    priority = next((number for least, number in _PRIORITIES if level >= least), 7)
    return "\n".join(f"<{priority}>{line}" for line in text.splitlines())


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time in seconds since the epoch, level, pid, logger, message, and any traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        entry = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class JournalFormatter(logging.Formatter):
    """What another formatter makes of a record, with priorities: the journal has time and pid by itself."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        return with_priority(record.levelno, self._inner.format(record))


def log_to(file: Path | None, level: str, style: str) -> None:
    """Send the daemon's log to ``file``, or stderr; ``style`` is text or json."""
    handler = logging.FileHandler(file) if file else logging.StreamHandler(sys.stderr)
    journal = file is None and goes_to_journal(sys.stderr.fileno(), os.environ)
    text = logging.Formatter("%(message)s" if journal else _TEXT)
    formatter = JsonFormatter() if style == "json" else text
    handler.setFormatter(JournalFormatter(formatter) if journal else formatter)
    root = logging.getLogger("hpkv_daemon")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
