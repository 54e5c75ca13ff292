"""Every command of the runbook, run against a live daemon with an engine."""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpkv_client.errors import BY_CODE
from tests.daemons import DaemonFactory, hpkvd, hpkvd_here
from tests.support import Rank, hashes, plain_shard

_TEXT = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()
_SECTION = _TEXT.partition("\n## Runbook\n")[2].partition("\n## ")[0]
SYMPTOMS = {
    title: re.findall(r"^hpkvd .*$", body, re.M)
    for title, body in re.findall(r"^### (.+?)\n(.*?)(?=^### |\Z)", _SECTION, re.M | re.S)
}


@pytest.fixture(scope="module")
def env() -> Iterator[dict[str, str]]:
    """Of a daemon that was started as operators start one."""
    factory = DaemonFactory()
    made = factory.environment(HPKV_KV_MEM_POOL_SIZE="66m")
    try:
        assert hpkvd("start", env=made).returncode == 0
        yield made
    finally:
        hpkvd("stop", "--force", env=made)
        factory.close()


def keep_evicting(rank: Rank, over: threading.Event) -> None:
    number = 0
    while not over.is_set():
        rank.store(hashes(*(f"{number} {i}" for i in range(16))), range(16))
        number += 1


def test_the_runbook_is_found() -> None:
    assert len(SYMPTOMS) >= 8
    assert all(SYMPTOMS.values()), SYMPTOMS


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_the_commands_of_a_symptom_run(symptom: str, env: dict[str, str], tmp_path: Path) -> None:
    over = threading.Event()
    with Rank(Path(env["HPKV_SOCKET"]), plain_shard(1 << 20, 16), engine="e").hello().register(model="m") as rank:
        rank.ready().match(hashes("never"))
        busy = threading.Thread(target=keep_evicting, args=(rank, over))
        if any("monitor" in command for command in SYMPTOMS[symptom]):
            busy.start()
        try:
            for command in SYMPTOMS[symptom]:
                words = [word.replace("/tmp/", f"{tmp_path}/") for word in shlex.split(command)[1:]]
                done = (hpkvd if words[0] == "restart" else hpkvd_here)(*words, env=env)
                assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
                assert done.stdout or done.stderr, command
        finally:
            over.set()
            if busy.ident is not None:
                busy.join()
            rank.channel.session = 0


def test_every_exit_code_is_explained() -> None:
    table = _TEXT.partition("## Exit codes")[2].partition("\n## ")[0]
    explained = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.M)}
    assert explained == {kind.exit_code for kind in BY_CODE.values()} | {0, 130}
