"""One engine over two nodes: each node's daemon keeps its ranks' part, and a hit is what all of them have."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from nodes import Node, free_port, two_nodes
from reader import Reader
from vllm_server import BLOCK_TOKENS, Answer, Topology, Vllm, full_hit, prompt

from hpkv_client.address import write_new_key
from tests.conftest import DaemonFactory, DaemonHandle

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(5)]
LAYER_BYTES = 4 * BLOCK_TOKENS * 2 * 32 * 4
"""KV heads x tokens x (K and V) x head size x float32."""
LENGTHS = (700, 517)
TP, PP = Topology("nodes-tp", tp=2), Topology("nodes-pp", pp=2)
PARTS = {
    # Names of the layers on each node, and the bytes of each.
    "nodes-tp": ([[f"{name}[{2 * k}:{2 * k + 2}/4]" for name in LAYERS] for k in range(2)], LAYER_BYTES // 2),
    "nodes-pp": ([LAYERS[:3], LAYERS[3:]], LAYER_BYTES),
}


class Cluster:
    """Two nodes with a daemon each, and at times an engine over both."""

    def __init__(self, nodes: list[Node], daemons: list[DaemonHandle], topology: Topology) -> None:
        self.nodes = nodes
        self.daemons = daemons
        self.topology = topology
        self.processes: list[Vllm] = []

    @property
    def engine(self) -> Vllm:
        """The process that serves, on the first node."""
        return self.processes[0]

    def start(self, model: Path, directory: Path) -> None:
        """A new engine, once it serves."""
        port = free_port()
        for node, daemon in zip(self.nodes, self.daemons, strict=True):
            environment = daemon.env | {
                "VLLM_HOST_IP": node.address,
                "GLOO_SOCKET_IFNAME": node.interface,
                # One rank on each node, and one core of the machine for each.
                "VLLM_CPU_OMP_THREADS_BIND": "1|0" if node.number else "0|1",
            }
            flags = [f"--nnodes=2 --node-rank={node.number}", f"--master-addr={self.nodes[0].address}"]
            flags = [*" ".join(flags).split(), f"--master-port={port}", *(["--headless"] if node.number else [])]
            log = directory / f"{self.topology.name}-{node.number}.log"
            self.processes.append(
                Vllm(model, self.topology, environment, log, *flags, host=node.address, prefix=node.prefix)
            )
        self.engine.wait_ready()

    def kill(self) -> None:
        """End the engine on both nodes at once."""
        for process in self.processes:
            process.kill()
        self.processes = []

    def stats(self) -> list[dict[str, int]]:
        """Statistics of both daemons."""
        return [daemon.client().call("stats", {}, 30.0) for daemon in self.daemons]

    def settle(self) -> list[dict[str, int]]:
        """Statistics once nothing moves any more on either node."""
        return [self._settled(daemon) for daemon in self.daemons]

    def _settled(self, daemon: DaemonHandle) -> dict[str, int]:
        channel, deadline = daemon.client(), time.monotonic() + 20
        while (stats := channel.call("stats", {}, 30.0))["pool_reserved_blocks"] or stats["leases"]:
            assert time.monotonic() < deadline, stats
            time.sleep(0.02)
        return stats

    def blocks(self, tokens: list[int], salt: str = "") -> list[list[np.ndarray]]:
        """What each node keeps of a prompt."""
        layers, layer_bytes = PARTS[self.topology.name]
        found = []
        for daemon, names in zip(self.daemons, layers, strict=True):
            reader = Reader(daemon.socket, self.engine.namespace, names, layer_bytes, 32)
            try:
                found.append(reader.blocks(tokens, BLOCK_TOKENS, salt))
            finally:
                reader.close()
        return found


@pytest.fixture(scope="module", params=[TP, PP], ids=["tp2", "pp2"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("nodes")
    key, port = directory / "cluster.key", free_port()
    write_new_key(key)
    factory = DaemonFactory()
    with ExitStack() as stack:
        nodes = stack.enter_context(two_nodes())
        stack.callback(factory.close)
        daemons = [
            factory(
                *node.prefix,
                HPKV_LISTEN=f"{node.address}:{port}",
                HPKV_KEY_FILE=key,
                HPKV_KV_MEM_POOL_SIZE="128m",
                HPKV_SUBMIT_DEADLINE_MS=5000,
            )
            for node in nodes
        ]
        made = Cluster(nodes, daemons, request.param)
        stack.callback(made.kill)
        made.start(model, directory)
        yield made


@pytest.fixture(scope="module")
def cold(cluster: Cluster) -> list[Answer]:
    """The first time that any of the prompts is asked for."""
    answers = [cluster.engine.ask(prompt(seed, length)) for seed, length in enumerate(LENGTHS)]
    cluster.settle()
    return answers


def test_each_node_keeps_its_part_and_a_prefix_is_hit_on_both(cluster: Cluster, cold: list[Answer]) -> None:
    assert [answer.cached for answer in cold] == [0, 0]
    blocks = sum((length + 7) // BLOCK_TOKENS for length in LENGTHS)
    layers, layer_bytes = PARTS[cluster.topology.name]
    for stats, names in zip(cluster.settle(), layers, strict=True):
        assert stats["stored_blocks"] == blocks
        assert stats["pool_resident_bytes"] == blocks * len(names) * layer_bytes
    cluster.engine.reset_local()
    warm = [cluster.engine.ask(prompt(seed, length)) for seed, length in enumerate(LENGTHS)]
    assert [answer.cached for answer in warm] == [full_hit(length) for length in LENGTHS]
    assert [answer.tokens for answer in warm] == [answer.tokens for answer in cold]
    for stats in cluster.settle():
        assert stats["loaded_blocks"] == sum(full_hit(length) // BLOCK_TOKENS for length in LENGTHS)
        assert (stats["load_failures"], stats["store_failures"], stats["internal_errors"]) == (0, 0, 0)


def test_both_daemons_know_their_ranks_and_the_scheduler(cluster: Cluster, cold: list[Answer]) -> None:
    del cold
    for number, daemon in enumerate(cluster.daemons):
        info = daemon.client().call("info", {}, 30.0)
        (engine,) = info["engines"]
        place = f"tp{number} pp0" if cluster.topology is TP else f"tp0 pp{number}"
        assert [rank["place"] for rank in engine["ranks"]] == [f"{place} node{number}"]
        (scheduler,) = [session for session in info["sessions"] if session["name"] == "scheduler"]
        assert bool(scheduler["host"]) == bool(number)


def test_what_is_computed_again_equals_what_each_node_keeps_byte_for_byte(cluster: Cluster, cold: list[Answer]) -> None:
    del cold
    tokens = prompt(0, LENGTHS[0])
    before = cluster.blocks(tokens)
    assert cluster.engine.ask(tokens, cache_salt="again").cached == 0
    cluster.settle()
    after = cluster.blocks(tokens, "again")
    for one, other in zip(before, after, strict=True):
        assert len(one) == len(other) == LENGTHS[0] // BLOCK_TOKENS
        assert all(np.array_equal(left, right) for left, right in zip(one, other, strict=True))


def test_what_one_node_has_lost_is_no_hit(cluster: Cluster, cold: list[Answer]) -> None:
    cluster.daemons[1].client().call("clear", {}, 30.0)
    cluster.engine.reset_local()
    tokens = prompt(0, LENGTHS[0])
    again = cluster.engine.ask(tokens)
    assert (again.cached, again.tokens) == (0, cold[0].tokens)
    cluster.settle()
    cluster.engine.reset_local()
    assert cluster.engine.ask(tokens).cached == full_hit(LENGTHS[0])


def hits_again(cluster: Cluster, tokens: list[int], seconds: float = 30.0) -> None:
    """Poll until a prompt is a full hit of the daemons again."""
    deadline = time.monotonic() + seconds
    while True:
        cluster.engine.reset_local()
        if cluster.engine.ask(tokens).cached == full_hit(len(tokens)):
            return
        assert time.monotonic() < deadline, f"no hit within {seconds} s"


def freeze(daemon: DaemonHandle) -> Callable[[], None]:
    daemon.process.send_signal(signal.SIGSTOP)
    return lambda: daemon.process.send_signal(signal.SIGCONT)


def replace(daemon: DaemonHandle) -> Callable[[], None]:
    daemon.kill()
    return daemon.restart


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("disturb", [freeze, replace])
def test_a_node_whose_daemon_is_down_costs_misses_and_no_hang(
    cluster: Cluster, cold: list[Answer], disturb: Callable[[DaemonHandle], Callable[[], None]], number: int
) -> None:
    tokens = prompt(0, LENGTHS[0])
    hits_again(cluster, tokens)
    repair = disturb(cluster.daemons[number])
    try:
        cluster.engine.reset_local()
        answer = cluster.engine.ask(tokens, timeout=60)
        assert (answer.cached, answer.tokens) == (0, cold[0].tokens)
        # The look-up of the first one found out; the next do not wait again.
        second = cluster.engine.ask(prompt(9, 300), timeout=60)
        assert second.seconds < 3
        # Whoever reads the log learns which node it is.
        place = cluster.daemons[number].env["HPKV_LISTEN"] if number else str(cluster.daemons[number].socket)
        assert place in cluster.engine.text()
    finally:
        repair()
    hits_again(cluster, tokens)
    for daemon in cluster.daemons:
        assert daemon.client().call("check", {}, 30.0)["ok"]


def test_a_second_engine_hits_what_the_first_one_stored(
    cluster: Cluster, cold: list[Answer], model: Path, tmp_path: Path
) -> None:
    tokens = prompt(0, LENGTHS[0])
    hits_again(cluster, tokens)
    cluster.kill()
    cluster.start(model, tmp_path)
    answer = cluster.engine.ask(tokens)
    assert (answer.cached, answer.tokens) == (full_hit(LENGTHS[0]), cold[0].tokens)
