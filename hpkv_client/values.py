"""How the text of a setting becomes a value: sizes, paths, durations, names.

Each parser raises ``ConfigError`` that says what is wrong with the value; the caller adds where it came from.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from hpkv_client.errors import ConfigError

MAX_SIZE = 1 << 50
"""Largest size in bytes that is taken at its word; more is a typing error."""

MAX_SOCKET_PATH = 107
"""Longest path of a Unix socket (sun_path without its terminating zero)."""

SNAPSHOT_SUFFIX = ".snapshot"
"""Ends the name of the socket that gives snapshots, beside one with events."""

MAX_SECONDS = 86_400.0

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z%]*)")
_EXPONENTS = {"k": 10, "m": 20, "g": 30, "t": 40}
_SIZE_HINT = "write 8g or 8GiB (2^30 bytes each), 25% of RAM, or plain bytes"
_QUOTA_HINT = "write MODEL=RESERVED:MAXIMUM, as in llama=20%:50%, *=:4g"
_INSTANCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def ram_bytes() -> int:
    """Memory this process may use at most: the machine's, or less if a control group says so."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _memory_limit_files():
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            limit = min(limit, int(text))
    return limit


def _memory_limit_files() -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            root, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        place = root / group.lstrip("/")
        found += [parent / name for parent in (place, *place.parents) if parent.is_relative_to(root)]
    return found


def parse_size(value: object) -> int:
    """Bytes of ``8g`` = ``8G`` = ``8GiB`` = ``8 GiB``, ``25%`` (of RAM) or plain bytes, as text or integer.

    Decimal units (``8GB``) are refused, because half of their readers expect 2^30 and half 10^9.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"a size must be text or an integer, not {type(value).__name__}", _SIZE_HINT)
    match = _SIZE.fullmatch(str(value).strip())
    if match is None:
        raise ConfigError("not a size", _SIZE_HINT)
    number, unit = Fraction(match[1]), match[2]
    if unit == "%":
        if number > 100:
            raise ConfigError("more than all of RAM", "give at most 100%")
        size = math.floor(number * ram_bytes() / 100)
    else:
        size = math.floor(number * _factor(match[1], unit))
    if size <= 0:
        raise ConfigError("a size must be more than 0 bytes", _SIZE_HINT)
    if size > MAX_SIZE:
        raise ConfigError(f"more than {MAX_SIZE} bytes, which no machine has", _SIZE_HINT)
    return size


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes, or a part of the pool in percent. Prints as it is written."""

    amount: Fraction
    percent: bool

    def __str__(self) -> str:
        return f"{float(self.amount):g}%" if self.percent else str(int(self.amount))

    def of(self, pool_bytes: int) -> int:
        """In bytes."""
        return math.floor(self.amount * pool_bytes / 100) if self.percent else int(self.amount)


NOTHING = Share(Fraction(0), percent=False)


@dataclass(frozen=True, slots=True)
class Quota:
    """What of the pool a model's blocks keep for sure, and how much they may fill (None: all of it)."""

    pattern: str
    reserved: Share
    maximum: Share | None

    def __str__(self) -> str:
        reserved = str(self.reserved) if self.reserved.amount else ""
        return f"{self.pattern}={reserved}:{'' if self.maximum is None else self.maximum}"


def parse_quotas(value: object) -> tuple[Quota, ...]:
    """Quotas of ``MODEL=RESERVED:MAXIMUM, ...``; either side may be empty, and a name may hold ``*`` and ``?``.

    Shares are sizes as in ``parse_size``, except that ``%`` is of the pool. The first name that fits a model counts.
    """
    if not isinstance(value, str):
        raise ConfigError(f"quotas must be text, not {type(value).__name__}", _QUOTA_HINT)
    quotas = tuple(_quota(text.strip()) for text in value.split(","))
    if sum(quota.reserved.amount for quota in quotas if quota.reserved.percent) > 100:
        raise ConfigError("more than 100% of the pool is reserved", _QUOTA_HINT)
    return quotas


def _quota(text: str) -> Quota:
    # A model's name may hold anything but a comma; what is behind its last '=' is ours.
    pattern, equals, shares = text.rpartition("=")
    reserved, colon, maximum = shares.partition(":")
    if not (pattern and equals and colon and (reserved or maximum)):
        raise ConfigError(f"{text!r} is not a quota", _QUOTA_HINT)
    if reserved and any(letter in pattern for letter in "*?["):
        raise ConfigError(f"{pattern!r} stands for many models, so nothing can be reserved for it", _QUOTA_HINT)
    quota = Quota(pattern, _share(reserved) if reserved else NOTHING, _share(maximum) if maximum else None)
    most = quota.maximum
    if most is not None and most.percent == quota.reserved.percent and most.amount < quota.reserved.amount:
        raise ConfigError(f"{text!r} reserves more than it allows", _QUOTA_HINT)
    return quota


def _share(text: str) -> Share:
    match = _SIZE.fullmatch(text)
    if match is not None and match[2] == "%":
        number = Fraction(match[1])
        if number > 100:
            raise ConfigError(f"{text} is more than all of the pool", _QUOTA_HINT)
        return Share(number, percent=True)
    return Share(Fraction(parse_size(text)), percent=False)


def _factor(number: str, unit: str) -> int:
    if unit == "":
        if "." in number:
            raise ConfigError("a fraction of a byte", _SIZE_HINT)
        return 1
    letter = unit[0].lower()
    if letter not in _EXPONENTS or unit[1:].lower() not in ("", "b", "ib"):
        raise ConfigError(f"unknown unit {unit!r}", _SIZE_HINT)
    if len(unit) == 2:
        exponent = _EXPONENTS[letter]
        raise ConfigError(
            f"unit {unit!r} means 10^{exponent // 10 * 3} bytes to some and 2^{exponent} to others",
            f"write {number}{letter} for {number} x 2^{exponent} bytes",
        )
    return 1 << _EXPONENTS[letter]


def format_size(size: int) -> str:
    """A size for people, with its exact bytes: ``8 GiB (8589934592 bytes)``."""
    for letter, exponent in reversed(_EXPONENTS.items()):
        if size >= 1 << exponent:
            rounded = f"{size / (1 << exponent):.2f}".rstrip("0").rstrip(".")
            return f"{rounded} {letter.upper()}iB ({size} bytes)"
    return f"{size} bytes"


def parse_text(value: object) -> str:
    """Text of at most 4096 characters without control characters."""
    if not isinstance(value, str):
        raise ConfigError(f"must be text, not {type(value).__name__}")
    if len(value) > 4096 or any(ord(character) < 32 for character in value):
        raise ConfigError("text with control characters, or longer than 4096 characters")
    return value


def parse_name(value: object) -> str:
    """Text that is not empty."""
    text = parse_text(value).strip()
    if not text:
        raise ConfigError("must not be empty")
    return text


def parse_path(value: object) -> Path:
    """An absolute path. ``~`` and ``file:///`` are understood; all else that is relative is refused."""
    text = parse_name(value)
    if text.startswith("file:///"):
        from urllib.parse import unquote

        text = unquote(text.removeprefix("file://"))
        parse_text(text)
    elif re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", text):
        raise ConfigError("a URL that is not file:///", "write an absolute path")
    if re.search(r"\$[A-Za-z_{]", text):
        raise ConfigError("variables are not expanded here", "write the path out, or use ~")
    if text.startswith("~"):
        text = os.path.expanduser(text)
        if text.startswith("~"):
            raise ConfigError("unknown home directory", "write the path out")
    if not text.startswith("/"):
        raise ConfigError("a relative path", f"write {os.path.abspath(text)}")
    return Path("/" + text.lstrip("/"))


_REMOTE_HINT = "write s3:// or gs://BUCKET/FOLDER, az://CONTAINER/FOLDER, file:///DIRECTORY or mooncake://HOST:PORT"
_REMOTE_SCHEMES = ("s3", "gs", "az", "file", "mooncake")
_HIDDEN = re.compile(r"(?<=://)[^/\s]*@|[?#]\S*")


def hide_secrets(text: str) -> str:
    """The text without what a URL in it may hide: what stands before the host's ``@``, and behind ``?``."""
    return _HIDDEN.sub("", text) if "://" in text else text


def parse_remote(value: object) -> str:
    """The URL of a store for the remote tier. Nothing secret can be in it: credentials and queries are refused."""
    url = parse_name(value)
    scheme, colon, rest = url.partition("://")
    if not colon or scheme not in _REMOTE_SCHEMES:
        raise ConfigError("not the URL of a store", _REMOTE_HINT)
    if hide_secrets(url) != url:
        raise ConfigError(
            "a URL with credentials or options", "leave them out: a store's own variables and files have them"
        )
    place, _, folder = rest.partition("/")
    if scheme == "file":
        if place or not folder:
            raise ConfigError("not a directory", "write file:/// and an absolute path")
    elif scheme == "mooncake":
        if folder or not re.fullmatch(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}", place):
            raise ConfigError("not a master's host and port", "write mooncake://HOST:PORT")
    elif not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", place):
        raise ConfigError(f"{place!r} is not the name of a bucket", _REMOTE_HINT)
    if any(part in ("", ".", "..") for part in folder.rstrip("/").split("/")) and folder.rstrip("/"):
        raise ConfigError("a folder with empty parts, or . or ..", _REMOTE_HINT)
    return url.rstrip("/")


def parse_socket(value: object) -> Path:
    """An absolute path that fits into a socket address."""
    path = parse_path(value)
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        raise ConfigError(
            f"the socket path has {length} bytes, the kernel allows {MAX_SOCKET_PATH}",
            "set HPKV_SOCKET to a shorter path",
        )
    return path


def parse_listen(value: object) -> str:
    """``HOST:PORT`` to listen on: an IP address of this machine (IPv6 in brackets) or ``*`` for all of them."""
    text = parse_name(value).removeprefix("tcp://")
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise ConfigError("not HOST:PORT", "write an IP address and a port, as in 10.0.0.1:7630")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        if host not in ("*", "0.0.0.0", "[::]"):
            address = ipaddress.ip_address(host[1:-1] if bracketed else host)
            if bracketed != (address.version == 6):
                raise ValueError
    except ValueError:
        raise ConfigError(
            f"{host!r} is no IP address", "write an address of this machine, an IPv6 one in brackets, or *"
        ) from None
    return f"{host}:{int(port)}"


def parse_metrics(value: object) -> str:
    """``HOST:PORT`` to serve metrics on, with port 0 for any that is free, or ``off``, which is the empty text."""
    text = parse_name(value)
    if text.lower() in ("off", "none", "0"):
        return ""
    host, colon, port = text.rpartition(":")
    if colon and port == "0":
        return f"{parse_listen(f'{host}:1').rpartition(':')[0]}:0"
    try:
        return parse_listen(text)
    except ConfigError as problem:
        raise ConfigError(problem.message, "write off, or an address and a port, as in 127.0.0.1:7631") from None


def parse_events(value: object) -> str:
    """``tcp://HOST:PORT`` or ``ipc:///PATH`` to publish events on; ``off`` is the empty text."""
    text = parse_name(value)
    if text.lower() in ("off", "none", "0"):
        return ""
    if text.startswith(("ipc://", "/")):
        # There is a second socket beside it, with a longer name.
        path = parse_path(text.removeprefix("ipc://"))
        if len(os.fsencode(path)) > MAX_SOCKET_PATH - len(SNAPSHOT_SUFFIX):
            raise ConfigError(f"the path of the socket {path} is too long", "choose a shorter one")
        return f"ipc://{path}"
    try:
        place = parse_listen(text)
        parse_listen(f"{place.rpartition(':')[0]}:{int(place.rpartition(':')[2]) + 1}")
    except ConfigError as problem:
        hint = "write off, tcp://HOST:PORT as in tcp://127.0.0.1:5557, or ipc:///PATH"
        raise ConfigError(problem.message, hint) from None
    return f"tcp://{place}"


def is_local(endpoint: str) -> bool:
    """Whether what ``parse_events`` gave can be reached from this machine only."""
    if not endpoint.startswith("tcp://"):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return host != "*" and ipaddress.ip_address(host).is_loopback


def parse_instance(value: object) -> str:
    """A name that may be part of a file name; empty is the unnamed instance."""
    text = parse_text(value)
    if text and not _INSTANCE.fullmatch(text):
        raise ConfigError("not an instance name", "use up to 64 letters, digits, dots, dashes; a letter or digit first")
    return text


def parse_mode(value: object) -> int:
    """Permission bits from octal text such as ``0660``; the owner's read and write bits must be in."""
    if not isinstance(value, str):
        raise ConfigError("permissions must be text", 'write them in quotes, as in "0660"')
    if not re.fullmatch(r"(0o?)?[0-7]{3}", value.strip()):
        raise ConfigError("not permissions", "write three octal digits, as in 0660")
    mode = int(value.strip().removeprefix("0o"), 8)
    if mode & 0o600 != 0o600:
        raise ConfigError("the owner could not use the socket", "use 0600, 0660 or 0666")
    return mode


def parse_seconds(unit: float) -> Callable[[object], float]:
    """A parser of positive durations of at most a day; ``unit`` is what one counts, in seconds."""

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ConfigError(f"must be a number, not {type(value).__name__}")
        try:
            number = float(value)
        except (ValueError, OverflowError):
            raise ConfigError("not a number", "write a plain number, without a unit") from None
        if not 0 < number * unit <= MAX_SECONDS:
            raise ConfigError(f"must be more than 0 and at most {MAX_SECONDS / unit:g}")
        return number

    return parse


def parse_choice(*choices: str) -> Callable[[object], str]:
    """A parser of one word out of ``choices``, in any case."""

    def parse(value: object) -> str:
        text = parse_text(value).strip().lower()
        if text not in choices:
            raise ConfigError(f"must be one of {', '.join(choices)}")
        return text

    return parse
