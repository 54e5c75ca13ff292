"""One daemon, assembled: locks, pool, store, movers, service, socket, loop."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import uvloop

from hpkv_client.address import read_key
from hpkv_client.errors import HpkvError
from hpkv_client.settings import Settings
from hpkv_client.values import is_local
from hpkv_daemon.core.slots import extent_bytes_for
from hpkv_daemon.core.store import BlockStore
from hpkv_daemon.faults import Faults
from hpkv_daemon.locks import InstanceLock
from hpkv_daemon.logs import log_to
from hpkv_daemon.movers.base import Mover
from hpkv_daemon.movers.cuda.mover import CudaMover
from hpkv_daemon.movers.host import HostMover
from hpkv_daemon.notify import Notifier
from hpkv_daemon.parts import disk_tier, disk_writes, remote_tier, remote_writes, storage_opener, store_of
from hpkv_daemon.pool.file import Pool
from hpkv_daemon.pool.ledger import PoolLedger
from hpkv_daemon.server.activation import passed_listener
from hpkv_daemon.server.http import HttpServer, http_server
from hpkv_daemon.server.local import LocalRouter
from hpkv_daemon.server.router import Router
from hpkv_daemon.service.live import LiveSettings, Load, Loaded
from hpkv_daemon.service.report import Identity
from hpkv_daemon.service.service import Service, new_epoch

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
_FREEZE_EVERY = 240
"""Ticks between moves of long-lived objects out of the garbage collector's sight."""

_STEP_SECONDS = 60.0
"""Longest time that one step of the start may take, for the service manager."""

Progress = Callable[[int, int], None]
"""Called with (bytes allocated, bytes in all) while the pool is made."""


_NICE = -10
"""Engine processes spin while they wait for the daemon; on few cores it must go first to be of use."""


def _claim_priority() -> bool:
    try:
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
        # Where the kernel groups processes by session, this is what counts against other sessions.
        with contextlib.suppress(FileNotFoundError):
            Path("/proc/self/autogroup").write_text(str(_NICE))
    except OSError:
        return False
    return True


def _claim_descriptors() -> None:
    """Every session takes a few descriptors; the usual soft limit of 1024 is meant for programs that select()."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def serve(
    settings: Settings, origins: dict[str, str], progress: Progress, reread: Callable[[], Loaded] | None = None
) -> None:
    """Run a daemon until SIGTERM or SIGINT. Raises ``HpkvError`` when it cannot start.

    ``reread`` reads the configuration anew, on SIGHUP and ``hpkvd reload``, in another thread; it may raise that, too.
    Order matters: the instance lock first (a second daemon learns who runs, before it touches anything), the
    pool next, the socket last, so that a client that connects finds a daemon that can serve.
    """
    log_to(settings.log_file, settings.log_level, settings.log_format)
    # A service manager's watchdog ends a hung daemon by SIGABRT: where it hung is worth more than a core dump.
    faulthandler.enable()
    passed = passed_listener(os.environ, Path(settings.socket))
    notifier = Notifier.from_environment(os.environ, time.monotonic)
    with (
        contextlib.closing(notifier),
        _Stop() as stop,
        InstanceLock(Path(settings.socket), passed is not None) as lock,
        http_server(settings.metrics, chosen=origins.get("metrics", "default") != "default") as http,
    ):
        goes_first = _claim_priority()
        _claim_descriptors()

        def allocated(done_bytes: int, total_bytes: int) -> None:
            stop.check()
            notifier.progress(f"allocating the pool: {done_bytes} of {total_bytes} bytes", _STEP_SECONDS)
            progress(done_bytes, total_bytes)

        pool = Pool.open(Path(settings.pool_path), settings.pool_size, allocated)
        useless = bool(pool.cold)
        try:
            lock.describe(pool.path)
            with contextlib.closing(PoolLedger.open(pool, extent_bytes_for(pool.size))) as ledger:
                store = store_of(settings, pool, ledger)
                stop.check()
                notifier.progress("starting to serve", _STEP_SECONDS)
                started = _Started(
                    settings, origins, pool, store, stop, goes_first, passed, notifier, lock, reread, http
                )
                uvloop.run(_run(started))
            useless = False
        finally:
            # A daemon that never served leaves no memory behind; all others leave it to the next one.
            pool.close(unlink=useless)


def _load_apart(reread: Callable[[], Loaded], loop: asyncio.AbstractEventLoop) -> Load:
    """Files may lie on network storage: they are read in a thread, while the loop goes on."""

    def load(done: Callable[[Loaded | HpkvError], None]) -> None:
        def over(reading: asyncio.Future[Loaded]) -> None:
            try:
                found: Loaded | HpkvError = reading.result()
            except HpkvError as problem:
                found = problem
            done(found)

        loop.run_in_executor(None, reread).add_done_callback(over)

    return load


def _reloaded(result: object) -> None:
    """SIGHUP has nobody to answer; the log has it."""


@dataclass(frozen=True)
class _Started:
    """What is there before the loop runs."""

    settings: Settings
    origins: dict[str, str]
    pool: Pool
    store: BlockStore
    stop: _Stop
    goes_first: bool
    passed: int | None
    """The listener that a service manager passed on."""
    notifier: Notifier
    lock: InstanceLock
    reread: Callable[[], Loaded] | None
    http: HttpServer | None


async def _run(started: _Started) -> None:
    settings, pool, notifier, http = started.settings, started.pool, started.notifier, started.http
    loop = asyncio.get_running_loop()
    faults = Faults(settings.faults)
    if settings.faults:
        log.warning("fault hooks are on: %s", settings.faults)
    local = LocalRouter(Path(settings.socket), settings.socket_mode, settings.socket_group, loop, started.passed)
    routers: list[Router] = [local]
    if settings.listen and settings.key_file:
        from hpkv_daemon.server.network import NetworkRouter

        routers.append(NetworkRouter(settings.listen, read_key(settings.key_file), loop))
    publisher = None
    if settings.events:
        from hpkv_daemon.server.events import EventPublisher

        key = None if is_local(settings.events) or settings.key_file is None else read_key(settings.key_file)
        publisher = EventPublisher(settings.events, settings.socket_mode, settings.socket_group, key, loop)
    identity = Identity(
        pid=os.getpid(),
        epoch=new_epoch(),
        version=version("hpkv"),
        instance=settings.instance,
        socket=str(settings.socket),
        pool_path=str(pool.path),
        pool_bytes=pool.size,
        policy=settings.policy,
        metrics=http.place if http else "",
        events=settings.events,
    )
    live = LiveSettings(settings, started.origins, _load_apart(started.reread, loop) if started.reread else None)
    live.on_change("log_level", lambda level: logging.getLogger("hpkv_daemon").setLevel(level.upper()))

    def host_mover() -> Mover:
        return HostMover(pool.fileno(), pool.size, settings.faults)

    service = Service(
        started.store,
        {"cpu": host_mover},
        identity,
        loop,
        time.monotonic,
        local.send,
        live,
        faults,
        lambda clock: disk_tier(settings, pool, clock),
        disk_writes(settings),
        storage_opener(pool, loop),
        lambda device: CudaMover(device, pool.fileno(), pool.size, settings.faults, Path(settings.socket)),
        lambda clock: remote_tier(settings, pool, clock),
        remote_writes(settings),
    )
    ticker = asyncio.create_task(_tick(service, notifier))
    for router in routers:
        router.serve(service.handle)
    # What exists now lives as long as the daemon: no collection needs to look at it again.
    gc.collect()
    gc.freeze()
    log.info(
        "hpkvd %s ready: pid %d, socket %s, pool %s (%d bytes), policy %s",
        identity.version,
        identity.pid,
        identity.socket,
        identity.pool_path,
        pool.size,
        identity.policy,
    )
    if publisher:
        # The format of the events wants the wall clock.
        stream = service.stream_events(lambda: time.clock_gettime(time.CLOCK_REALTIME), publisher.publish)
        publisher.serve(stream.snapshot)
        log.info("KV events on %s", publisher.endpoint)
    if http:
        http.serve(loop, service.snapshot)
        log.info("metrics on http://%s/metrics", http.place)
    if settings.listen:
        log.info("serving other nodes on %s, with the key in %s", settings.listen, settings.key_file)
    if not started.goes_first:
        log.info("running at normal priority (no right to raise it)")
    loop.add_signal_handler(signal.SIGHUP, lambda: live.reload(_reloaded))
    started.lock.describe(pool.path, ready=True)
    notifier.ready(f"serving {identity.socket}, pool of {pool.size} bytes")
    try:
        await started.stop.wait()
        log.info("stopping")
        notifier.stopping("writing out what waits")
    finally:
        if http:
            http.withdraw()
        ticker.cancel()
        for router in routers:
            router.close()
        service.close()
        if publisher:
            publisher.close()


async def _tick(service: Service, notifier: Notifier) -> None:
    ticks = 0
    while True:
        await asyncio.sleep(TICK_SECONDS)
        service.tick()
        notifier.tick()
        ticks += 1
        if ticks % _FREEZE_EVERY == 0:
            gc.freeze()


class _Stop:
    """Holds stop signals back, except where they can be obeyed without leaving anything behind.

    They stay blocked while the daemon starts (``check`` looks for them between steps of the allocation) and
    again once it ends: no signal, however often it comes, interrupts the clean-up. A reload waits as well.
    """

    _SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
    _HELD = _SIGNALS | {signal.SIGHUP}

    def __enter__(self) -> _Stop:
        signal.pthread_sigmask(signal.SIG_BLOCK, self._HELD)
        return self

    def __exit__(self, *_: object) -> None:
        """The process is about to end; a signal has nothing more to say."""

    def check(self) -> None:
        """Leave if a signal came while the daemon starts."""
        if signal.sigpending() & self._SIGNALS:
            log.info("told to stop while starting")
            raise SystemExit(0)

    async def wait(self) -> None:
        """Return at the first signal, those included that came earlier."""
        stopped = asyncio.Event()
        for number in self._SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._HELD)
        await stopped.wait()
        signal.pthread_sigmask(signal.SIG_BLOCK, self._HELD)
