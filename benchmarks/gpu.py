"""Stores and loads of a GPU's KV through a real mover process: right to the byte, and how fast beside one plain copy.

    python -m benchmarks.gpu [--seconds 480] [--json FILE]

One script of at most eight minutes. It needs an NVIDIA GPU, its driver, torch with CUDA, numpy and msgpack, and this
checkout; no daemon, no installation. The engine is this process, its memory torch's; the mover is the one that hpkvd
starts. First everything is checked, then measured. Speeds are ratios to one large copy between page-locked memory and
the GPU, done right before and after.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_checks import check_bytes, check_order, check_peer
from benchmarks.gpu_engine import LAYOUTS, Engine
from benchmarks.gpu_link import GpuLink, find_checkout
from hpkv_client.cuda import Driver
from hpkv_daemon.movers.base import Direction


@dataclass(frozen=True)
class Sizes:
    """How much is taken and done; bytes, unless the name says otherwise."""

    pool: int = 8 << 30
    sample: int = 2 << 30
    plain: int = 1 << 30
    peer: int = 8 << 30
    width: int = 8192
    """Of the square weights of a decode step, in elements."""
    ordered_stores: int = 200
    rounds: int = 7
    steps: int = 200


SMALL = Sizes(
    pool=64 << 20, sample=8 << 20, plain=8 << 20, peer=16 << 20, width=64, ordered_stores=5, rounds=2, steps=20
)


def plain_speed(torch: Any, size: int, to_device: bool) -> float:
    """Bytes per second of one large asynchronous copy between page-locked memory and the GPU."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    target, source = (device, host) if to_device else (host, device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    target.copy_(source, non_blocking=True)
    begin.record()
    target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return size / (begin.elapsed_time(end) / 1e3)


def copy_speed(link: GpuLink, go: Callable[[], list[int]], size: int) -> float:
    """Bytes per second of copies through the mover, with all that lies between."""
    started = time.perf_counter()
    link.wait(go())
    return size / (time.perf_counter() - started)


def measure(torch: Any, link: GpuLink, engine: Engine, sizes: Sizes, deadline: float) -> dict[str, Any]:
    """Ratios of store, load and both at once; medians of rounds that are each framed by plain copies."""
    ways: dict[str, tuple[Callable[[], list[int]], Callable[[], float], int]] = {
        "store": (lambda: [engine.go(Direction.STORE)], lambda: plain_speed(torch, sizes.plain, False), 1),
        "load": (lambda: [engine.go(Direction.LOAD)], lambda: plain_speed(torch, sizes.plain, True), 1),
        "both": (
            lambda: [engine.go(Direction.STORE, second_half=True), engine.go(Direction.LOAD)],
            lambda: plain_speed(torch, sizes.plain, True) + plain_speed(torch, sizes.plain, False),
            2,
        ),
    }
    found: dict[str, Any] = {
        "layout": engine.layout.name,
        "run_bytes": engine.run_bytes,
    }
    for name, (go, plain, times) in ways.items():
        link.wait(go())
        speeds, ratios = [], []
        for _ in range(sizes.rounds):
            if time.monotonic() > deadline:
                break
            before = plain()
            speed = copy_speed(link, go, engine.bytes * times)
            after = plain()
            speeds.append(speed / 1e9)
            ratios.append(speed / statistics.fmean((before, after)))
        if ratios:
            found[name] = {
                "gigabytes_per_second": round(statistics.median(speeds), 2),
                "ratio": round(statistics.median(ratios), 3),
                "rounds": len(ratios),
            }
    return found


def decode_steps(torch: Any, weights: Any, activations: Any) -> Iterator[float]:
    """Seconds of steps that read all weights, as a decode step of a small batch does."""
    while True:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for weight in weights:
            activations = activations @ weight
        end.record()
        end.synchronize()
        yield begin.elapsed_time(end) / 1e3


def decode_slowdown(torch: Any, link: GpuLink, engine: Engine, sizes: Sizes) -> dict[str, float]:
    """A decode step alone, and while blocks are stored all the time."""
    weights = [torch.zeros((sizes.width, sizes.width), dtype=torch.bfloat16, device="cuda") for _ in range(32)]
    steps = decode_steps(torch, weights, torch.zeros((16, sizes.width), dtype=torch.bfloat16, device="cuda"))
    for _ in range(20):
        next(steps)
    alone = [next(steps) for _ in range(sizes.steps)]
    beside = []
    tickets = [engine.go(Direction.STORE), engine.go(Direction.STORE)]
    while len(beside) < sizes.steps:
        beside.append(next(steps))
        done = link.done()
        if done is not None:
            tickets.remove(done.ticket)
            tickets.append(engine.go(Direction.STORE))
    link.wait(tickets)
    return {
        "alone_milliseconds": round(statistics.median(alone) * 1e3, 3),
        "while_storing_milliseconds": round(statistics.median(beside) * 1e3, 3),
        "slowdown": round(statistics.median(beside) / statistics.median(alone), 3),
    }


def check(torch: Any, driver: Driver, link: GpuLink, sizes: Sizes) -> dict[str, str]:
    """Everything that must be right; each check ends the script with words if it is not."""
    found = {}
    for layout in LAYOUTS:
        engine = Engine(torch, driver, link, layout, sizes.sample)
        check_bytes(torch, link, engine)
        engine.close()
    found["bytes"] = f"right in {len(LAYOUTS)} layouts"
    check_order(torch, driver, link, sizes.sample, sizes.ordered_stores)
    found["order"] = f"right in {sizes.ordered_stores} stores"
    # The others need room.
    torch.cuda.empty_cache()
    found["another process"] = check_peer(torch, link, sizes.peer, paged=False)
    found["expandable segments"] = check_peer(torch, link, sizes.peer, paged=True)
    return found


def main() -> None:
    """Entry of the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=480.0, help="take at most about so long")
    parser.add_argument("--json", type=Path, help="write what was found to this file, too")
    parser.add_argument("--small", action="store_true", help="try the script out; its figures mean nothing")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds * 0.9
    sizes = SMALL if options.small else Sizes()
    import torch

    if not torch.cuda.is_available():
        sys.exit("no GPU here that torch can use")
    torch.zeros(1, device="cuda")
    driver = Driver()
    device = f"cuda:{driver.uuid_of(driver.devices()[torch.cuda.current_device()])}"
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "layouts": [],
    }

    def tell(name: str, value: Any) -> None:
        print(json.dumps({name: value}), flush=True)

    with GpuLink(device, sizes.pool) as link:
        found["checks"] = check(torch, driver, link, sizes)
        tell("checks", found["checks"])
        found["page_lock_seconds"] = round(link.lock_all(), 3)
        for layout in LAYOUTS:
            engine = Engine(torch, driver, link, layout, sizes.sample)
            found["layouts"].append(measure(torch, link, engine, sizes, deadline))
            tell("layout", found["layouts"][-1])
            if layout is LAYOUTS[0]:
                found["decode"] = decode_slowdown(torch, link, engine, sizes)
                tell("decode", found["decode"])
            engine.close()
    text = json.dumps(found, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    find_checkout()
    main()
