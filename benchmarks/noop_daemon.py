"""hpkvd as it is, but for two seams: movers that copy nothing, and a pool without memory behind it.

    python -m benchmarks.noop_daemon PAUSES_FILE

So a small machine holds a million blocks, and only the control path is measured. At its end the process writes
every garbage collection to PAUSES_FILE, as JSON: when it began by the monotonic clock, and its seconds.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from hpkv_client.settings import from_environment
from hpkv_daemon import app
from hpkv_daemon.movers.noop import NoopMover


class BarePool:
    """A size and a path: everything that the control process knows of a pool. Its index is real."""

    cold = "a pool without memory"
    identity = 0

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size

    @classmethod
    def open(cls, directory: Path, size: int, progress: Callable[[int, int], None]) -> BarePool:
        """As ``Pool.open``; allocates nothing."""
        progress(size, size)
        return cls(directory / "pool", size)

    def fileno(self) -> int:
        """There is none."""
        return -1

    def close(self, unlink: bool) -> None:
        """Nothing to let go of."""


class Collections:
    """Times every garbage collection of this process."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []
        self._started = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.monotonic()
        else:
            self.found.append((self._started, time.monotonic() - self._started))


def _main(pauses_file: str) -> None:
    collections = Collections()
    settings = from_environment(os.environ)
    with patch.object(app, "HostMover", lambda *_: NoopMover()), patch.object(app, "Pool", BarePool):
        app.serve(settings, {}, lambda *_: None)
    Path(pauses_file).write_text(json.dumps(collections.found))


if __name__ == "__main__":
    _main(sys.argv[1])
