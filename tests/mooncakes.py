"""Mooncake Store as tests need it: a real master, and a process that lends memory, over TCP."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.stores import START_SECONDS
from tests.support import wait_until

_LENDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
host, master, lent_bytes = sys.argv[1:]
if store.setup(host, "P2PHANDSHAKE", int(lent_bytes), 16 << 20, "tcp", "", master):
    sys.exit("the lender could not be set up")
print("ready", flush=True)
sys.stdin.read()
"""


class MooncakeCluster:
    """A master and one lender. Both can be killed and started again, empty then. ``close`` it."""

    def __init__(self, host: str = "127.0.0.1", lent_bytes: int = 256 << 20) -> None:
        self._lent_bytes = lent_bytes
        with socket.socket() as rpc, socket.socket() as metrics:
            rpc.bind((host, 0))
            metrics.bind((host, 0))
            self._port, self._metrics = int(rpc.getsockname()[1]), int(metrics.getsockname()[1])
        self._host = host
        self.url = f"mooncake://{host}:{self._port}"
        self.variables: dict[str, str] = {}
        self.restart()

    def restart(self) -> None:
        """Both anew, on the same port."""
        program = Path(sys.executable).parent / "mooncake_master"
        ports = ["--rpc_port", str(self._port), "--metrics_port", str(self._metrics)]
        self._master = subprocess.Popen([program, *ports], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self._listens, START_SECONDS, "the master did not start")
        self._lender = subprocess.Popen(
            [sys.executable, "-c", _LENDER, self._host, f"{self._host}:{self._port}", str(self._lent_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._lender.stdout is not None
        while (line := self._lender.stdout.readline()) != b"ready\n":
            assert line, "the lender did not start"

    def _listens(self) -> bool:
        try:
            socket.create_connection((self._host, self._port), 1).close()
        except OSError:
            return False
        return True

    def freeze(self) -> None:
        """SIGSTOP to the master."""
        self._master.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT to it."""
        self._master.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to both: all objects are gone."""
        for process in (self._lender, self._master):
            process.kill()
            process.wait()
        for pipe in (self._lender.stdin, self._lender.stdout):
            assert pipe is not None
            pipe.close()

    def close(self) -> None:
        """End both."""
        self.kill()
