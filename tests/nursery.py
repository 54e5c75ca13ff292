"""Forks ready-made test clients: a process that has everything imported makes one in a few milliseconds."""

from __future__ import annotations

import atexit
import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_CLONE_NEWPID = 0x20000000
_CLONE3 = 435
"""Its number on every architecture."""
_REUSE_SECONDS = 5.0
_LONGEST = 1 << 20


class Nursery:
    """Starts the process on first use; it ends with this one."""

    def __init__(self) -> None:
        self._ours: socket.socket | None = None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", "from tests.nursery import serve; serve()", str(theirs.fileno())]
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=(theirs.fileno(),))
        theirs.close()

        def end() -> None:
            ours.close()
            process.wait()

        atexit.register(end)
        return ours

    def fork(self, code: str, environment: dict[str, str], alone: bool, stdin: int, stdout: int, pid: int = 0) -> int:
        """Run code in a fork with these standard files; its pid.

        ``alone``: as process 1 of a PID namespace. ``pid``: under this number, which must be free.
        """
        if self._ours is None:
            self._ours = self._start()
        request = json.dumps({"code": code, "environment": environment, "alone": alone, "pid": pid})
        socket.send_fds(self._ours, [request.encode()], [stdin, stdout])
        forked = int(self._ours.recv(100))
        if forked < 0:
            raise OSError(-forked, f"no process under number {pid}: {os.strerror(-forked)}")
        return forked


NURSERY = Nursery()


def serve() -> None:
    """The nursery itself."""
    import tests.support  # noqa: F401  (what children need)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    orders = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, fds, _, _ = socket.recv_fds(orders, _LONGEST, 2)
        if not message:
            return
        request = json.loads(message)
        if request["alone"]:
            pid = _fork_alone(orders)
        else:
            pid = _fork_as(request["pid"]) if request["pid"] else os.fork()
        if pid == 0:
            _become(request["code"], request["environment"], orders, *fds)
        for fd in fds:
            os.close(fd)
        if pid > 0 or request["pid"]:
            orders.send(str(pid).encode())


def _fork_alone(orders: socket.socket) -> int:
    """Fork into a new PID namespace; 0 in the new process, -1 in the nursery: the one between tells the pid."""
    if os.fork():
        return -1
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWPID):
        os._exit(1)
    pid = os.fork()
    if pid:
        orders.send(str(pid).encode())
        os._exit(0)
    return 0


class _CloneArguments(ctypes.Structure):
    """struct clone_args of linux/sched.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack")),
        *((name, ctypes.c_uint64) for name in ("stack_size", "tls", "set_tid", "set_tid_size", "cgroup")),
    )


def _fork_as(pid: int) -> int:
    """Fork into a process of this number, or give the error as a negative one.

    What os.fork does for threads is not needed by a process that has one.
    """
    wanted = ctypes.c_int32(pid)
    arguments = _CloneArguments(exit_signal=signal.SIGCHLD, set_tid=ctypes.addressof(wanted), set_tid_size=1)
    # PyDLL: the interpreter's lock stays held, so both processes go on as its owner.
    system_call = ctypes.PyDLL(None, use_errno=True).syscall
    system_call.restype = ctypes.c_long
    deadline = time.monotonic() + _REUSE_SECONDS
    while (forked := int(system_call(_CLONE3, ctypes.byref(arguments), ctypes.sizeof(arguments)))) < 0:
        # The number of a process that has just died is taken for a moment longer.
        if ctypes.get_errno() != errno.EEXIST or time.monotonic() > deadline:
            return -ctypes.get_errno()
        time.sleep(0.001)
    return forked


def _become(code: str, environment: dict[str, str], orders: socket.socket, stdin: int, stdout: int) -> None:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        orders.close()
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.closerange(3, 100)
        sys.stdin, sys.stdout = os.fdopen(0, "r"), os.fdopen(1, "w")
        os.environ.clear()
        os.environ.update(environment)
        exec(compile(code, "<test client>", "exec"), {"__name__": "client"})
    except BaseException:  # noqa: BLE001  (it has no caller to return to)
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
