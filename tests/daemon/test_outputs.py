"""What commands print about a real daemon, for people and as JSON, against golden files: all but the figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemons import hpkvd_here
from tests.outputs import assert_golden, shape
from tests.support import Observed, Rank, hashes, observed_daemon, plain_shard

COMMANDS = {
    "status": ("status",),
    "ping": ("ping",),
    "check": ("check",),
    "explain": ("explain", "--last", "1"),
    "clients": ("clients",),
    "leases": ("leases",),
    "hot": ("hot", "-n", "1"),
    "latency": ("latency", "--once", "-n", "3", "-i", "0"),
    "pin": ("pin", "--request", "cmpl-1"),
    "pins": ("pins",),
    "unpin": ("unpin", "--all"),
    "config-get": ("config", "get", "lease_seconds"),
    "config-set": ("config", "set", "lease_seconds", "20"),
    "config-check": ("config", "check"),
    "reload": ("reload",),
    "export": ("export", "FILE", "--namespace", "NAMESPACE"),
    "restore": ("restore", "FILE"),
    "bench": ("bench", "--size", "1m", "--block-size", "256k", "--seconds", "0.1"),
    "support-bundle": ("support-bundle", "FILE"),
    "clear": ("clear",),
}


@pytest.fixture(scope="module")
def live() -> Iterator[Observed]:
    """A daemon with a rank, two blocks, a lease and a look-up that has a name."""
    with (
        observed_daemon(HPKV_KV_MEM_POOL_SIZE="8m", HPKV_LEASE_SECONDS=1800) as made,
        Rank(made.socket, plain_shard(64 << 10, 4), engine="engine").hello().register(model="model") as rank,
    ):
        rank.ready().store(hashes("a", "b"), [0, 1])
        rank.call("match", keys=rank.keys(hashes("a", "b", "c")), request="cmpl-1")
        yield made


BEFORE = {
    "pins": ("pin", "--request", "cmpl-1"),
    "unpin": ("pin", "--request", "cmpl-1"),
    "config-set": ("config", "set", "lease_seconds", "30"),
    "config-check": ("config", "set", "lease_seconds", "20"),
    "reload": ("config", "set", "lease_seconds", "20"),
    "restore": ("export", "FILE", "--namespace", "NAMESPACE"),
}
"""What is run before each form of a command, so that it has something to print."""


def without_figures(text: str, directories: list[Path]) -> str:
    """Paths, digests and numbers as words, columns apart by two blanks."""
    for directory in directories:
        text = text.replace(str(directory), "DIRECTORY")
    text = re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{12,}\b", "HEX", text)
    text = re.sub(r"\b(\d+m\d\ds|\d+\.\ds)\b", "TIME", text)
    text = re.sub(r"\b\d[\d,.]*\b", "N", text)
    text = re.sub(r"\b(B|KiB|MiB)\b", "SIZE", text)
    return "\n".join(re.sub(r" {2,}", "  ", line.rstrip()) for line in text.splitlines()) + "\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_it_always_did(live: Observed, tmp_path: Path, name: str) -> None:
    namespace = live.ask("info")["namespaces"][0]["id"]
    printed = []
    for form in ([], ["--json"]):
        names = {"FILE": str(tmp_path / f"{name}{len(form)}"), "NAMESPACE": namespace}
        if name in BEFORE:
            first = hpkvd_here(*(names.get(word, word) for word in BEFORE[name]), env=live.handle.env)
            assert first.returncode == 0, first.stderr
        done = hpkvd_here(*(names.get(word, word) for word in COMMANDS[name]), *form, env=live.handle.env)
        assert done.returncode == 0, done.stderr
        printed.append(done)
    directories = [tmp_path, live.socket.parent, live.handle.pool_directory]
    people, programs = printed
    assert_golden(f"commands/{name}.txt", without_figures(people.stdout + people.stderr, directories))
    assert programs.stdout.count("\n") == 1
    assert_golden(f"commands/{name}.json", json.dumps(shape(json.loads(programs.stdout)), indent=1) + "\n")
