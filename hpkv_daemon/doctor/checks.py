"""The checks: each looks at the facts and says one thing. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

from hpkv_client.values import format_size
from hpkv_daemon.doctor.findings import Facts, Finding, Level

LEAST_KERNEL = (5, 6)
"""The first with pidfd_getfd and pidfd_open."""
LEAST_OPEN_FILES = 4096
LEAST_LOCKED_BYTES = 1 << 30
SLOW_DISK_BYTES = 500_000_000
"""A second. Below it, blocks are computed faster than they are read."""
FAST_CLOCKS = frozenset({"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"})

Check = Callable[[Facts], Finding]


def _ok(check: str, seen: str) -> Finding:
    return Finding(check, Level.OK, seen)


def _warn(check: str, seen: str, advice: str) -> Finding:
    return Finding(check, Level.WARN, seen, advice)


def _fail(check: str, seen: str, advice: str) -> Finding:
    return Finding(check, Level.FAIL, seen, advice)


def settings(facts: Facts) -> Finding:
    """Whether the configuration can be read."""
    if facts.settings_problem:
        return _fail("settings", facts.settings_problem, "correct it; 'hpkvd config check' looks again")
    return _ok("settings", "readable")


def kernel(facts: Facts) -> Finding:
    """Old ones lack what the daemon watches processes with."""
    seen = "Linux {}.{}".format(*facts.kernel)
    if facts.kernel < LEAST_KERNEL:
        return _fail("kernel", seen, "use Linux {}.{} or later".format(*LEAST_KERNEL))
    return _ok("kernel", seen)


def pool(facts: Facts) -> Finding:
    """Whether the pool fits where it shall lie."""
    seen = (
        f"{format_size(facts.pool_bytes)} in {facts.pool_path} ({facts.pool_file_system}), "
        f"{format_size(facts.pool_available_bytes)} available"
    )
    allocated = facts.socket.state == "serving"
    if facts.pool_bytes > facts.pool_available_bytes and not allocated:
        in_docker = (
            "; in docker: '--shm-size', in kubernetes: an emptyDir with medium Memory" if facts.container else ""
        )
        return _fail("pool", seen, f"set HPKV_KV_MEM_POOL_SIZE to less, or enlarge the file system{in_docker}")
    if facts.pool_bytes > facts.ram_bytes:
        return _fail("pool", f"{seen}, {format_size(facts.ram_bytes)} of memory", "set HPKV_KV_MEM_POOL_SIZE to less")
    if facts.pool_file_system not in ("tmpfs", "hugetlbfs", "ramfs"):
        return _warn("pool", seen, "set HPKV_SHARE_MEM_FILE_PATH to a directory under /dev/shm")
    return _ok("pool", seen)


def huge_pages(facts: Facts) -> Finding:
    """A large tmpfs pool is mapped in small pages unless the kernel is told otherwise."""
    seen = f"shmem_enabled is {facts.shmem_huge_pages or 'not known'}"
    if facts.pool_file_system == "hugetlbfs":
        return _ok("huge pages", "the pool lies on hugetlbfs")
    if facts.pool_file_system == "tmpfs" and facts.shmem_huge_pages in ("never", "deny", ""):
        return _warn(
            "huge pages",
            seen,
            "mount the pool's tmpfs with '-o huge=within_size', or put it on hugetlbfs: fewer TLB misses",
        )
    return _ok("huge pages", seen)


def locked_memory(facts: Facts) -> Finding:
    """Devices that copy by themselves need pinned memory."""
    if facts.memlock_bytes is None:
        return _ok("locked memory", "no limit")
    seen = f"at most {format_size(facts.memlock_bytes)}"
    if facts.gpu.version and facts.memlock_bytes < LEAST_LOCKED_BYTES:
        return _warn("locked memory", seen, "LimitMEMLOCK=infinity in the unit, or 'ulimit -l unlimited'")
    return _ok("locked memory", seen)


def open_files(facts: Facts) -> Finding:
    """Every session takes some descriptors."""
    seen = f"at most {facts.open_files}"
    if facts.open_files < LEAST_OPEN_FILES:
        return _warn("open files", seen, f"LimitNOFILE=65536 in the unit, or 'ulimit -n {LEAST_OPEN_FILES}'")
    return _ok("open files", seen)


def socket(facts: Facts) -> Finding:
    """Whether a daemon answers."""
    there = facts.socket
    seen = f"{there.path}: {there.state}{f' ({there.problem})' if there.problem else ''}"
    advice = {
        "missing": "run 'hpkvd start', or let the first engine start it",
        "stale": "no daemon is behind it: run 'hpkvd start'",
        "not a socket": "move the file away, or set HPKV_SOCKET to another path",
        "denied": f"join the group {there.group or there.gid} ('usermod -aG'), or run as uid {there.uid}",
        "hanging": "see the daemon's log, then 'hpkvd restart'",
        "untrusted": "put the socket into a directory that only root or you can write to",
    }
    if there.state == "serving":
        return _ok("socket", f"{seen}, pid {there.daemon_pid}" if there.daemon_pid else seen)
    if there.state in ("missing", "stale"):
        return _warn("socket", seen, advice[there.state])
    return _fail("socket", seen, advice[there.state])


def socket_access(facts: Facts) -> Finding:
    """Whether only those may connect who should, and all of those."""
    there = facts.socket
    seen = f"mode {there.mode:04o}, uid {there.uid}, group {there.group or there.gid}"
    if there.state in ("missing", "not a socket"):
        return _ok("socket access", "no socket")
    if there.mode & 0o002:
        return _warn(
            "socket access", seen, "everybody on this machine can read and fill the cache: HPKV_SOCKET_MODE=0660"
        )
    if facts.uid not in (0, there.uid) and there.gid not in facts.groups:
        return _fail(
            "socket access", f"{seen}; uid {facts.uid} is not in it", f"'usermod -aG {there.group or there.gid}'"
        )
    return _ok("socket access", seen)


def stale_lock(facts: Facts) -> Finding:
    """A killed daemon leaves its lock file; the next one takes it over."""
    if facts.socket.stale_lock:
        return _warn(
            "stale lock", f"{facts.socket.path}.lock, held by nobody", "nothing: the next daemon takes it over"
        )
    return _ok("stale lock", "none")


def namespaces(facts: Facts) -> Finding:
    """Movers open engines' memory through /proc: both must see each other."""
    if not facts.socket.same_pid_namespace:
        return _fail(
            "namespaces",
            "the daemon runs in another PID namespace",
            "share it: docker '--pid=host' (or '--pid=container:...'), kubernetes 'hostPID: true' or "
            "'shareProcessNamespace: true'",
        )
    return _ok("namespaces", "shared with the daemon" if facts.socket.daemon_pid else "no daemon to compare with")


def round_trip(facts: Facts) -> Finding:
    """A block goes to the daemon and comes back."""
    if facts.round_trip is None:
        return _ok("round trip", "not tried: no daemon answers")
    if facts.round_trip:
        return _fail("round trip", facts.round_trip, "see the daemon's log")
    return _ok("round trip", "a block was stored and came back")


def numa(facts: Facts) -> Finding:
    """On several nodes memory is near to some processors only."""
    if facts.numa_nodes > 1:
        return _warn(
            "NUMA",
            f"{facts.numa_nodes} nodes",
            "mount the pool's tmpfs with '-o mpol=interleave', or run one daemon per node (HPKV_INSTANCE)",
        )
    return _ok("NUMA", "one node")


def gpu(facts: Facts) -> Finding:
    """Driver and library belong together."""
    there = facts.gpu
    if not there.version:
        return _ok("GPU", "no NVIDIA driver")
    seen = f"driver {there.version}, {there.devices} devices, CUDA {there.cuda_version or 'not loadable'}"
    if not there.cuda_version:
        return _fail("GPU", seen, "libcuda.so.1 is missing here; in a container: '--gpus all' and the NVIDIA runtime")
    return _ok("GPU", seen)


def allocator(facts: Facts) -> Finding:
    """Memory of expandable segments has no IPC handle that others can open."""
    if facts.gpu.version and "expandable_segments:true" in facts.allocator.lower().replace(" ", ""):
        return _warn(
            "allocator", f"PYTORCH_CUDA_ALLOC_CONF={facts.allocator}", "start the engine without expandable_segments"
        )
    return _ok("allocator", "nothing that hinders CUDA IPC")


def storage(facts: Facts) -> Finding:
    """Room and speed of the disk tier."""
    there = facts.storage
    if there is None:
        return _ok("storage", "off")
    seen = f"{there.path} ({there.file_system}), {format_size(there.free_bytes)} free"
    if there.problem:
        return _fail(
            "storage", f"{seen}: {there.problem}", "let hpkvd write there, or set HPKV_KV_STORAGE_PATH to another"
        )
    if there.wanted_bytes is not None and there.wanted_bytes > there.free_bytes:
        return _fail("storage", f"{seen}, {format_size(there.wanted_bytes)} wanted", "set HPKV_STORAGE_SIZE to less")
    if there.file_system in ("tmpfs", "ramfs"):
        return _warn("storage", seen, "that is memory: name a directory on a disk")
    if not there.direct:
        return _warn("storage", f"{seen}, no O_DIRECT", "use a file system with O_DIRECT (ext4, xfs)")
    speed = there.write_bytes_per_second
    if speed is not None and speed < SLOW_DISK_BYTES:
        return _warn("storage", f"{seen}, {speed / 1e9:.2f} GB/s written", "use a local NVMe disk")
    return _ok("storage", seen if speed is None else f"{seen}, {speed / 1e9:.2f} GB/s written")


def vllm(facts: Facts) -> Finding:
    """The connector needs a certain version."""
    if not facts.vllm:
        return _ok("vLLM", "not installed here")
    found = re.match(r"(\d+)\.(\d+)", facts.vllm)
    if found and (int(found[1]), int(found[2])) < facts.vllm_least:
        return _fail("vLLM", facts.vllm, "use vLLM {}.{} or later".format(*facts.vllm_least))
    return _ok("vLLM", facts.vllm)


def enabled(facts: Facts) -> Finding:
    """Only for engines: the connector is off by default."""
    if facts.enabled:
        return _ok("enabled", "VLLM_ENABLE_HPKV=1")
    return _warn("enabled", "VLLM_ENABLE_HPKV is not 1", "set it where the engine is started")


def hash_seed(facts: Facts) -> Finding:
    """Prefix hashes begin with it, if it is set."""
    if facts.hash_seed:
        seen = f"PYTHONHASHSEED={facts.hash_seed}"
        return _warn(
            "hash seed", seen, "engines share blocks only with those that have the same: set it everywhere or nowhere"
        )
    return _ok("hash seed", "PYTHONHASHSEED is not set")


def clock(facts: Facts) -> Finding:
    """A slow clock source costs every request; a wrong wall clock makes logs useless."""
    if facts.clock_behind:
        return _warn(
            "clock", "it shows a time before HPKV was installed", "synchronise it ('timedatectl set-ntp true')"
        )
    if facts.clock_source and facts.clock_source not in FAST_CLOCKS:
        return _warn("clock", f"clock source {facts.clock_source}", "it is slow to read; see 'dmesg | grep -i tsc'")
    return _ok("clock", facts.clock_source or "not known")


NODE: tuple[Check, ...] = (
    settings,
    kernel,
    pool,
    huge_pages,
    locked_memory,
    open_files,
    socket,
    socket_access,
    stale_lock,
    namespaces,
    round_trip,
    numa,
    gpu,
    storage,
    vllm,
    clock,
)
"""Where the daemon runs."""

ENGINE: tuple[Check, ...] = (
    settings,
    kernel,
    locked_memory,
    open_files,
    socket,
    socket_access,
    namespaces,
    round_trip,
    gpu,
    allocator,
    vllm,
    enabled,
    hash_seed,
    clock,
)
"""Where an engine runs, in its container."""


def examine(facts: Facts, checks: tuple[Check, ...]) -> list[Finding]:
    """All findings, in the order of the checks."""
    return [check(facts) for check in checks]
