"""What a starting daemon tells the ``hpkvd start`` that waits for it: one JSON object per line of a pipe."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from hpkv_client.errors import HpkvError, from_code

log = logging.getLogger(__name__)

_PARTS_LOGGED = 10


class Report:
    """The daemon's end. Without a descriptor, or once the other side has left, everything goes nowhere."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            # Movers must not keep the pipe open.
            os.set_inheritable(fd, False)
            os.set_blocking(fd, False)

    def _send(self, message: dict[str, Any]) -> None:
        if self._fd is None:
            return
        try:
            os.write(self._fd, json.dumps(message).encode() + b"\n")
        except BlockingIOError:
            return
        except OSError:
            os.close(self._fd)
            self._fd = None

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """The pool grew."""
        self._send({"done_bytes": done_bytes, "total_bytes": total_bytes})

    def warn(self, text: str) -> None:
        """Something the user should know, although the daemon starts."""
        self._send({"warning": text})

    def fail(self, error: HpkvError) -> None:
        """The daemon does not start."""
        self._send({"code": error.code, "message": error.message, "hint": error.hint})


def failure_in(message: dict[str, Any]) -> HpkvError | None:
    """The error that a line of the pipe carries, if it does."""
    if "code" not in message:
        return None
    return from_code(*(str(message.get(field, "")) for field in ("code", "message", "hint")))


class Allocation:
    """Progress of the pool's allocation, for the log and for who waits.

    Its first call comes when the daemon's log is open: until then ``notes`` have no place to go.
    """

    def __init__(self, report: Report, notes: list[tuple[int, str]]) -> None:
        self._report = report
        self._notes = notes
        self._parts_logged = -1

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        for level, text in self._notes:
            log.log(level, text)
        self._notes = []
        self._report.progress(done_bytes, total_bytes)
        part = done_bytes * _PARTS_LOGGED // total_bytes
        if part > self._parts_logged and done_bytes:
            log.info("pool: %d of %d bytes allocated", done_bytes, total_bytes)
            self._parts_logged = part
