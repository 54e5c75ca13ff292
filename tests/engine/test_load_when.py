"""Load or recompute: an engine that finds loads slower than computing leaves hits alone, and comes back to them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hpkv_vllm.pace import LEAST_SAMPLES, PROBE_EVERY
from node import Node, node_of
from vllm_server import Topology, full_hit

from tests.conftest import DaemonFactory

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LENGTH = 640


@pytest.fixture(scope="module")
def node(start_engine, daemons: DaemonFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    directory = tmp_path_factory.mktemp("load-when")
    with node_of(start_engine, daemons, directory, Topology("tp1"), HPKV_LOAD_WHEN="faster") as made:
        yield made


def counters(node: Node) -> dict[str, int]:
    """What the engine counts itself."""
    found = node.info()["engines"][0]["counters"]
    assert isinstance(found, dict)
    return found


def test_slow_loads_are_left_alone_and_fast_ones_come_back(node: Node) -> None:
    known = [node.fresh(LENGTH) for _ in range(LEAST_SAMPLES + 1)]
    cold = [node.warm(tokens) for tokens in known]
    assert node.engine.ask(known[-1]).cached == full_hit(LENGTH)

    node.set_faults("load=delay:0.2")
    slow = [node.engine.ask(tokens) for tokens in known[:LEAST_SAMPLES]]
    assert [answer.tokens for answer in slow] == cold[:LEAST_SAMPLES]
    node.engine.reset_local()
    left_alone = node.engine.ask(known[0])
    assert (left_alone.tokens, left_alone.cached) == (cold[0], 0)
    node.until(lambda _: counters(node).get("hits_recomputed", 0) >= 1)
    assert counters(node)["hit_tokens_recomputed"] >= full_hit(LENGTH)

    stored = node.stats()["stored_blocks"]
    node.set_faults("")
    cached = []
    for _ in range(6 * PROBE_EVERY):
        node.engine.reset_local()
        answer = node.engine.ask(known[0])
        assert answer.tokens == cold[0]
        cached.append(answer.cached)
        if cached[-2:] == [full_hit(LENGTH)] * 2:
            break
    assert cached[-2:] == [full_hit(LENGTH)] * 2
    # What was left alone is there: nobody stored it again.
    assert node.stats()["stored_blocks"] == stored


def test_explain_names_the_request_and_why_it_missed(node: Node) -> None:
    tokens = node.fresh(LENGTH)
    node.engine.ask(tokens)
    lookup = node.daemon.client().call("explain", {"last": 1}, 30.0)["lookups"][0]
    assert lookup["request"].startswith("cmpl-")
    assert (lookup["asked_blocks"], lookup["hit_blocks"]) == (full_hit(LENGTH) // 64, 0)
    assert lookup["reason"] == "never stored here, or too long ago to tell"
