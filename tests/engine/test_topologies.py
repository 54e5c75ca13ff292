"""Stored by one engine, hit by the next, under every strategy of one node: the whole writer x reader matrix."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from reader import Reader, learn_hashes
from vllm_server import BLOCK_TOKENS, Answer, Topology, Vllm, full_hit, prompt

from tests.conftest import DaemonFactory, DaemonHandle
from tests.daemons import without_hpkv

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

TOPOLOGIES = [
    Topology("tp1"),
    Topology("tp2", tp=2),
    Topology("pp2", pp=2),
    Topology("pp2-1+4", pp=2, stages="1,4"),
    Topology("tp2pp2", tp=2, pp=2),
    Topology("dp2", dp=2),
]
NAMES = [topology.name for topology in TOPOLOGIES]
LENGTHS = (1000, 1037, 1088)
LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(5)]
LAYER_BYTES = 4 * BLOCK_TOKENS * 2 * 32 * 4
"""KV heads x tokens x (K and V) x head size x float32."""
OUTPUT_TOKENS = 30


def prompts_of(topology: Topology) -> list[list[int]]:
    """The prompts that only this topology computes."""
    return [prompt(1 + 3 * TOPOLOGIES.index(topology) + i, length) for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def reference(start_engine) -> dict[str, list[Answer]]:
    """Answers of an engine that has the connector but not the switch: exactly an engine without HPKV."""
    environment = without_hpkv(os.environ) | {"VLLM_ENABLE_HPKV": "0"}
    engine = start_engine(Topology("off"), environment)
    answers = {
        topology.name: [engine.ask(tokens, OUTPUT_TOKENS) for tokens in prompts_of(topology)] for topology in TOPOLOGIES
    }
    log = engine.text()
    engine.stop()
    assert log.count("HPKV is off: set VLLM_ENABLE_HPKV=1 to use it") == 1
    assert {answer.cached for all_answers in answers.values() for answer in all_answers} == {0}
    return answers


@dataclass
class Archive:
    """What six engines, one after the other and each killed, stored in one daemon."""

    daemon: DaemonHandle
    namespace: bytes
    cold: dict[str, list[Answer]]
    stored: dict[str, int]
    blocks: dict[str, list[list[np.ndarray]]]
    seconds_to_forget: dict[str, float]


@dataclass
class Second:
    """A second engine of one topology, after it has asked for what the first one computed."""

    topology: Topology
    engine: Vllm
    warm: list[Answer]
    loaded: int


def kv(archive_daemon: DaemonHandle, namespace: bytes, prompts: list[list[int]], salt: str = "") -> list:
    """Resident blocks of prompts, read by key."""
    reader = Reader(archive_daemon.socket, namespace, LAYERS, LAYER_BYTES, 32)
    try:
        return [reader.blocks(tokens, BLOCK_TOKENS, salt) for tokens in prompts]
    finally:
        reader.close()


def settled(daemon: DaemonHandle, name: str, value: int) -> dict[str, int]:
    """Statistics once the counter has reached the value."""
    channel = daemon.client()
    deadline = time.monotonic() + 20
    while (stats := channel.call("stats", {}, 30.0))[name] < value:
        assert time.monotonic() < deadline, f"{name} is {stats[name]}, not {value}"
        time.sleep(0.05)
    return stats


@pytest.fixture(scope="module")
def archive(start_engine, daemons: DaemonFactory) -> Archive:
    daemon = daemons(HPKV_KV_MEM_POOL_SIZE="512m", HPKV_SUBMIT_DEADLINE_MS=5000)
    made = Archive(daemon, b"", {}, {}, {}, {})
    learn_hashes(
        (tokens, BLOCK_TOKENS, salt)
        for topology in TOPOLOGIES
        for tokens in prompts_of(topology)
        for salt in ("", topology.name)
    )
    total = 0
    for topology in TOPOLOGIES:
        engine = start_engine(topology, daemon)
        prompts = prompts_of(topology)
        made.cold[topology.name] = [engine.ask(tokens, OUTPUT_TOKENS) for tokens in prompts]
        total += sum((len(tokens) + OUTPUT_TOKENS - 1) // BLOCK_TOKENS for tokens in prompts)
        made.stored[topology.name] = settled(daemon, "stored_blocks", total)["stored_blocks"]
        made.namespace = made.namespace or engine.namespace
        assert engine.namespace == made.namespace
        engine.kill()
        made.seconds_to_forget[topology.name] = _forgotten(daemon)
        made.blocks[topology.name] = kv(daemon, made.namespace, prompts)
    return made


def _forgotten(daemon: DaemonHandle) -> float:
    """Seconds until the daemon holds nothing of a killed engine: no session, no mapping."""
    channel, started = daemon.client(), time.monotonic()
    while True:
        info = channel.call("info", {}, 30.0)
        if not info["engines"] and not info["movers"] and not info["leases"]["count"]:
            return time.monotonic() - started
        assert time.monotonic() - started < 20, info
        time.sleep(0.02)


@pytest.fixture(scope="module", params=TOPOLOGIES, ids=NAMES)
def second(request: pytest.FixtureRequest, start_engine, archive: Archive) -> Iterator[Second]:
    topology = request.param
    engine = start_engine(topology, archive.daemon)
    before = archive.daemon.client().call("stats", {}, 30.0)["loaded_blocks"]
    warm = [engine.ask(tokens, OUTPUT_TOKENS) for tokens in prompts_of(topology)]
    loaded = archive.daemon.client().call("stats", {}, 30.0)["loaded_blocks"] - before
    yield Second(topology, engine, warm, loaded)
    engine.stop()


def test_a_killed_engine_is_forgotten_within_two_seconds(archive: Archive) -> None:
    assert max(archive.seconds_to_forget.values()) < 2


def test_answers_equal_an_engine_without_the_connector(
    second: Second, archive: Archive, reference: dict[str, list[Answer]]
) -> None:
    name = second.topology.name
    expected = [answer.tokens for answer in reference[name]]
    assert [answer.tokens for answer in archive.cold[name]] == expected
    assert [answer.tokens for answer in second.warm] == expected


def test_second_engine_hits_every_full_block_and_computes_the_rest(second: Second, archive: Archive) -> None:
    assert [answer.cached for answer in archive.cold[second.topology.name]] == [0, 0, 0]
    assert [answer.cached for answer in second.warm] == [full_hit(length) for length in LENGTHS]


def test_every_block_is_stored_once_and_loaded_once_per_rank(second: Second, archive: Archive) -> None:
    index = NAMES.index(second.topology.name)
    full_blocks = sum((length + OUTPUT_TOKENS - 1) // BLOCK_TOKENS for length in LENGTHS)
    assert archive.stored[second.topology.name] == (index + 1) * full_blocks
    assert second.loaded == sum(full_hit(length) // BLOCK_TOKENS for length in LENGTHS) * second.topology.ranks


@pytest.mark.parametrize("writer", TOPOLOGIES, ids=NAMES)
def test_what_one_strategy_stored_is_a_full_hit_under_any_other(
    second: Second, writer: Topology, reference: dict[str, list[Answer]]
) -> None:
    second.engine.reset_local()
    for tokens, expected in zip(prompts_of(writer), reference[writer.name], strict=True):
        answer = second.engine.ask(tokens)
        assert (answer.cached, answer.tokens) == (full_hit(len(tokens)), expected.tokens[:8])


def test_recomputed_blocks_equal_the_stored_ones_byte_for_byte(second: Second, archive: Archive) -> None:
    before = archive.blocks[second.topology.name]
    assert [len(blocks) for blocks in before] == [length // BLOCK_TOKENS for length in LENGTHS]
    prompts = prompts_of(second.topology)
    stored = archive.daemon.client().call("stats", {}, 30.0)["stored_blocks"]
    salt = second.topology.name
    again = [second.engine.ask(tokens, 1, cache_salt=salt) for tokens in prompts]
    assert [answer.cached for answer in again] == [0, 0, 0]
    settled(archive.daemon, "stored_blocks", stored + sum(length // BLOCK_TOKENS for length in LENGTHS))
    after = kv(archive.daemon, archive.namespace, prompts, salt)
    for one, other in zip(before, after, strict=True):
        assert len(one) == len(other)
        assert all(np.array_equal(left, right) for left, right in zip(one, other, strict=True))


def test_decoded_blocks_are_hits_of_the_next_turn(second: Second) -> None:
    conversation = prompts_of(second.topology)[0] + second.warm[0].tokens
    second.engine.reset_local()
    assert second.engine.ask([*conversation, 7, 8, 9]).cached == full_hit(len(conversation) + 3)


def test_the_daemon_is_consistent_and_knows_every_rank(second: Second, archive: Archive) -> None:
    channel, topology = archive.daemon.client(), second.topology
    assert channel.call("check", {}, 30.0)["ok"]
    stats = channel.call("stats", {}, 30.0)
    assert (stats["load_failures"], stats["store_failures"], stats["internal_errors"]) == (0, 0, 0)
    info = channel.call("info", {}, 30.0)
    assert len(info["engines"]) == topology.dp
    for engine in info["engines"]:
        places = {f"tp{tp} pp{pp}" for tp in range(topology.tp) for pp in range(topology.pp)}
        assert {rank["place"] for rank in engine["ranks"]} == places
        assert engine["strategy"] == f"TP{topology.tp} PP{topology.pp}"
        assert engine["block_bytes"] == LAYER_BYTES * len(LAYERS)
        assert {rank["first_layer"] for rank in engine["ranks"]} >= {LAYERS[0]}
        assert {rank["last_layer"] for rank in engine["ranks"]} >= {LAYERS[-1]}
        assert sum(rank["block_bytes"] for rank in engine["ranks"]) == LAYER_BYTES * len(LAYERS)
    assert Path(info["pool"]["path"]).parent == archive.daemon.pool_directory


def test_every_replica_of_an_engine_hits(second: Second) -> None:
    for replica in range(second.topology.dp):
        second.engine.reset_local()
        tokens = prompts_of(TOPOLOGIES[0])[replica]
        assert second.engine.ask(tokens, replica=replica).cached == full_hit(len(tokens))


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        (["--dtype=bfloat16"], {}),
        (["--block-size=32"], {}),
        # The order of elements within a head is that of the kernels' instruction set.
        ([], {"ATEN_CPU_CAPABILITY": "default"}),
    ],
    ids=["element type", "block size", "layout"],
)
def test_another_element_type_block_size_or_layout_never_hits(
    start_engine, archive: Archive, flags: list[str], variables: dict[str, str]
) -> None:
    engine = start_engine(TOPOLOGIES[0], archive.daemon.env | variables, *flags)
    try:
        tokens = prompts_of(TOPOLOGIES[0])[0]
        assert engine.ask(tokens).cached == 0
        deadline = time.monotonic() + 20
        while engine.ask(tokens).cached == 0:
            assert time.monotonic() < deadline, "this engine caches nothing at all"
        assert archive.daemon.client().call("stats", {}, 30.0)["internal_errors"] == 0
    finally:
        engine.stop()
