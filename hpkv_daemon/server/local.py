"""The socket of this node: a file, guarded by its permissions; the kernel tells who sends."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from pathlib import Path

import zmq

from hpkv_client.errors import ConfigError
from hpkv_client.transport import endpoint
from hpkv_daemon.server.router import Router
from hpkv_daemon.service.sessions import Peer


class LocalRouter(Router):
    """Owns the socket file at ``socket_path``, of this mode and group, and removes it in the end.

    With a ``passed`` listener (a descriptor, which it owns) the file, mode and group are the service manager's.
    """

    def __init__(
        self,
        socket_path: Path,
        mode: int,
        group: str | None,
        loop: asyncio.AbstractEventLoop,
        passed: int | None = None,
    ) -> None:
        super().__init__(loop)
        self._path = socket_path
        self._passed = passed is not None
        if passed is not None:
            self._socket.setsockopt(zmq.USE_FD, passed)
            self._socket.bind(endpoint(socket_path))
        else:
            self._listen(mode, group)

    def _listen(self, mode: int, group: str | None) -> None:
        # A umask that only narrows: nobody connects in the moment before chmod.
        before = os.umask(0o777 & ~mode)
        try:
            self._socket.bind(endpoint(self._path))
            if group is not None:
                shutil.chown(self._path, group=group)
            os.chmod(self._path, mode)
        except (zmq.ZMQError, OSError) as problem:
            self._context.destroy(0)
            raise ConfigError(
                f"cannot listen on {self._path}: {problem}", "set HPKV_SOCKET to a writable place"
            ) from None
        finally:
            os.umask(before)

    def _parse(self, identity: bytes, address: str) -> Peer:
        # The kernel's word (SO_PEERCRED) as ZeroMQ writes it.
        _, uid, _, pid = address.rsplit(":", 3)
        return Peer(identity, int(uid), int(pid))

    def close(self) -> None:
        """Stop listening, give pending replies a moment, remove the socket file if it is ours."""
        super().close()
        if not self._passed and self._path.exists() and stat.S_ISSOCK(self._path.lstat().st_mode):
            self._path.unlink()
