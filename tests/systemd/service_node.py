"""A machine with the service on it, and what tests do to both."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from machine import Machine

from tests.support import wait_until

PYTHON = "/usr/lib/hpkv/bin/python3"
START_SECONDS = 60.0
_DROP_INS = "etc/systemd/system/hpkvd.service.d"

PUT = (
    "from hpkv_client.client import BlockCache\n"
    "with BlockCache('test', block_bytes=4096) as cache:\n"
    "    cache.put({b'k' * 32: b'v' * 4096})\n"
)
GET = (
    "from hpkv_client.client import BlockCache\n"
    "with BlockCache('test', block_bytes=4096) as cache:\n"
    "    print(cache.get([b'k' * 32])[0] == b'v' * 4096)\n"
)


class Node:
    """A machine, and the service on it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.run = machine.run

    def install(self, package: Path) -> str:
        """Install the package, or a newer one; what dpkg said."""
        shutil.copy(package, self.machine.root / "var/tmp/hpkv.deb")
        done = self.run("dpkg", "--force-unsafe-io", "--no-triggers", "--install", "/var/tmp/hpkv.deb")
        return done.stdout + done.stderr

    def property(self, name: str, unit: str = "hpkvd.service") -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit).stdout.strip()

    def status(self) -> dict[str, Any]:
        """What 'hpkvd status' says to root."""
        found = json.loads(self.run("hpkvd", "status", "--json", check=False).stdout)
        assert isinstance(found, dict)
        return found

    def serving(self, not_pid: int = 0) -> int:
        """Wait until the service is active; its process, another one than that."""

        def active() -> int:
            pid = int(self.property("MainPID"))
            return pid if self.property("ActiveState") == "active" and pid != not_pid else 0

        pid = wait_until(active, START_SECONDS, "the service is not active")
        assert isinstance(pid, int)
        return pid

    def change(self, settings: str, name: str = "test") -> None:
        """Replace a drop-in of the service; for the next start."""
        directory = self.machine.root / _DROP_INS
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.conf").write_text(f"[Service]\n{settings}\n" if settings else "")
        self.run("systemctl", "daemon-reload")

    def restart(self) -> int:
        """Restart the service and its socket, whatever state they are in; the new process."""
        self.run("systemctl", "reset-failed", "hpkvd.service", "hpkvd.socket", check=False)
        self.run("systemctl", "restart", "hpkvd.socket", "hpkvd.service")
        return self.serving()

    def journal(self, *arguments: str) -> str:
        """What the journal has of the service."""
        self.run("journalctl", "--sync")
        return self.run("journalctl", "--no-pager", "--unit=hpkvd.service", "--output=cat", *arguments).stdout

    def python(self, code: str, user: str = "engine") -> str:
        """What a program of a user prints."""
        return self.run(PYTHON, "-c", code, user=user).stdout.strip()
