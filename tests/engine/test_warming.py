"""A prompt is warmed and pinned through a real engine, and outlives a flood of others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from node import Node, node_of
from vllm_server import Topology, full_hit

from tests.conftest import DaemonFactory
from tests.daemons import hpkvd

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LENGTH = 640
"""Ten blocks, nine of which a cache may serve."""


@pytest.fixture(scope="module")
def node(start_engine, daemons: DaemonFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    directory = tmp_path_factory.mktemp("warming")
    with node_of(start_engine, daemons, directory, Topology("tp1"), HPKV_KV_MEM_POOL_SIZE="16m") as made:
        yield made


def test_a_warmed_and_pinned_prompt_outlives_a_flood(node: Node, tmp_path: Path) -> None:
    kept, lost = node.fresh(LENGTH), node.fresh(LENGTH)
    file = tmp_path / "prompt.json"
    env = node.daemon.env
    answers = {}
    for name, tokens, more in (("lost", lost, ()), ("kept", kept, ("--pin",))):
        file.write_text(json.dumps(tokens))
        done = hpkvd("warm", "--url", node.engine.url, "--tokens", str(file), "--json", *more, env=env)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["hit_blocks"] == told["asked_blocks"] == full_hit(LENGTH) // 64
        answers[name] = node.engine.ask(tokens).tokens
    evicted = node.stats()["evicted_blocks"]
    for _ in range(200):
        node.engine.ask(node.fresh(LENGTH), 1)
        if node.stats()["evicted_blocks"] - evicted > 200:
            break
    node.engine.reset_local()
    again = node.engine.ask(kept)
    assert (again.tokens, again.cached) == (answers["kept"], full_hit(LENGTH))
    assert node.engine.ask(lost).cached == 0
