"""Placeholders of pictures are equal tokens; what they stand for is part of the key."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from multimodal import IMAGE_TOKENS, make_blip2, picture
from vllm_server import BLOCK_TOKENS, Topology, Vllm, full_hit

from examples.tiny_model import CORPUS
from tests.conftest import DaemonFactory

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


class Seeing:
    """An engine that is asked about pictures."""

    def __init__(self, engine: Vllm, daemon) -> None:
        self.engine = engine
        self._channel = daemon.client()

    def ask(self, seed: int) -> tuple[str, int, int]:
        """About a picture, always with the same words: text, prompt tokens, cached ones."""
        words = " ".join(CORPUS[:8])
        content = [
            {"type": "text", "text": "Look: "},
            {"type": "image_url", "image_url": {"url": picture(seed)}},
            {"type": "text", "text": words},
        ]
        return self.engine.chat([{"role": "user", "content": content}])

    def settle(self) -> None:
        """Wait until nothing is stored any more, then empty the engine's own cache."""
        deadline = time.monotonic() + 20
        while (stats := self._channel.call("stats", {}, 30.0))["pool_reserved_blocks"] or stats["leases"]:
            assert time.monotonic() < deadline, stats
            time.sleep(0.02)
        self.engine.reset_local()


@pytest.fixture
def seeing(daemons: DaemonFactory, model: Path, tmp_path: Path) -> Iterator[Seeing]:
    seer = make_blip2(model, tmp_path / "blip2")
    daemon = daemons(HPKV_KV_MEM_POOL_SIZE="128m", HPKV_SUBMIT_DEADLINE_MS=5000)
    engine = Vllm(seer, Topology("multimodal"), daemon.env, tmp_path / "engine.log")
    try:
        yield Seeing(engine.wait_ready(), daemon)
    finally:
        engine.kill()


def test_another_picture_is_no_hit_and_the_same_one_is(seeing: Seeing) -> None:
    first, length, cached = seeing.ask(1)
    assert length > IMAGE_TOKENS + 2 * BLOCK_TOKENS
    assert cached == 0
    seeing.settle()
    # The placeholders begin in the first block: no block of the other picture's prompt is shared.
    other, _, cached = seeing.ask(2)
    assert cached == 0
    assert other != first
    seeing.settle()
    for seed, text in ((1, first), (2, other)):
        assert seeing.ask(seed) == (text, length, full_hit(length))
        seeing.settle()
