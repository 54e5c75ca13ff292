"""Every fault at every point, on the real engine: same tokens, same bytes, in bounded time, and a sound daemon."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from node import Node, node_of
from reader import Reader, learn_hashes
from test_topologies import LAYER_BYTES, LAYERS
from vllm_server import BLOCK_TOKENS, Topology, prompt

from tests.conftest import DaemonFactory

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TOPOLOGIES = [Topology("tp1"), Topology("tp2pp2", tp=2, pp=2)]
POINTS = ("match", "reserve", "store@2", "commit", "load@2", "release")
ACTIONS = ("fail", "delay", "die")
DELAY_SECONDS = 3.0
"""Longer than every deadline that the nodes of these tests have."""
MOST_SECONDS = 20.0
PROMPTS = {
    (point, action): prompt(300 + i, 640) for i, (point, action) in enumerate((p, a) for p in POINTS for a in ACTIONS)
}


@pytest.fixture(scope="module", params=TOPOLOGIES, ids=[topology.name for topology in TOPOLOGIES])
def node(
    request: pytest.FixtureRequest, start_engine, daemons: DaemonFactory, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    learn_hashes((tokens, BLOCK_TOKENS, "") for tokens in PROMPTS.values())
    with node_of(
        start_engine,
        daemons,
        tmp_path_factory.mktemp("faults"),
        request.param,
        HPKV_SUBMIT_DEADLINE_MS=1000,
        HPKV_LOAD_DEADLINE_SECONDS=2,
        HPKV_LEASE_SECONDS=2,
    ) as made:
        yield made


def kv(node: Node, tokens: list[int]) -> list[np.ndarray]:
    """Resident blocks of a prompt."""
    reader = Reader(node.daemon.socket, node.engine.namespace, LAYERS, LAYER_BYTES, 32)
    try:
        return reader.blocks(tokens, BLOCK_TOKENS)
    finally:
        reader.close()


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("point", POINTS)
def test_answers_and_bytes_are_right_whatever_fails(node: Node, point: str, action: str) -> None:
    tokens = PROMPTS[point, action]
    stored_before = point in ("match", "load@2", "release")
    before = node.warm(tokens) if stored_before else None
    struck = len(node.fired())
    node.set_faults(f"{point}={action}" + (f":{DELAY_SECONDS}" if action == "delay" else ""))
    answer = node.engine.ask(tokens)
    node.until(lambda _: node.fired()[struck:]) if node.daemon.process.poll() is None else None
    assert point.partition("@")[0] in node.fired()[struck:]
    assert answer.seconds < MOST_SECONDS
    node.heal()
    node.until(lambda _: node.hits(tokens))
    node.quiet()
    node.check()
    kept = kv(node, tokens)

    node.engine.reset_everything()
    undisturbed = node.warm(tokens)
    fresh = kv(node, tokens)
    assert answer.tokens == undisturbed
    assert before in (None, undisturbed)
    assert len(kept) == len(fresh) == len(tokens) // BLOCK_TOKENS
    for one, other in zip(kept, fresh, strict=True):
        assert np.array_equal(one, other)
