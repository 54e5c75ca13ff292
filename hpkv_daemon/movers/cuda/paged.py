"""Memory of ranks that comes as descriptors: taken from a socket piece by piece, mapped, and shared by attachments."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from hpkv_client.cuda import CudaError, Driver
from hpkv_client.cuda_pages import MappedPieces
from hpkv_client.descriptors import NOT_WANTED, Parcel, answer, receive
from hpkv_client.errors import HpkvError, LayoutRefused, ProtocolError
from hpkv_client.peer import peer_of

log = logging.getLogger(__name__)

MemoryName = tuple[int, str]
"""The process whose memory it is, by the kernel's word, and what it calls it."""

_MOST_CHANNELS = 256


@dataclass(slots=True, eq=False)
class _Delivery:
    channel: socket.socket
    pid: int
    name: MemoryName | None = None
    memory: MappedPieces | None = None


class PagedMemories:
    """All of a mover's, each mapped once, however many attachments have it. Owns the listener.

    Never waits. Raises ``CudaError`` where only the process' end gives back what is mapped.
    """

    def __init__(self, driver: Driver, device: int, listener: socket.socket | None) -> None:
        self._driver = driver
        self._device = device
        self._listener = listener
        if listener is not None:
            listener.setblocking(False)
        self._users: dict[MemoryName, set[int]] = {}
        """Attachments that have it, or wait for it."""
        self._memories: dict[MemoryName, MappedPieces] = {}
        self._deliveries: list[_Delivery] = []
        self._waiting: dict[int, set[MemoryName]] = {}
        self._refused: dict[int, str] = {}

    def want(self, attachment: int, names: set[MemoryName]) -> None:
        """An attachment needs these; ``ended`` tells when they are here, or that they do not come."""
        self._waiting[attachment] = names
        for name in names:
            self._users.setdefault(name, set()).add(attachment)
        if self._listener is None:
            self._refused[attachment] = "the daemon cannot listen for descriptors, see its log"

    def ended(self) -> list[tuple[int, str]]:
        """Attachments whose wait is over since the last call, and the problem, or an empty text."""
        over = {number: "" for number, names in self._waiting.items() if names <= self._memories.keys()}
        over |= {number: problem for number, problem in self._refused.items() if number in self._waiting}
        self._refused.clear()
        for number in over:
            del self._waiting[number]
        return list(over.items())

    def memory(self, name: MemoryName) -> MappedPieces:
        """One that is here."""
        return self._memories[name]

    def release(self, attachment: int) -> None:
        """The attachment needs none any more; what nobody needs is unmapped. No copy of it may run."""
        self._waiting.pop(attachment, None)
        for name, users in list(self._users.items()):
            users.discard(attachment)
            if users:
                continue
            del self._users[name]
            if name in self._memories:
                self._memories.pop(name).close()
            for delivery in [one for one in self._deliveries if one.name == name]:
                self._end(delivery)

    def sources(self) -> list[socket.socket]:
        """What is worth looking at."""
        channels = [delivery.channel for delivery in self._deliveries]
        return [self._listener, *channels] if self._listener is not None else channels

    def serve(self) -> None:
        """Take what has come, a parcel from each rank."""
        if self._listener is not None:
            for channel, pid in _callers(self._listener):
                if len(self._deliveries) < _MOST_CHANNELS and any(owner == pid for owner, _ in self._users):
                    channel.setblocking(False)
                    self._deliveries.append(_Delivery(channel, pid))
                else:
                    channel.close()
        for delivery in list(self._deliveries):
            try:
                parcel = receive(delivery.channel)
            except BlockingIOError:
                continue
            except ProtocolError as nonsense:
                self._end(delivery, str(nonsense))
                continue
            if parcel is None:
                self._end(delivery)
                continue
            try:
                self._take(delivery, parcel)
            finally:
                parcel.close()

    def _take(self, delivery: _Delivery, parcel: Parcel) -> None:
        name = (delivery.pid, parcel.name)
        if delivery.name is None:
            if name not in self._users or name in self._memories or any(one.name == name for one in self._deliveries):
                self._end(delivery, NOT_WANTED)
                return
            delivery.name = name
        try:
            self._map(delivery, parcel)
        except CudaError as problem:
            if problem.lost:
                raise
            self._refuse(delivery, str(problem))
        except HpkvError as problem:
            self._refuse(delivery, str(problem))
        else:
            answer(delivery.channel, "")

    def _map(self, delivery: _Delivery, parcel: Parcel) -> None:
        if parcel.problem:
            raise LayoutRefused(f"the engine cannot share its memory: {parcel.problem}")
        if delivery.memory is None:
            delivery.memory = MappedPieces(self._driver, self._device, parcel.total)
        memory = delivery.memory
        if (delivery.pid, parcel.name) != delivery.name or parcel.total != memory.size:
            raise LayoutRefused("two memories over one connection")
        for descriptor, size in zip(parcel.descriptors, parcel.sizes, strict=True):
            memory.add(descriptor, size)
        if memory.filled == memory.size:
            memory.open()
            delivery.memory = None
            self._memories[delivery.name] = memory

    def _refuse(self, delivery: _Delivery, problem: str) -> None:
        assert delivery.name is not None
        for number in self._users.get(delivery.name, ()):
            self._refused[number] = problem
        self._end(delivery, problem)

    def _end(self, delivery: _Delivery, problem: str = "") -> None:
        """Close the connection; what it brought and is not complete is unmapped."""
        self._deliveries.remove(delivery)
        if problem:
            answer(delivery.channel, problem)
        delivery.channel.close()
        if delivery.memory is not None:
            delivery.memory.close()


def _callers(listener: socket.socket) -> Iterator[tuple[socket.socket, int]]:
    """Connections that wait, each with the process that made it."""
    while True:
        try:
            channel, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        with contextlib.ExitStack() as stack:
            stack.callback(channel.close)
            pid = peer_of(channel).pid
            stack.pop_all()
        yield channel, pid
