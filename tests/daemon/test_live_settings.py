"""Settings that change while the daemon runs: set, reload, SIGHUP. Real processes throughout."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from hpkv_client.client import BlockCache
from tests.daemons import DaemonFactory, DaemonHandle, hpkvd, refusal
from tests.support import NOBODY, Child, wait_until

SIZE, POOL = 64 << 10, 4 << 20


def used(handle: DaemonHandle, name: str) -> object:
    return handle.client().call("config", {}, 30.0)["settings"][name]


def test_a_setting_is_found_by_each_of_its_names_and_by_a_pattern(running: DaemonHandle) -> None:
    for name in ("pool_size", "pool_size_bytes", "HPKV_KV_MEM_POOL_SIZE"):
        assert hpkvd("config", "get", name, env=running.env).stdout == f"pool_size_bytes {64 << 20}\n"
    found = json.loads(hpkvd("config", "get", "lease*", "--json", env=running.env).stdout)
    assert found == {"lease_seconds": 30.0}
    assert "did you mean lease_seconds?" in refusal("config", "get", "leese_seconds", env=running.env, exit_code=78)


def test_set_changes_a_setting_until_it_is_read_anew(daemon: DaemonFactory) -> None:
    handle = daemon()
    done = hpkvd("config", "set", "lease_seconds", "7", env=handle.env)
    assert (done.returncode, done.stdout) == (0, "lease_seconds: 7.0 (was 30.0)\n")
    answer = handle.client().call("hello", {"major": 1, "minor": 0, "name": "n"}, 30.0)
    assert answer["lease_seconds"] == 7
    shown = json.loads(hpkvd("config", "running", "--json", env=handle.env).stdout)
    assert shown["origins"]["lease_seconds"] == "set while it runs"
    told = json.loads(hpkvd("reload", "--json", env=handle.env).stdout)
    assert told == {"changed": [{"name": "lease_seconds", "before": 7.0, "now": 30.0}], "needs_restart": []}
    assert "nothing changed" in hpkvd("reload", env=handle.env).stderr


def test_the_log_level_changes_at_once(daemon: DaemonFactory) -> None:
    handle = daemon()
    hpkvd("config", "set", "HPKV_LOG_LEVEL", "warning", env=handle.env)
    said = handle.text()
    hpkvd("config", "set", "lease_seconds", "8", env=handle.env)
    assert handle.text() == said
    hpkvd("config", "set", "log_level", "", env=handle.env)
    hpkvd("config", "set", "lease_seconds", "9", env=handle.env)
    assert f"lease_seconds is now 9.0, by uid {os.getuid()}" in handle.text()


def test_what_cannot_change_is_refused_with_what_to_do(running: DaemonHandle) -> None:
    said = refusal("config", "set", "pool_size", "1g", env=running.env, exit_code=2)
    assert "pool_size cannot change while hpkvd runs" in said
    assert f"set it in {running.env['HPKV_CONFIG']} and run 'hpkvd restart'" in said
    said = refusal("config", "set", "load_deadline_seconds", "3", env=running.env, exit_code=2)
    assert "set HPKV_LOAD_DEADLINE_SECONDS where the engine is started" in said
    assert "'x'" in refusal("config", "set", "lease_seconds", "x", env=running.env, exit_code=78)
    assert "reserved of a pool" in refusal("config", "set", "quotas", "m=65m:", env=running.env, exit_code=78)


def test_quotas_change_at_once_and_what_is_too_much_leaves(daemon: DaemonFactory) -> None:
    handle = daemon(HPKV_KV_MEM_POOL_SIZE=POOL)
    names = [f"key {i}".encode() for i in range(40)]
    with BlockCache("greedy", SIZE, socket=handle.socket) as cache:
        for name in names:
            cache.put({name: name.ljust(SIZE, b".")})
        assert sum(cache.contains(names)) == 40
        assert hpkvd("config", "set", "quotas", "greedy=:25%", env=handle.env).returncode == 0
        assert cache.contains(names) == [False] * 24 + [True] * 16
        assert cache.get(names[-1:]) == [names[-1].ljust(SIZE, b".")]
        quotas = {quota["model"]: quota for quota in handle.client().call("info", {}, 30.0)["quotas"]}
        assert quotas["greedy"]["held_bytes"] == quotas["greedy"]["maximum_bytes"] == POOL // 4
        assert hpkvd("config", "set", "quotas", "", env=handle.env).returncode == 0
        for name in names:
            cache.put({name: name.ljust(SIZE, b".")})
        assert sum(cache.contains(names)) == 40
    assert hpkvd("check", env=handle.env).returncode == 0


def test_the_daily_writes_of_a_disk_change_at_once(daemon: DaemonFactory) -> None:
    env = daemon.environment()
    handle = daemon(HPKV_KV_STORAGE_PATH=Path(env["HPKV_SOCKET"]).parent / "disk", HPKV_STORAGE_SIZE="64m")
    ask = handle.client().call
    assert ask("info", {}, 10)["storage"]["allowed_bytes"] is None
    assert hpkvd("config", "set", "storage_daily_writes", "24m", env=handle.env).returncode == 0
    assert (1 << 20) <= ask("info", {}, 10)["storage"]["allowed_bytes"] < (2 << 20)
    assert used(handle, "storage_daily_writes_bytes") == 24 << 20
    assert hpkvd("config", "set", "storage_daily_writes", "", env=handle.env).returncode == 0
    assert ask("info", {}, 10)["storage"]["allowed_bytes"] is None


def test_reload_applies_the_file_and_names_what_needs_a_restart(daemon: DaemonFactory) -> None:
    handle = daemon()
    Path(handle.env["HPKV_CONFIG"]).write_text('lease_seconds = 11\npolicy = "s3fifo"\nload_deadline_seconds = 9\n')
    done = hpkvd("reload", env=handle.env)
    assert done.stdout == "lease_seconds: 11.0 (was 30.0)\n"
    assert done.stderr == "hpkvd: policy: s3fifo needs 'hpkvd restart' (now lru)\n"
    assert used(handle, "policy") == "lru"
    assert used(handle, "lease_seconds") == 11.0
    checked = json.loads(hpkvd("config", "check", "--json", env=handle.env).stdout)
    assert {"name": "policy", "running": "lru", "configured": "s3fifo"} in checked["differs"]


def test_a_broken_file_changes_nothing_and_is_told(daemon: DaemonFactory) -> None:
    handle = daemon()
    Path(handle.env["HPKV_CONFIG"]).write_text('lease_seconds = 11\nlog_levle = "debug"\n')
    assert "did you mean log_level?" in refusal("reload", env=handle.env, exit_code=78)
    assert "did you mean log_level?" in refusal("config", "check", env=handle.env, exit_code=78)
    assert used(handle, "lease_seconds") == 30.0
    Path(handle.env["HPKV_CONFIG"]).write_text('quotas = "m=65m:"\n')
    assert "reserved of a pool" in refusal("reload", env=handle.env, exit_code=78)


def test_hangup_reads_the_file_anew_and_nothing_ends(daemon: DaemonFactory) -> None:
    handle = daemon()
    Path(handle.env["HPKV_CONFIG"]).write_text("lease_seconds = 12\n")
    handle.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "configuration read anew: lease_seconds" in handle.text(), 20)
    assert used(handle, "lease_seconds") == 12.0
    Path(handle.env["HPKV_CONFIG"]).write_text("lease_seconds = 'soon'\n")
    handle.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "the configuration was not read anew" in handle.text(), 20)
    assert used(handle, "lease_seconds") == 12.0
    assert handle.process.poll() is None
    assert handle.stop() == 0


def test_config_check_needs_no_daemon_and_makes_nothing(daemon: DaemonFactory) -> None:
    env = daemon.environment()
    directory = Path(env["HPKV_SOCKET"]).parent / "pool"
    env["HPKV_SHARE_MEM_FILE_PATH"] = str(directory)
    done = hpkvd("config", "check", env=env)
    assert (done.returncode, done.stdout) == (0, f"{env['HPKV_CONFIG']}: ok\n")
    assert not directory.exists()
    assert "larger than the memory" in refusal("config", "check", "--pool-size", "512t", env=env, exit_code=78)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_changes_nothing(daemon: DaemonFactory) -> None:
    handle = daemon(HPKV_SOCKET_MODE="0666")
    handle.socket.parent.chmod(0o755)
    code = (
        f"os.setuid({NOBODY})\n"
        "channel = Channel(socket)\n"
        "for verb, body in (('set', {'name': 'lease_seconds', 'value': '9'}), ('reload', {})):\n"
        "    try: channel.call(verb, body, 30.0)\n"
        "    except NotPermitted as problem: say(problem.message)\n"
    )
    with Child(handle, code) as child:
        assert child.heard() == f"uid {NOBODY} may not change settings"
        assert child.heard() == f"uid {NOBODY} may not reload the configuration"
    assert used(handle, "lease_seconds") == 30.0
