"""The protocol, in full: frames, verbs, fields, limits. ``docs/protocol.md`` is its text.

A request is one ZeroMQ message with one frame, a msgpack array ``[verb, request id, session, body]``; its reply is
``[request id, status, body]`` with status 0 or 1 (body of an error: ``code``, ``message``, ``hint``). Bodies are
maps. Unknown fields are ignored, so that a newer minor version can add some; everything else is checked here,
before any of it reaches the daemon's logic. msgpack only: nothing on the wire is ever executed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from hpkv_client.errors import HpkvError, ProtocolError, from_code
from hpkv_client.types import KEY_BYTES, Layer, MemoryHandle, RankShard, Run

PROTOCOL = (1, 2)
"""Major, minor. Peers of one major understand each other."""

MAX_FRAME = 4 << 20
"""Longest message in bytes; the socket cuts off a peer that sends more."""
MAX_PARTS = 1 << 17
"""Most lists and maps in one message: a few megabytes of empty ones would stall the daemon for seconds."""
MAX_ECHO = 1 << 16
MAX_COUNTERS = 64
MAX_KEYS = 1 << 16
"""Most blocks in one request."""
MAX_RANKS = 4096
MAX_LAYERS = 4096
MAX_REGIONS = 4096
MAX_RUNS = 1 << 16
MAX_TEXT = 1024
MAX_INT = (1 << 63) - 1

Body = dict[str, Any]


class Request(NamedTuple):
    """A checked request. ``session`` is 0 before hello."""

    verb: str
    id: int
    session: int
    body: Body


class Reply(NamedTuple):
    """A reply as the client sees it."""

    id: int
    ok: bool
    body: Body

    def result(self) -> Body:
        """The body, or the error it carries, raised."""
        if self.ok:
            return self.body
        code, message, hint = (str(self.body.get(field, "")) for field in ("code", "message", "hint"))
        raise from_code(code, message, hint)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a body: its check (raises ``ValueError``) and whether it may be missing."""

    check: Callable[[Any], Any]
    default: Any = ...


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"must be an integer from {low} to {high}")
        return value

    return check


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise ValueError(f"must be text of at most {MAX_TEXT} characters")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _binary(length: int, exact: bool = False) -> Callable[[Any], bytes]:
    def check(value: Any) -> bytes:
        if not isinstance(value, bytes) or len(value) > length or (exact and len(value) != length):
            raise ValueError(f"must be {'exactly' if exact else 'at most'} {length} bytes")
        return value

    return check


def _records(size: int, most: int) -> Callable[[Any], bytes]:
    def check(value: Any) -> bytes:
        if not isinstance(value, bytes) or len(value) % size or len(value) > size * most:
            raise ValueError(f"must be at most {most} records of {size} bytes")
        return value

    return check


def _counters(value: Any) -> dict[str, int]:
    if not isinstance(value, dict) or len(value) > MAX_COUNTERS:
        raise ValueError(f"must be a map of at most {MAX_COUNTERS} counters")
    return {_text(name): _integer(0, MAX_INT)(count) for name, count in value.items()}


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > MAX_COUNTERS:
        raise ValueError(f"must be a map of at most {MAX_COUNTERS} texts")
    return {_text(name): _text(text) for name, text in value.items()}


def _nullable(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


def _list(most: int, check: Callable[[Any], Any], least: int = 1) -> Callable[[Any], Any]:
    def checked(value: Any) -> list[Any]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise ValueError(f"must be a list of {least} to {most} entries")
        return [check(entry) for entry in value]

    return checked


def _offset(value: Any) -> int:
    return _integer(0, MAX_INT)(value)


def _handle(value: Any) -> MemoryHandle:
    if not isinstance(value, dict):
        raise ValueError("must be a map")
    handle = MemoryHandle(
        kind=_text(value.get("kind")),
        size=_integer(1, 1 << 50)(value.get("size")),
        pid=_integer(0, 1 << 31)(value.get("pid", 0)),
        fd=_integer(-1, 1 << 31)(value.get("fd", -1)),
        name=_text(value.get("name", "")),
        token=_binary(4096)(value.get("token", b"")),
        offset=_offset(value.get("offset", 0)),
        event=_binary(4096)(value.get("event", b"")),
    )
    if handle.kind not in ("memfd", "cuda_ipc", "cuda_fd"):
        raise ValueError("kind must be memfd, cuda_ipc or cuda_fd")
    return handle


def _run(value: Any) -> Run:
    if not isinstance(value, list) or len(value) != 8:
        raise ValueError("a run must be a list of 8 integers")
    run = Run(*(_offset(number) for number in value))
    if not run.fragment or not run.count:
        raise ValueError("a run must move at least one byte")
    return run


def _layer(value: Any) -> Layer:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError("a layer must be [name, canonical bytes, runs]")
    layer = Layer(_text(value[0]), _integer(1, 1 << 40)(value[1]), tuple(_list(MAX_RUNS, _run)(value[2])))
    if any(run.last_canonical_byte() > layer.canonical_bytes for run in layer.runs):
        raise ValueError("a run leaves its layer")
    if sum(run.size for run in layer.runs) > layer.canonical_bytes:
        raise ValueError("the runs of a layer move more bytes than it has")
    return layer


_JOB = Field(_integer(0, MAX_INT))
_KEYS = Field(_records(KEY_BYTES, MAX_KEYS))
_BLOCKS = Field(_records(4, MAX_KEYS))
_DIGEST = Field(_binary(KEY_BYTES, exact=True))

VERBS: Mapping[str, Mapping[str, Field]] = {
    "hello": {
        "major": Field(_integer(0, 1 << 31)),
        "minor": Field(_integer(0, 1 << 31)),
        "name": Field(_text),
        "instance": Field(_text, ""),
        "engine": Field(_text, ""),
        "pid": Field(_integer(0, 1 << 31), 0),
    },
    "bye": {},
    "heartbeat": {"counters": Field(_counters, {})},
    "ping": {"echo": Field(_binary(MAX_ECHO), b"")},
    "register": {
        "rank": Field(_integer(0, MAX_RANKS - 1)),
        "world": Field(_integer(1, MAX_RANKS)),
        "namespace": _DIGEST,
        "model": Field(_text),
        "strategy": Field(_text, ""),
        "fields": Field(_texts, {}),
        "key_namespace": Field(_nullable(_binary(KEY_BYTES, exact=True)), None),
        "group": Field(_integer(0, 1 << 16), 0),
        "place": Field(_text, ""),
        "block_tokens": Field(_integer(0, 1 << 31), 0),
        "archive": Field(_flag, False),
        "device": Field(_text),
        "regions": Field(_list(MAX_REGIONS, _handle)),
        "control": Field(_nullable(_handle), None),
        # None for a rank of a pipeline whose stage holds no layer of this KV-cache group.
        "layers": Field(_list(MAX_LAYERS, _layer, least=0)),
        "blocks": Field(_integer(1, (1 << 32) - 1)),
        "replicas": Field(_integer(1, MAX_RANKS), 1),
        "replica": Field(_integer(0, MAX_RANKS - 1), 0),
    },
    "unregister": {},
    "reset": {},
    "match": {"keys": _KEYS, "request": Field(_text, "")},
    "acquire": {"keys": _KEYS, "request": Field(_text, "")},
    "release": {"lease": _JOB},
    "load": {"job": _JOB, "lease": _JOB, "first": Field(_integer(0, MAX_KEYS)), "blocks": _BLOCKS},
    "store": {
        "job": _JOB,
        "parent": Field(_nullable(_binary(KEY_BYTES, exact=True))),
        "keys": _KEYS,
        "blocks": _BLOCKS,
    },
    "cancel": {"job": _JOB},
    "contains": {"keys": _KEYS},
    "put": {"job": _JOB, "keys": _KEYS, "blocks": _BLOCKS},
    "get": {"job": _JOB, "keys": _KEYS, "blocks": _BLOCKS},
    "info": {},
    "stats": {},
    "leases": {},
    "check": {},
    "explain": {"engine": Field(_text, ""), "request": Field(_text, ""), "last": Field(_integer(1, 256), 20)},
    "blocks": {"namespace": _DIGEST, "after": Field(_integer(0, MAX_INT), 0)},
    "pins": {},
    "pin": {"prefix": Field(_text, ""), "request": Field(_text, "")},
    "unpin": {"prefix": Field(_text, "")},
    "hot": {"last": Field(_integer(1, 256), 20)},
    "events": {"after": Field(_integer(-1, MAX_INT), -1), "most": Field(_integer(1, 1024), 256)},
    "clear": {"namespace": Field(_nullable(_binary(KEY_BYTES, exact=True)), None)},
    "config": {},
    "set": {"name": Field(_text), "value": Field(_text)},
    "reload": {},
    "drain": {"begin": Field(_flag, False)},
    "import": {"path": Field(_text, "")},
    "scrub": {"begin": Field(_flag, False), "bytes_per_second": Field(_integer(1, 1 << 50), 1 << 50)},
}
"""Verb -> its fields. ``acquire``, ``put`` and ``get`` are ``match``, ``store`` and ``load`` for blocks that form no
prefix."""


def _pack(value: Any) -> bytes:
    packed = msgpack.packb(value, use_bin_type=True)
    assert isinstance(packed, bytes)
    return packed


def _unpack(frame: bytes) -> Any:
    # A short frame cannot hold many parts: counting them, the dearer way, is for long ones.
    count = _PartCount() if len(frame) > MAX_PARTS else None
    try:
        return msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            max_array_len=MAX_RUNS,
            max_map_len=256,
            list_hook=count,
            object_hook=count,
        )
    except (ValueError, TypeError, msgpack.exceptions.ExtraData, RecursionError) as problem:
        # msgpack's own exceptions for bad input derive from ValueError, except ExtraData in some versions.
        raise ProtocolError(f"a frame that is not one msgpack value ({type(problem).__name__})") from None


class _PartCount:
    """Lets ``MAX_PARTS`` lists and maps pass."""

    def __init__(self) -> None:
        self._left = MAX_PARTS

    def __call__(self, part: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError("too many parts")
        return part


def encode_request(verb: str, request_id: int, session: int, body: Body) -> bytes:
    """The frame of a request."""
    return _pack([verb, request_id, session, body])


def request_id_of(frame: bytes) -> int | None:
    """The id of a request that may be malformed otherwise, so that its sender can be told; None if unreadable."""
    try:
        value = _unpack(frame)
    except ProtocolError:
        return None
    if isinstance(value, list) and len(value) > 1 and _is_number(value[1]):
        number: int = value[1]
        return number
    return None


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT


def decode_request(frame: bytes) -> Request:
    """Check a frame in full. Raises ``ProtocolError`` that names the field; never anything else."""
    value = _unpack(frame)
    if not isinstance(value, list) or len(value) != 4:
        raise ProtocolError("a request must be [verb, id, session, body]")
    verb, request_id, session, body = value
    if not isinstance(verb, str):
        raise ProtocolError("the verb must be text", f"this daemon speaks {version_text()}")
    if (fields := VERBS.get(verb)) is None:
        raise ProtocolError(f"unknown verb {verb[:64]!r}", f"this daemon speaks {version_text()}")
    if not _is_number(request_id) or not _is_number(session):
        raise ProtocolError(f"{verb}: id and session must be positive integers up to {MAX_INT}")
    if not isinstance(body, dict):
        raise ProtocolError(f"{verb}: the body must be a map")
    checked: Body = {}
    for name, field in fields.items():
        if name in body:
            try:
                checked[name] = field.check(body[name])
            except ValueError as problem:
                raise ProtocolError(f"{verb}: field {name} {problem}") from None
        elif field.default is ...:
            raise ProtocolError(f"{verb}: field {name} is missing")
        else:
            checked[name] = field.default
    return Request(verb, request_id, session, checked)


def encode_reply(request_id: int, body: Body) -> bytes:
    """The frame of a successful reply."""
    return _pack([request_id, 0, body])


def encode_error(request_id: int, error: HpkvError) -> bytes:
    """The frame of a failed reply."""
    return _pack([request_id, 1, {"code": error.code, "message": error.message, "hint": error.hint}])


def decode_reply(frame: bytes) -> Reply:
    """Check a reply's envelope. Raises ``ProtocolError``: the peer is not an hpkvd."""
    value = _unpack(frame)
    if (
        not isinstance(value, list)
        or len(value) != 3
        or type(value[0]) is not int
        or value[1] not in (0, 1)
        or not isinstance(value[2], dict)
    ):
        raise ProtocolError("the peer's reply is not one of hpkvd", "check the socket path")
    return Reply(value[0], value[1] == 0, value[2])


def version_text() -> str:
    """``hpkv/1.0``"""
    return f"hpkv/{PROTOCOL[0]}.{PROTOCOL[1]}"


def pack_blocks(blocks: Sequence[int]) -> bytes:
    """Block ids as one blob of little-endian 32-bit integers."""
    return struct.pack(f"<{len(blocks)}I", *blocks)


def unpack_blocks(blob: bytes) -> tuple[int, ...]:
    """Inverse of ``pack_blocks``."""
    return struct.unpack(f"<{len(blob) // 4}I", blob)


def handle_to_wire(handle: MemoryHandle) -> Body:
    """A memory handle as a map; fields at their default stay out."""
    wire: Body = {"kind": handle.kind, "size": handle.size}
    if handle.kind == "memfd":
        return wire | {"pid": handle.pid, "fd": handle.fd, "name": handle.name}
    if handle.kind == "cuda_fd":
        return wire | {"pid": handle.pid, "name": handle.name, "offset": handle.offset}
    return wire | {"token": handle.token, "offset": handle.offset, "event": handle.event}


def run_to_wire(run: Run) -> list[int]:
    """A run as a list, in the order of its fields."""
    return [
        run.region,
        run.local_offset,
        run.block_stride,
        run.canonical_offset,
        run.fragment,
        run.count,
        run.local_step,
        run.canonical_step,
    ]


def shard_to_wire(shard: RankShard) -> Body:
    """The part of a ``register`` body that describes the shard."""
    return {
        "layers": [
            [layer.name, layer.canonical_bytes, [run_to_wire(run) for run in layer.runs]] for layer in shard.layers
        ],
        "blocks": shard.blocks,
        "replicas": shard.replicas,
        "replica": shard.replica,
    }


def shard_from_wire(body: Body) -> RankShard:
    """The shard of a checked ``register`` body. Raises ``ProtocolError`` if its parts contradict each other."""
    shard = RankShard(tuple(body["layers"]), body["blocks"], body["replicas"], body["replica"])
    if shard.replica >= shard.replicas:
        raise ProtocolError(f"register: replica {shard.replica} of {shard.replicas}")
    sizes = [handle.size for handle in body["regions"]]
    for layer in shard.layers:
        for run in layer.runs:
            if run.region >= len(sizes) or run.last_local_byte(shard.blocks) > sizes[run.region]:
                raise ProtocolError(f"register: layer {layer.name} leaves its region")
    return shard
