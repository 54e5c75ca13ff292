"""Engines are expensive: models are made once, an engine is started once for each need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm_server import Topology, Vllm

from examples.tiny_model import make
from tests.conftest import DaemonFactory, DaemonHandle

StartEngine = Callable[..., Vllm]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2 with 5 layers and 4 KV heads, in float32."""
    return make("qwen2", tmp_path_factory.mktemp("models"), dtype="float32")


@pytest.fixture(scope="module")
def daemons() -> Iterator[DaemonFactory]:
    """Daemons that live as long as the tests of one file."""
    factory = DaemonFactory()
    yield factory
    factory.close()


@pytest.fixture(scope="module")
def start_engine(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[StartEngine]:
    """``start_engine(topology, daemon, *flags)``: a ready engine, stopped with the module."""
    started: list[Vllm] = []
    directory = tmp_path_factory.mktemp("engines")

    def start(topology: Topology, daemon: DaemonHandle | dict[str, str], *flags: str, connector: bool = True) -> Vllm:
        environment = daemon if isinstance(daemon, dict) else daemon.env
        engine = Vllm(
            model,
            topology,
            environment,
            directory / f"{topology.name}-{len(started)}.log",
            *flags,
            connector=connector,
        )
        started.append(engine)
        return engine.wait_ready()

    yield start
    for engine in started:
        engine.kill()
