"""The daemon's side of a mover with a process: starts it, talks to it, notices its end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from hpkv_client.types import MemoryHandle
from hpkv_client.wire import pack_blocks, run_to_wire
from hpkv_daemon.link import Link
from hpkv_daemon.movers.base import (
    Alive,
    Attached,
    Attachment,
    CopyJob,
    Died,
    Done,
    Event,
    Locked,
    Notice,
    Outcome,
)

_TUNABLES = "glibc.cpu.x86_non_temporal_threshold=0x8000"
"""Copies of 32 KiB and more stream past the cache: the pool is far larger than it, and the engine needs it."""


class ProcessMover:
    """A ``Mover`` whose process runs ``module``. Owns the process: ``close`` it, then ask ``ended`` until it is.

    Not thread-safe. The pool's descriptor is inherited by the process, not kept here, and so are ``inherited``. Its
    arguments are ``first``, then the descriptors of link and pool, the pool's bytes and the fault hooks.
    """

    descriptor_socket = ""

    def __init__(
        self,
        device: str,
        module: str,
        first: Sequence[str],
        environment: Mapping[str, str],
        pool_fd: int,
        pool_bytes: int,
        faults: str,
        inherited: Sequence[int] = (),
    ) -> None:
        self.device = device
        ours, theirs = socket.socketpair()
        whole = dict(os.environ, GLIBC_TUNABLES=_TUNABLES, OMP_NUM_THREADS="1") | dict(environment)
        command = [sys.executable, "-P", "-m", module, *first]
        arguments = [str(theirs.fileno()), str(pool_fd), str(pool_bytes), faults]
        try:
            self._process = subprocess.Popen(
                command + arguments,
                env=whole,
                pass_fds=(theirs.fileno(), pool_fd, *inherited),
                stdin=subprocess.DEVNULL,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._link = Link(ours)
        self._exit = os.pidfd_open(self._process.pid)
        self._ready = select.epoll()
        self._ready.register(ours, select.EPOLLIN)
        self._watched = ours.fileno()
        self._tickets = 0
        self._last_words = ""

    @property
    def pid(self) -> int:
        """See ``Mover``."""
        return self._process.pid

    def fileno(self) -> int:
        """See ``Mover``."""
        return self._ready.fileno()

    def attach(self, attachment: int, what: Attachment) -> None:
        """See ``Mover``."""
        regions = [_fields(handle) for handle in what.regions]
        control = _fields(what.control) if what.control else None
        runs = [run_to_wire(run) for run in what.runs]
        self._link.send(["attach", attachment, regions, control, runs, what.blocks])

    def detach(self, attachment: int) -> None:
        """See ``Mover``."""
        self._link.send(["detach", attachment])

    def submit(self, job: CopyJob) -> int:
        """See ``Mover``."""
        self._tickets += 1
        offsets = struct.pack(f"={len(job.offsets)}Q", *job.offsets)
        message = [job.attachment, int(job.direction), job.job, offsets, pack_blocks(job.blocks)]
        self._link.send(["copy", self._tickets, *message])
        return self._tickets

    def cancel(self, ticket: int) -> None:
        """See ``Mover``."""
        self._link.send(["cancel", ticket])

    def flush(self) -> bool:
        """Send queued messages; True when none is left."""
        return self._link.flush()

    def ping(self) -> None:
        """See ``Mover``."""
        self._link.send(["ping", 0])

    def poll(self) -> Iterator[Event]:
        """See ``Mover``."""
        for verb, number, *rest in self._link.receive():
            if verb == "attached":
                yield Attached(number, rest[0])
            elif verb == "alive":
                yield Alive()
            elif verb == "locked":
                yield Locked(rest[0])
            elif verb == "notice":
                yield Notice(rest[0])
            elif verb == "dying":
                self._last_words = rest[0]
            else:
                outcome, problem, moved, seconds = rest
                yield Done(number, Outcome(outcome), problem, moved, seconds)
        if self._link.closed:
            self._await_exit()
            if self.ended():
                yield Died(self._last_words or f"exit status {self._process.returncode}")

    def _await_exit(self) -> None:
        """From a closed link on only the end of the process matters: until then a device may still write for it."""
        if self._watched != self._exit:
            self.kill()
            self._ready.unregister(self._watched)
            self._ready.register(self._exit, select.EPOLLIN)
            self._watched = self._exit

    def kill(self) -> None:
        """See ``Mover``."""
        # It holds nothing that a polite end would save, and it may be frozen.
        self._process.kill()

    def close(self) -> None:
        """See ``Mover``."""
        self._link.close()
        self.kill()
        self._ready.close()
        os.close(self._exit)

    def ended(self, timeout: float = 0.0) -> bool:
        """See ``Mover``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        return self._process.returncode is not None


def _fields(handle: MemoryHandle) -> list[object]:
    return list(dataclasses.astuple(handle))
