"""An engine's memory on a GPU, a pool, and a real mover process between them, without a daemon.

Needs numpy and msgpack, as the mover does; whoever uses it brings device memory (torch's, or any driver's pointer).
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from hpkv_client.control import PAGE_BYTES
from hpkv_client.errors import HpkvError
from hpkv_client.memory import SharedMemory
from hpkv_client.topology import canonical_layout, place
from hpkv_client.types import MemoryHandle, RankShard
from hpkv_daemon.movers.base import Alive, Attached, Attachment, CopyJob, Died, Direction, Done, Event, Locked, Outcome
from hpkv_daemon.movers.cuda.mover import CudaMover

WAIT_SECONDS = 120.0
ROOT = Path(__file__).resolve().parent.parent


def find_checkout() -> None:
    """Make this checkout's packages importable, here and in processes that are started, also if none is installed."""
    sys.path[:0] = [str(ROOT), str(ROOT / "connectors")]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


class GpuLink:
    """A mover with a pool of its own. A context manager; not thread-safe."""

    def __init__(self, device: str, pool_bytes: int) -> None:
        self.pool = SharedMemory(pool_bytes)
        self._control = SharedMemory(PAGE_BYTES)
        self._directory = tempfile.TemporaryDirectory(prefix="hpkv-gpu-")
        # Stands for the daemon's socket, beside which the mover takes descriptors.
        place = Path(self._directory.name) / "daemon"
        place.touch(0o600)
        self._mover = CudaMover(device, self.pool.handle.fd, pool_bytes, socket_path=place)
        self._inlet = place.with_name(self._mover.descriptor_socket)
        self._locked = 0
        self._answers = 0
        self._numbers = 0
        self._events: list[Event] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._mover.close()
        self._mover.ended(WAIT_SECONDS)
        self._directory.cleanup()
        self._control.close()
        self.pool.close()

    @property
    def pid(self) -> int:
        """Of the mover."""
        return self._mover.pid

    def _poll(self, seconds: float) -> None:
        select.select([self._mover], [], [], seconds)
        self._mover.flush()
        for event in self._mover.poll():
            if isinstance(event, Died):
                raise RuntimeError(f"the mover ended: {event.reason}")
            if isinstance(event, Locked):
                self._locked = event.bytes
            elif isinstance(event, Alive):
                self._answers += 1
            else:
                self._events.append(event)

    def attach(
        self,
        handle: MemoryHandle,
        shards: Sequence[RankShard],
        hand_over: Callable[[Path], bool] | None = None,
    ) -> int:
        """Map the memory of the first of an engine's ranks; the number for ``submit``. ``hand_over`` sends descriptors.

        Raises ``RuntimeError`` with the mover's problem.
        """
        self._numbers += 1
        runs = place(shards[0], canonical_layout(shards))
        self._mover.attach(self._numbers, Attachment((handle,), self._control.handle, runs, shards[0].blocks))
        while True:
            for event in self._events:
                if isinstance(event, Attached) and event.attachment == self._numbers:
                    self._events.remove(event)
                    if event.problem:
                        raise RuntimeError(event.problem)
                    return self._numbers
            self._poll(0.01 if hand_over else 1.0)
            if hand_over:
                # Until the mover waits for them; what is wrong with them it says itself.
                with contextlib.suppress(HpkvError):
                    hand_over = None if hand_over(self._inlet) else hand_over

    def detach(self, attachment: int) -> None:
        """Let the memory go."""
        self._mover.detach(attachment)

    def await_answer(self) -> None:
        """Wait until the mover has said that it lives. Raises ``RuntimeError`` when it ended, or says nothing."""
        self._answers = 0
        self._mover.ping()
        deadline = time.monotonic() + WAIT_SECONDS
        while not self._answers:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the mover said nothing for {WAIT_SECONDS} s")
            self._poll(0.5)

    def lock_all(self) -> float:
        """Wait until the pool is page-locked; the seconds."""
        started = time.perf_counter()
        while self._locked < self.pool.handle.size:
            self._poll(0.1)
        return time.perf_counter() - started

    def submit(self, attachment: int, direction: Direction, offsets: Sequence[int], blocks: Sequence[int]) -> int:
        """Queue a copy; its ticket."""
        return self._mover.submit(CopyJob(attachment, direction, 0, tuple(offsets), tuple(blocks)))

    def done(self) -> Done | None:
        """A copy that ended, if there is one; looks at the mover without waiting."""
        self._poll(0.0)
        for event in self._events:
            if isinstance(event, Done):
                self._events.remove(event)
                return event
        return None

    def wait(self, tickets: Sequence[int]) -> None:
        """Wait until these copies are done. Raises ``RuntimeError`` when one failed."""
        left = set(tickets)
        deadline = time.monotonic() + WAIT_SECONDS
        while left:
            if time.monotonic() > deadline:
                raise RuntimeError(f"copies take longer than {WAIT_SECONDS} s")
            self._poll(0.5)
            for event in [event for event in self._events if isinstance(event, Done) and event.ticket in left]:
                self._events.remove(event)
                left.discard(event.ticket)
                if event.outcome is not Outcome.OK:
                    raise RuntimeError(event.problem)
