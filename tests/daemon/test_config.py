"""Settings as a daemon takes them, and every bad one as one clear line. Real processes throughout."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from hpkv_client.errors import HpkvError
from hpkv_client.transport import Channel
from hpkv_client.wire import PROTOCOL
from tests.daemons import DaemonFactory, DaemonHandle, hpkvd, refusal


def test_config_show_tells_value_and_origin_of_every_setting(daemon: DaemonFactory) -> None:
    env = daemon.environment(HPKV_POLICY="s3fifo", HPKV_LEASE_SECONDS="")
    Path(env["HPKV_CONFIG"]).write_text('policy = "lru"\nlog_level = "debug"\n')
    shown = json.loads(hpkvd("config", "show", "--json", "--pool-size", "1.5g", env=env).stdout)
    assert shown["settings"]["pool_size_bytes"] == 3 << 29
    assert shown["origins"]["pool_size_bytes"] == "flag --pool-size"
    assert (shown["settings"]["policy"], shown["origins"]["policy"]) == ("s3fifo", "environment HPKV_POLICY")
    assert shown["origins"]["log_level"] == f"file {env['HPKV_CONFIG']}"
    assert shown["origins"]["lease_seconds"] == "default"


def test_config_default_is_a_file_to_start_from(daemon: DaemonFactory) -> None:
    text = hpkvd("config", "default", env={}).stdout
    assert '# pool_size = "25%"' in text
    env = daemon.environment()
    lines = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ") and " = " in line]
    Path(env["HPKV_CONFIG"]).write_text("\n".join(line for line in lines if "8g = 8G" not in line))
    shown = json.loads(hpkvd("config", "show", "--json", env=env).stdout)
    assert shown["origins"]["policy"] == f"file {env['HPKV_CONFIG']}"


def test_a_file_edited_while_the_daemon_runs_changes_nothing_yet(running: DaemonHandle) -> None:
    Path(running.env["HPKV_CONFIG"]).write_text('policy = "s3fifo"\n')
    assert json.loads(hpkvd("config", "running", "--json", env=running.env).stdout)["settings"]["policy"] == "lru"
    assert json.loads(hpkvd("config", "show", "--json", env=running.env).stdout)["settings"]["policy"] == "s3fifo"


def test_the_log_tells_the_file_and_what_overrides_it(running: DaemonHandle) -> None:
    line = next(line for line in running.text().splitlines() if "configuration" in line)
    assert running.env["HPKV_CONFIG"] in line
    assert "environment HPKV_KV_MEM_POOL_SIZE" in line


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"HPKV_KV_MEM_POOL_SIZE": "8GB"}, "write 8g for 8 x 2^30 bytes"),
        ({"HPKV_KV_MEM_POOL_SIZE": "1e9"}, "not a size"),
        ({"HPKV_KV_MEM_POOL_SIZE": "512t"}, "larger than the memory"),
        ({"HPKV_KV_MEM_POOL_SIZE": "4k"}, "holds no blocks"),
        ({"HPKV_POOL_SZIE": "1g"}, "did you mean HPKV_KV_MEM_POOL_SIZE?"),
        ({"HPKV_SHARE_MEM_FILE_PATH": "/dev/shm/hpkv-missing/deep"}, "does not exist"),
        ({"HPKV_SHARE_MEM_FILE_PATH": "/etc/passwd"}, "is not a directory"),
        ({"HPKV_SHARE_MEM_FILE_PATH": "pool"}, "a relative path"),
        ({"HPKV_SHARE_MEM_FILE_PATH": "$HOME/pool"}, "variables are not expanded"),
        ({"HPKV_KV_STORAGE_PATH": "/etc/passwd"}, "storage directory /etc/passwd is not a directory"),
        ({"HPKV_SOCKET": "/tmp/" + "s" * 103}, "has 108 bytes, the kernel allows 107"),
        ({"HPKV_SOCKET_GROUP": "no-such-group"}, "does not exist"),
        ({"HPKV_CONFIG": "/etc/no-such-file.toml"}, "does not exist"),
        ({"HPKV_FAULTS": "x"}, "HPKV_FAULTS_CONFIRM"),
        ({"HPKV_POLICY": "fifo"}, "must be one of lru, s3fifo"),
    ],
)
def test_an_impossible_setting_is_one_clear_line_and_78(
    daemon: DaemonFactory, settings: dict[str, str], complaint: str
) -> None:
    env = daemon.environment(**settings)
    assert complaint in refusal("serve", env=env, exit_code=78)
    assert not Path(env["HPKV_SHARE_MEM_FILE_PATH"], "pool").exists()


def test_start_passes_on_what_keeps_the_daemon_from_starting(daemon: DaemonFactory) -> None:
    env = daemon.environment(HPKV_KV_MEM_POOL_SIZE="512t")
    assert "larger than the memory" in refusal("start", env=env, exit_code=78)


def test_a_misspelt_key_in_the_file_is_refused_with_the_right_one(daemon: DaemonFactory) -> None:
    env = daemon.environment()
    Path(env["HPKV_CONFIG"]).write_text('pool_szie = "1g"\n')
    complaint = refusal("serve", env=env, exit_code=78)
    assert env["HPKV_CONFIG"] in complaint
    assert "did you mean pool_size?" in complaint


def test_a_pool_larger_than_its_tmpfs_is_refused_with_the_numbers(
    daemon: DaemonFactory, tmpfs: Callable[[str], Path]
) -> None:
    directory = tmpfs("32m")
    env = daemon.environment(HPKV_SHARE_MEM_FILE_PATH=directory)
    complaint = refusal("serve", env=env, exit_code=78)
    assert "64 MiB (67108864 bytes) does not fit" in complaint
    assert "32 MiB (33554432 bytes) available" in complaint
    assert list(directory.iterdir()) == []


def test_a_pool_outside_memory_starts_with_a_warning(daemon: DaemonFactory) -> None:
    env = daemon.environment(HPKV_KV_MEM_POOL_SIZE="8m")
    env["HPKV_SHARE_MEM_FILE_PATH"] = str(Path(env["HPKV_SOCKET"]).parent / "pool")
    done = hpkvd("start", env=env)
    try:
        assert done.returncode == 0
        assert "not tmpfs" in done.stderr
        assert "not tmpfs" in Path(env["HPKV_SOCKET"]).with_suffix(".log").read_text()
    finally:
        hpkvd("stop", env=env)


def test_a_storage_path_is_made_and_reported_as_not_used_yet(daemon: DaemonFactory) -> None:
    env = daemon.environment()
    storage = Path(env["HPKV_SOCKET"]).parent / "storage"
    handle = daemon(HPKV_KV_STORAGE_PATH=storage)
    assert stat.S_IMODE(storage.stat().st_mode) == 0o700
    assert handle.text().count(str(storage)) == 1
    shown = json.loads(hpkvd("config", "running", "--json", env=handle.env).stdout)
    assert shown["settings"]["storage_path"] == str(storage)


@pytest.mark.parametrize("length", [60, 100, 107])
def test_both_ends_agree_on_socket_paths_the_kernel_can_hold(daemon: DaemonFactory, length: int) -> None:
    directory = Path(daemon.environment()["HPKV_SOCKET"]).parent
    path = directory / ("s" * (length - len(str(directory)) - 1))
    assert len(str(path)) == length
    handle = daemon(HPKV_SOCKET=path)
    assert json.loads(hpkvd("ping", "--json", env=handle.env).stdout)["pid"] == handle.pid


def test_two_instances_with_default_paths_do_not_meet(tmp_path: Path) -> None:
    names = [f"t{os.getpid()}-{letter}" for letter in "ab"]
    config = tmp_path / "empty.toml"
    config.touch()
    base = {"PATH": os.environ["PATH"], "HPKV_CONFIG": str(config), "HPKV_KV_MEM_POOL_SIZE": "4m"}
    envs = [base | {"HPKV_INSTANCE": name} for name in names]
    started = [json.loads(hpkvd("start", "--json", env=env).stdout) for env in envs]
    paths = [json.loads(hpkvd("config", "show", "--json", env=env).stdout)["settings"] for env in envs]
    try:
        assert [path["socket"] for path in paths] == [facts["socket"] for facts in started]
        for env, facts, name in zip(envs, started, names, strict=True):
            answer = json.loads(hpkvd("ping", "--json", env=env).stdout)
            assert (answer["pid"], answer["instance"]) == (facts["pid"], name)
        crossed = Channel(Path(started[0]["socket"]))
        hello = {"major": PROTOCOL[0], "minor": PROTOCOL[1], "name": "test"}
        try:
            with pytest.raises(HpkvError, match=f"is instance '{names[0]}', not '{names[1]}'"):
                crossed.call("hello", hello | {"instance": names[1]}, 30.0)
            assert crossed.call("hello", hello | {"instance": names[0]}, 30.0)["session"] > 0
        finally:
            crossed.close()
    finally:
        for env, path in zip(envs, paths, strict=True):
            assert hpkvd("stop", "--discard", env=env).returncode == 0
            assert list(Path(path["pool_path"]).iterdir()) == []
            Path(path["pool_path"]).rmdir()
            Path(path["socket"]).with_suffix(".log").unlink()
