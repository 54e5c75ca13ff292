"""``hpkvd bench``: how fast blocks go into the running daemon and come back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hpkv_client.errors import Busy, UsageError
from hpkv_client.values import format_size, parse_size
from hpkv_daemon.cli.figures import size, speed
from hpkv_daemon.cli.options import (
    CLIENT_SETTINGS,
    as_json,
    client_settings,
    connected,
    reply_timeout,
    setting_options,
)
from hpkv_daemon.cli.output import emit

NAMESPACE = "hpkvd bench"
_MOST_BYTES = 1 << 30


def _rate(seconds: float, step: Callable[[], int]) -> float:
    """Bytes a second of a step that gives the bytes it moved, done again and again; the median of all of them."""
    rates: list[float] = []
    end = time.perf_counter() + seconds
    while not rates or time.perf_counter() < end:
        started = time.perf_counter()
        moved = step()
        rates.append(moved / (time.perf_counter() - started))
    return sorted(rates)[len(rates) // 2]


def measure(socket: Path, block_bytes: int, blocks: int, seconds: float, timeout: float) -> dict[str, Any]:
    """Put and get blocks through the daemon, and copy as many bytes in this process. The daemon forgets them again.

    Raises ``Busy`` if the pool has no room for them.
    """
    import numpy as np

    from hpkv_client.client import BlockCache

    total = block_bytes * blocks
    source = np.frombuffer(os.urandom(1 << 16) * (total // (1 << 16) + 1), np.uint8)[:total].copy()
    target = np.zeros_like(source)

    def copy() -> int:
        for start in range(0, total, block_bytes):
            np.copyto(target[start : start + block_bytes], source[start : start + block_bytes])
        return total

    with BlockCache(NAMESPACE, block_bytes, arena_blocks=blocks, socket=socket, timeout=timeout) as cache:
        run = os.urandom(16)
        for index in range(blocks):
            cache.block(index)[:] = source[index * block_bytes : (index + 1) * block_bytes].data
        number = 0

        def put() -> int:
            nonlocal number
            keys = [run + number.to_bytes(4, "big") + index.to_bytes(4, "big") for index in range(blocks)]
            number += 1
            if cache.put_arena(keys, range(blocks)) < blocks:
                raise Busy("the pool has no room for the blocks of the benchmark", "use a smaller --size")
            return total

        def again() -> int:
            cache.clear()
            return put()

        try:
            _rate(0, put)
            floor, stored = _rate(seconds / 3, copy), _rate(seconds / 3, again)
            last = [run + (number - 1).to_bytes(4, "big") + index.to_bytes(4, "big") for index in range(blocks)]

            def get() -> int:
                if not all(cache.get_arena(last, range(blocks))):
                    raise Busy("the daemon evicted blocks of the benchmark", "try again when it is less busy")
                return total

            loaded = _rate(seconds / 3, get)
        finally:
            cache.clear()
    return {
        "block_bytes": block_bytes,
        "blocks": blocks,
        "memcpy_bytes_per_second": round(floor),
        "put_bytes_per_second": round(stored),
        "get_bytes_per_second": round(loaded),
        "put_to_memcpy_ratio": round(stored / floor, 3),
        "get_to_memcpy_ratio": round(loaded / floor, 3),
    }


def lines(found: dict[str, Any]) -> str:
    """The figures for people."""
    head = f"{found['blocks']} blocks of {size(found['block_bytes'])}"
    rows = [f"memcpy  {speed(found['memcpy_bytes_per_second'])}"]
    for verb in ("put", "get"):
        rows.append(f"{verb:<6}  {speed(found[f'{verb}_bytes_per_second'])}  {found[f'{verb}_to_memcpy_ratio']:.2f} x")
    return "\n".join([head, *rows])


@click.command()
@as_json
@reply_timeout(30.0)
@click.option("--block-size", default="1m", show_default=True, help="Size of a block.")
@click.option(
    "--size", "total", default="64m", show_default=True, help="Bytes in a round: so much of the pool is taken."
)
@click.option("--seconds", type=click.FloatRange(0.1, 600), default=3.0, show_default=True, help="How long it takes.")
@setting_options(*CLIENT_SETTINGS)
def bench(as_json: bool, timeout: float, block_size: str, total: str, seconds: float, **flags: Any) -> None:
    """Put and get blocks through the running daemon, against copies in this process.

    Its blocks go into a namespace of their own, which is emptied again; in a full pool they evict others.
    """
    block_bytes, whole = parse_size(block_size), parse_size(total)
    if not block_bytes <= whole <= _MOST_BYTES:
        raise UsageError(f"--size must be from one block to {format_size(_MOST_BYTES)}", "choose another")
    socket = client_settings(flags).socket
    with connected(socket, timeout):
        found = measure(socket, block_bytes, whole // block_bytes, seconds, timeout)
    if as_json:
        emit(found, as_json)
    else:
        click.echo(lines(found))
