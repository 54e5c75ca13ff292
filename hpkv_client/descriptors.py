"""Descriptors of a rank's memory on their way to a mover, over a socket beside the daemon's.

The mover listens; a rank whose memory has no handle that could travel as bytes connects when its heartbeat is told to.
Sequenced packets: the rank sends ``[name, total bytes, sizes, problem]`` with one descriptor for each size, at most
``MOST_DESCRIPTORS`` at once, and waits for ``[problem]`` before it opens more. A problem, from either side, ends it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgpack

from hpkv_client.errors import LayoutRefused, ProtocolError, Unreachable

MOST_DESCRIPTORS = 64
MOST_BYTES = 1 << 50
ANSWER_SECONDS = 5.0
"""For one packet: the mover maps what is in it, and may be in the middle of something else."""
NOT_WANTED = "nobody waits for it"
"""The problem of memory that is there already, or that no rank has registered yet."""
_PACKET_BYTES = 1 << 16
_TEXT = 1024


class Parcel(NamedTuple):
    """What a rank sends at once. The descriptors are the receiver's."""

    name: str
    total: int
    sizes: tuple[int, ...]
    problem: str
    descriptors: tuple[int, ...]

    def close(self) -> None:
        """Close its descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """The path in a form that fits into a socket's address, however long it is."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def listen(path: Path, like: Path) -> socket.socket:
    """Listen at ``path``, for those who may use the socket ``like``. Takes the place of what is there. ``OSError``."""
    path.unlink(missing_ok=True)
    mode = like.stat()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # A umask that only narrows: nobody connects in the moment before chmod.
        before = os.umask(0o177)
        try:
            with _short(path) as place:
                listener.bind(place)
        finally:
            os.umask(before)
        if path.stat().st_gid != mode.st_gid:
            os.chown(path, -1, mode.st_gid)
        path.chmod(mode.st_mode & 0o777)
        listener.listen(MOST_DESCRIPTORS)
    except OSError:
        listener.close()
        raise
    return listener


def hand_over(path: Path, name: str, sizes: Sequence[int], open_one: Callable[[int], int]) -> bool:
    """Send the pieces of the memory ``name`` to the mover that listens; ``open_one(i)`` opens the i-th.

    False: it does not wait for this memory. What ``open_one`` raises is told to the mover, and raised. Raises
    ``Unreachable``, and ``LayoutRefused`` when the mover does not take them.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.settimeout(ANSWER_SECONDS)
        try:
            with _short(path) as place:
                channel.connect(place)
            for first in range(0, len(sizes), MOST_DESCRIPTORS):
                if not _send(channel, name, sum(sizes), sizes[first : first + MOST_DESCRIPTORS], first, open_one):
                    return False
        except OSError as problem:
            raise Unreachable(f"no mover takes descriptors at {path}: {problem}", "it is asked again") from None
    return True


def _send(
    channel: socket.socket, name: str, total: int, sizes: Sequence[int], first: int, open_one: Callable[[int], int]
) -> bool:
    descriptors: list[int] = []
    try:
        try:
            for index in range(first, first + len(sizes)):
                descriptors.append(open_one(index))
        except Exception as problem:
            channel.send(msgpack.packb([name, total, [], str(problem)[:_TEXT]]))
            raise
        socket.send_fds(channel, [msgpack.packb([name, total, list(sizes), ""])], descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    packet = channel.recv(_PACKET_BYTES)
    if not packet:
        raise ConnectionResetError("the mover closed the connection")
    told = msgpack.unpackb(packet)
    if told not in ([""], [NOT_WANTED]):
        raise LayoutRefused(f"the mover does not take the memory: {told}")
    return bool(told == [""])


def answer(channel: socket.socket, problem: str) -> None:
    """The mover's word on a parcel; with a problem it is the last one. A rank that is gone does not hear it."""
    with contextlib.suppress(OSError):
        channel.send(msgpack.packb([problem[:_TEXT]]))


def receive(channel: socket.socket) -> Parcel | None:
    """The next parcel, None when the rank is gone. Raises ``BlockingIOError``, and ``ProtocolError`` for nonsense."""
    try:
        packet, descriptors, flags, _ = socket.recv_fds(
            channel, _PACKET_BYTES, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError:
        return None
    parcel = Parcel("", 0, (), "", tuple(descriptors))
    if not packet:
        parcel.close()
        return None
    try:
        name, total, sizes, words = msgpack.unpackb(packet)
        parcel = Parcel(name, total, tuple(sizes), words, parcel.descriptors)
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or not _makes_sense(parcel):
            raise ValueError("its parts contradict each other")
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as problem:
        parcel.close()
        raise ProtocolError(f"a parcel of descriptors that makes no sense: {problem}") from None
    return parcel


def _makes_sense(parcel: Parcel) -> bool:
    numbers = (parcel.total, *parcel.sizes)
    return (
        isinstance(parcel.name, str)
        and isinstance(parcel.problem, str)
        and all(type(number) is int and 0 < number <= MOST_BYTES for number in numbers)
        and len(parcel.sizes) == len(parcel.descriptors)
        and bool(parcel.sizes) != bool(parcel.problem)
    )
