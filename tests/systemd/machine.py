"""A machine of its own: namespaces with a real systemd as process 1, on a throw-away copy of this system's files."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support import ROOT, wait_until

BOOT_SECONDS = 60.0
_MISSING = "no systemd as process 1 here"

_BOOT = r"""
set -e
top=$1
root=$top/root
mount --make-rprivate /
mount -t tmpfs -o mode=755 machine $top
mkdir -m 755 $top/upper $top/work $root
mount -t overlay overlay -o lowerdir=/,upperdir=$top/upper,workdir=$top/work $root
mount -t proc proc $root/proc
mount -t sysfs -o ro sysfs $root/sys
mount -t cgroup2 cgroup2 $root/sys/fs/cgroup
mount -t tmpfs -o mode=755 run $root/run
mount -t tmpfs -o mode=1777 tmp $root/tmp
# Devices of its own: systemd puts things there.
mount -t tmpfs -o mode=755 dev $root/dev
mkdir -m 755 $root/dev/shm $root/dev/pts
mount -t tmpfs -o mode=1777 shm $root/dev/shm
for name in null zero full random urandom tty; do
    touch $root/dev/$name
    mount --bind /dev/$name $root/dev/$name
done
ln -s /proc/self/fd $root/dev/fd
# Nothing starts but what is asked for: above all nothing that changes settings of the kernel, which is not its own.
rm -rf $root/{usr/lib,lib,etc}/systemd/system/*.{wants,requires} $root/usr/sbin/policy-rc.d $root/etc/fstab
rm -rf $root/etc/systemd/system/hpkvd* $root/etc/hpkv
for path in "${@:2}"; do
    mkdir -p $root$path
    mount --rbind $path $root$path
done
mkdir -p $root/etc/systemd/journald.conf.d $root/etc/systemd/system/sysinit.target.wants
ln -s /lib/systemd/system/systemd-journald.{socket,service} $root/etc/systemd/system/sysinit.target.wants
ln -s /dev/null $root/etc/systemd/system/systemd-remount-fs.service
printf '[Journal]\nStorage=volatile\nAudit=no\nReadKMsg=no\n' > $root/etc/systemd/journald.conf.d/test.conf
ip link set lo up
# As systemd expects it of who starts it in a container: credentials come by a mount that propagates.
mount --make-rshared $root
exec chroot $root env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
    /lib/systemd/systemd --system --unit=multi-user.target --log-target=journal --show-status=no
"""


def why_not() -> str:
    """Why there can be no such machine here; empty if there can."""
    if os.geteuid() != 0:
        return f"{_MISSING}: that needs root"
    needed = ("unshare", "nsenter", "systemctl", "dpkg", "dpkg-deb", "runuser", "useradd", "ip")
    missing = [name for name in needed if shutil.which(name) is None]
    if not Path("/lib/systemd/systemd").exists() or missing:
        return f"{_MISSING}: {', '.join(missing) or 'it'} is not installed"
    python = Path("/usr/bin/python3").resolve().name
    if subprocess.run(["dpkg-query", "--status", python], capture_output=True).returncode:
        return "the package needs the distribution's own Python, and /usr/bin/python3 is not it"
    probe = "mount -t tmpfs t /mnt && mkdir /mnt/u /mnt/w /mnt/m && mount -t cgroup2 c /mnt/m && umount /mnt/m && "
    probe += "mount -t overlay o -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/m"
    spaces = ("--mount", "--pid", "--cgroup", "--uts", "--ipc", "--net", "--fork", "--kill-child")
    done = subprocess.run(["unshare", *spaces, "sh", "-c", probe], capture_output=True, text=True)
    return f"{_MISSING}: {done.stderr.strip()}" if done.returncode else ""


def _control_group() -> Path:
    """A new control group below this process' own, of version 2."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    at = next(line.split()[4] for line in mounts if " - cgroup2 " in line)
    own = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    group = Path(f"{at}{own.rstrip('/')}/hpkv-test-{os.getpid()}")
    group.mkdir()
    return group


def _not_there() -> list[Path]:
    """Of the checkout and its environment, what the copy of / would not show: other file systems, and /tmp."""
    system = os.stat("/").st_dev
    return [path for path in (ROOT, Path(sys.prefix)) if path.stat().st_dev != system or path.is_relative_to("/tmp")]


class Machine:
    """A booted machine. ``close`` it. ``root`` is its file system, seen from here."""

    def __init__(self) -> None:
        self._top = Path(tempfile.mkdtemp(prefix="hpkv-machine-", dir="/var/tmp"))
        self._group = _control_group()
        self._console = (self._top.with_suffix(".log")).open("w+")
        spaces = "--mount --pid --cgroup --uts --ipc --net --fork --kill-child"
        enter = f'echo $$ > "$1/cgroup.procs"; exec unshare {spaces} bash -c "$2" bash "${{@:3}}"'
        self._process = subprocess.Popen(
            ["bash", "-c", enter, "bash", self._group, _BOOT, self._top, *_not_there()],
            stdin=subprocess.DEVNULL,
            stdout=self._console,
            stderr=self._console,
        )
        try:
            self.init = wait_until(self._find_init, BOOT_SECONDS, "no process 1")
            self.root = Path(f"/proc/{self.init}/root")
            wait_until(self._has_booted, BOOT_SECONDS, "systemd did not come up")
        except BaseException:
            self.close()
            raise

    def _find_init(self) -> int:
        assert self._process.poll() is None, Path(self._console.name).read_text()
        with contextlib.suppress(FileNotFoundError):
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
            for child in children:
                if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                    return int(child)
        return 0

    def _has_booted(self) -> bool:
        return self.run("systemctl", "is-active", "multi-user.target", check=False).returncode == 0

    def run(
        self, *command: object, user: str = "", check: bool = True, seconds: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the machine, as root or another user, to its end."""
        done = subprocess.run(
            self.command(*command, user=user), capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def command(self, *command: object, user: str = "") -> list[str]:
        """What runs a command in the machine, for a process that goes on."""
        enter = [*self.entrance, "--net"]
        clean = ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", "TERM=dumb"]
        become = ["runuser", "-u", user, "--"] if user else []
        return [*enter, *clean, *become, *map(str, command)]

    @property
    def entrance(self) -> list[str]:
        """What runs a command in the machine, but with the network and the environment of this process."""
        return ["nsenter", f"--target={self.init}", "-m", "-p", "-u", "-i", "-C", "-r", "-w"]

    def close(self) -> None:
        """End every process in it; nothing of it stays."""
        with contextlib.suppress(ProcessLookupError):
            # Its end takes process 1 along, and that everything else.
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        wait_until(self._group_is_gone, BOOT_SECONDS, "processes stay")
        self._console.close()
        Path(self._console.name).unlink()
        self._top.rmdir()

    def _group_is_gone(self) -> bool:
        try:
            for path in sorted(self._group.rglob("*/"), reverse=True):
                path.rmdir()
            self._group.rmdir()
        except OSError:
            return False
        return True
