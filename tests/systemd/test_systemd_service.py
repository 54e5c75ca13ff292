"""The service under a real systemd: how it starts, what kills it, what outlives that, and who may use it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from service_node import GET, PUT, PYTHON, START_SECONDS, Node

from tests.support import wait_until

pytestmark = pytest.mark.systemd

ASK = (
    "import sys; from pathlib import Path; from hpkv_client.transport import Channel\n"
    "channel = Channel(Path('/run/hpkv/hpkvd.sock'))\n"
    "while sys.stdin.readline():\n"
    "    print('asking', flush=True)\n"
    "    print(channel.call('ping', {}, 60)['pid'], flush=True)\n"
)


@contextmanager
def asking(node: Node) -> Iterator[subprocess.Popen[str]]:
    """A client that stays connected; it asks once for each line it is told, and says who answered."""
    command = node.machine.command(PYTHON, "-c", ASK, user="engine")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(client: subprocess.Popen[str]) -> None:
    """Have it ask, and return when it does."""
    assert client.stdin
    assert client.stdout
    client.stdin.write("\n")
    client.stdin.flush()
    assert client.stdout.readline() == "asking\n"


def answer(client: subprocess.Popen[str]) -> int:
    """Who answered."""
    assert client.stdout
    return int(client.stdout.readline())


def test_it_is_ready_when_systemd_says_so(node: Node) -> None:
    pid = node.restart()
    found = node.status()
    assert (found["running"], found["pid"], found["socket"]) == (True, pid, "/run/hpkv/hpkvd.sock")
    assert node.property("StatusText") == "serving /run/hpkv/hpkvd.sock, pool of 67108864 bytes"
    assert node.run("stat", "-c", "%U", f"/proc/{pid}").stdout == "hpkv\n"
    assert node.run("stat", "-c", "%U %G %a", "/run/hpkv/hpkvd.sock").stdout == "root hpkv 660\n"


def test_a_program_of_another_user_in_the_group_stores_and_finds_blocks(node: Node) -> None:
    node.python(PUT)
    assert node.python(GET) == "True"


def test_a_stranger_is_refused(node: Node) -> None:
    done = node.run("hpkvd", "ping", user="stranger", check=False)
    assert done.returncode == 77
    assert "join the group" in done.stderr


def test_after_a_crash_the_next_one_has_the_blocks(node: Node) -> None:
    node.python(PUT)
    before = node.serving()
    node.run("kill", "-KILL", before)
    node.serving(not_pid=before)
    assert node.python(GET) == "True"


def test_a_frozen_daemon_is_killed_by_the_watchdog_and_replaced(node: Node) -> None:
    node.change("WatchdogSec=4\nTimeoutAbortSec=1\nRestartSec=100ms")
    node.python(PUT)
    before = node.restart()
    node.run("kill", "-STOP", before)
    node.serving(not_pid=before)
    assert "Watchdog timeout" in node.journal()
    assert node.python(GET) == "True"


def test_one_that_serves_is_left_alone_by_the_watchdog(node: Node) -> None:
    node.change("WatchdogSec=6")
    pid = node.restart()
    first = node.property("WatchdogTimestampMonotonic")
    wait_until(lambda: node.property("WatchdogTimestampMonotonic") != first, 20, "no sign of life")
    assert node.serving() == pid


def test_a_request_waits_while_the_daemon_restarts(node: Node) -> None:
    with asking(node) as client:
        ask(client)
        before = node.serving()
        assert answer(client) == before
        node.run("rm", "-f", "/run/go")
        node.change("ExecStartPre=/bin/sh -c 'while [ ! -e /run/go ]; do sleep 0.05; done'")
        node.run("systemctl", "--no-block", "restart", "hpkvd.service")
        wait_until(lambda: node.property("SubState") == "start-pre", START_SECONDS)
        ask(client)
        found = node.run("systemctl", "is-active", "hpkvd.service", check=False).stdout.strip()
        assert found == "activating"
        node.run("touch", "/run/go")
        assert answer(client) == node.serving(not_pid=before)


def test_the_first_who_connects_starts_it(node: Node) -> None:
    before = node.serving()
    node.run("systemctl", "stop", "hpkvd.service")
    assert node.property("ActiveState") == "inactive"
    pid = json.loads(node.run("hpkvd", "ping", "--json", "--timeout", "60", user="engine").stdout)["pid"]
    assert pid == node.serving() != before


def test_stopping_the_socket_stops_both_and_keeps_the_pool(node: Node) -> None:
    node.python(PUT)
    node.run("systemctl", "stop", "hpkvd.socket")
    assert node.property("ActiveState") == node.property("ActiveState", "hpkvd.socket") == "inactive"
    assert node.property("Result") == "success"
    assert node.run("hpkvd", "status", check=False).returncode == 3
    node.run("systemctl", "start", "hpkvd.service")
    assert node.python(GET) == "True"


def test_root_stops_the_services_daemon_and_frees_its_memory(node: Node) -> None:
    node.run("systemctl", "stop", "hpkvd.socket")
    node.run("systemctl", "start", "hpkvd.service")
    pid = node.serving()
    done = node.run("hpkvd", "stop", "--discard")
    assert f"pid {pid} has ended" in done.stderr
    assert "are free again" in done.stderr
    assert node.run("ls", "/dev/shm/hpkv").stdout == ""


@pytest.mark.parametrize(("settings", "status"), [("HPKV_POLICY=none", "78"), ("HPKV_KV_STORAGE_PATH=/opt/x", "78")])
def test_what_starting_again_cannot_mend_is_left_to_the_operator(node: Node, settings: str, status: str) -> None:
    node.change(f"Environment={settings}")
    started = node.run("systemctl", "restart", "hpkvd.service", check=False)
    assert started.returncode != 0
    assert (node.property("ActiveState"), node.property("ExecMainStatus")) == ("failed", status)
    assert node.property("NRestarts") == "0"
    assert settings.partition("=")[2] in node.journal("--priority=err", "--lines=20")


def test_lines_of_the_journal_have_their_priorities(node: Node) -> None:
    node.restart()
    lines = [json.loads(line) for line in node.journal("--output=json", f"_PID={node.serving()}").splitlines()]
    ready = next(line for line in lines if " ready: " in line["MESSAGE"])
    assert ready["PRIORITY"] == "6"
    assert ready["MESSAGE"].startswith("hpkvd ")


def test_a_reload_changes_what_can_be_changed_and_a_wrong_one_nothing(node: Node) -> None:
    before = node.restart()
    settings = node.machine.root / "etc/hpkv/hpkvd.toml"
    kept = settings.read_text()
    try:
        settings.write_text('log_level = "debug"\n')
        node.run("systemctl", "reload", "hpkvd.service")
        running = json.loads(node.run("hpkvd", "config", "running", "--json").stdout)
        assert running["settings"]["log_level"] == "debug"
        settings.write_text('log_level = "loud"\n')
        assert node.run("systemctl", "reload", "hpkvd.service", check=False).returncode != 0
        assert node.serving() == before
    finally:
        settings.write_text(kept)


def test_the_key_of_a_cluster_is_a_credential(node: Node) -> None:
    node.run("mkdir", "-p", "/etc/credstore")
    node.run("hpkvd", "keygen", "/etc/credstore/hpkv.key")
    node.change("Environment=HPKV_LISTEN=127.0.0.1:7630")
    try:
        node.restart()
        running = json.loads(node.run("hpkvd", "config", "running", "--json").stdout)["settings"]
        assert running["key_file"] == "/run/credentials/hpkvd.service/hpkv.key"
    finally:
        node.run("rm", "/etc/credstore/hpkv.key")
