"""One engine stores a long prompt in HPKV and ends; a second engine is served from memory, a third one from disk.

    make demo            # a table
    make demo JSON=1     # one line of JSON at the end

Starts hpkvd and the stock ``vllm serve`` (CPU build, TP 2 x PP 2) on a small model with random weights, with
the environment variables and flags of the README. Before the third engine the daemon ends and its memory is
discarded: what the next daemon serves comes from the disk. Exit status 0: the second and the third engine were
served by HPKV, and their answers are those of the first.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine import Completion, Engine, EngineFailed, cpu_environment, last_lines
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tiny_model import CORPUS, make

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL, DTYPE = "qwen2-large", "float32"
BLOCK_TOKENS = 64
PROMPT_SENTENCES = 110
OUTPUT_TOKENS = 32
RANKS = 4
POOL_BYTES = 8 << 30
SMALLEST_POOL_BYTES = 256 << 20
STORE_SECONDS = 60.0
REST_SECONDS = 3.0
"""vLLM's processes spin for a second after their last work; what is timed is an engine that waits for work."""
MAX_SOCKET_PATH = 100

USER_FLAGS = (
    *("--block-size", str(BLOCK_TOKENS)),
    *("--tensor-parallel-size", "2"),
    *("--pipeline-parallel-size", "2"),
    "--enable-prefix-caching",
    *("--max-num-batched-tokens", "8192"),
    *("--kv-transfer-config", '{"kv_connector":"HpkvConnectorV1","kv_role":"kv_both"}'),
)
"""What a user of HPKV passes to ``vllm serve``."""

DEMO_FLAGS = (
    # float32: the sum of a prefill in other pieces must not flip a token of a model that is nearly undecided.
    *("--dtype", DTYPE),
    # Pipeline parallelism on the CPU build runs without the compiler only.
    *("--compilation-config", '{"mode":2,"backend":"eager"}'),
    "--enable-prompt-tokens-details",
)
"""What the demo needs on top."""

HIT_METRIC = "vllm:external_prefix_cache_hits_total"


class DemoFailed(Exception):
    """The demo cannot go on; the text says why."""


@dataclass
class Facts:
    """What the demo found out."""

    ok: bool = False
    identical: bool = False
    prompt_tokens: int = 0
    hit_tokens: int = 0
    ttft_cold_s: float = 0.0
    ttft_warm_s: float = 0.0
    disk_hit_tokens: int = 0
    ttft_disk_s: float = 0.0
    stored_blocks: int = 0
    stored_bytes: int = 0


class Steps:
    """Tells on stderr what is going on, for how long, and what a log said last."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 120)
        self._pause = 0.5 if self._console.is_terminal else 10.0

    @contextmanager
    def __call__(self, what: str, log: Path | None = None) -> Iterator[None]:
        started = time.monotonic()
        over = threading.Event()

        def tell(show: Callable[[Text], None]) -> None:
            while not over.wait(self._pause):
                line = Text(f"{what}: {time.monotonic() - started:.0f} s  ")
                line.append(_last_message(log) if log else "", style="dim")
                line.truncate(max(40, self._console.width - 4), overflow="ellipsis")
                show(line)

        with self._console.status(Text(what)) as status:
            show = status.update if self._console.is_terminal else self._console.print
            teller = threading.Thread(target=tell, args=(show,), daemon=True)
            teller.start()
            try:
                yield
            finally:
                over.set()
                teller.join()
        self._console.print(Text(f"{what}: done in {time.monotonic() - started:.1f} s"))

    def fail(self, message: str, log: Path | None) -> None:
        """The last words of a log, and what went wrong."""
        if log is not None:
            for line in last_lines(log, 20):
                self._console.print(Text(f"  {line}", style="dim"))
            self._console.print(Text(f"the whole log is {log}"))
        self._console.print(Text(f"demo failed: {message}", style="bold red"))


def _last_message(log: Path) -> str:
    """The last line of vLLM's log without process, level, time and place."""
    return re.sub(r"^\([^)]*\) |[A-Z]+ [0-9-]+ [0-9:]+ \[[^]]*\] ", "", "".join(last_lines(log, 1))).strip()


class Daemon:
    """hpkvd in a runtime directory of the demo, driven by its command line. A context manager.

    ``more``: variables on top of those that every demo sets.
    """

    def __init__(self, runtime: Path, pool: Path, storage: Path, more: dict[str, str] | None = None) -> None:
        self._script = Path(sys.executable).with_name("hpkvd")
        config = runtime / "hpkvd.toml"
        config.touch()
        own = {
            "HPKV_KV_MEM_POOL_SIZE": f"{_pool_bytes(pool) >> 20}m",
            "HPKV_SHARE_MEM_FILE_PATH": str(pool),
            "HPKV_KV_STORAGE_PATH": str(storage),
            "HPKV_SOCKET": str(runtime / "hpkvd.sock"),
            "HPKV_CONFIG": str(config),
        }
        foreign = {name: value for name, value in os.environ.items() if not name.startswith("HPKV_")}
        self.environment = foreign | own | (more or {}) | {"VLLM_ENABLE_HPKV": "1"}

    def __enter__(self) -> Daemon:
        self._run("stop", "--force", may_fail=True)
        self._run("start", "--json")
        return self

    def __exit__(self, *_: object) -> None:
        self._run("stop", "--force", may_fail=True)

    def forget_memory(self) -> None:
        """Write all blocks to the disk, end, free the memory, and start anew."""
        self._run("drain")
        self._run("stop", "--discard")
        self._run("start", "--json")

    def stats(self) -> dict[str, Any]:
        """Its counters."""
        found = json.loads(self._run("stats", "--json"))
        assert isinstance(found, dict)
        return found

    def info(self) -> dict[str, Any]:
        """What it tells about itself."""
        found = json.loads(self._run("info", "--json"))
        assert isinstance(found, dict)
        return found

    def _run(self, *arguments: str, may_fail: bool = False) -> str:
        done = subprocess.run(
            [self._script, *arguments], env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode and not may_fail:
            raise DemoFailed(done.stderr.strip() or f"hpkvd {arguments[0]}: exit status {done.returncode}")
        return done.stdout


def _pool_bytes(pool: Path) -> int:
    """8 GiB, or less where that is more than a quarter of the free memory or half of the file system."""
    fields = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    free = next(int(field[1]) << 10 for field in fields if field[0] == "MemAvailable:")
    room = shutil.disk_usage(pool).free
    size = min(POOL_BYTES, free // 4, room // 2)
    if size < SMALLEST_POOL_BYTES:
        raise DemoFailed(f"{free >> 20} MiB of memory and {room >> 20} MiB in {pool} are free, too little")
    return size


def prompt_text() -> str:
    """A long text; the same in every run."""
    order = random.Random(7)
    return " ".join(order.choice(CORPUS) for _ in range(PROMPT_SENTENCES))


@contextmanager
def asked(steps: Steps, daemon: Daemon, model: Path, name: str, log: Path) -> Iterator[tuple[Engine, Completion]]:
    """A new engine that was asked the long prompt, and its answer. It ends with the context."""
    environment = daemon.environment | cpu_environment(RANKS)
    with Engine(model, USER_FLAGS + DEMO_FLAGS, environment, log) as engine:
        with steps(f"starting vLLM ({name} engine, TP 2 x PP 2)", log):
            engine.wait_ready()
        with steps("warming it up with another, short prompt, then letting it come to rest"):
            engine.complete("Good morning.", 4)
            time.sleep(REST_SECONDS)
        with steps(f"asking the {name} engine the long prompt"):
            answer = engine.complete(prompt_text(), OUTPUT_TOKENS)
        yield engine, answer
        with steps(f"stopping the {name} engine"):
            engine.stop()


def await_stored(daemon: Daemon, blocks: int) -> dict[str, Any]:
    """The daemon's counters once it has stored that many blocks."""
    deadline = time.monotonic() + STORE_SECONDS
    while (stats := daemon.stats())["stored_blocks"] < blocks:
        if time.monotonic() > deadline:
            raise DemoFailed(f"hpkvd stored {stats['stored_blocks']} of {blocks} blocks")
        time.sleep(0.2)
    return stats


def run(steps: Steps, facts: Facts, runtime: Path, pool: Path, storage: Path) -> None:
    """The whole story; ``facts`` fills up as it goes."""
    with steps(f"making the model {MODEL} ({DTYPE}) unless it is there"):
        model = make(MODEL, REPOSITORY / ".demo" / "models", DTYPE)
    with ExitStack() as stack:
        with steps("starting hpkvd"):
            daemon = stack.enter_context(Daemon(runtime, pool, storage))
        with asked(steps, daemon, model, "first", runtime / "engine-1.log") as (_, cold):
            facts.prompt_tokens, facts.ttft_cold_s = cold.prompt_tokens, round(cold.ttft_seconds, 3)
            with steps("waiting until hpkvd has stored the prompt"):
                await_stored(daemon, cold.prompt_tokens // BLOCK_TOKENS)
        stats = daemon.stats()
        facts.stored_blocks, facts.stored_bytes = stats["stored_blocks"], stats["stored_bytes"]
        with asked(steps, daemon, model, "second", runtime / "engine-2.log") as (engine, warm):
            facts.ttft_warm_s = round(warm.ttft_seconds, 3)
            facts.hit_tokens = hit_tokens(engine, warm)
        with steps("writing the blocks to disk, and starting a new hpkvd without memory of them"):
            daemon.forget_memory()
        with asked(steps, daemon, model, "third", runtime / "engine-3.log") as (engine, disk):
            facts.ttft_disk_s = round(disk.ttft_seconds, 3)
            facts.disk_hit_tokens = hit_tokens(engine, disk)
    facts.identical = all((cold.tokens, cold.text) == (other.tokens, other.text) for other in (warm, disk))
    facts.ok = facts.identical and facts.hit_tokens > 0 and facts.disk_hit_tokens > 0


def hit_tokens(engine: Engine, answer: Completion) -> int:
    """Prompt tokens that HPKV served: found by vLLM's metric, and not computed by its usage.

    The two differ when blocks were found and did not come in time.
    """
    return min(int(engine.metric(HIT_METRIC)), answer.cached_tokens)


def table(facts: Facts) -> Table:
    """The facts for people."""
    result = Table(title="HPKV: stored by one engine, served to the next", title_justify="left")
    for column in ("", "first engine (cold)", "second engine (memory)", "third engine (disk)"):
        result.add_column(column, justify="right" if column else "left")
    tokens = f"{facts.prompt_tokens}"
    rows = (
        ("time to first token", f"{facts.ttft_cold_s:.3f} s", *(_faster(facts, taken) for taken in served(facts))),
        ("prompt tokens", tokens, tokens, tokens),
        ("of them served by HPKV", "0", f"{facts.hit_tokens}", f"{facts.disk_hit_tokens}"),
        ("blocks stored", f"{facts.stored_blocks}", "", ""),
        ("bytes stored", f"{facts.stored_bytes} ({facts.stored_bytes / 2**20:.1f} MiB)", "", ""),
        ("identical output", "", *["yes" if facts.identical else "NO"] * 2),
    )
    for row in rows:
        result.add_row(*row)
    return result


def served(facts: Facts) -> tuple[float, float]:
    """The times to first token of the engines that HPKV served."""
    return facts.ttft_warm_s, facts.ttft_disk_s


def _faster(facts: Facts, taken: float) -> str:
    return f"{taken:.3f} s ({facts.ttft_cold_s / taken if taken else 0.0:.1f}x)"


def main() -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    steps, facts, problem = Steps(), Facts(), ""
    try:
        with directories() as (runtime, pool, storage):
            run(steps, facts, runtime, pool, storage)
    except KeyboardInterrupt:
        steps.fail("interrupted", None)
        return 128 + signal.SIGINT
    except EngineFailed as failure:
        problem = str(failure)
        steps.fail(problem, failure.log)
    except (DemoFailed, OSError) as failure:
        problem = str(failure)
        steps.fail(problem, None)
    if arguments.json:
        print(json.dumps(asdict(facts) | ({"problem": problem} if problem else {})))
    elif not problem:
        Console().print(table(facts))
    return 0 if facts.ok else 1


@contextmanager
def directories() -> Iterator[tuple[Path, Path, Path]]:
    """The demo's own directories, for one demo at a time: runtime; pool and storage, which end with it."""
    runtime = REPOSITORY / ".demo"
    if len(os.fsencode(runtime / "hpkvd.sock")) > MAX_SOCKET_PATH:
        runtime = Path(tempfile.gettempdir()) / f"hpkv-demo-{os.geteuid()}"
    runtime.mkdir(mode=0o700, exist_ok=True)
    with (runtime / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoFailed(f"another demo runs in {runtime}") from None
        shm = Path("/dev/shm")
        roomy = shm.is_dir() and shutil.disk_usage(shm).free >= 2 * SMALLEST_POOL_BYTES
        pool = Path(tempfile.mkdtemp(prefix="hpkv-demo-", dir=shm if roomy else runtime))
        storage = Path(tempfile.mkdtemp(prefix="storage-", dir=runtime))
        try:
            yield runtime, pool, storage
        finally:
            shutil.rmtree(pool, ignore_errors=True)
            shutil.rmtree(storage, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
