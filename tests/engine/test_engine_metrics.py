"""The engine's own /metrics and events, and the daemon's: both tell the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from node import Node, node_of
from vllm_server import BLOCK_TOKENS, Topology, full_hit

from hpkv_client.counters import ENGINE_COUNTERS
from hpkv_client.types import block_key
from tests.conftest import DaemonFactory
from tests.scrape import Metrics, Scraper, fetch
from tests.subscriber import Subscriber
from tests.support import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LENGTH = 640


@pytest.fixture(scope="module")
def node(start_engine, daemons: DaemonFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    directory = tmp_path_factory.mktemp("metrics")
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{directory}/vllm"}
    with node_of(
        start_engine,
        daemons,
        directory,
        Topology("tp1"),
        f"--kv-events-config={json.dumps(events)}",
        # Else its events have 64 bits of each hash.
        variables={"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"},
        HPKV_METRICS="127.0.0.1:0",
        HPKV_EVENTS=f"ipc://{directory}/hpkv",
    ) as made:
        yield made


def of_engine(node: Node) -> Metrics:
    status, text = fetch(f"{node.engine.url}/metrics")
    assert status == 200
    return Metrics(text)


def exposed(counter: str) -> str:
    return f"vllm:hpkv_{counter.replace('_microseconds', '_seconds')}_total"


def test_the_engine_and_the_daemon_and_vllm_count_the_same(node: Node) -> None:
    prompts = [node.fresh(LENGTH) for _ in range(3)]
    cold = [node.warm(tokens) for tokens in prompts]
    assert [node.engine.ask(tokens).tokens for tokens in prompts] == cold
    scraper = Scraper(node.daemon.client())
    hit = 3 * full_hit(LENGTH)

    engine = of_engine(node)
    assert engine.sum("vllm:external_prefix_cache_hits_total") == hit
    assert engine.sum("vllm:external_prefix_cache_queries_total") == 6 * LENGTH
    assert engine.sum(exposed("hit_tokens_loaded")) == hit
    assert engine.sum(exposed("loads")) == 3
    assert engine.sum(exposed("lookups")) >= 6
    assert engine.sum(exposed("hit_tokens_failed")) == 0
    assert engine.sum(exposed("saved_prefill_microseconds")) > 0
    assert engine.sum(exposed("load_wait_microseconds")) > 0
    assert engine.values("model_name") == {"tiny"}

    # The daemon hears of it with the next heartbeat.
    told = "hpkv_engine_hit_tokens_loaded_total"
    wait_until(lambda: scraper.metrics().sum(told, model="tiny") == hit, 20, "the daemon was not told")
    daemon = scraper.metrics()
    for name in ENGINE_COUNTERS:
        short = name.replace("_microseconds", "_seconds")
        assert daemon.sum(f"hpkv_engine_{short}_total") == pytest.approx(engine.sum(exposed(name))), name
    # One rank: what it loaded are the blocks of the hits.
    assert daemon.sum("hpkv_transfer_blocks_total", tier="memory", direction="load") * BLOCK_TOKENS == hit
    assert daemon.sum("hpkv_lookup_blocks_total", result="hit") * BLOCK_TOKENS == hit
    assert daemon.sum("hpkv_stored_blocks_total") == daemon.sum("hpkv_resident_blocks") == node.stats()["stored_blocks"]


def test_a_load_that_fails_is_a_hit_that_was_computed(node: Node) -> None:
    tokens = node.fresh(LENGTH)
    cold = node.warm(tokens)
    before = of_engine(node)
    node.set_faults("load=fail")
    assert node.engine.ask(tokens).tokens == cold
    node.set_faults("")
    after = of_engine(node)
    failed, loaded = (
        after.sum(exposed(name)) - before.sum(exposed(name)) for name in ("hit_tokens_failed", "hit_tokens_loaded")
    )
    assert failed == loaded >= full_hit(LENGTH)
    assert after.sum(exposed("load_failures")) > before.sum(exposed("load_failures"))


DECODE = """
import json, sys
from pathlib import Path
import msgspec
from vllm.distributed.kv_events import BlockStored, KVEventBatch
for path in sys.argv[1:]:
    batch = msgspec.msgpack.decode(Path(path).read_bytes(), type=KVEventBatch)
    for event in batch.events:
        if isinstance(event, BlockStored):
            print(json.dumps([path, [key.hex() for key in event.block_hashes], event.medium, event.block_size]))
"""
"""In a process of its own: what vLLM imports is full of warnings."""


def decoded(batches: list[bytes], directory: Path) -> list[tuple[list[bytes], str, int]]:
    """Hashes, medium and block size of the stored blocks in batches, as vLLM's own classes read them."""
    paths = [directory / str(number) for number in range(len(batches))]
    for path, batch in zip(paths, batches, strict=True):
        path.write_bytes(batch)
    done = subprocess.run([sys.executable, "-c", DECODE, *paths], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return [([bytes.fromhex(key) for key in hashes], medium, size) for _, hashes, medium, size in found]


def test_vllm_reads_the_daemons_events_and_its_own_hashes_lead_to_the_same_keys(node: Node, tmp_path: Path) -> None:
    endpoint = node.info()["events"]
    context = zmq.Context()
    own = context.socket(zmq.SUB)
    try:
        own.setsockopt(zmq.SUBSCRIBE, b"")
        own.connect(endpoint.replace("/hpkv", "/vllm"))
        batches: list[bytes] = []

        def heard() -> bool:
            node.engine.ask(node.fresh(BLOCK_TOKENS * 2))
            while own.poll(100):
                batches.append(own.recv_multipart()[2])
            return bool(batches)

        wait_until(heard, 30, "the engine publishes nothing")
        node.warm(node.fresh(LENGTH))
        while own.poll(500):
            batches.append(own.recv_multipart()[2])
    finally:
        own.close(0)
        context.term()
    engine_hashes = {key for hashes, medium, _ in decoded(batches, tmp_path) if medium == "GPU" for key in hashes}
    assert len(engine_hashes) >= LENGTH // BLOCK_TOKENS

    with Subscriber(endpoint) as router:
        router.join()
        told = decoded([batch.payload for batch in router.seen], tmp_path)
        assert {key for hashes, _, _ in told for key in hashes} == router.held
        assert {(medium, size) for _, medium, size in told} == {("CPU", BLOCK_TOKENS)}
        engine = node.info()["engines"][0]
        # What docs/events.md says: a router that knows the engine's hash of a block knows the daemon's key.
        assert {
            block_key(bytes.fromhex(engine["key_namespace"]), engine["group"], each) for each in engine_hashes
        } <= router.held
