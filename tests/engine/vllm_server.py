"""The real engine as a process: stock ``vllm serve`` on a tiny model, driven over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 64
START_SECONDS = 240.0
CONNECTOR = '{"kv_connector":"HpkvConnectorV1","kv_role":"kv_both"}'


@dataclass(frozen=True)
class Topology:
    """A parallel strategy and the flags that the CPU build needs for it."""

    name: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    stages: str = ""
    """Layers of each pipeline stage, if not vLLM's own choice."""

    @property
    def ranks(self) -> int:
        """Ranks of one replica."""
        return self.tp * self.pp

    @property
    def variables(self) -> dict[str, str]:
        """Environment of ``vllm serve``."""
        count = os.cpu_count() or 1
        cores = "|".join(str(rank % count) for rank in range(self.ranks * self.dp))
        chosen = {"VLLM_CPU_OMP_THREADS_BIND": cores}
        return chosen | ({"VLLM_PP_LAYER_PARTITION": self.stages} if self.stages else {})

    @property
    def flags(self) -> list[str]:
        """Flags of ``vllm serve``."""
        compile_mode = ["--enforce-eager"] if self.pp == 1 else ["-cc.mode=2", "-cc.backend=eager"]
        return [
            "--tensor-parallel-size",
            str(self.tp),
            "--pipeline-parallel-size",
            str(self.pp),
            "--data-parallel-size",
            str(self.dp),
            *compile_mode,
        ]


@dataclass(frozen=True)
class Answer:
    """Greedy tokens of one request, and how many prompt tokens came from a cache (local or external)."""

    tokens: list[int]
    cached: int
    seconds: float


def prompt(seed: int, length: int) -> list[int]:
    """``length`` token ids below 500, different for each seed."""
    return [(i * 7 + i // 11 + seed * 13) % 490 + 3 for i in range(length)]


def full_hit(length: int) -> int:
    """Most tokens of a prompt that a cache may serve: whole blocks, and at least one token is computed."""
    return (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS


class Vllm:
    """One ``vllm serve``. ``stop`` or ``kill`` it; ``text`` is its log."""

    def __init__(
        self,
        model: Path,
        topology: Topology,
        environment: dict[str, str],
        log: Path,
        *flags: str,
        connector: bool = True,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://{host}:{port}"
        self.model = str(model)
        self._log = log
        command = [
            *prefix,
            str(Path(sys.executable).with_name("vllm")),
            "serve",
            self.model,
            f"--host={host}",
            f"--port={port}",
            "--dtype=float32",
            f"--block-size={BLOCK_TOKENS}",
            "--max-model-len=2048",
            "--enable-prefix-caching",
            "--max-num-batched-tokens=8192",
            "--enable-prompt-tokens-details",
            "--trust-remote-code",
            "--served-model-name=tiny",
            *topology.flags,
            *flags,
        ]
        if connector:
            command += ["--kv-transfer-config", CONNECTOR]
        settings = {
            "VLLM_ENABLE_HPKV": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            **topology.variables,
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=settings | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_ready(self) -> Vllm:
        """Wait until it serves; its log is in the failure."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise AssertionError(f"vllm ended with {self._process.returncode}:\n{self.text()[-6000:]}")
            try:
                urllib.request.urlopen(self.url + "/health", timeout=5).close()
            except (urllib.error.URLError, OSError):
                time.sleep(0.25)
            else:
                return self
        raise AssertionError(f"vllm is not ready after {START_SECONDS:.0f} s:\n{self.text()[-6000:]}")

    def text(self) -> str:
        """Its log so far."""
        return self._log.read_text(errors="replace")

    @property
    def namespace(self) -> bytes:
        """The namespace its scheduler logged last."""
        return bytes.fromhex(re.findall(r"HPKV: namespace ([0-9a-f]{64})", self.text())[-1])

    def post(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float = 120.0,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """POST JSON, return JSON (None for an empty body)."""
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"} | (headers or {}))
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            text = reply.read()
        return json.loads(text) if text.strip() else None

    def ask(
        self,
        tokens: list[int],
        max_tokens: int = 8,
        timeout: float = 120.0,
        replica: int | None = None,
        **more: Any,
    ) -> Answer:
        """Greedy completion of a prompt given as token ids, by one data-parallel replica if it is named."""
        headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
        started = time.monotonic()
        body = {
            "model": "tiny",
            "prompt": tokens,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        reply = self.post("/v1/completions", body, timeout, headers)
        details = reply["usage"].get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens") or 0
        return Answer(reply["choices"][0]["token_ids"], cached, time.monotonic() - started)

    def ask_all(self, prompts: list[list[int]], max_tokens: int = 8) -> list[Answer]:
        """The same, all at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda tokens: self.ask(tokens, max_tokens), prompts))

    def chat(self, messages: list[dict[str, Any]], max_tokens: int = 24) -> tuple[str, int, int]:
        """One chat turn: text, prompt tokens, cached prompt tokens."""
        body = {
            "model": "tiny",
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        reply = self.post("/v1/chat/completions", body)
        usage = reply["usage"]
        details = usage.get("prompt_tokens_details") or {}
        content = reply["choices"][0]["message"]["content"]
        return content, usage["prompt_tokens"], details.get("cached_tokens") or 0

    def reset_local(self) -> None:
        """Empty the engine's own prefix cache only; waits until nothing pins its blocks."""
        self._reset("")

    def reset_everything(self) -> None:
        """Empty the engine's prefix cache and its namespace in the daemon."""
        self._reset("?reset_external=true")

    def _reset(self, query: str) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            before = self.text().count("Failed to reset prefix cache")
            try:
                self.post("/reset_prefix_cache" + query)
            except urllib.error.HTTPError:
                # Stores still pin blocks: not an error, a moment too early.
                time.sleep(0.05)
                continue
            if self.text().count("Failed to reset prefix cache") == before:
                return
            time.sleep(0.05)
        raise AssertionError("the engine's prefix cache could not be reset")

    def metric(self, name: str) -> float:
        """Sum of one Prometheus metric over its labels."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=20) as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " ")))

    def running(self) -> bool:
        """Whether the server process lives."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Polite end, as an operator would."""
        if self.running():
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the server and all of its processes."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            self._process.wait()
