"""Two nodes and one store: a prompt that was computed on the first is an exact hit on the second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from nodes import Node, outer_address, two_nodes
from reader import Reader, learn_hashes
from test_topologies import LAYER_BYTES, LAYERS
from vllm_server import BLOCK_TOKENS, Answer, Topology, Vllm, full_hit, prompt

from tests.conftest import DaemonFactory, DaemonHandle
from tests.mooncakes import MooncakeCluster
from tests.stores import Folder, S3Server
from tests.support import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TOKENS = prompt(950, 1000)
OUTPUT_TOKENS = 16
Store = Folder | S3Server | MooncakeCluster
BLOCKS = (len(TOKENS) + OUTPUT_TOKENS - 1) // BLOCK_TOKENS


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    with two_nodes() as made:
        yield made


@pytest.fixture(params=["file", "s3", "mooncake"])
def store(request: pytest.FixtureRequest, nodes: list[Node], tmp_path: Path) -> Iterator[Store]:
    """A store that both nodes reach."""
    if request.param == "file":
        path = tmp_path / "shared"
        path.mkdir()
        yield Folder(path)
        return
    if request.param == "mooncake":
        pytest.importorskip("mooncake.store", exc_type=ImportError)
        cluster = MooncakeCluster(outer_address(nodes))
        yield cluster
        cluster.close()
        return
    server = S3Server(outer_address(nodes))
    yield server
    server.close()


class Site:
    """One node's daemon with a pool of its own, and the engines that run there one after another."""

    def __init__(self, node: Node, daemons: DaemonFactory, store: Store, model: Path, logs: Path) -> None:
        self._node, self._model, self._logs = node, model, logs
        self._engines = 0
        self.daemon: DaemonHandle = daemons(
            *node.prefix,
            HPKV_KV_MEM_POOL_SIZE="64m",
            HPKV_REMOTE=store.url,
            HPKV_REMOTE_ADMISSION="all",
            HPKV_SUBMIT_DEADLINE_MS=5000,
            HPKV_LOAD_DEADLINE_SECONDS=20,
            **store.variables,
        )

    def ask(self, topology: Topology) -> tuple[Answer, list[np.ndarray]]:
        """Start an engine, ask it for the prompt, and end it; its answer, and the KV that the daemon has then."""
        self._engines += 1
        log = self._logs / f"{self._node.number}-{self._engines}.log"
        engine = Vllm(self._model, topology, self.daemon.env, log, host=self._node.address, prefix=self._node.prefix)
        try:
            engine.wait_ready()
            answer = engine.ask(TOKENS, OUTPUT_TOKENS)
            self.settle()
            reader = Reader(self.daemon.socket, engine.namespace, LAYERS, LAYER_BYTES, 32)
            try:
                return answer, reader.blocks(TOKENS, BLOCK_TOKENS)
            finally:
                reader.close()
        finally:
            engine.kill()

    def settle(self) -> None:
        """Wait until nothing is on its way to the store."""
        channel = self.daemon.client()

        def idle() -> bool:
            usage = channel.call("info", {}, 30.0)["remote"]
            return not usage["queued_blocks"] and not usage["queued_bytes"]

        wait_until(idle, 30)

    def stats(self) -> dict[str, int]:
        return self.daemon.client().call("stats", {}, 30.0)

    def rebuild_empty(self) -> None:
        """The daemon is killed, its pool is gone."""
        self.daemon.kill()
        for file in self.daemon.pool_directory.iterdir():
            file.unlink()
        self.daemon.restart()


def test_a_prompt_of_one_node_is_an_exact_hit_on_another_and_on_the_first_rebuilt_empty(
    nodes: list[Node], daemons: DaemonFactory, store: Store, model: Path, tmp_path: Path
) -> None:
    learn_hashes([(TOKENS, BLOCK_TOKENS, "")])
    one, other = (Site(node, daemons, store, model, tmp_path) for node in nodes)
    cold, before = one.ask(Topology("tp2", tp=2))
    assert cold.cached == 0
    assert one.stats()["remote_written_blocks"] >= BLOCKS

    warm, after = other.ask(Topology("pp2", pp=2))
    assert (warm.tokens, warm.cached) == (cold.tokens, full_hit(len(TOKENS)))
    assert other.stats()["remote_read_blocks"] >= full_hit(len(TOKENS)) // BLOCK_TOKENS
    assert len(before) >= len(TOKENS) // BLOCK_TOKENS
    for mine, theirs in zip(before, after, strict=False):
        assert np.array_equal(mine, theirs)

    if isinstance(store, S3Server):
        one.rebuild_empty()
        again, _ = one.ask(Topology("tp1"))
        assert (again.tokens, again.cached) == (cold.tokens, full_hit(len(TOKENS)))
    for site in (one, other):
        assert site.daemon.client().call("check", {}, 30.0)["ok"]
        assert site.stats()["remote_bad_blocks"] == site.stats()["internal_errors"] == 0
