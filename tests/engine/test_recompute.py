"""Requests that a pipeline has to start again get the KV they still have back on every stage: tokens are counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from node import Node, node_of
from vllm_server import BLOCK_TOKENS, Topology, full_hit, prompt

from tests.conftest import DaemonFactory

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ENGINE_BLOCKS = 40
STORM = [prompt(seed, 500) for seed in range(60, 66)]
STORM_OUTPUT = 200
COUNT = Path(__file__).with_name("count_computed_patch")


class Pipeline:
    """A node whose engine of two stages counts the tokens it computes."""

    def __init__(self, node: Node, counted: Path) -> None:
        self.node = node
        self._counted = counted

    def computed(self) -> int:
        """Tokens that the engine has computed since it started."""
        return sum(map(int, self._counted.read_text().split()))


@pytest.fixture(scope="module")
def pipeline(start_engine, daemons: DaemonFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    directory = tmp_path_factory.mktemp("recompute")
    counted = directory / "counted"
    with node_of(
        start_engine,
        daemons,
        directory,
        Topology("pp2", pp=2),
        f"--num-gpu-blocks-override={ENGINE_BLOCKS}",
        variables={"PYTHONPATH": str(COUNT), "COUNT_COMPUTED": str(counted)},
        HPKV_LOAD_DEADLINE_SECONDS=20,
    ) as node:
        yield Pipeline(node, counted)


@pytest.mark.parametrize("nth", [1, 12])
def test_a_load_that_failed_on_one_stage_is_loaded_again_on_both(pipeline: Pipeline, nth: int) -> None:
    tokens = pipeline.node.fresh(640)
    cold = pipeline.node.warm(tokens)
    before, computed = pipeline.node.stats(), pipeline.computed()
    pipeline.node.set_faults(f"load@{nth}=fail")
    answer = pipeline.node.engine.ask(tokens)
    assert (answer.tokens, answer.cached) == (cold, full_hit(640))
    # The last block of the prompt, and each token of the answer but the last.
    assert pipeline.computed() - computed == 640 - full_hit(640) + 7
    after = pipeline.node.stats()
    assert after["load_failures"] - before["load_failures"] == 1
    # Once on the stage that went well at first, and once more on both.
    assert after["loaded_blocks"] - before["loaded_blocks"] == 3 * full_hit(640) // BLOCK_TOKENS


def test_a_daemon_that_fails_every_load_is_not_asked_for_ever(pipeline: Pipeline) -> None:
    tokens = pipeline.node.fresh(640)
    cold = pipeline.node.warm(tokens)
    computed = pipeline.computed()
    pipeline.node.set_faults("load=fail")
    answer = pipeline.node.engine.ask(tokens)
    pipeline.node.set_faults("")
    assert (answer.tokens, answer.cached) == (cold, 0)
    assert pipeline.computed() - computed == 640 + 7


def test_preempted_requests_compute_only_what_the_daemon_does_not_have(pipeline: Pipeline) -> None:
    expected = [pipeline.node.engine.ask(tokens, STORM_OUTPUT).tokens for tokens in STORM]
    pipeline.node.quiet()
    pipeline.node.engine.reset_everything()
    computed, before = pipeline.computed(), pipeline.node.engine.metric("vllm:num_preemptions_total")
    answers = pipeline.node.engine.ask_all(STORM, STORM_OUTPUT)
    assert [answer.tokens for answer in answers] == expected
    preemptions = pipeline.node.engine.metric("vllm:num_preemptions_total") - before
    again = pipeline.computed() - computed - sum(len(tokens) + STORM_OUTPUT - 1 for tokens in STORM)
    assert preemptions > 0
    # Each comes back with all its blocks but those that were not full, or on their way, when it had to go.
    assert again <= preemptions * 3 * BLOCK_TOKENS
