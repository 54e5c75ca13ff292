"""The wire codec against any bytes: nothing but ``ProtocolError`` comes out, and what is accepted means one thing.

python -m tests.fuzz.codec -max_total_time=60
"""

from __future__ import annotations

if __name__ == "__main__":
    from tests.fuzz.engine import main

    main("codec")

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import msgpack

from hpkv_client import wire
from hpkv_client.errors import HpkvError, ProtocolError
from hpkv_client.types import Layer, MemoryHandle
from hpkv_client.wire import MAX_INT, VERBS, Body, Request
from tests.fuzz.entropy import Entropy
from tests.golden import BODIES, GOLDEN

_VERBS = sorted(VERBS)
_REPLIES: tuple[Any, ...] = (
    [1, 0, {"hit": 3, "lease": 1 << 40}],
    [MAX_INT, 1, {"code": "usage", "message": "m", "hint": "h"}],
    [0, True, {"found": b"\x01\x00"}],
)


def run(data: bytes) -> None:
    """Make a frame out of the input, and check everything that reads it."""
    check(frame_of(Entropy(data)))


def frame_of(entropy: Entropy) -> bytes:
    """Bytes as they are, a request or reply with some parts changed, or a cut and patched frame."""
    kind = entropy.below(5)
    if kind == 0:
        return entropy.bytes(entropy.left)
    if kind == 1:
        verb = entropy.pick(_VERBS)
        return _packed(_changed(entropy, [verb, 1 + entropy.below(4), entropy.below(4), copy.deepcopy(BODIES[verb])]))
    if kind == 2:
        return _packed(_changed(entropy, copy.deepcopy(entropy.pick(_REPLIES))))
    if kind == 3:
        return _packed(entropy.value(6))
    frame = bytes.fromhex(GOLDEN[entropy.pick(_VERBS)])
    for _ in range(1 + entropy.below(3)):
        cut, gone = entropy.number(2) % (len(frame) + 1), entropy.below(9)
        frame = frame[:cut] + entropy.bytes(entropy.below(9)) + frame[cut + gone :]
    return frame


def _changed(entropy: Entropy, value: Any) -> Any:
    for _ in range(entropy.below(4)):
        value = entropy.changed(value)
    return value


def _packed(value: Any) -> bytes:
    packed = msgpack.packb(value, use_bin_type=True)
    assert isinstance(packed, bytes)
    return packed


def check(frame: bytes) -> None:
    """Read a frame in every way. Raises whatever should not be."""
    readable = wire.request_id_of(frame)
    assert readable is None or 0 <= readable <= MAX_INT
    with contextlib.suppress(ProtocolError):
        request = wire.decode_request(frame)
        assert request.id == readable, f"the id is {request.id} to one reader and {readable} to the other"
        _check_request(request)
    with contextlib.suppress(ProtocolError):
        _check_reply(wire.decode_reply(frame))


def _check_request(request: Request) -> None:
    verb, number, session, body = request
    assert 0 <= session <= MAX_INT
    assert set(body) == set(VERBS[verb])
    sent = {name: _as_sent(value) for name, value in body.items()}
    again = wire.decode_request(wire.encode_request(verb, number, session, sent))
    assert again == request, f"{request} came back as {again}"
    if "blocks" in body and verb != "register":
        assert wire.pack_blocks(wire.unpack_blocks(body["blocks"])) == body["blocks"]
    if verb == "register":
        _check_shard(body)


def _as_sent(value: Any) -> Any:
    if isinstance(value, MemoryHandle):
        return {name: getattr(value, name) for name in MemoryHandle.__slots__}
    if isinstance(value, Layer):
        return [value.name, value.canonical_bytes, [wire.run_to_wire(run) for run in value.runs]]
    if isinstance(value, list):
        return [_as_sent(entry) for entry in value]
    return value


def _check_shard(body: Body) -> None:
    shard = wire.shard_from_wire(body)
    assert wire.shard_from_wire(body | {"layers": list(shard.layers)}) == shard
    assert shard.replica < shard.replicas
    sizes = [handle.size for handle in body["regions"]]
    for layer in shard.layers:
        for run in layer.runs:
            assert run.last_local_byte(shard.blocks) <= sizes[run.region]
            assert run.last_canonical_byte() <= layer.canonical_bytes


def _check_reply(reply: wire.Reply) -> None:
    with contextlib.suppress(HpkvError):
        assert reply.result() is reply.body
    try:
        frame = _packed([reply.id, 0 if reply.ok else 1, reply.body])
    except ValueError:
        # Nested more deeply than msgpack writes, though it reads it.
        return
    again = wire.decode_reply(frame)
    assert (again.id, again.ok) == (reply.id, reply.ok)
    assert _packed(again.body) == _packed(reply.body)


def seeds() -> Iterator[bytes]:
    """Every golden frame as it is, every verb built anew, replies, and values nested deeply."""
    for position, verb in enumerate(_VERBS):
        yield b"\x00" + bytes.fromhex(GOLDEN[verb])
        yield bytes([1, position, 0, 0, 0])
        yield bytes([1, position, 0, 0, 2, 1, 3, 7, 1, 0, 0, 1, 1, 3, 7, 1, 0, 0])
        yield bytes([4, position, 1, 9, 0, 2, 2, 0xFF, 0xFF, 20, 0, 0, 0])
    for position in range(len(_REPLIES)):
        yield bytes([2, position, 0])
        yield bytes([2, position, 1, 1, 2, 2, 0, 3])
    yield bytes([3, 6, 4, 7, 2, 1, 1, 6, 2, 0, 9, 3, 1, 2, 3, 4, 5, 6, 7, 8])
    for opening in (b"\x91", b"\x81\xa1a"):
        for depth in (10, 400):
            yield b"\x00" + opening * depth + b"\xc0"
            yield b"\x00\x93\x01\x01\x81\xa4code" + opening * depth + b"\xc0"
