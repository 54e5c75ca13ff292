"""Every setting of HPKV in one table, read alike by the daemon, the command line, clients and connectors.

Flags win over ``HPKV_*`` variables, those over the TOML file, that over the defaults. A variable that is set
but empty counts as unset. Standard library only: this module is imported inside engines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hpkv_client.errors import ConfigError, NotPermitted
from hpkv_client.values import (
    Quota,
    format_size,
    hide_secrets,
    is_local,
    parse_choice,
    parse_events,
    parse_instance,
    parse_listen,
    parse_metrics,
    parse_mode,
    parse_name,
    parse_path,
    parse_quotas,
    parse_remote,
    parse_seconds,
    parse_size,
    parse_socket,
    parse_text,
)

__all__ = [
    "SETTINGS",
    "Setting",
    "Settings",
    "check_environment",
    "config_path",
    "format_size",
    "from_environment",
    "load",
    "nearest",
    "parse_size",
    "parse_value",
    "plain",
    "read_file",
    "report",
    "setting_named",
]

PREFIX = "HPKV_"
DEFAULT_CONFIG = "/etc/hpkv/hpkvd.toml"
FAULTS_CONFIRMATION = "HPKV_FAULTS_CONFIRM"
FAULTS_CONFIRMED = "this-breaks-my-cache"

_SYSTEM_DIRECTORY = "/run/hpkv"
_CREDENTIAL = "hpkv.key"


def _owned_by_us(directory: str) -> bool:
    try:
        return os.stat(directory).st_uid == os.geteuid()
    except OSError:
        return False


def _suffix(instance: str) -> str:
    return f"@{instance}" if instance else ""


def _default_socket(environ: Mapping[str, str], instance: str) -> str:
    name = f"hpkvd{_suffix(instance)}.sock"
    system_wide = f"{_SYSTEM_DIRECTORY}/{name}"
    if os.geteuid() == 0 or os.path.exists(system_wide) or _owned_by_us(_SYSTEM_DIRECTORY):
        return system_wide
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and _owned_by_us(runtime):
        return f"{runtime.rstrip('/')}/hpkv/{name}"
    return f"/tmp/hpkv-{os.geteuid()}/{name}"


def _default_pool_path(_environ: Mapping[str, str], instance: str) -> str:
    system_wide = f"/dev/shm/hpkv{_suffix(instance)}"
    if os.geteuid() == 0 or _owned_by_us(system_wide):
        return system_wide
    return f"/dev/shm/hpkv-{os.geteuid()}{_suffix(instance)}"


def _default_key_file(environ: Mapping[str, str], _instance: str) -> str | None:
    """The credential that systemd passes to the service, if there is one."""
    credentials = environ.get("CREDENTIALS_DIRECTORY", "")
    path = f"{credentials.rstrip('/')}/{_CREDENTIAL}"
    return path if os.path.isabs(credentials) and os.path.exists(path) else None


def _default_metrics(_environ: Mapping[str, str], instance: str) -> str:
    """One port of a node belongs to the unnamed instance; others must be told theirs."""
    return "off" if instance else "127.0.0.1:7631"


Default = str | Callable[[Mapping[str, str], str], str | None] | None


@dataclass(frozen=True)
class Setting:
    """One row of the table.

    ``parse`` takes text or a TOML/JSON value and raises ``ConfigError``; ``default`` is a value to parse, a
    function of (environment, instance) that gives one, or None; ``unit`` names what a bare number counts,
    unless the name ends with it. ``flag`` is empty for what only the environment or the file may say.
    """

    name: str
    env: str
    flag: str
    parse: Callable[[object], Any]
    default: Default
    help: str
    unit: str = ""

    @property
    def key(self) -> str:
        """The name with its unit, for output."""
        return f"{self.name}_{self.unit}" if self.unit else self.name

    def default_value(self, environ: Mapping[str, str], instance: str) -> str | None:
        """The default as text, still to be parsed; None means the setting is off."""
        return self.default(environ, instance) if callable(self.default) else self.default


_TABLE = (
    Setting("config", "HPKV_CONFIG", "--config", parse_path, DEFAULT_CONFIG, "TOML file with settings"),
    Setting(
        "instance",
        "HPKV_INSTANCE",
        "--instance",
        parse_instance,
        None,
        "name of this daemon; part of the default paths, and checked when a client connects",
    ),
    Setting("socket", "HPKV_SOCKET", "--socket", parse_socket, _default_socket, "socket to serve on"),
    Setting(
        "socket_mode",
        "HPKV_SOCKET_MODE",
        "--socket-mode",
        parse_mode,
        "0660",
        "permissions of the socket, in octal",
    ),
    Setting("socket_group", "HPKV_SOCKET_GROUP", "--socket-group", parse_name, None, "group that owns the socket"),
    Setting(
        "listen",
        "HPKV_LISTEN",
        "--listen",
        parse_listen,
        None,
        "address and port for engines that run over several nodes, as in 10.0.0.1:7630; needs a key file",
    ),
    Setting(
        "key_file",
        "HPKV_KEY_FILE",
        "--key-file",
        parse_path,
        _default_key_file,
        "key that all nodes of a cluster share; 'hpkvd keygen' makes one",
    ),
    Setting(
        "pool_size",
        "HPKV_KV_MEM_POOL_SIZE",
        "--pool-size",
        parse_size,
        "25%",
        "size of the memory pool: 8g = 8G = 8GiB, 25% of RAM, or plain bytes",
        "bytes",
    ),
    Setting(
        "pool_path",
        "HPKV_SHARE_MEM_FILE_PATH",
        "--pool-path",
        parse_path,
        _default_pool_path,
        "directory of the memory pool, on tmpfs or hugetlbfs",
    ),
    Setting(
        "policy",
        "HPKV_POLICY",
        "--policy",
        parse_choice("lru", "s3fifo"),
        "lru",
        "which blocks leave a full pool first: lru or s3fifo",
    ),
    Setting(
        "quotas",
        "HPKV_QUOTAS",
        "--quotas",
        parse_quotas,
        None,
        "shares of the pool by model: MODEL=RESERVED:MAXIMUM, as in 'llama=20%:50%, *=:4g'",
    ),
    Setting(
        "storage_path",
        "HPKV_KV_STORAGE_PATH",
        "--storage-path",
        parse_path,
        None,
        "directory of the disk tier; without it blocks are kept in memory only",
    ),
    Setting(
        "storage_size",
        "HPKV_STORAGE_SIZE",
        "--storage-size",
        parse_size,
        None,
        "limit of the disk tier; without it 80% of what is free there",
        "bytes",
    ),
    Setting(
        "storage_write",
        "HPKV_STORAGE_WRITE",
        "--storage-write",
        parse_choice("through", "demote"),
        "through",
        "write every block at once (through), or only what is idle or about to be evicted (demote)",
    ),
    Setting(
        "storage_idle_seconds",
        "HPKV_STORAGE_IDLE_SECONDS",
        "--storage-idle-seconds",
        parse_seconds(0.001),
        "60",
        "with demote: a block that was not used for so long is written",
    ),
    Setting(
        "storage_admission",
        "HPKV_STORAGE_ADMISSION",
        "--storage-admission",
        parse_choice("all", "second-touch"),
        "all",
        "write all blocks, or only those that were stored or asked for twice (second-touch)",
    ),
    Setting(
        "storage_daily_writes",
        "HPKV_STORAGE_DAILY_WRITES",
        "--storage-daily-writes",
        parse_size,
        None,
        "bytes that may be written to the disk tier in a day; without it any number",
        "bytes",
    ),
    Setting(
        "remote",
        "HPKV_REMOTE",
        "--remote",
        parse_remote,
        None,
        "store for blocks beyond this node: s3://, gs://, az://, file:///shared/directory or mooncake://",
    ),
    Setting(
        "remote_admission",
        "HPKV_REMOTE_ADMISSION",
        "--remote-admission",
        parse_choice("second-touch", "all"),
        "second-touch",
        "write only blocks that were stored or asked for twice to the remote store (second-touch), or all",
    ),
    Setting(
        "remote_bandwidth",
        "HPKV_REMOTE_BANDWIDTH",
        "--remote-bandwidth",
        parse_size,
        None,
        "bytes per second that may be written to the remote store; without it any number",
        "bytes",
    ),
    Setting(
        "remote_key_file",
        "HPKV_REMOTE_KEY_FILE",
        "--remote-key-file",
        parse_path,
        None,
        "encrypt blocks in the remote store with the key in this file, the same on all nodes",
    ),
    Setting(
        "lease_seconds",
        "HPKV_LEASE_SECONDS",
        "--lease-seconds",
        parse_seconds(1.0),
        "30",
        "how long a match stays readable without a sign of its owner",
    ),
    Setting(
        "submit_deadline_ms",
        "HPKV_SUBMIT_DEADLINE_MS",
        "--submit-deadline-ms",
        parse_seconds(0.001),
        "50",
        "longest wait of an engine to hand over a request",
    ),
    Setting(
        "load_deadline_seconds",
        "HPKV_LOAD_DEADLINE_SECONDS",
        "--load-deadline-seconds",
        parse_seconds(1.0),
        "5",
        "longest wait of an engine for its blocks",
    ),
    Setting(
        "load_when",
        "HPKV_LOAD_WHEN",
        "",
        parse_choice("faster", "always"),
        "faster",
        "load a hit unless computing it was much faster lately (faster), or in any case (always)",
    ),
    Setting(
        "weights_id",
        "HPKV_WEIGHTS_ID",
        "",
        parse_text,
        None,
        "name of a model's weights, for those that are not in local files",
    ),
    Setting(
        "metrics",
        "HPKV_METRICS",
        "--metrics",
        parse_metrics,
        _default_metrics,
        "where /metrics, /healthz and /readyz are served, as in 127.0.0.1:7631; off for nowhere",
    ),
    Setting(
        "events",
        "HPKV_EVENTS",
        "--events",
        parse_events,
        None,
        "where KV events are published for routers, as in tcp://127.0.0.1:5557 or ipc:///run/hpkv/events.sock",
    ),
    Setting(
        "log_level",
        "HPKV_LOG_LEVEL",
        "--log-level",
        parse_choice("debug", "info", "warning", "error"),
        "info",
        "debug, info, warning or error",
    ),
    Setting(
        "log_file",
        "HPKV_LOG_FILE",
        "--log-file",
        parse_path,
        None,
        "log file; without it stderr, and for 'hpkvd start' a file beside the socket",
    ),
    Setting(
        "log_format",
        "HPKV_LOG_FORMAT",
        "--log-format",
        parse_choice("text", "json"),
        "text",
        "text, or json: one object per line",
    ),
    Setting(
        "faults",
        "HPKV_FAULTS",
        "",
        parse_text,
        None,
        "faults to inject, for tests of HPKV itself",
    ),
)

SETTINGS: dict[str, Setting] = {setting.name: setting for setting in _TABLE}
"""Name -> setting, in the order of the documentation."""


@dataclass(frozen=True)
class Settings:
    """All settings, parsed; paths are absolute. Sizes are bytes; the other units are in the names."""

    config: Path
    instance: str
    socket: Path
    socket_mode: int
    socket_group: str | None
    listen: str | None
    key_file: Path | None
    pool_size: int
    pool_path: Path
    policy: str
    quotas: tuple[Quota, ...]
    storage_path: Path | None
    storage_size: int | None
    storage_write: str
    storage_idle_seconds: float
    storage_admission: str
    storage_daily_writes: int | None
    remote: str | None
    remote_admission: str
    remote_bandwidth: int | None
    remote_key_file: Path | None
    lease_seconds: float
    submit_deadline_ms: float
    load_deadline_seconds: float
    load_when: str
    weights_id: str
    metrics: str
    events: str
    log_level: str
    log_file: Path | None
    log_format: str
    faults: str


_WHEN_OFF: dict[str, object] = {"instance": "", "weights_id": "", "events": "", "faults": "", "quotas": ()}


def nearest(name: str, known: Mapping[str, str]) -> str:
    """A hint with the right spelling; ``known`` maps what people may write to what they should have."""
    import difflib

    found = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {known[found[0]]}?" if found else "'hpkvd config default' lists the settings"


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` for an ``HPKV_*`` variable that no setting reads, with the nearest right name."""
    right = {setting.env: setting.env for setting in _TABLE} | {FAULTS_CONFIRMATION: FAULTS_CONFIRMATION}
    guesses = {PREFIX + setting.name.upper(): setting.env for setting in _TABLE}
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in right:
            raise ConfigError(f"unknown environment variable {name}", nearest(name, guesses | right))


def config_path(environ: Mapping[str, str], flags: Mapping[str, object] | None) -> tuple[Path, bool]:
    """The configuration file, and whether someone named it (then it must exist)."""
    setting = SETTINGS["config"]
    for raw, place in (((flags or {}).get("config"), setting.flag), (environ.get(setting.env), setting.env)):
        if raw:
            return _parsed(setting, raw, place), True
    return Path(DEFAULT_CONFIG), False


def read_file(path: Path, named: bool) -> dict[str, object]:
    """The TOML file as a map; empty if the file is missing and nobody named it.

    Raises ``ConfigError`` (missing, not TOML) or ``NotPermitted``; keys are checked by ``load``.
    """
    import tomllib

    try:
        return tomllib.loads(path.read_bytes().decode())
    except FileNotFoundError:
        if named:
            raise ConfigError(
                f"configuration file {path} does not exist", "create it, or drop HPKV_CONFIG and --config"
            ) from None
        return {}
    except PermissionError:
        raise NotPermitted(f"no access to configuration file {path}", "run as its owner") from None
    except OSError as problem:
        raise ConfigError(f"configuration file {path}: {problem.strerror}") from None
    except ValueError as problem:
        raise ConfigError(f"configuration file {path}: {problem}", "the file must be TOML") from None


def _parsed(setting: Setting, raw: object, place: str) -> Any:
    try:
        return setting.parse(raw)
    except ConfigError as problem:
        shown = hide_secrets(str(raw))[:200]
        raise ConfigError(f"{place}={shown!r}: {problem.message}", problem.hint) from None


def _refuse_unknown(given: Iterable[str], place: str) -> None:
    for name in given:
        if name not in SETTINGS:
            hint = nearest(name, {known: known for known in SETTINGS})
            raise ConfigError(f"unknown setting {name!r} in {place}", hint)


def load(
    environ: Mapping[str, str],
    flags: Mapping[str, object] | None = None,
    file: Mapping[str, object] | None = None,
    file_path: Path | None = None,
) -> tuple[Settings, dict[str, str]]:
    """Settings from all sources, and for each setting where its value came from.

    ``flags`` maps setting names to values, None for one that was not given; ``file`` is what ``read_file``
    gave for ``file_path``. Raises ``ConfigError`` that names the source and the value.
    """
    flags = {name: value for name, value in (flags or {}).items() if value is not None}
    file = dict(file or {})
    _refuse_unknown(flags, "the flags")
    _refuse_unknown(file, str(file_path))
    if "config" in file:
        raise ConfigError(f"{file_path}: a configuration file cannot name another one", "drop the key config")

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in _TABLE:
        raw: object
        if setting.name in flags:
            raw, place, origin = flags[setting.name], setting.flag or setting.name, f"flag {setting.flag}"
        elif environ.get(setting.env):
            raw, place, origin = environ[setting.env], setting.env, f"environment {setting.env}"
        elif setting.name in file:
            raw, place, origin = file[setting.name], f"{file_path}: {setting.name}", f"file {file_path}"
        else:
            raw = setting.default_value(environ, values.get("instance", ""))
            place, origin = f"default of {setting.env}", "default"
        values[setting.name] = _WHEN_OFF.get(setting.name) if raw is None else _parsed(setting, raw, place)
        origins[setting.name] = origin
    if values["listen"] and not values["key_file"]:
        raise ConfigError(
            "listening on the network needs a key file",
            "make one with 'hpkvd keygen FILE', copy it to every node and set HPKV_KEY_FILE",
        )
    if not is_local(values["events"]) and not values["key_file"]:
        raise ConfigError(
            "publishing events to other machines needs a key file",
            "publish on 127.0.0.1, or make one with 'hpkvd keygen FILE' and set HPKV_KEY_FILE",
        )
    if values["faults"] and environ.get(FAULTS_CONFIRMATION) != FAULTS_CONFIRMED:
        raise ConfigError(
            "fault injection is on without its confirmation",
            f"unset HPKV_FAULTS; only tests of HPKV set it, with {FAULTS_CONFIRMATION}={FAULTS_CONFIRMED}",
        )
    return Settings(**values), origins


def from_environment(environ: Mapping[str, str]) -> Settings:
    """What a client or connector uses: environment, configuration file, defaults. Raises like ``load``."""
    path, named = config_path(environ, None)
    return load(environ, None, read_file(path, named), path)[0]


def setting_named(text: str) -> Setting:
    """The setting of this name, with or without its unit, or of this variable.

    Raises ``ConfigError`` with the nearest right name.
    """
    for setting in _TABLE:
        if text in (setting.name, setting.key, setting.env):
            return setting
    raise ConfigError(f"unknown setting {text[:64]!r}", nearest(text, {known: known for known in SETTINGS}))


def parse_value(name: str, raw: object, place: str) -> Any:
    """A setting's value from text or a TOML value; empty text is its default. Raises ``ConfigError``."""
    setting = SETTINGS[name]
    if raw == "":
        raw = setting.default_value(os.environ, "")
    return _WHEN_OFF.get(name) if raw is None else _parsed(setting, raw, place)


def plain(name: str, value: object) -> object:
    """A setting's value as JSON and people have it."""
    if name == "socket_mode" and isinstance(value, int):
        return f"{value:04o}"
    if name == "quotas" and isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value) if isinstance(value, Path) else value


def report(settings: Settings, origins: Mapping[str, str]) -> dict[str, dict[str, object]]:
    """``settings`` and ``origins`` as plain values under names with units, fit for JSON and the wire."""
    keys = {field.name: SETTINGS[field.name].key for field in fields(settings)}
    return {
        "settings": {key: plain(name, getattr(settings, name)) for name, key in keys.items()},
        "origins": {key: origins.get(name, "default") for name, key in keys.items()},
    }
