"""Weights changed while the engine runs, over its own API: nothing stale is served, nothing wrong is stored."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from node import Node, node_of
from vllm_server import Topology, Vllm, full_hit

from tests.conftest import DaemonFactory

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LENGTH = 640


@pytest.fixture(scope="module")
def other_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    from safetensors.torch import load_file, save_file

    other = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(model, other)
    for path in other.glob("*.safetensors"):
        weights = load_file(path)
        save_file({name: -value if "k_proj" in name else value for name, value in weights.items()}, path)
    return other


@pytest.fixture(scope="module", params=[Topology("tp1"), Topology("tp2", tp=2)], ids=["tp1", "tp2"])
def node(
    request: pytest.FixtureRequest, start_engine, daemons: DaemonFactory, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    with node_of(start_engine, daemons, tmp_path_factory.mktemp("reloads"), request.param) as made:
        yield made


def reload(engine: Vllm, model: Path) -> None:
    """Have every rank read its weights from another checkpoint."""
    engine.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(model)}})


def store_count(node: Node) -> int:
    """Blocks stored so far, once nothing is under way."""
    return node.quiet()["stored_blocks"]


def test_new_weights_find_nothing_old_and_leave_nothing_wrong(node: Node, model: Path, other_model: Path) -> None:
    tokens = node.fresh(LENGTH)
    old = node.warm(tokens)
    assert (node.engine.ask(tokens).tokens, node.hits(tokens)) == (old, True)

    reload(node.engine, other_model)
    node.engine.reset_local()
    stored = store_count(node)
    first = node.engine.ask(tokens)
    assert first.cached == 0
    assert first.tokens != old
    assert store_count(node) == stored, "blocks were stored before the engine's cache was known to be clean"

    node.engine.reset_everything()
    again = node.warm(tokens)
    assert again == first.tokens
    assert (node.engine.ask(tokens).tokens, node.hits(tokens)) == (again, True)

    # With its first weights back it is still another engine: what it stored in between is not asked for.
    node.engine.reset_everything()
    reload(node.engine, model)
    back = node.engine.ask(tokens)
    assert (back.tokens, back.cached) == (old, 0)


def test_a_sleeping_engine_wakes_up_without_what_it_had(node: Node) -> None:
    tokens = node.fresh(LENGTH)
    node.engine.reset_everything()
    cold = node.warm(tokens)
    assert node.hits(tokens)
    node.engine.post("/sleep?level=1")
    node.engine.post("/wake_up")
    answer = node.engine.ask(tokens)
    assert (answer.tokens, answer.cached) == (cold, 0)
    node.quiet()
    node.until(lambda _: node.hits(tokens))
    assert full_hit(LENGTH) == 576


def test_a_reload_in_the_middle_of_a_load_makes_it_a_miss(node: Node, model: Path, other_model: Path) -> None:
    reload(node.engine, model)
    node.engine.reset_everything()
    # The first request after a change tells of it, and is not cached itself.
    node.engine.ask(node.fresh(64))
    tokens = node.fresh(LENGTH)
    node.warm(tokens)
    node.set_faults("load=delay:0.2")
    answers = []
    request = threading.Thread(target=lambda: answers.append(node.engine.ask(tokens)))
    request.start()
    node.until(lambda stats: stats["leases"] > 0)
    reload(node.engine, other_model)
    request.join(60)
    node.set_faults("")
    node.engine.reset_everything()
    fresh = node.engine.ask(tokens)
    assert fresh.cached == 0
    assert [answer.tokens for answer in answers] == [fresh.tokens]
