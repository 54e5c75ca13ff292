"""A stock ``vllm serve`` on this machine's CPU, as a process to start, ask over HTTP and stop."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
MODEL_NAME = "demo"
START_SECONDS = 900.0
REQUEST_SECONDS = 600.0
STOP_SECONDS = 30.0


class EngineFailed(Exception):
    """The engine did not do what it should; ``log`` tells more."""

    def __init__(self, message: str, log: Path) -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True)
class Completion:
    """One answer, and how long its first token took."""

    tokens: tuple[int, ...]
    text: str
    ttft_seconds: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that vLLM did not compute, by its own account."""
    arrivals: tuple[float, ...]
    """When each token came, by ``time.perf_counter``."""


def free_port(first: int = 8100) -> int:
    """A TCP port from ``first`` on that nobody listens on."""
    for port in range(first, first + 200):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port from {first} to {first + 199}")


def cpu_environment(ranks: int, cache_gib: int = 1) -> dict[str, str]:
    """What the CPU build of vLLM needs beside the user's variables: KV memory, and cores for each rank."""
    cpus = sorted(os.sched_getaffinity(0))
    each = max(1, len(cpus) // ranks)
    shares = [[cpus[(rank * each + i) % len(cpus)] for i in range(each)] for rank in range(ranks)]
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, share)) for share in shares),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
    }


class Engine:
    """A running ``vllm serve``. A context manager: leaving it ends every process of the engine."""

    def __init__(self, model: Path, flags: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self.port = free_port()
        script = Path(sys.executable).with_name("vllm")
        command = [str(script), "serve", str(model), "--host", HOST, "--port", str(self.port)]
        command += ["--served-model-name", MODEL_NAME, *flags]
        with log.open("w") as output:
            output.write(f"$ {' '.join(command)}\n")
            output.flush()
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self, timeout: float = START_SECONDS) -> None:
        """Return when the engine answers. Raises ``EngineFailed`` when it ends or takes too long."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise EngineFailed(f"vLLM ended with status {self._process.returncode}", self.log)
            try:
                if self._get("/health")[0] == http.HTTPStatus.OK:
                    return
            except OSError:
                pass
            time.sleep(0.25)
        raise EngineFailed(f"vLLM was not ready after {timeout:.0f} s", self.log)

    def complete(self, prompt: str, max_tokens: int) -> Completion:
        """Continue the prompt greedily, streaming, with exactly ``max_tokens`` tokens."""
        body = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        tokens: list[int] = []
        arrivals: list[float] = []
        text, ttft, usage = "", 0.0, dict[str, Any]()
        started = time.perf_counter()
        try:
            for chunk in self._stream("/v1/completions", body):
                for choice in chunk["choices"]:
                    ttft = ttft or time.perf_counter() - started
                    fresh = choice.get("token_ids") or ()
                    tokens += fresh
                    arrivals += [time.perf_counter()] * len(fresh)
                    text += choice["text"]
                usage = chunk.get("usage") or usage
        except (OSError, http.client.HTTPException) as problem:
            raise EngineFailed(f"the request failed: {problem!r}", self.log) from None
        if len(tokens) != max_tokens:
            raise EngineFailed(f"the answer has {len(tokens)} tokens, not {max_tokens}", self.log)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Completion(tuple(tokens), text, ttft, usage["prompt_tokens"], cached, tuple(arrivals))

    def metric(self, name: str) -> float:
        """The sum of one Prometheus metric over its labels, 0 when there is none."""
        lines = self._get("/metrics")[1].decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] == name)

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=10)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=REQUEST_SECONDS)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                detail = response.read(500).decode(errors="replace")
                raise EngineFailed(f"vLLM answered {response.status}: {detail}", self.log)
            for line in response:
                kind, _, data = line.decode().strip().partition(": ")
                if kind == "data" and data != "[DONE]":
                    yield json.loads(data)
        finally:
            connection.close()

    def stop(self) -> None:
        """Ask the engine to end, wait, and kill what is left of it. May be called again."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def last_lines(log: Path, count: int) -> list[str]:
    """The end of a log file, without empty lines; empty when there is no file."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - (count << 10)))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [line for line in lines if line.strip()][-count:]
