"""The real engine: stock ``vllm serve`` (CPU build) on a small model, asked over HTTP.

Time to the first token of long prompts: computed, served by the engine's own prefix cache, and served by HPKV to an
engine that was just started. Then an engine that stores everything in HPKV against one without the connector:
throughput of prompts that nobody has seen, speed of decoding, and what a daemon that is frozen costs.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.daemon import Daemon, daemon
from benchmarks.memory import available_bytes
from benchmarks.paired import Pairs, Spread, alternate
from benchmarks.placement import cores, pin
from benchmarks.report import Aim, Found, Measure, Unfit, main, ratio, say

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL, DTYPE = "qwen2-large", "bfloat16"
BLOCK_TOKENS = 64
POOL_BYTES = 1 << 30
NEEDED_BYTES = 9 << 30
"""Two engines at once, and the pool."""
LONG_SENTENCES, SHORT_SENTENCES = 160, 20
OUTPUT_TOKENS = 32
DISTINCT = 16
REST_SECONDS = 2.0
"""vLLM's processes spin for a second after their last work; what is timed is an engine that waits for work."""
STORE_SECONDS = 120.0
DECODERS, DECODED_TOKENS = 4, 128
SUBMIT_DEADLINE_MS = 50
"""The default of HPKV_SUBMIT_DEADLINE_MS."""
FLAGS = (
    *("--block-size", str(BLOCK_TOKENS)),
    *("--dtype", DTYPE),
    *("--max-num-batched-tokens", "8192"),
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",
    "--enforce-eager",
)
CONNECTOR = ("--kv-transfer-config", '{"kv_connector":"HpkvConnectorV1","kv_role":"kv_both"}')

# The examples are scripts, not a package.
sys.path.insert(0, str(REPOSITORY / "examples"))
engines = importlib.import_module("engine")
models = importlib.import_module("tiny_model")


def prompt(seed: int, sentences: int) -> str:
    """A text that shares no prefix with that of another seed."""
    order = random.Random(seed)
    return f"{seed}: " + " ".join(order.choice(models.CORPUS) for _ in range(sentences))


@contextmanager
def engine(model: Path, served: Daemon | None, log: Path) -> Iterator[Any]:
    """A warm engine on the cores of this thread, with the connector if there is a daemon."""
    environment = engines.cpu_environment(1)
    if served is None:
        environment |= {"VLLM_ENABLE_HPKV": "0"}
        flags: tuple[str, ...] = FLAGS
    else:
        environment |= served.environment | {"VLLM_ENABLE_HPKV": "1"}
        flags = FLAGS + CONNECTOR
    say(f"starting vLLM {'with' if served else 'without'} the connector")
    with engines.Engine(model, flags, dict(os.environ) | environment, log) as started:
        started.wait_ready()
        for seed in (-1, -2):
            started.complete(prompt(seed, LONG_SENTENCES), 4)
        yield started


def ask_rested(asked: Any, text: str) -> tuple[float, Any]:
    """Seconds per output token after the first, and the whole completion."""
    time.sleep(REST_SECONDS)
    started = time.perf_counter()
    answer = asked.complete(text, OUTPUT_TOKENS)
    decoding = time.perf_counter() - started - answer.ttft_seconds
    return decoding / (OUTPUT_TOKENS - 1), answer


def await_stored(served: Daemon, blocks: int) -> None:
    """Return once hpkvd holds so many blocks."""
    channel = served.channel()
    deadline = time.monotonic() + STORE_SECONDS
    while channel.call("stats", {}, 10.0)["stored_blocks"] < blocks:
        if time.monotonic() > deadline:
            raise RuntimeError(f"hpkvd has not stored {blocks} blocks after {STORE_SECONDS:.0f} s")
        time.sleep(0.1)
    channel.close()


def stats(served: Daemon) -> dict[str, Any]:
    """Counters of the daemon."""
    channel = served.channel()
    try:
        return channel.call("stats", {}, 10.0)
    finally:
        channel.close()


class Answers:
    """Completions of the same prompts in one situation."""

    def __init__(self, asked: Any, texts: Sequence[str], most_cached: bool) -> None:
        found = [ask_rested(asked, text) for text in texts]
        self.ttft = [answer.ttft_seconds for _, answer in found]
        self.decode_seconds = [seconds for seconds, _ in found]
        self.tokens = [answer.prompt_tokens for _, answer in found]
        self.outputs = [answer.tokens for _, answer in found]
        for _, answer in found:
            expected = (answer.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS if most_cached else 0
            if answer.cached_tokens != expected:
                raise RuntimeError(f"{answer.cached_tokens} prompt tokens were cached, not {expected}")


def times(cold: Answers, own: Answers, hpkv: Answers, load_seconds: float) -> list[Measure]:
    """What the first tokens cost."""

    def against(floor: Answers, sample: Answers) -> Pairs:
        return Pairs(floor.ttft, sample.ttft)

    def absolute(answers: Answers) -> dict[str, float]:
        return {
            "ttft_s": Spread.of(answers.ttft).median,
            "output_tokens_per_s": 1 / Spread.of(answers.decode_seconds).median,
        }

    tokens = Spread.of(cold.tokens).median
    named = f"{tokens:.0f} prompt tokens"
    seconds = Spread.of(cold.ttft)
    return [
        Measure(
            f"time to first token, computed, {named}",
            seconds.median,
            "s",
            low=seconds.low,
            high=seconds.high,
            context=absolute(cold) | {"prompt_tokens_per_s": tokens / seconds.median},
        ),
        ratio(
            f"first token, engine's own cache against computed, {named}",
            against(cold, own).speed,
            context=absolute(own),
        ),
        ratio(
            f"first token, HPKV after a restart against computed, {named}",
            against(cold, hpkv).speed,
            context=absolute(hpkv) | {"load_s": load_seconds},
        ),
        Measure(
            "first token, HPKV after a restart beside the engine's own cache",
            1e3 * Spread.of([ours - theirs for ours, theirs in zip(hpkv.ttft, own.ttft, strict=True)]).median,
            "ms",
            note="what the daemon's part costs",
        ),
    ]


def throughput(asked: Any, seeds: Iterator[int]) -> float:
    """Seconds for prompts that nobody has seen, all at once."""
    texts = [prompt(next(seeds), SHORT_SENTENCES) for _ in range(DISTINCT)]
    time.sleep(REST_SECONDS)
    started = time.perf_counter()
    with ThreadPoolExecutor(DISTINCT) as pool:
        list(pool.map(lambda text: asked.complete(text, OUTPUT_TOKENS), texts))
    return time.perf_counter() - started


def storing(with_hpkv: Any, without: Any, rounds: int) -> Measure:
    """The two engines in turn."""
    seeds = iter(range(10_000, 1_000_000))
    pairs = Pairs()
    for asked in (with_hpkv, without):
        throughput(asked, seeds)
    before = throughput(without, seeds)
    for _ in range(rounds):
        taken, after = throughput(with_hpkv, seeds), throughput(without, seeds)
        pairs.add(before, taken, after)
        before = after
        say(f"storing on: {pairs.floors[-1] / taken:.3f} of the throughput without connector")
    produced = DISTINCT * OUTPUT_TOKENS
    return ratio(
        f"throughput of {DISTINCT} distinct prompts, storing on against no connector",
        pairs.speed,
        context={
            "output_tokens_per_s": produced / Spread.of(pairs.samples).median,
            "floor_output_tokens_per_s": produced / Spread.of(pairs.floors).median,
        },
    )


def decode(asked: Any, seeds: Iterator[int]) -> float:
    """Seconds per output token of some requests at once, from where the last of them has its first token.

    Before that some compute their prompts while others decode already: how many is chance, and no part of decoding.
    """
    texts = [prompt(next(seeds), SHORT_SENTENCES) for _ in range(DECODERS)]
    time.sleep(REST_SECONDS)
    with ThreadPoolExecutor(DECODERS) as pool:
        answers = list(pool.map(lambda text: asked.complete(text, DECODED_TOKENS), texts))
    since = max(answer.arrivals[0] for answer in answers)
    until = min(answer.arrivals[-1] for answer in answers)
    decoded = sum(since < arrival <= until for answer in answers for arrival in answer.arrivals)
    return DECODERS * (until - since) / decoded


def decoding(with_hpkv: Any, without: Any, rounds: int, where: str, aim: Aim) -> Measure:
    """The two engines in turn."""
    seeds = iter(range(1_000_000, 2_000_000))
    pairs = alternate(lambda: decode(without, seeds), {"storing": lambda: decode(with_hpkv, seeds)}, rounds)["storing"]
    return ratio(
        f"decoding of {DECODERS} requests at once, storing on against no connector, {where}",
        pairs.speed,
        aim,
        context={
            "output_tokens_per_s": DECODERS / Spread.of(pairs.samples).median,
            "floor_output_tokens_per_s": DECODERS / Spread.of(pairs.floors).median,
        },
    )


def apart(model: Path, served: Daemon, logs: Path, rounds: int) -> Measure:
    """Decoding of engines that have a core of their own, and leave the daemon another: as beside a GPU."""
    engine_core, *others = cores()
    with (
        on(engine_core),
        engine(model, served, logs / "fourth.log") as with_hpkv,
        engine(model, None, logs / "fifth.log") as without,
        on(*others),
    ):
        for pid in (served.pid, *served.movers()):
            pin(pid, others[0])
        return decoding(with_hpkv, without, rounds, "cores of their own", Aim(at_least=0.99))


@contextmanager
def on(*those: int) -> Iterator[None]:
    """This thread, and what it starts, runs on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, those)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def frozen(with_hpkv: Any, without: Any, served: Daemon, rounds: int) -> list[Measure]:
    """What a stopped daemon adds to the first token: of the request that finds it so, and of those after it."""
    seeds = iter(range(2_000_000, 3_000_000))

    def first_token(asked: Any) -> float:
        return ask_rested(asked, prompt(next(seeds), SHORT_SENTENCES))[1].ttft_seconds

    finding, later = Pairs(), Pairs()
    before = first_token(without)
    for _ in range(rounds):
        os.kill(served.pid, signal.SIGSTOP)
        try:
            for pairs in (finding, later, later):
                taken, after = first_token(with_hpkv), first_token(without)
                pairs.add(before, taken, after)
                before = after
        finally:
            os.kill(served.pid, signal.SIGCONT)
        # The next round must find it answering again.
        for _ in range(2):
            first_token(with_hpkv)

    def added(name: str, pairs: Pairs, aim: Aim) -> Measure:
        spread = Spread.of([1e3 * (taken - floor) for floor, taken in zip(pairs.floors, pairs.samples, strict=True)])
        return Measure(name, spread.median, "ms", aim, spread.low, spread.high)

    return [
        added(
            "added to the first token by a daemon that froze just now", finding, Aim(at_most=SUBMIT_DEADLINE_MS + 50)
        ),
        added("added to the first token by a daemon that is known to be frozen", later, Aim(at_most=10)),
    ]


def run(quick: bool) -> Found:
    """Five starts of the engine."""
    if available_bytes() < NEEDED_BYTES:
        raise Unfit(f"{available_bytes() >> 30} GiB of memory are available, {NEEDED_BYTES >> 30} are needed")
    prompts, rounds = (2, 1) if quick else (7, 7)
    model = models.make(MODEL, REPOSITORY / ".demo" / "models", DTYPE)
    texts = [prompt(seed, LONG_SENTENCES) for seed in range(prompts)]
    with daemon(POOL_BYTES) as served, tempfile.TemporaryDirectory(prefix="hpkv-bench-") as directory:
        logs = Path(directory)
        with engine(model, served, logs / "first.log") as first:
            cold = Answers(first, texts, most_cached=False)
            own = Answers(first, texts, most_cached=True)
            await_stored(served, sum((tokens // BLOCK_TOKENS) for tokens in cold.tokens))
        with engine(model, served, logs / "second.log") as second:
            before = stats(served)
            hpkv = Answers(second, texts, most_cached=True)
            after = stats(served)
            load_seconds = (after["load_microseconds"] - before["load_microseconds"]) / prompts / 1e6
            measures = times(cold, own, hpkv, load_seconds)
            same = sum(ours == theirs for ours, theirs in zip(hpkv.outputs, own.outputs, strict=True))
            with engine(model, None, logs / "third.log") as third:
                measures.append(storing(second, third, rounds))
                measures.append(decoding(second, third, rounds, "cores shared", Aim()))
                measures += frozen(second, third, served, rounds)
        if len(cores()) > 1:
            measures.append(apart(model, served, logs, rounds))
    for measure in measures:
        say(f"{measure.name}: {measure.value:.4g} {measure.unit}")
    return measures, {"model": MODEL, "dtype": DTYPE, "prompts": prompts, "same_outputs": same, "rounds": rounds}


if __name__ == "__main__":
    sys.exit(main("engine", __doc__, run, urgent=False))
