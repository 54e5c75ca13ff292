"""The floor of the control plane: a ROUTER socket that sends every message back, and nothing else.

python -m benchmarks.echo SOCKET [ANSWER_BYTES]

With ANSWER_BYTES it answers with so many bytes instead.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import zmq

from benchmarks.placement import go_first


class Server(NamedTuple):
    """Where a process listens, and which one it is."""

    socket: Path
    pid: int


@contextmanager
def echo(answer_bytes: int | None = None) -> Iterator[Server]:
    """An echo process."""
    with tempfile.TemporaryDirectory(prefix="hpkv-bench-") as directory:
        path = Path(directory, "echo.sock")
        command = [sys.executable, "-m", "benchmarks.echo", str(path)]
        command += [] if answer_bytes is None else [str(answer_bytes)]
        process = subprocess.Popen(command)
        try:
            while not path.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"the echo process ended with status {process.returncode}")
                time.sleep(0.01)
            yield Server(path, process.pid)
        finally:
            process.kill()
            process.wait()


def _main(path: str, answer_bytes: str = "") -> None:
    go_first()
    router = zmq.Context().socket(zmq.ROUTER)
    router.set_hwm(10_000)
    router.bind(f"ipc://{path}")
    answer = bytes(int(answer_bytes)) if answer_bytes else None
    while True:
        identity, frame = router.recv_multipart()
        router.send_multipart((identity, frame if answer is None else answer))


if __name__ == "__main__":
    _main(*sys.argv[1:])
