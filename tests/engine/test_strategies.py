"""Strategies and model kinds, one engine each: recognised by itself, stored once, hit again, with equal answers."""

from __future__ import annotations

import base64
import io
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from adapters import make_adapter
from vllm_server import BLOCK_TOKENS, Topology, Vllm, full_hit, prompt

from examples.tiny_model import make
from tests.conftest import DaemonFactory, DaemonHandle

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LENGTHS = (320, 517, 700)
EXPERTS = Path(__file__).with_name("expert_parallel_patch")


class Site:
    """An engine of some kind on a daemon of its own."""

    def __init__(self, daemon: DaemonHandle, engine: Vllm) -> None:
        self.daemon = daemon
        self.engine = engine
        self._channel = daemon.client()

    def stats(self) -> dict[str, int]:
        """The daemon's statistics."""
        return self._channel.call("stats", {}, 30.0)

    def info(self) -> dict[str, list]:
        """What the daemon tells operators."""
        return self._channel.call("info", {}, 30.0)

    def ranks(self) -> list[dict[str, object]]:
        """What the daemon knows of the ranks."""
        return [rank for engine in self.info()["engines"] for rank in engine["ranks"]]

    def settle(self) -> dict[str, int]:
        """Statistics once nothing moves any more."""
        deadline = time.monotonic() + 20
        while (stats := self.stats())["pool_reserved_blocks"] or stats["leases"]:
            assert time.monotonic() < deadline, stats
            time.sleep(0.02)
        return stats

    def hit_again(
        self, seed: int, length: int, block_tokens: int = BLOCK_TOKENS, replicas: tuple[int, int] | None = None
    ) -> None:
        """Cold, by the engine's own cache, and by the daemon: the last two see the same KV, bit for bit.

        Of two data-parallel replicas the first one stores, the second one hits.
        """
        tokens = prompt(seed, length)
        writer, reader = replicas or (None, None)
        before = self.settle()
        assert self.engine.ask(tokens, replica=writer).cached == 0
        stored = self.settle()["stored_blocks"] - before["stored_blocks"]
        assert stored >= length // block_tokens
        own = self.engine.ask(tokens, replica=writer)
        self.settle()
        self.engine.reset_local()
        loaded = self.stats()["loaded_blocks"]
        theirs = self.engine.ask(tokens, replica=reader)
        expected = (length - 1) // block_tokens * block_tokens
        assert (own.cached, theirs.cached) == (expected, expected)
        assert theirs.tokens == own.tokens
        assert self.stats()["loaded_blocks"] > loaded


@pytest.fixture
def site(daemons: DaemonFactory, model: Path, tmp_path: Path) -> object:
    """``site(topology, *flags, model=None, **env)`` as a context manager."""

    @contextmanager
    def open_site(topology: Topology, *flags: str, model_name: str = "", **env: object) -> Iterator[Site]:
        path = make(model_name, model.parent, dtype="float32") if model_name else model
        daemon = daemons(HPKV_KV_MEM_POOL_SIZE="128m", HPKV_SUBMIT_DEADLINE_MS=5000)
        environment = daemon.env | {name: str(value) for name, value in env.items()}
        engine = Vllm(path, topology, environment, tmp_path / "engine.log", *flags)
        try:
            yield Site(daemon, engine.wait_ready())
            assert daemon.client().call("check", {}, 30.0)["ok"]
        finally:
            engine.kill()
            daemon.close()

    return open_site


def test_one_latent_for_all_ranks_is_stored_once_by_writers_in_turn(site) -> None:
    with site(Topology("mla-tp2", tp=2), "--dtype=bfloat16", model_name="deepseek-v2") as node:
        for seed, length in enumerate(LENGTHS):
            node.hit_again(seed, length)
        ranks = node.ranks()
        assert [(rank["replicas"], rank["replica"]) for rank in ranks] == [(2, 0), (2, 1)]
        stats = node.stats()
        assert stats["stored_bytes"] == stats["stored_blocks"] * ranks[0]["block_bytes"]
        written = [rank["written_blocks"] for rank in ranks]
        assert sum(written) == stats["stored_blocks"]
        assert abs(written[0] - written[1]) <= 1
        assert stats["pool_resident_bytes"] == stats["pool_resident_blocks"] * ranks[0]["block_bytes"]


def test_one_kv_head_on_two_ranks_is_stored_once(site) -> None:
    with site(Topology("1kv-tp2", tp=2), model_name="qwen2-1kv") as node:
        for seed, length in enumerate(LENGTHS):
            node.hit_again(seed, length)
        ranks = node.ranks()
        assert [(rank["replicas"], rank["replica"]) for rank in ranks] == [(2, 0), (2, 1)]
        stats = node.stats()
        assert stats["pool_resident_bytes"] == stats["pool_resident_blocks"] * ranks[0]["block_bytes"]


def test_experts_over_ranks(site) -> None:
    topology = Topology("ep", tp=2)
    with site(topology, "--enable-expert-parallel", model_name="qwen3-moe", PYTHONPATH=EXPERTS) as node:
        node.hit_again(1, 700)
        assert {engine["strategy"] for engine in node.info()["engines"]} == {"TP2 PP1 EP"}


def test_latents_over_stages(site) -> None:
    with site(Topology("mla-pp2", pp=2), "--dtype=bfloat16", model_name="deepseek-v2") as node:
        node.hit_again(1, 700)
        # Three layers on two stages.
        assert sorted(rank["layers"] for rank in node.ranks()) == [1, 2]


def test_experts_over_ranks_and_stages(site) -> None:
    with site(Topology("moe-tp2pp2", tp=2, pp=2), model_name="qwen3-moe") as node:
        node.hit_again(1, 700)
        assert len(node.ranks()) == 4


@pytest.mark.parametrize("topology", [Topology("tp2dp2", tp=2, dp=2), Topology("pp2dp2", pp=2, dp=2)])
def test_replicas_of_several_ranks_share(site, topology: Topology) -> None:
    with site(topology) as node:
        node.hit_again(1, 700, replicas=(0, 1))
        node.hit_again(2, 517, replicas=(1, 0))
        assert len(node.ranks()) == 4
        # Both at once: stored once.
        before, tokens = node.settle(), prompt(3, 700)
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda replica: node.engine.ask(tokens, replica=replica), (0, 1)))
        assert answers[0].tokens == answers[1].tokens
        assert node.settle()["stored_blocks"] - before["stored_blocks"] == (700 + 7) // BLOCK_TOKENS


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_sliding_windows_load_only_what_the_window_needs(site, name: str) -> None:
    with site(Topology("window"), model_name=name) as node:
        before = node.stats()["loaded_blocks"]
        node.hit_again(1, 1000)
        loaded = node.stats()["loaded_blocks"] - before
        groups = len(node.daemon.client().call("info", {}, 30.0)["engines"])
        assert groups > 1
        whole, window = full_hit(1000) // BLOCK_TOKENS, 128 // BLOCK_TOKENS
        assert loaded == whole + (groups - 1) * window
        # A shorter prefix needs other window blocks: they are there too.
        node.engine.reset_local()
        assert node.engine.ask(prompt(1, 1000)[:500]).cached == full_hit(500)


@pytest.mark.parametrize("tp", [1, 2])
def test_recurrent_state_is_restored_from_snapshots(site, tp: int) -> None:
    with site(Topology(f"recurrent-tp{tp}", tp=tp), "--dtype=bfloat16", model_name="qwen3-next") as node:
        block_tokens = {engine["block_tokens"] for engine in node.info()["engines"]}.pop()
        node.hit_again(1, 5 * block_tokens + 40, block_tokens)
        node.hit_again(2, 3 * block_tokens + 1, block_tokens)
        # A prefix that ends where no snapshot was taken is no hit, as in the engine's own cache.
        node.engine.reset_local()
        assert node.engine.ask(prompt(1, 5 * block_tokens + 40)[: 2 * block_tokens + 9]).cached == 0


def test_recurrent_layers_without_snapshots_are_refused_in_one_line(site) -> None:
    flags = ("--dtype=bfloat16", "--no-enable-prefix-caching")
    with site(Topology("stateful"), *flags, model_name="qwen3-next") as node:
        assert node.engine.ask(prompt(1, 700)).tokens == node.engine.ask(prompt(1, 700)).tokens
        refusals = [line for line in node.engine.text().splitlines() if "HPKV is off" in line]
        assert refusals
        assert all("keeps no snapshots of its recurrent state" in line for line in refusals)
        assert node.stats()["stored_blocks"] == 0


def test_eight_bit_kv(site) -> None:
    with site(Topology("fp8"), "--kv-cache-dtype=fp8") as node:
        node.hit_again(1, 700)


@pytest.mark.parametrize(
    "speculation",
    [
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
        {"method": "draft_model", "num_speculative_tokens": 3, "model": "qwen2-1kv"},
    ],
    ids=["ngram", "draft"],
)
def test_speculative_decoding(site, model: Path, speculation: dict[str, object]) -> None:
    if "model" in speculation:
        speculation = speculation | {"model": str(make("qwen2-1kv", model.parent, dtype="float32"))}
    with site(Topology("spec"), f"--speculative-config={json.dumps(speculation)}") as node:
        node.hit_again(1, 700)
        node.hit_again(2, 517)


def test_adapters_never_share_with_each_other_or_the_base(site, model: Path, tmp_path: Path) -> None:
    paths = [make_adapter(tmp_path / name, model, seed) for seed, name in enumerate(("one", "two"))]
    modules = [f"{path.name}={path}" for path in paths]
    flags = ["--enable-lora", "--max-lora-rank=8", "--lora-modules", *modules]
    with site(Topology("lora"), *flags) as node:
        tokens = prompt(1, 517)
        for name in ("one", "two", "tiny"):
            assert node.engine.ask(tokens, model=name).cached == 0
        node.settle()
        node.engine.reset_local()
        assert [node.engine.ask(tokens, model=name).cached for name in ("two", "tiny", "one")] == [full_hit(517)] * 3


def test_an_adapter_is_what_is_in_its_files(daemons: DaemonFactory, model: Path, tmp_path: Path) -> None:
    path, other = (make_adapter(tmp_path / name, model, seed) for seed, name in enumerate(("mine", "other")))
    daemon = daemons(HPKV_KV_MEM_POOL_SIZE="128m", HPKV_SUBMIT_DEADLINE_MS=5000)
    flags = ["--enable-lora", "--max-lora-rank=8", "--lora-modules", f"mine={path}"]
    tokens = prompt(1, 517)

    def answers(engine: Vllm, count: int) -> list[tuple[list[int], int]]:
        found = []
        node = Site(daemon, engine)
        for _ in range(count):
            answer = engine.ask(tokens, model="mine")
            found.append((answer.tokens, answer.cached))
            node.settle()
            engine.reset_local()
        return found

    first = Vllm(model, Topology("lora"), daemon.env, tmp_path / "first.log", *flags)
    try:
        first.wait_ready()
        (cold, none), (warm, hit) = answers(first, 2)
        assert (none, hit, warm) == (0, full_hit(517), cold)
        weights, times = path / "adapter_model.safetensors", (path / "adapter_model.safetensors").stat()
        weights.write_bytes((other / "adapter_model.safetensors").read_bytes())
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
        # The engine has the old weights still, and nobody knows that from outside.
        assert answers(first, 2) == [(cold, 0), (cold, 0)]
        assert "the files of adapter mine have changed" in first.text()
    finally:
        first.kill()
    second = Vllm(model, Topology("lora"), daemon.env, tmp_path / "second.log", *flags)
    try:
        second.wait_ready()
        (fresh, none), (again, hit) = answers(second, 2)
        assert (none, hit, again) == (0, full_hit(517), fresh)
        assert fresh != cold
    finally:
        second.kill()


def test_prompts_given_as_embeddings_share_by_content(site) -> None:
    import torch

    def embedded(seed: int) -> str:
        values = torch.randn(320, 256, generator=torch.Generator().manual_seed(seed))
        file = io.BytesIO()
        torch.save(values, file)
        return base64.b64encode(file.getvalue()).decode()

    with site(Topology("tp1"), "--enable-prompt-embeds") as found:

        def ask(text: str) -> tuple[list[int], int]:
            found.settle()
            found.engine.reset_local()
            loaded = found.stats()["loaded_blocks"]
            body = {"model": "tiny", "prompt_embeds": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            reply = found.engine.post("/v1/completions", body | {"return_token_ids": True})
            return reply["choices"][0]["token_ids"], found.stats()["loaded_blocks"] - loaded

        one, other = embedded(1), embedded(2)
        first, none = ask(one)
        assert none == 0
        second, still_none = ask(other)
        assert (still_none, second != first) == (0, True)
        assert ask(one) == (first, full_hit(320) // BLOCK_TOKENS)
        assert ask(other) == (second, full_hit(320) // BLOCK_TOKENS)
