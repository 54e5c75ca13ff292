"""What operators ask: the daemon's own state, and what they may change of it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from hpkv_client import wire
from hpkv_client.counters import EngineTotals
from hpkv_client.errors import HpkvError, UsageError
from hpkv_client.wire import Body, Request
from hpkv_daemon.core.counts import Histogram
from hpkv_daemon.core.store import BlockStore
from hpkv_daemon.service.access import require_owner
from hpkv_daemon.service.chain import TierChain
from hpkv_daemon.service.clock import AwakeClock
from hpkv_daemon.service.engines import Engine
from hpkv_daemon.service.events import EventLog
from hpkv_daemon.service.explain import Explanations
from hpkv_daemon.service.movers import Movers
from hpkv_daemon.service.report import Identity, describe, fitted, leases, statistics
from hpkv_daemon.service.sessions import Peer, SessionTable
from hpkv_daemon.service.snapshot import Snapshot
from hpkv_daemon.service.transfers import Transfers

log = logging.getLogger(__name__)


class Operators:
    """Verbs that need no session. Control loop only; everything it is given belongs to the service."""

    def __init__(
        self,
        store: BlockStore,
        identity: Identity,
        clock: Callable[[], float],
        awake: AwakeClock,
        engines: dict[str, Engine],
        sessions: SessionTable,
        movers: Movers,
        transfers: Transfers,
        tiering: TierChain,
        explanations: Explanations,
        events: EventLog,
        counters: Counter[str],
    ) -> None:
        self._store = store
        self._identity = identity
        self._clock = clock
        self._started = clock()
        self._awake = awake
        self._engines = engines
        self._sessions = sessions
        self._movers = movers
        self._transfers = transfers
        self._tiering = tiering
        self._explanations = explanations
        self._event_log = events
        self._counters = counters
        self.verbs: dict[str, Callable[[Peer, Request], Body]] = {
            "ping": self._ping,
            "info": self._info,
            "stats": self._stats,
            "leases": self._leases,
            "check": self._check,
            "explain": self._explain,
            "hot": self._hot,
            "events": self._events,
            "clear": self._clear,
            "drain": self._drain,
            "import": self._import,
            "scrub": self._scrub,
        }
        """Verb -> what answers it; raises ``HpkvError``."""

    def _ping(self, peer: Peer, request: Request) -> Body:  # noqa: ARG002
        identity = self._identity
        return {
            "pid": identity.pid,
            "epoch": identity.epoch,
            "uptime_seconds": round(self._clock() - self._started, 3),
            "version": identity.version,
            "protocol": wire.version_text(),
            "instance": identity.instance,
            "echo": request.body["echo"],
        }

    def _info(self, peer: Peer, request: Request) -> Body:  # noqa: ARG002
        return describe(
            self._identity,
            self._clock() - self._started,
            self._awake(),
            self._store,
            self._engines.values(),
            self._sessions,
            self._movers,
            self._explanations,
            self._tiering.describe(),
        )

    def _stats(self, peer: Peer, request: Request) -> Body:  # noqa: ARG002
        uptime = self._clock() - self._started
        return statistics(self._counted(), uptime, self._store, len(self._sessions), len(self._engines))

    def _counted(self) -> Counter[str]:
        counters = self._counters + self._transfers.counters + self._store.blocks.counters + self._tiering.count()
        counters["mover_restarts"] = self._movers.restarts
        return counters

    def snapshot(self, engines: EngineTotals) -> Snapshot:
        """All that is counted, copied. Takes the loop some 100 us, however much the pool holds."""
        blocks = self._store.blocks
        return Snapshot(
            identity=self._identity,
            uptime=self._clock() - self._started,
            counters=self._counted(),
            namespaces=[counts.copy() for counts in blocks.counts],
            engines={model: dict(totals) for model, totals in engines.by_model.items()},
            durations={where: taken.copy() for where, taken in self._durations()},
            pool=replace(blocks.usage),
            slots=(blocks.slots.extents, blocks.slots.free_extents(), blocks.slots.extent_bytes),
            accounts=[(one.name, one.held, one.reserved, one.maximum) for one in blocks.accounts],
            sessions=len(self._sessions),
            engines_ready=[engine.ready for engine in self._engines.values()],
            leases=len(self._store.leases),
            movers=self._movers.describe(),
            **self._tiering.describe(),
        )

    def _durations(self) -> Iterator[tuple[tuple[str, str], Histogram]]:
        """Tier and direction, and how long copies took."""
        yield from self._transfers.durations.items()
        yield from self._tiering.durations.items()

    def _leases(self, peer: Peer, request: Request) -> Body:  # noqa: ARG002
        return leases(self._store, self._clock())

    def _check(self, peer: Peer, request: Request) -> Body:  # noqa: ARG002
        engines = list(self._engines.values())
        try:
            self._store.check(self._tiering.pins)
            self._sessions.check()
            self._transfers.check(engines, {session.engine for session in self._sessions})
            self._tiering.check()
            self._movers.check({rank.attachment for engine in engines for rank in engine.ranks.values()} - {0})
        except AssertionError as broken:
            raise HpkvError(f"invariant broken: {broken}", "restart hpkvd and report this") from None
        return {
            "ok": True,
            "blocks": self._store.blocks.usage.resident_blocks,
            "leases": len(self._store.leases),
            "sessions": len(self._sessions),
            "engines": len(engines),
            "loads": self._transfers.loads_under_way,
            "stores": sum(len(engine.stores) for engine in engines),
        }

    def _explain(self, peer: Peer, request: Request) -> Body:  # noqa: ARG002
        body = request.body
        engines = list(self._engines.values())
        return fitted(
            self._explanations.describe(body["engine"], body["request"], body["last"], self._clock(), engines)
        )

    def _hot(self, peer: Peer, request: Request) -> Body:  # noqa: ARG002
        return self._explanations.hot(request.body["last"])

    def _events(self, peer: Peer, request: Request) -> Body:  # noqa: ARG002
        return fitted(self._event_log.follow(request.body["after"], request.body["most"]))

    def _clear(self, peer: Peer, request: Request) -> Body:
        require_owner(peer, "clear the cache")
        wanted = request.body["namespace"]
        number = None if wanted is None else self._store.find_namespace(wanted)
        if wanted is not None and number is None:
            raise UsageError(f"no namespace {wanted.hex()}", "see 'hpkvd info'")
        cleared = self._store.clear(number)
        self._tiering.forget(number, everywhere=False)
        log.info("cleared %d blocks for uid %d", cleared, peer.uid)
        return {"cleared_blocks": cleared}

    def _drain(self, peer: Peer, request: Request) -> Body:
        if request.body["begin"]:
            require_owner(peer, "drain the cache")
        return self._tiering.disk.drain(request.body["begin"])

    def _import(self, peer: Peer, request: Request) -> Body:
        if request.body["path"]:
            require_owner(peer, "import storage")
        return self._tiering.disk.adopt(request.body["path"])

    def _scrub(self, peer: Peer, request: Request) -> Body:
        if not request.body["begin"]:
            return self._tiering.disk.scrub(None)
        require_owner(peer, "verify the storage")
        return self._tiering.disk.scrub(request.body["bytes_per_second"])
