"""What a service manager hears, on a real socket of datagrams."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpkv_daemon.notify import Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "notify"))
        bound.setblocking(False)
        yield bound


def heard(manager: socket.socket) -> list[str]:
    """All messages so far."""
    messages = []
    while True:
        try:
            messages.append(manager.recv(4096).decode())
        except BlockingIOError:
            return messages


class Time:
    """A clock that stands still unless told otherwise."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_signs_of_life_come_three_times_as_often_as_they_must(manager: socket.socket) -> None:
    environ = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}
    clock = Time()
    notifier = Notifier.from_environment(environ, clock)
    assert environ == {}
    for _ in range(8):
        notifier.tick()
        clock.now += 0.25
    assert heard(manager) == ["WATCHDOG=1"] * 2
    notifier.close()


@pytest.mark.parametrize("environ", [{"WATCHDOG_PID": "1", "WATCHDOG_USEC": "1000"}, {"WATCHDOG_USEC": "x"}, {}])
def test_a_watchdog_of_another_process_gets_no_signs(manager: socket.socket, environ: dict[str, str]) -> None:
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": manager.getsockname(), **environ}, Time())
    notifier.tick()
    notifier.ready("serving")
    assert heard(manager) == ["READY=1\nSTATUS=serving"]
    notifier.close()


def test_that_it_is_ready_is_said_until_it_is_heard(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    notifier = Notifier(str(path), 0.0, Time())
    notifier.ready("serving")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.setblocking(False)
        notifier.tick()
        notifier.tick()
        assert heard(manager) == ["READY=1\nSTATUS=serving"]
        notifier.stopping("over")
        assert heard(manager) == ["STOPPING=1\nSTATUS=over"]
    notifier.close()


def test_a_full_queue_blocks_nobody(manager: socket.socket) -> None:
    notifier = Notifier(manager.getsockname(), 0.0, Time())
    for _ in range(10_000):
        notifier.progress("allocating", 1.0)
    assert heard(manager)[0] == "STATUS=allocating\nEXTEND_TIMEOUT_USEC=1000000"
    notifier.close()


def test_abstract_addresses_are_understood() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0hpkv-test-{os.getpid()}")
        notifier = Notifier(f"@hpkv-test-{os.getpid()}", 0.0, Time())
        notifier.stopping("over")
        manager.settimeout(5)
        assert manager.recv(100) == b"STOPPING=1\nSTATUS=over"
        notifier.close()


def test_without_a_service_manager_nothing_happens() -> None:
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": "vsock:2:1"}, Time())
    notifier.ready("serving")
    notifier.tick()
    notifier.close()
