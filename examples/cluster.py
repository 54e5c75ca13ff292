"""A prompt that one node computed is served to another one from an object store.

    make demo CLUSTER=1

Two daemons, each with a pool of its own, stand for two nodes; a server of S3 (moto's) on this machine for the store.
Three engines are asked the same long prompt, one after another: on the first node while nobody knows it (cold), there
again (local), and on the second node, whose memory is empty (remote). Exit status 0: the last two were served by HPKV,
and all answers are the same.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import boto3
from botocore.exceptions import BotoCoreError, ClientError
from demo import (
    BLOCK_TOKENS,
    DTYPE,
    MODEL,
    REPOSITORY,
    STORE_SECONDS,
    Daemon,
    DemoFailed,
    Steps,
    asked,
    await_stored,
    directories,
    hit_tokens,
)
from engine import EngineFailed, free_port
from rich.console import Console
from rich.table import Table
from tiny_model import make

BUCKET = "demo"
START_SECONDS = 60.0


@dataclass
class Facts:
    """What the demo found out, by where the prompt came from: cold, local, remote."""

    ok: bool = False
    identical: bool = False
    prompt_tokens: int = 0
    ttft_s: dict[str, float] = field(default_factory=dict)
    hit_tokens: dict[str, int] = field(default_factory=dict)
    remote_written_blocks: int = 0
    remote_read_blocks: int = 0


@contextmanager
def object_store() -> Iterator[dict[str, str]]:
    """A server of S3 with one bucket; the variables that make a daemon use it."""
    port = free_port(9100)
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo",
        "AWS_REGION": "us-east-1",
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        client = boto3.client(
            "s3",
            endpoint_url=variables["AWS_ENDPOINT_URL"],
            aws_access_key_id="demo",
            aws_secret_access_key="demo",
            region_name="us-east-1",
        )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                client.create_bucket(Bucket=BUCKET)
                break
            except (BotoCoreError, ClientError) as problem:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise DemoFailed(f"the object store did not start: {problem}") from None
                time.sleep(0.2)
        yield variables
    finally:
        server.kill()
        server.wait()


def await_written(daemon: Daemon, blocks: int) -> int:
    """Blocks in the object store, once nothing waits to be written there."""
    deadline = time.monotonic() + STORE_SECONDS
    while True:
        waiting, stats = daemon.info()["remote"], daemon.stats()
        written = stats["remote_written_blocks"]
        if written >= blocks and not waiting["queued_blocks"] and not waiting["queued_bytes"]:
            return int(written)
        if time.monotonic() > deadline:
            raise DemoFailed(f"{written} of {blocks} blocks are in the object store")
        time.sleep(0.2)


def run(steps: Steps, facts: Facts, runtime: Path, pool: Path, storage: Path) -> None:
    """The whole story; ``facts`` fills up as it goes."""
    with steps(f"making the model {MODEL} ({DTYPE}) unless it is there"):
        model = make(MODEL, REPOSITORY / ".demo" / "models", DTYPE)
    answers = {}
    with ExitStack() as stack:
        with steps("starting an object store (S3) and two nodes' daemons"):
            store = stack.enter_context(object_store())
            settings = store | {"HPKV_REMOTE": f"s3://{BUCKET}/blocks", "HPKV_REMOTE_ADMISSION": "all"}
            nodes = []
            for name in ("a", "b"):
                home, memory = runtime / f"node-{name}", pool / name
                shutil.rmtree(home, ignore_errors=True)
                home.mkdir()
                memory.mkdir()
                nodes.append(stack.enter_context(Daemon(home, memory, storage / name, settings)))
        for name, daemon in (("cold", nodes[0]), ("local", nodes[0]), ("remote", nodes[1])):
            with asked(steps, daemon, model, name, runtime / f"engine-{name}.log") as (engine, answer):
                answers[name] = answer.tokens, answer.text
                facts.prompt_tokens = answer.prompt_tokens
                facts.ttft_s[name] = round(answer.ttft_seconds, 3)
                facts.hit_tokens[name] = hit_tokens(engine, answer)
                if name == "cold":
                    blocks = answer.prompt_tokens // BLOCK_TOKENS
                    with steps("waiting until the prompt is in the object store"):
                        await_stored(daemon, blocks)
                        facts.remote_written_blocks = await_written(daemon, blocks)
        facts.remote_read_blocks = nodes[1].stats()["remote_read_blocks"]
    facts.identical = len(set(answers.values())) == 1
    served = facts.hit_tokens["local"] > 0 and facts.hit_tokens["remote"] > 0 and facts.remote_read_blocks > 0
    facts.ok = facts.identical and served


def table(facts: Facts) -> Table:
    """The facts for people."""
    result = Table(title="HPKV: two nodes, one object store", title_justify="left")
    for column in ("", "cold (node A)", "local (node A again)", "remote (node B)"):
        result.add_column(column, justify="right" if column else "left")
    kinds = ("cold", "local", "remote")
    speedups = [facts.ttft_s["cold"] / max(facts.ttft_s[kind], 1e-9) for kind in kinds]
    times = [f"{facts.ttft_s[kind]:.3f} s ({speedup:.1f}x)" for kind, speedup in zip(kinds, speedups, strict=True)]
    result.add_row("time to first token", *times)
    result.add_row("prompt tokens", *[f"{facts.prompt_tokens}"] * 3)
    result.add_row("of them served by HPKV", *(f"{facts.hit_tokens[kind]}" for kind in kinds))
    result.add_row("blocks to and from the store", f"{facts.remote_written_blocks}", "", f"{facts.remote_read_blocks}")
    result.add_row("identical output", "", "", "yes" if facts.identical else "NO")
    return result


def main() -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    steps, facts, problem = Steps(), Facts(), ""
    try:
        with directories() as (runtime, pool, storage):
            run(steps, facts, runtime, pool, storage)
    except KeyboardInterrupt:
        steps.fail("interrupted", None)
        return 128 + signal.SIGINT
    except EngineFailed as failure:
        problem = str(failure)
        steps.fail(problem, failure.log)
    except (DemoFailed, OSError) as failure:
        problem = str(failure)
        steps.fail(problem, None)
    if arguments.json:
        print(json.dumps(asdict(facts) | ({"problem": problem} if problem else {})))
    elif not problem:
        Console().print(table(facts))
    return 0 if facts.ok else 1


if __name__ == "__main__":
    sys.exit(main())
