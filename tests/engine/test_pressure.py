"""An engine with hardly any KV cache, and daemons with hardly any pool: preemptions, slow copies, drops."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from node import Node, node_of
from reader import Reader, learn_hashes
from test_topologies import LAYER_BYTES, LAYERS
from vllm_server import BLOCK_TOKENS, Topology, full_hit, prompt

from tests.conftest import DaemonFactory

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ENGINE_BLOCKS = 40
STORM = [prompt(seed, 500) for seed in range(40, 46)]
OUTPUT_TOKENS = 300


@pytest.fixture(scope="module")
def node(start_engine, daemons: DaemonFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    few = f"--num-gpu-blocks-override={ENGINE_BLOCKS}"
    directory = tmp_path_factory.mktemp("pressure")
    with node_of(start_engine, daemons, directory, Topology("tp1"), few, HPKV_LOAD_DEADLINE_SECONDS=20) as made:
        yield made


def kv(node: Node, tokens: list[int]) -> list[np.ndarray]:
    """Resident blocks of a prompt."""
    reader = Reader(node.daemon.socket, node.engine.namespace, LAYERS, LAYER_BYTES, 32)
    try:
        return reader.blocks(tokens, BLOCK_TOKENS)
    finally:
        reader.close()


@pytest.fixture(scope="module")
def alone(node: Node) -> tuple[list[list[int]], list[list[np.ndarray]]]:
    """Answers and KV of each request of the storm when it runs by itself."""
    learn_hashes((one, BLOCK_TOKENS, "") for one in STORM)
    tokens = [node.engine.ask(one, OUTPUT_TOKENS).tokens for one in STORM]
    node.quiet()
    blocks = [kv(node, one) for one in STORM]
    assert [len(one) for one in blocks] == [len(tokens) // BLOCK_TOKENS for tokens in STORM]
    node.engine.reset_everything()
    return tokens, blocks


@pytest.mark.parametrize("rules", ["", "store=delay:0.02", "load=delay:0.01;store=delay:0.01"])
def test_preempted_requests_come_back_with_right_answers_and_right_bytes(node: Node, alone, rules: str) -> None:
    expected, blocks = alone
    node.engine.reset_everything()
    node.set_faults(rules)
    before = node.engine.metric("vllm:num_preemptions_total")
    loaded = node.stats()["loaded_blocks"]
    answers = node.engine.ask_all(STORM, OUTPUT_TOKENS)
    node.set_faults("")
    assert node.engine.metric("vllm:num_preemptions_total") > before
    assert [answer.tokens for answer in answers] == expected
    stats = node.quiet()
    if not rules:
        # With slow stores the daemon may have no more of it by then than the engine itself.
        assert stats["loaded_blocks"] > loaded, "what a preempted request still has in the daemon is loaded back"
    for tokens, right in zip(STORM, blocks, strict=True):
        for stored, wanted in zip(kv(node, tokens), right, strict=False):
            # Another batch shape rounds differently; another request's block would be far off.
            np.testing.assert_allclose(stored, wanted, rtol=1e-3, atol=1e-4)
    assert node.daemon.client().call("check", {}, 30.0)["ok"]


def test_the_engine_never_stalls_on_slow_stores(node: Node) -> None:
    node.engine.reset_everything()
    node.set_faults("store=delay:0.2")
    started = time.monotonic()
    node.engine.ask_all([node.fresh(400) for _ in range(8)], 20)
    assert time.monotonic() - started < 60
    node.set_faults("")
    node.quiet()


def test_all_blocks_of_the_engine_are_free_after_storms(node: Node) -> None:
    tokens = node.fresh((ENGINE_BLOCKS - 10) * BLOCK_TOKENS)
    cold = node.warm(tokens)
    answer = node.engine.ask(tokens)
    assert (answer.tokens, answer.cached) == (cold, full_hit(len(tokens)))


def test_a_pool_of_a_few_blocks_drops_stores_and_never_a_request(node: Node) -> None:
    prompts = [node.fresh(640) for _ in range(16)]
    expected = [node.engine.ask(tokens).tokens for tokens in prompts]
    node.daemon.stop()
    node.daemon.env["HPKV_KV_MEM_POOL_SIZE"] = "2m"
    node.daemon.restart()
    node.until(lambda stats: stats["engines"] == 1)
    assert [answer.tokens for answer in node.engine.ask_all(prompts)] == expected
    stats = node.quiet()
    assert 0 < stats["pool_resident_blocks"] * LAYER_BYTES * len(LAYERS) <= 2 << 20
    assert stats["evicted_blocks"] + stats["dropped_full_blocks"] + stats["dropped_orphan_blocks"] > 0
    assert node.daemon.client().call("check", {}, 30.0)["ok"]
    assert Path(node.daemon.pool_directory, "pool").stat().st_size == 2 << 20
