"""A real ``hpkvd`` for a benchmark, with a socket, pool and configuration of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpkv_client.errors import HpkvError
from hpkv_client.launch import listener
from hpkv_client.transport import Channel

READY_SECONDS = 120.0
STOP_SECONDS = 30.0
HPKVD = (sys.executable, "-P", "-m", "hpkv_daemon", "serve")


@dataclass(frozen=True)
class Daemon:
    """A running daemon: its socket, what a client's environment needs to find it, and its control process."""

    socket: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """Of the control process."""
        return self.process.pid

    @property
    def pool_directory(self) -> Path:
        """Where its pool file lies."""
        return Path(self.environment["HPKV_SHARE_MEM_FILE_PATH"])

    def stop(self) -> None:
        """A polite end, or a kill if that takes too long. May be called again."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def movers(self) -> list[int]:
        """The pids of its movers."""
        channel = self.channel()
        try:
            return [mover["pid"] for mover in channel.call("info", {}, 10.0)["movers"]]
        finally:
            channel.close()

    def channel(self) -> Channel:
        """A new connection."""
        return Channel(self.socket)


@contextmanager
def place(pool_bytes: int) -> Iterator[dict[str, str]]:
    """The environment of a daemon in directories of its own, which are removed afterwards."""
    run = Path(tempfile.mkdtemp(prefix="hpkv-bench-"))
    pool = Path(tempfile.mkdtemp(prefix="hpkv-bench-", dir="/dev/shm"))
    config = run / "hpkvd.toml"
    config.touch()
    own = {
        "HPKV_CONFIG": str(config),
        "HPKV_SOCKET": str(run / "hpkvd.sock"),
        "HPKV_SHARE_MEM_FILE_PATH": str(pool),
        "HPKV_KV_MEM_POOL_SIZE": str(pool_bytes),
        "HPKV_LOG_FILE": str(run / "hpkvd.log"),
    }
    try:
        yield {name: value for name, value in os.environ.items() if not name.startswith("HPKV_")} | own
    finally:
        shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(pool, ignore_errors=True)


@contextmanager
def daemon(pool_bytes: int, command: Sequence[str] = HPKVD) -> Iterator[Daemon]:
    """A daemon that answers, from its start to its polite end."""
    with place(pool_bytes) as environment:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        served = Daemon(Path(environment["HPKV_SOCKET"]), environment, process)
        try:
            await_answer(served.socket, process)
            yield served
        finally:
            served.stop()


def await_answer(socket: Path, process: subprocess.Popen[bytes]) -> None:
    """Return with the first answer to a ping. Raises ``RuntimeError`` when the daemon ends or stays silent."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"hpkvd ended with status {process.returncode} while starting")
        if listener(socket) is None:
            time.sleep(0.001)
            continue
        channel = Channel(socket)
        try:
            channel.call("ping", {}, 5.0)
            return
        except HpkvError:
            continue
        finally:
            channel.close()
    raise RuntimeError(f"hpkvd did not answer within {READY_SECONDS:.0f} s")
