"""The one tree of errors. Every error says what happened and what to do next."""

from __future__ import annotations

from typing import ClassVar


class HpkvError(Exception):
    """Base of all HPKV errors.

    ``code`` travels on the wire, ``exit_code`` is what ``hpkvd`` exits with, ``hint`` says what to do next.
    """

    code: ClassVar[str] = "failed"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class UsageError(HpkvError):
    """The caller asked for something that does not exist or makes no sense."""

    code = "usage"
    exit_code = 2


class NotRunning(HpkvError):
    """No daemon serves the socket."""

    code = "not_running"
    exit_code = 3


class Unreachable(HpkvError):
    """A daemon should be there but does not answer in time."""

    code = "unreachable"
    exit_code = 69


class Busy(HpkvError):
    """The resource is held by someone else or full of pinned blocks."""

    code = "busy"
    exit_code = 75


class NotPermitted(HpkvError):
    """The operating system or the daemon denies the access."""

    code = "permission"
    exit_code = 77


class ConfigError(HpkvError):
    """A setting is unknown, malformed or impossible on this machine."""

    code = "config"
    exit_code = 78


class ProtocolError(HpkvError):
    """A frame does not follow the protocol."""

    code = "protocol"


class VersionMismatch(ProtocolError):
    """The peer speaks another major version of the protocol."""

    code = "version"


class UnknownSession(HpkvError):
    """The daemon does not know the session: it restarted or dropped the peer. Say hello again."""

    code = "unknown_session"


class NotRegistered(HpkvError):
    """A verb that moves blocks came before the ranks of the engine were registered."""

    code = "not_registered"


class LayoutRefused(HpkvError):
    """The KV layout cannot be proven to map onto a canonical block; nothing is cached for it."""

    code = "layout"


class NoSuchDevice(LayoutRefused):
    """The handle names a device that this node's daemon has no mover for."""

    code = "device"


class LeaseLost(HpkvError):
    """The lease is unknown, expired or belongs to another engine."""

    code = "lease"


class CopyFailed(HpkvError):
    """A copy between an engine's memory and the pool did not happen in full."""

    code = "copy"


def _tree(root: type[HpkvError]) -> dict[str, type[HpkvError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


BY_CODE = _tree(HpkvError)


def from_code(code: str, message: str, hint: str = "") -> HpkvError:
    """The error that a reply's ``code`` names; an unknown code (a newer daemon) becomes the base class."""
    return BY_CODE.get(code, HpkvError)(message, hint)
