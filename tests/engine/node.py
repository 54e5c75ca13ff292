"""A daemon with switchable faults and an engine on it, as most tests of behaviour need them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_server import BLOCK_TOKENS, Topology, Vllm, full_hit, prompt

from hpkv_client.errors import HpkvError
from hpkv_client.wire import Body
from tests.conftest import DaemonFactory, DaemonHandle

CONFIRM = "this-breaks-my-cache"


class Node:
    """A daemon with switchable faults, and an engine on it."""

    def __init__(self, daemon: DaemonHandle, engine: Vllm, faults: Path) -> None:
        self.daemon = daemon
        self.engine = engine
        self._faults = faults
        self._channel = daemon.client()
        self._seed = 100

    def set_faults(self, rules: str) -> None:
        """Replace the fault rules from now on; empty: none."""
        new = self._faults.with_suffix(".new")
        new.write_text(rules)
        new.replace(self._faults)

    def fired(self) -> list[str]:
        """The points of all faults that have struck so far."""
        fired = self._faults.with_suffix(".fired")
        return fired.read_text().split() if fired.exists() else []

    def stats(self) -> dict[str, int]:
        """The daemon's counters and gauges."""
        return self._channel.call("stats", {}, 30.0)

    def info(self) -> Body:
        """What the daemon tells about its engines, movers and sessions."""
        return self._channel.call("info", {}, 30.0)

    def fresh(self, length: int) -> list[int]:
        """A prompt that nobody has used."""
        self._seed += 1
        return prompt(self._seed, length)

    def quiet(self) -> dict[str, int]:
        """Statistics once nothing is reserved or pinned any more."""
        return self.until(lambda stats: stats["pool_reserved_blocks"] == stats["leases"] == 0)

    def until(self, condition: Callable[[dict[str, int]], Any], seconds: float = 30.0) -> dict[str, int]:
        """Statistics that meet the condition."""
        deadline = time.monotonic() + seconds
        while not condition(stats := self.stats()):
            assert time.monotonic() < deadline, stats
            time.sleep(0.02)
        return stats

    def warm(self, tokens: list[int], max_tokens: int = 8) -> list[int]:
        """Answer cold, wait until the daemon has the prompt, empty the engine's own cache; the tokens."""
        before = self.stats()["stored_blocks"]
        answer = self.engine.ask(tokens, max_tokens)
        self.until(lambda stats: stats["stored_blocks"] >= before + len(tokens) // BLOCK_TOKENS)
        self.quiet()
        self.engine.reset_local()
        return answer.tokens

    def hits(self, tokens: list[int]) -> bool:
        """Whether all of the prompt that can be loaded is loaded now."""
        self.engine.reset_local()
        return self.engine.ask(tokens).cached == full_hit(len(tokens))

    def heal(self) -> None:
        """No faults any more; a daemon that died is started again, and the engine finds it."""
        self.set_faults("")
        if self.daemon.process.poll() is not None:
            self.daemon.restart()
        self.until(lambda _: [engine["ready"] for engine in self.info()["engines"]] == [True], 90)

    def check(self) -> None:
        """Every invariant of the daemon holds. Raises what it says."""
        try:
            assert self._channel.call("check", {}, 30.0)["ok"]
        except HpkvError as problem:
            raise AssertionError(str(problem)) from None


@contextmanager
def node_of(
    start_engine: Callable[..., Vllm],
    daemons: DaemonFactory,
    directory: Path,
    topology: Topology,
    *flags: str,
    variables: dict[str, str] | None = None,
    **env: Any,
) -> Iterator[Node]:
    """A daemon with settings ``env`` and a ready engine, stopped afterwards; ``variables`` are the engine's own."""
    faults = directory / "rules"
    faults.write_text("")
    settings = {
        "HPKV_KV_MEM_POOL_SIZE": "256m",
        "HPKV_FAULTS": f"@{faults}",
        "HPKV_FAULTS_CONFIRM": CONFIRM,
        # A busy test machine is not a dead daemon; the default of 50 ms is for hosts with a core to spare.
        "HPKV_SUBMIT_DEADLINE_MS": 5000,
    }
    daemon = daemons(**(settings | env))
    engine = start_engine(topology, daemon.env | (variables or {}), *flags)
    yield Node(daemon, engine, faults)
    engine.stop()
