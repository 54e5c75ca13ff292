"""Two nodes on one machine: network namespaces on a bridge where root may make them, else two loopback addresses."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

_NETWORK = "198.18.77"
"""From the range for tests of network devices (RFC 2544)."""


@dataclass(frozen=True)
class Node:
    """``prefix`` starts a command there."""

    number: int
    address: str
    interface: str
    prefix: tuple[str, ...] = ()


def free_port() -> int:
    """A port that nobody uses on any address of this machine."""
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        port = probe.getsockname()[1]
    assert isinstance(port, int)
    return port


@contextmanager
def two_nodes() -> Iterator[list[Node]]:
    """Nodes that reach each other and that this process reaches, by their addresses."""
    with ExitStack() as stack:
        try:
            nodes = _namespaces(stack)
        except (subprocess.CalledProcessError, FileNotFoundError, PermissionError):
            stack.close()
            nodes = [Node(number, f"127.0.0.{number + 1}", "lo") for number in range(2)]
        yield nodes


def _namespaces(stack: ExitStack) -> list[Node]:
    tag = os.getpid() % 100_000
    bridge = f"hpkvb{tag}"
    _ip("link", "add", bridge, "type", "bridge")
    stack.callback(_ip, "link", "del", bridge)
    _ip("addr", "add", f"{_NETWORK}.254/24", "dev", bridge)
    _ip("link", "set", bridge, "up")
    nodes = []
    for number in range(2):
        name, near = f"hpkv-{tag}-{number}", f"hpkv{tag}v{number}"
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "del", name)
        _ip("link", "add", near, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", near, "master", bridge, "up")
        address = f"{_NETWORK}.{number + 1}"
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        nodes.append(Node(number, address, "eth0", ("nsenter", f"--net=/run/netns/{name}")))
    # A kernel may let namespaces be made and nothing pass between them.
    subprocess.run([*nodes[0].prefix, "true"], check=True, capture_output=True)
    with socket.create_server((f"{_NETWORK}.254", 0)) as server:
        probe = f"import socket; socket.create_connection(('{_NETWORK}.254', {server.getsockname()[1]}), 5)"
        for node in nodes:
            subprocess.run([*node.prefix, "python3", "-c", probe], check=True, capture_output=True)
    return nodes


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def outer_address(nodes: list[Node]) -> str:
    """An address of this machine that the nodes reach: that of the bridge, if there is one."""
    return f"{_NETWORK}.254" if nodes[0].prefix else "127.0.0.1"
