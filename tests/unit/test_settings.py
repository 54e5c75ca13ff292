"""Settings: sizes, paths, precedence, and what is refused with which hint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpkv_client.errors import ConfigError
from hpkv_client.settings import (
    SETTINGS,
    check_environment,
    config_path,
    format_size,
    from_environment,
    load,
    parse_size,
    read_file,
    report,
)
from hpkv_client.values import parse_mode, parse_path, parse_quotas, parse_socket, ram_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8g", 8 * GIB),
        ("8G", 8 * GIB),
        ("8GiB", 8 * GIB),
        ("1 GiB", GIB),
        (" 1g ", GIB),
        ("1.5g", 3 * GIB // 2),
        ("1024M", GIB),
        ("64k", 65536),
        ("2t", 2 << 40),
        ("1073741824", GIB),
        (1073741824, GIB),
        ("1024T", 1 << 50),
        (1, 1),
    ],
)
def test_sizes_are_powers_of_two_as_text_or_integer(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *(
            "8GB",
            "1Gb",
            "1gb",
            "1kB",
            "0",
            "0g",
            "-1",
            "-1g",
            "+1g",
            "",
            " ",
            "abc",
            "1e9",
            "nan",
            "inf",
            "1.5",
        ),
        *("1.g", ".5g", "1,5g", "1_000", "0x10", "1gg", "1GiBB", "g", "%", "0%", "101%", "-5%", "1B", "8Gi"),
        *("9999999T", "1025T", "\u0661g", "1g\n2g"),
        *(0, -1, (1 << 50) + 1, 1.5, 8e9, True, None, [8], {"size": 8}),
    ],
)
def test_what_is_not_a_size_is_refused(text: object) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


def test_decimal_units_are_refused_with_the_right_spelling() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size("8GB")
    assert "10^9" in caught.value.message
    assert "write 8g for 8 x 2^30 bytes" in caught.value.hint


def test_a_percentage_is_of_the_memory_this_process_may_use() -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert parse_size("25%") == ram_bytes() // 4
    assert parse_size("12.5%") == ram_bytes() // 8
    assert 0 < ram_bytes() <= physical


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (8 * GIB, "8 GiB (8589934592 bytes)"),
        (3 * GIB // 2, "1.5 GiB (1610612736 bytes)"),
        (100 << 20, "100 MiB (104857600 bytes)"),
        (GIB + 1, "1 GiB (1073741825 bytes)"),
        (512, "512 bytes"),
        (0, "0 bytes"),
    ],
)
def test_sizes_are_printed_back_with_their_exact_bytes(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/a/b", "/a/b"),
        ("/a/b/", "/a/b"),
        ("//a//b", "/a/b"),
        ("/a b/ü", "/a b/ü"),
        ("file:///a/b", "/a/b"),
        ("file:///a%20b", "/a b"),
    ],
)
def test_paths_become_absolute(text: str, path: str) -> None:
    assert parse_path(text) == Path(path)


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert parse_path("~/x") == Path("/home/someone/x")
    assert parse_path("~") == Path("/home/someone")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "x",
            "./x",
            "../x",
            "file://x",
            "file:/x",
            "s3://b/x",
            "$HOME/x",
            "/a/${B}/c",
            "~nobody-has-this/x",
        ),
        *("", " ", "/a\nb", "/a\0b", "file:///a%00b", 7, None),
    ],
)
def test_paths_that_could_mean_something_else_are_refused(text: object) -> None:
    with pytest.raises(ConfigError):
        parse_path(text)


def test_a_relative_path_is_refused_with_the_absolute_one() -> None:
    with pytest.raises(ConfigError, match=str(Path.cwd() / "x")):
        parse_path("x")


def test_socket_paths_end_at_what_the_kernel_can_hold() -> None:
    assert len(str(parse_socket("/" + "s" * 106))) == 107
    for length in (108, 200):
        with pytest.raises(ConfigError, match=f"{length} bytes, the kernel allows 107"):
            parse_socket("/" + "s" * (length - 1))
    with pytest.raises(ConfigError, match="108 bytes"):
        parse_socket("/" + "ü" * 53 + "s")


@pytest.mark.parametrize("value", ["9999", "0440", "rw", "0", "066", "1777", 660, "-660"])
def test_permissions_are_octal_text_that_lets_the_owner_in(value: object) -> None:
    assert parse_mode("0660") == parse_mode("660") == parse_mode("0o660") == 0o660
    with pytest.raises(ConfigError):
        parse_mode(value)


def test_flags_win_over_environment_over_file_over_defaults() -> None:
    path = Path("/etc/hpkv/hpkvd.toml")
    environ = {"HPKV_KV_MEM_POOL_SIZE": "2g", "HPKV_POLICY": "s3fifo"}
    file: dict[str, object] = {"pool_size": "1g", "policy": "lru", "lease_seconds": 7}
    settings, origins = load(environ, {"pool_size": "3g", "policy": None}, file, path)
    assert (settings.pool_size, settings.policy, settings.lease_seconds) == (3 * GIB, "s3fifo", 7.0)
    assert settings.load_deadline_seconds == 5.0
    assert origins["pool_size"] == "flag --pool-size"
    assert origins["policy"] == "environment HPKV_POLICY"
    assert origins["lease_seconds"] == "file /etc/hpkv/hpkvd.toml"
    assert origins["load_deadline_seconds"] == "default"
    assert set(origins) == set(SETTINGS)


def test_a_variable_that_is_set_but_empty_counts_as_unset() -> None:
    settings, origins = load({"HPKV_KV_MEM_POOL_SIZE": "", "HPKV_SOCKET": ""}, None, {"pool_size": "1g"}, Path("/f"))
    assert settings.pool_size == GIB
    assert origins["pool_size"] == "file /f"
    assert origins["socket"] == "default"


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("HPKV_POOL_SZIE", "HPKV_KV_MEM_POOL_SIZE"),
        ("HPKV_POOL_SIZE", "HPKV_KV_MEM_POOL_SIZE"),
        ("HPKV_KV_MEM_POOLSIZE", "HPKV_KV_MEM_POOL_SIZE"),
        ("HPKV_STORAGE_PATH", "HPKV_KV_STORAGE_PATH"),
        ("HPKV_SOKCET", "HPKV_SOCKET"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_right_name(name: str, right: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}; did you mean {right}\\?"):
        check_environment({"HOME": "/", name: "1"})


def test_every_variable_of_the_table_is_known() -> None:
    check_environment({setting.env: "x" for setting in SETTINGS.values()} | {"HPKV_FAULTS_CONFIRM": "x"})


def test_an_unknown_key_of_file_or_flags_is_refused_with_the_nearest_right_name() -> None:
    with pytest.raises(ConfigError, match="'pool_szie' in /f; did you mean pool_size"):
        load({}, None, {"pool_szie": "1g"}, Path("/f"))
    with pytest.raises(ConfigError, match="did you mean socket"):
        load({}, {"sokcet": "/x"})


def test_errors_name_the_source_and_the_value() -> None:
    with pytest.raises(ConfigError, match="HPKV_KV_MEM_POOL_SIZE='8GB'"):
        load({"HPKV_KV_MEM_POOL_SIZE": "8GB"})
    with pytest.raises(ConfigError, match="--policy='fifo'"):
        load({}, {"policy": "fifo"})
    with pytest.raises(ConfigError, match="/f: lease_seconds='soon'"):
        load({}, None, {"lease_seconds": "soon"}, Path("/f"))


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1d", "", True, None, [1], "86401", 10**400])
def test_durations_are_positive_and_at_most_a_day(value: object) -> None:
    with pytest.raises(ConfigError):
        load({}, None, {"lease_seconds": {"none": None} if value is None else value}, Path("/f"))


def test_faults_need_their_confirmation() -> None:
    assert load({})[0].faults == ""
    with pytest.raises(ConfigError, match="HPKV_FAULTS_CONFIRM=this-breaks-my-cache"):
        load({"HPKV_FAULTS": "delay-copy=1"})
    confirmed = {"HPKV_FAULTS": "delay-copy=1", "HPKV_FAULTS_CONFIRM": "this-breaks-my-cache"}
    assert load(confirmed)[0].faults == "delay-copy=1"


def test_default_paths_derive_from_the_instance() -> None:
    plain, named = load({})[0], load({"HPKV_INSTANCE": "blue"})[0]
    assert plain.socket.name == "hpkvd.sock"
    assert named.socket == plain.socket.with_name("hpkvd@blue.sock")
    assert named.pool_path == plain.pool_path.with_name(plain.pool_path.name + "@blue")


@pytest.mark.parametrize("name", ["../x", "/abs", "a/b", "x" * 65, ".", "..", ".a", "a b", "a\n", "ü", "-a"])
def test_instance_names_cannot_leave_their_directory(name: str) -> None:
    with pytest.raises(ConfigError):
        load({"HPKV_INSTANCE": name})


def test_the_named_file_must_exist_and_the_default_file_need_not(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    assert read_file(missing, named=False) == {}
    with pytest.raises(ConfigError, match=f"{missing} does not exist"):
        read_file(missing, named=True)
    assert config_path({}, None) == (Path("/etc/hpkv/hpkvd.toml"), False)
    assert config_path({"HPKV_CONFIG": ""}, {"config": None})[1] is False
    assert config_path({"HPKV_CONFIG": "/a"}, {"config": "/b"}) == (Path("/b"), True)
    with pytest.raises(ConfigError, match=str(missing)):
        from_environment({"HPKV_CONFIG": str(missing)})


@pytest.mark.parametrize("content", [b"pool_size = 8g", b"\xff\xfe", b"[pool_size]\na = 1", b"config = '/x'"])
def test_a_broken_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_bytes(content)
    with pytest.raises(ConfigError, match=str(broken)):
        from_environment({"HPKV_CONFIG": str(broken)})


def test_a_connector_reads_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "hpkvd.toml"
    file.write_text('socket = "/from/file.sock"\npool_size = "1g"\nload_deadline_seconds = 2.5\n')
    settings = from_environment({"HPKV_CONFIG": str(file), "HPKV_KV_MEM_POOL_SIZE": "2g"})
    assert settings.socket == Path("/from/file.sock")
    assert (settings.pool_size, settings.load_deadline_seconds) == (2 * GIB, 2.5)


def test_a_report_is_plain_and_names_its_units() -> None:
    plain = json.loads(json.dumps(report(*load({"HPKV_KV_MEM_POOL_SIZE": "1g"}))))
    assert plain["settings"]["pool_size_bytes"] == GIB
    assert plain["settings"]["socket_mode"] == "0660"
    assert plain["origins"]["pool_size_bytes"] == "environment HPKV_KV_MEM_POOL_SIZE"
    assert set(plain["settings"]) == set(plain["origins"])


def test_reading_settings_imports_nothing_but_the_standard_library() -> None:
    code = (
        "import sys, hpkv_client.settings as s; s.from_environment({});"
        "print([n for n in ('click', 'msgpack', 'numpy', 'rich', 'zmq', 'hpkv_daemon') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("llama=20%:50%", ["llama=20%:50%"]),
        ("llama=1g:", ["llama=1073741824:"]),
        ("*=:4m, a=b=1%:", ["*=:4194304", "a=b=1%:"]),
    ],
)
def test_quotas_are_read_as_they_are_written(text: str, shown: list[str]) -> None:
    assert [str(quota) for quota in parse_quotas(text)] == shown
    assert parse_quotas(", ".join(shown)) == parse_quotas(text)


@pytest.mark.parametrize(
    "text",
    [
        "llama",
        "llama=",
        "llama=20%",
        "=20%:",
        "llama=:",
        "llama=x:",
        "llama=101%:",
        "llama=50%:20%",
        "llama=2g:1g",
        "llama*=1%:",
        "a=60%:, b=60%:",
        "a=1%:,",
        "a=8GB:",
    ],
)
def test_malformed_quotas_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_quotas(text)
    assert caught.value.hint
