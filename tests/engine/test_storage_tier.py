"""A prompt that is on disk only, after engine and daemon were both started anew: an exact hit."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from reader import Reader, learn_hashes
from test_topologies import LAYER_BYTES, LAYERS
from vllm_server import BLOCK_TOKENS, Topology, Vllm, full_hit, prompt

from tests.conftest import DaemonFactory, DaemonHandle
from tests.support import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TOKENS = prompt(900, 1000)
OUTPUT_TOKENS = 30


@pytest.fixture
def storage() -> Iterator[Path]:
    """An empty directory on the machine's disk."""
    path = Path(tempfile.mkdtemp(prefix="hpkv-storage-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def written(daemon: DaemonHandle, least: int) -> None:
    """Wait until so many blocks are on disk and nothing waits to be written."""
    channel = daemon.client()

    def settled() -> bool:
        usage = channel.call("info", {}, 30.0)["storage"]
        return usage["blocks"] >= least and not usage["queued_bytes"] and not usage["queued_blocks"]

    wait_until(settled, 30)


def kv(daemon: DaemonHandle, namespace: bytes) -> list[np.ndarray]:
    """Resident blocks of the prompt."""
    reader = Reader(daemon.socket, namespace, LAYERS, LAYER_BYTES, 32)
    try:
        return reader.blocks(TOKENS, BLOCK_TOKENS)
    finally:
        reader.close()


@pytest.mark.parametrize("topology", [Topology("tp1"), Topology("tp2pp2", tp=2, pp=2)], ids=lambda one: one.name)
def test_a_prompt_on_disk_only_is_an_exact_hit_after_both_were_restarted(
    daemons: DaemonFactory, model: Path, tmp_path: Path, storage: Path, topology: Topology
) -> None:
    learn_hashes([(TOKENS, BLOCK_TOKENS, "")])
    daemon = daemons(
        HPKV_KV_MEM_POOL_SIZE="16m",
        HPKV_KV_STORAGE_PATH=storage,
        HPKV_STORAGE_SIZE="512m",
        HPKV_SUBMIT_DEADLINE_MS=5000,
        HPKV_LOAD_DEADLINE_SECONDS=20,
    )
    first = Vllm(model, topology, daemon.env, tmp_path / "first.log")
    try:
        first.wait_ready()
        cold = first.ask(TOKENS, OUTPUT_TOKENS)
        assert cold.cached == 0
        blocks = (len(TOKENS) + OUTPUT_TOKENS - 1) // BLOCK_TOKENS
        written(daemon, blocks)
        before = kv(daemon, first.namespace)
        for seed in range(901, 910):
            first.ask(prompt(seed, 1000), 1)
            written(daemon, blocks + (seed - 900) * (1000 // BLOCK_TOKENS))
        namespace = first.namespace
    finally:
        first.kill()
    assert kv(daemon, namespace) == []
    daemon.kill()
    for file in daemon.pool_directory.iterdir():
        file.unlink()
    daemon.restart()

    second = Vllm(model, topology, daemon.env, tmp_path / "second.log")
    try:
        second.wait_ready()
        wait_until(lambda: daemon.client().call("info", {}, 30.0)["storage"]["state"] == "ready", 30)
        warm = second.ask(TOKENS, OUTPUT_TOKENS)
        assert (warm.tokens, warm.cached) == (cold.tokens, full_hit(len(TOKENS)))
        stats = daemon.client().call("stats", {}, 30.0)
        assert stats["promoted_blocks"] >= full_hit(len(TOKENS)) // BLOCK_TOKENS
        after = kv(daemon, namespace)
        assert len(before) >= len(TOKENS) // BLOCK_TOKENS
        for one, other in zip(before, after, strict=False):
            assert np.array_equal(one, other)
        assert daemon.client().call("check", {}, 30.0)["ok"]
    finally:
        second.kill()
