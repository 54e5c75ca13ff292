"""The way of a new operator: install the package, start a stock vLLM beside it, see a hit."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from service_node import Node
from vllm_server import Topology, Vllm, full_hit, prompt

from examples.tiny_model import make
from tests.daemons import without_hpkv
from tests.support import wait_until

pytestmark = pytest.mark.engine

TOKENS = 1000


def test_after_installing_the_package_vllm_has_a_hit(installed: Node, tmp_path: Path) -> None:
    installed.serving()
    shutil.copytree(make("qwen2", tmp_path, dtype="float32"), installed.machine.root / "srv/model")
    # It computes a tiny model faster than anybody could load.
    environment = without_hpkv(os.environ) | {"HPKV_LOAD_WHEN": "always"}
    engine = Vllm(
        Path("/srv/model"), Topology("alone"), environment, tmp_path / "vllm.log", prefix=installed.machine.entrance
    )
    try:
        engine.wait_ready()
        first = engine.ask(prompt(1, TOKENS))

        def stored() -> bool:
            stats = json.loads(installed.run("hpkvd", "stats", "--json").stdout)
            return bool(stats["stored_blocks"] * 64 >= full_hit(TOKENS))

        wait_until(stored, 60, "nothing was stored")
        engine.reset_local()
        second = engine.ask(prompt(1, TOKENS))
        assert second.tokens == first.tokens
        assert (first.cached, second.cached) == (0, full_hit(TOKENS)), engine.text()[-3000:]
    finally:
        engine.kill()
