"""Stored by one engine, hit by the next: on every topology of one node, with equal answers and equal bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from reader import Reader
from vllm_server import BLOCK_TOKENS, Answer, Topology, Vllm, full_hit, prompt

from tests.conftest import DaemonFactory, DaemonHandle, without_hpkv

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TOPOLOGIES = [Topology("tp1"), Topology("tp2", tp=2), Topology("pp2", pp=2), Topology("tp2pp2", tp=2, pp=2)]
PROMPTS = [prompt(1, 1000), prompt(2, 1037), prompt(3, 1088)]
LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(5)]
LAYER_BYTES = 4 * BLOCK_TOKENS * 2 * 32 * 4
"""KV heads x tokens x (K and V) x head size x float32."""
OUTPUT_TOKENS = 100


@pytest.fixture(scope="module")
def reference(start_engine) -> list[Answer]:
    """Answers of an engine that has the connector but not the switch: exactly an engine without HPKV."""
    environment = without_hpkv(os.environ) | {"VLLM_ENABLE_HPKV": "0"}
    engine = start_engine(Topology("off"), environment)
    answers = [engine.ask(tokens, OUTPUT_TOKENS) for tokens in PROMPTS]
    log = engine.text()
    engine.stop()
    assert log.count("HPKV is off: set VLLM_ENABLE_HPKV=1 to use it") == 1
    assert [answer.cached for answer in answers] == [0, 0, 0]
    return answers


@dataclass
class Run:
    """What two engines in a row did on one daemon."""

    topology: Topology
    daemon: DaemonHandle
    cold: list[Answer]
    warm: list[Answer]
    stored: int
    loaded: int
    bytes_cold: list[list[np.ndarray]]
    second: Vllm


def kv_bytes(daemon: DaemonHandle, namespace: bytes) -> list[list[np.ndarray]]:
    """All resident blocks of the three prompts."""
    reader = Reader(daemon.socket, namespace, LAYERS, LAYER_BYTES, 32)
    try:
        return [reader.blocks(tokens, BLOCK_TOKENS) for tokens in PROMPTS]
    finally:
        reader.close()


def settled(daemon: DaemonHandle, name: str, value: int) -> dict[str, int]:
    """Statistics once the counter has reached the value."""
    channel = daemon.client()
    deadline = time.monotonic() + 20
    while True:
        stats = channel.call("stats", {}, 5)
        if stats[name] >= value:
            return stats
        assert time.monotonic() < deadline, f"{name} is {stats[name]}, not {value}"
        time.sleep(0.05)


@pytest.fixture(scope="module", params=TOPOLOGIES, ids=lambda topology: topology.name)
def run(request: pytest.FixtureRequest, start_engine, daemons: DaemonFactory) -> Iterator[Run]:
    """Cold on a first engine, killed; warm on a second one."""
    topology = request.param
    daemon = daemons(HPKV_KV_MEM_POOL_SIZE="256m", HPKV_SUBMIT_DEADLINE_MS=5000)
    first = start_engine(topology, daemon)
    cold = [first.ask(tokens, OUTPUT_TOKENS) for tokens in PROMPTS]
    stored = sum((len(tokens) + OUTPUT_TOKENS - 1) // BLOCK_TOKENS for tokens in PROMPTS)
    settled(daemon, "stored_blocks", stored)
    namespace = first.namespace
    first.kill()
    bytes_cold = kv_bytes(daemon, namespace)
    second = start_engine(topology, daemon)
    warm = [second.ask(tokens, OUTPUT_TOKENS) for tokens in PROMPTS]
    stats = settled(daemon, "stored_blocks", stored)
    yield Run(topology, daemon, cold, warm, stats["stored_blocks"], stats["loaded_blocks"], bytes_cold, second)
    second.stop()
    daemon.stop()


def test_answers_equal_an_engine_without_the_connector(run: Run, reference: list[Answer]) -> None:
    for mine, theirs in zip(run.cold + run.warm, reference + reference, strict=True):
        assert mine.tokens == theirs.tokens


def test_second_engine_hits_every_full_block_and_computes_the_rest(run: Run) -> None:
    assert [answer.cached for answer in run.cold] == [0, 0, 0]
    assert [answer.cached for answer in run.warm] == [full_hit(len(tokens)) for tokens in PROMPTS]


def test_every_block_is_stored_once_and_loaded_once_per_rank(run: Run) -> None:
    full_blocks = [(len(tokens) + OUTPUT_TOKENS - 1) // BLOCK_TOKENS for tokens in PROMPTS]
    ranks = run.topology.tp * run.topology.pp
    readers = 1
    hits = sum(full_hit(len(tokens)) // BLOCK_TOKENS for tokens in PROMPTS)
    assert run.stored == sum(full_blocks)
    assert run.loaded == hits * ranks + sum(len(blocks) for blocks in run.bytes_cold) * readers


def test_recomputed_blocks_equal_the_stored_ones_byte_for_byte(run: Run) -> None:
    assert [len(blocks) for blocks in run.bytes_cold] == [len(tokens) // BLOCK_TOKENS for tokens in PROMPTS]
    run.second.reset_everything()
    assert run.daemon.client().call("stats", {}, 5)["pool_resident_blocks"] == 0
    again = [run.second.ask(tokens, OUTPUT_TOKENS) for tokens in PROMPTS]
    assert [answer.cached for answer in again] == [0, 0, 0]
    settled(run.daemon, "pool_resident_blocks", run.stored)
    for before, after in zip(run.bytes_cold, kv_bytes(run.daemon, run.second.namespace), strict=True):
        assert len(before) == len(after)
        for one, other in zip(before, after, strict=True):
            assert np.array_equal(one, other)


def test_decoded_blocks_are_hits_of_the_next_turn(run: Run) -> None:
    conversation = PROMPTS[0] + run.warm[0].tokens
    run.second.reset_local()
    answer = run.second.ask([*conversation, 7, 8, 9])
    assert answer.cached == full_hit(len(conversation) + 3)


def test_the_daemon_is_consistent_afterwards(run: Run) -> None:
    channel = run.daemon.client()
    assert channel.call("check", {}, 5)["ok"]
    stats = channel.call("stats", {}, 5)
    assert (stats["load_failures"], stats["store_failures"], stats["internal_errors"]) == (0, 0, 0)
    info = channel.call("info", {}, 5)
    ranks = info["engines"][0]["ranks"]
    assert {rank["place"] for rank in ranks} == {
        f"tp{tp} pp{pp}" for tp in range(run.topology.tp) for pp in range(run.topology.pp)
    }
    assert sum(rank["block_bytes"] for rank in ranks) == LAYER_BYTES * len(LAYERS)


def test_pool_path_is_the_users(run: Run) -> None:
    assert Path(run.daemon.client().call("info", {}, 5)["pool"]["path"]).parent == run.daemon.pool_directory
