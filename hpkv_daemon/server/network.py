"""The port for other nodes: encrypted and authenticated by CURVE, open to holders of the cluster's key only."""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from hpkv_client.address import ClusterKey
from hpkv_client.errors import ConfigError
from hpkv_daemon.server.router import Router
from hpkv_daemon.service.sessions import REMOTE_UID, Peer

_HEARTBEAT_MS = 5000
"""A connection whose other end vanished is closed within two of these."""


class OnlyTheKey:
    """What the authenticator asks about each client's public key."""

    def __init__(self, key: ClusterKey) -> None:
        self._public = key.public

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002
        return key == self._public


class NetworkRouter(Router):
    """Listens on ``place`` (``HOST:PORT``). Its peers have no process here: they are known by their address."""

    def __init__(self, place: str, key: ClusterKey, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._authenticator = AsyncioAuthenticator(zmq.asyncio.Context(self._context))
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", OnlyTheKey(key))
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        self._socket.setsockopt(zmq.IPV6, int(place.startswith("[")))
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_MS)
        try:
            self._socket.bind(f"tcp://{place}")
        except zmq.ZMQError as problem:
            self._authenticator.stop()
            self._context.destroy(0)
            raise ConfigError(
                f"cannot listen on {place}: {problem}", "set HPKV_LISTEN to a free port of this machine"
            ) from None

    def _parse(self, identity: bytes, address: str) -> Peer:
        if not address:
            raise ValueError("a connection without address")
        return Peer(identity, REMOTE_UID, 0, address)

    def close(self) -> None:
        """Stop listening, give pending replies a moment."""
        self._authenticator.stop()
        super().close()
