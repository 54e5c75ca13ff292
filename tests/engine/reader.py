"""Reads canonical blocks out of a daemon by key: an engine of one rank, as the protocol allows anyone to be."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hpkv_client.memory import SharedMemory
from hpkv_client.transport import Channel
from hpkv_client.types import KeyMaker, Layer, RankShard, Run, typed_digest
from hpkv_client.wire import PROTOCOL, handle_to_wire, pack_blocks, shard_to_wire

_HASH_PROGRAM = """
import json, sys
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
kv_cache_utils.init_none_hash(sha256)
for tokens, block, salt in json.load(sys.stdin):
    hashes = []
    for start in range(0, len(tokens) - block + 1, block):
        parent = hashes[-1] if hashes else None
        extra = (("cache_salt", salt),) if salt and not hashes else None
        hashes.append(kv_cache_utils.hash_block_tokens(sha256, parent, tokens[start : start + block], extra))
    print("hashes", *(bytes(one).hex() for one in hashes))
"""

_Prompt = tuple[tuple[int, ...], int, str]
_known: dict[_Prompt, list[bytes]] = {}


def learn_hashes(prompts: Iterable[tuple[list[int], int, str]]) -> None:
    """vLLM's own hashes of the full blocks of prompts (tokens, tokens per block, salt); sha256.

    From one process of its own: vLLM takes seconds to import, and would stay in this one.
    """
    wanted = [(tuple(tokens), block, salt) for tokens, block, salt in prompts]
    wanted = [one for one in wanted if one not in _known]
    if not wanted:
        return
    command = [sys.executable, "-W", "ignore", "-c", _HASH_PROGRAM]
    said = subprocess.run(command, input=json.dumps(wanted), capture_output=True, text=True, check=True, timeout=180)
    lines = [line.split()[1:] for line in said.stdout.splitlines() if line.startswith("hashes")]
    for one, hashes in zip(wanted, lines, strict=True):
        _known[one] = [bytes.fromhex(each) for each in hashes]


def prefix_hashes(tokens: list[int], block_tokens: int, salt: str = "") -> list[bytes]:
    """The hashes of one prompt."""
    learn_hashes([(tokens, block_tokens, salt)])
    return _known[tuple(tokens), block_tokens, salt]


class Reader:
    """``layers``: names of all layers of the model; ``layer_bytes``: canonical bytes of each."""

    def __init__(self, socket: Path, namespace: bytes, layers: list[str], layer_bytes: int, blocks: int) -> None:
        self._namespace = namespace
        self._block_bytes = layer_bytes * len(layers)
        self._memory = SharedMemory(self._block_bytes * blocks)
        self._channel = Channel(socket)
        hello = {"major": PROTOCOL[0], "minor": PROTOCOL[1], "name": "reader", "engine": f"reader-{id(self)}"}
        self._channel.session = self._channel.call("hello", hello, 30.0)["session"]
        shard = RankShard(
            tuple(
                Layer(name, layer_bytes, (Run(0, i * layer_bytes, self._block_bytes, 0, layer_bytes),))
                for i, name in enumerate(layers)
            ),
            blocks,
        )
        registration = {
            "rank": 0,
            "world": 1,
            "namespace": typed_digest(namespace, "g0s0", 0, "hnd"),
            "model": "reader",
            "device": "cpu",
            "regions": [handle_to_wire(self._memory.handle)],
            **shard_to_wire(shard),
        }
        self._channel.call("register", registration, 30.0)
        deadline = time.monotonic() + 10
        while not self._channel.call("heartbeat", {}, 30.0)["ready"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self._job = 0

    def blocks(self, tokens: list[int], block_tokens: int, salt: str = "") -> list[npt.NDArray[np.float32]]:
        """The resident leading blocks of a prompt, as float32."""
        make = KeyMaker(self._namespace, 0)
        keys = b"".join(make(prefix) for prefix in prefix_hashes(tokens, block_tokens, salt))
        matched = self._channel.call("match", {"keys": keys}, 30.0)
        if not matched["hit"]:
            return []
        self._job += 1
        count = matched["hit"]
        body = {"job": self._job, "lease": matched["lease"], "first": 0, "blocks": pack_blocks(range(count))}
        assert self._channel.call("load", body, 30.0)["loaded"] == count
        self._channel.call("release", {"lease": matched["lease"]}, 30.0)
        memory = np.frombuffer(self._memory.mapping, np.float32).reshape(-1, self._block_bytes // 4)
        return [memory[i].copy() for i in range(count)]

    def close(self) -> None:
        """Leave the daemon."""
        self._channel.call("bye", {}, 30.0)
        self._channel.close()
        self._memory.close()
