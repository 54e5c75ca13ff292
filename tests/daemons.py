"""Real daemons for tests: each with its own socket, pool and configuration."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from hpkv_client.errors import HpkvError
from hpkv_client.launch import listener
from hpkv_client.transport import Channel
from hpkv_daemon.cli import hpkvd as commands

READY_SECONDS = 20.0
POOL_SIZE = "64m"
HPKVD = (sys.executable, "-P", "-m", "hpkv_daemon")


def without_hpkv(environ: os._Environ[str]) -> dict[str, str]:
    """The environment without settings of the person who runs the tests."""
    return {name: value for name, value in environ.items() if not name.startswith("HPKV_")}


def hpkvd(*arguments: str, env: dict[str, str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; whatever happens, no user sees a traceback."""
    done = subprocess.run([*HPKVD, *arguments], env=env, cwd=cwd, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def hpkvd_here(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The same in this process, which is faster: for tests of what is printed. Not for commands that start a daemon."""
    done = CliRunner().invoke(commands, arguments, env=dict.fromkeys(os.environ) | env)
    said = done.stderr if done.exception is None else f"{done.stderr}{done.exception!r}"
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, said)


def refusal(*arguments: str, env: dict[str, str], exit_code: int, cwd: Path | None = None) -> str:
    """The one line on stderr of a command that must fail with this exit code and print nothing else."""
    done = hpkvd(*arguments, env=env, cwd=cwd)
    assert done.returncode == exit_code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("hpkvd: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


class DaemonHandle:
    """A running ``hpkvd serve``. ``env`` makes any process use it; ``log`` is what it wrote.

    ``prefix`` is a command that starts it somewhere else, a network namespace for instance, and becomes it.
    """

    def __init__(self, env: dict[str, str], log: Path, prefix: Sequence[str] = ()) -> None:
        self.env = env
        self._prefix = prefix
        self.log = log
        self.socket = Path(env["HPKV_SOCKET"])
        self.pool_directory = Path(env["HPKV_SHARE_MEM_FILE_PATH"])
        self._channels: list[Channel] = []
        self.process = self._spawn()

    @property
    def pid(self) -> int:
        """Of the control process."""
        return self.process.pid

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [*self._prefix, *HPKVD, "serve"], env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self._await_answer(process)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return process

    def _await_answer(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while listener(self.socket) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"hpkvd did not start: {self.text()}")
            time.sleep(0.01)
        channel = Channel(self.socket)
        try:
            assert channel.call("ping", {}, READY_SECONDS)["pid"] == process.pid
        except HpkvError as problem:
            raise AssertionError(f"{problem}: {self.text()}") from None
        finally:
            channel.close()

    def text(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace")

    def client(self) -> Channel:
        """A new connection to it, closed with the test."""
        self._channels.append(Channel(self.socket))
        return self._channels[-1]

    def stop(self, timeout: float = 30.0) -> int:
        """SIGTERM, wait; its exit status (of an earlier end, if it has ended already)."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        return self.process.wait(timeout)

    def kill(self) -> None:
        """SIGKILL, wait."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """A new process under the same settings, after ``stop`` or ``kill``."""
        assert self.process.poll() is not None
        self.process = self._spawn()

    def close(self) -> None:
        """Close the connections and end the process, whatever state it is in."""
        for channel in self._channels:
            channel.close()
        if self.process.poll() is None:
            self.kill()


class DaemonFactory:
    """``factory(**env)`` starts a daemon; ``env`` overrides settings by their variables."""

    def __init__(self) -> None:
        self._handles: list[DaemonHandle] = []
        self._directories: list[Path] = []

    def environment(self, **env: Any) -> dict[str, str]:
        """An environment with a private socket, pool and (empty) configuration file; starts nothing."""
        run = self._directory("/tmp")
        pool = self._directory("/dev/shm")
        config = run / "hpkvd.toml"
        config.touch()
        settings = {
            "HPKV_CONFIG": config,
            "HPKV_SOCKET": run / "hpkvd.sock",
            "HPKV_SHARE_MEM_FILE_PATH": pool,
            "HPKV_KV_MEM_POOL_SIZE": POOL_SIZE,
            # The default port is one for all.
            "HPKV_METRICS": "off",
            # A tiny model computes faster than a disturbed daemon loads: with the default, hits would be left alone.
            "HPKV_LOAD_WHEN": "always",
        }
        return without_hpkv(os.environ) | {name: str(value) for name, value in (settings | env).items()}

    def _directory(self, parent: str) -> Path:
        directory = Path(tempfile.mkdtemp(prefix="hpkv-t-", dir=parent))
        self._directories.append(directory)
        return directory

    def __call__(self, *prefix: str, **env: Any) -> DaemonHandle:
        whole = self.environment(**env)
        handle = DaemonHandle(whole, Path(whole["HPKV_CONFIG"]).with_suffix(".out"), prefix)
        self._handles.append(handle)
        return handle

    def close(self) -> None:
        """End every daemon and remove every directory."""
        for handle in self._handles:
            handle.close()
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)
