"""The verbs. One call of ``handle`` per frame; every request gets exactly one reply, now or later."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable

from hpkv_client import wire
from hpkv_client.counters import EngineTotals
from hpkv_client.errors import (
    Busy,
    CopyFailed,
    HpkvError,
    LayoutRefused,
    NoSuchDevice,
    NotPermitted,
    NotRegistered,
    ProtocolError,
    UsageError,
    VersionMismatch,
)
from hpkv_client.types import Keys
from hpkv_client.wire import PROTOCOL, Body, Request
from hpkv_daemon.core.admission import WritePolicy
from hpkv_daemon.core.counts import MOST_APART
from hpkv_daemon.core.index import NONE
from hpkv_daemon.core.store import BlockStore
from hpkv_daemon.faults import Faults
from hpkv_daemon.movers.base import Attached, Mover
from hpkv_daemon.service.access import require_owner
from hpkv_daemon.service.archive import ArchiveVerbs
from hpkv_daemon.service.chain import TierChain
from hpkv_daemon.service.clock import AwakeClock
from hpkv_daemon.service.engines import Engine, Rank
from hpkv_daemon.service.events import EventLog
from hpkv_daemon.service.explain import Explanations
from hpkv_daemon.service.importing import Opener
from hpkv_daemon.service.kv_events import EventStream
from hpkv_daemon.service.live import LiveSettings, SettingVerbs
from hpkv_daemon.service.movers import Movers
from hpkv_daemon.service.operators import Operators
from hpkv_daemon.service.pinning import PinVerbs
from hpkv_daemon.service.report import Identity
from hpkv_daemon.service.sessions import REMOTE_UID, Peer, Reactor, Session, SessionTable
from hpkv_daemon.service.snapshot import Snapshot
from hpkv_daemon.service.tiering import Tiering
from hpkv_daemon.service.transfers import Caller, Transfers
from hpkv_daemon.tiers.base import Tier

log = logging.getLogger(__name__)

SILENCE_SECONDS = 15.0
"""A session whose process is not visible and that sends nothing for so long is gone."""
HEARTBEAT_SECONDS = 2.0
STORAGE_SECONDS = 10.0
"""The end waits so long for blocks that are on their way to the tier."""
SESSIONS_PER_PROCESS = 256
"""With more, the longest silent session of the process that registered nothing has to say hello again."""

REMOTE_VERBS = frozenset(
    {"hello", "bye", "heartbeat", "ping", "match", "acquire", "contains", "release", "reset", "info", "stats"}
)
"""What other nodes may ask: to look up, hold and forget blocks. Memory, and the daemon itself, are its node's own."""

FAULT_POINTS = {"match": "match", "acquire": "match", "store": "reserve", "put": "reserve", "release": "release"}
"""Verb -> the fault point that it passes."""

Send = Callable[[bytes, bytes], None]
"""Sends a frame to a ZeroMQ identity without waiting."""


class Service:
    """Sessions, engines and verbs over one block store. Control loop only; ``clock`` is monotonic seconds.

    ``tier`` makes the tier; its clock stands still while this process is stopped. ``writes``: what is written to it.
    ``open_storage`` opens what another daemon wrote, for an import. ``remote`` makes the tier that nodes share, if any.
    """

    def __init__(
        self,
        store: BlockStore,
        factories: dict[str, Callable[[], Mover]],
        identity: Identity,
        reactor: Reactor,
        clock: Callable[[], float],
        send: Send,
        settings: LiveSettings,
        faults: Faults,
        tier: Callable[[Callable[[], float]], Tier],
        writes: WritePolicy = WritePolicy(),  # noqa: B008  (it cannot be changed)
        open_storage: Opener | None = None,
        gpus: Callable[[str], Mover] | None = None,
        remote: Callable[[Callable[[], float]], Tier | None] = lambda _: None,
        remote_writes: WritePolicy = WritePolicy(),  # noqa: B008  (it cannot be changed)
    ) -> None:
        self._store = store
        self._identity = identity
        self._clock = clock
        self._send = send
        self._settings = settings
        self._reactor = reactor
        self._faults = faults
        self._awake = AwakeClock(clock)
        self._engines: dict[str, Engine] = {}
        self._sessions = SessionTable(reactor, self._on_death)
        self._movers = Movers(factories, reactor, self._awake, gpus)
        self._events = EventLog(clock)
        self._transfers = Transfers(
            store, self._movers, reactor, self._awake, self._answer, self._lease_deadline, faults, self._events
        )
        disk = Tiering(store, tier(self._awake), reactor, writes, self._awake, open_storage)
        beyond = remote(self._awake)
        shared = None
        if beyond is not None:
            shared = Tiering(store, beyond, reactor, remote_writes, self._awake, None, "remote")
        self._tiering = TierChain(disk, shared)
        self._explanations = Explanations(store, self._events)
        self._counters: Counter[str] = Counter()
        self._engine_totals = EngineTotals(MOST_APART)
        self._operators = Operators(
            store,
            identity,
            clock,
            self._awake,
            self._engines,
            self._sessions,
            self._movers,
            self._transfers,
            self._tiering,
            self._explanations,
            self._events,
            self._counters,
        )
        settings.on_change("lease_seconds", lambda _: None)
        settings.on_change("quotas", store.blocks.set_quotas)
        settings.on_change("storage_daily_writes", disk.allow)
        self._open_verbs: dict[str, Callable[[Peer, Request], Body | None]] = {
            "hello": self._hello,
            **SettingVerbs(settings, self._answer).verbs,
            **ArchiveVerbs(store, self._explanations).verbs,
            **PinVerbs(store, self._explanations).verbs,
            **self._operators.verbs,
        }
        self._session_verbs: dict[str, Callable[[Peer, Request, Session], Body | None]] = {
            "bye": self._bye,
            "heartbeat": self._heartbeat,
            "register": self._register,
            "unregister": self._unregister,
            "reset": self._reset,
            "match": self._match,
            "acquire": self._acquire,
            "contains": self._contains,
            "release": self._release,
            "load": self._load,
            "get": self._get,
            "store": self._store_verb,
            "put": self._put,
            "cancel": self._cancel,
        }

    def _lease_deadline(self) -> float:
        """When a lease ends that is granted or used now."""
        return self._clock() + self._settings.current.lease_seconds

    def handle(self, peer: Peer, frame: bytes) -> bytes | None:
        """The reply frame, or None when it will be sent later (or cannot be addressed)."""
        self._counters["requests"] += 1
        try:
            request = wire.decode_request(frame)
        except ProtocolError as problem:
            self._counters["bad_requests"] += 1
            request_id = wire.request_id_of(frame)
            return None if request_id is None else wire.encode_error(request_id, problem)
        point = FAULT_POINTS.get(request.verb)
        if point is not None and self._faults.possible:
            fault = self._faults.at(point)
            if fault.fail:
                return wire.encode_error(request.id, CopyFailed(f"fault hook failed a {point}"))
            if fault.delay:
                self._reactor.call_later(fault.delay, lambda: self._perform_late(peer, request))
                return None
        return self._perform(peer, request)

    def _perform_late(self, peer: Peer, request: Request) -> None:
        reply = self._perform(peer, request)
        if reply is not None:
            self._send(peer.identity, reply)

    def _perform(self, peer: Peer, request: Request) -> bytes | None:
        try:
            if peer.host and request.verb not in REMOTE_VERBS:
                raise NotPermitted(f"{request.verb} is not for other nodes", "ask on the daemon's own node")
            body: Body | None
            open_verb = self._open_verbs.get(request.verb)
            if open_verb is not None:
                body = open_verb(peer, request)
            else:
                session = self._sessions.get(request.session, peer.uid, self._awake())
                body = self._session_verbs[request.verb](peer, request, session)
            return None if body is None else wire.encode_reply(request.id, body)
        except HpkvError as problem:
            self._counters["refused_requests"] += 1
            return wire.encode_error(request.id, problem)
        except Exception as bug:
            self._counters["internal_errors"] += 1
            log.exception("verb %s failed", request.verb)
            return wire.encode_error(request.id, HpkvError(f"internal error: {bug!r}", "report this"))

    def _answer(self, identity: bytes, request: int, result: Body | HpkvError) -> None:
        if isinstance(result, HpkvError):
            self._send(identity, wire.encode_error(request, result))
        else:
            self._send(identity, wire.encode_reply(request, result))

    # -- sessions -----------------------------------------------------------------------------------------

    def _hello(self, peer: Peer, request: Request) -> Body:
        body = request.body
        if body["major"] != PROTOCOL[0]:
            raise VersionMismatch(
                f"hpkvd {self._identity.version} speaks {wire.version_text()}, "
                f"the client hpkv/{body['major']}.{body['minor']}",
                "install the same HPKV release in the engine and for the daemon",
            )
        if body["instance"] and body["instance"] != self._identity.instance:
            raise UsageError(
                f"this daemon is instance {self._identity.instance!r}, not {body['instance']!r}",
                "set HPKV_SOCKET to the socket of the other instance",
            )
        self._require_own(peer, body["engine"])
        self._make_room(peer)
        session = self._sessions.open(peer, body["name"], body["engine"], self._awake())
        self._events.tell("opened", engine=session.engine, name=session.name, pid=session.pid, uid=session.uid)
        return {
            "session": session.token,
            "epoch": self._identity.epoch,
            "major": PROTOCOL[0],
            "minor": PROTOCOL[1],
            "pid": self._identity.pid,
            "heartbeat_seconds": HEARTBEAT_SECONDS,
            "lease_seconds": self._settings.current.lease_seconds,
        }

    def _require_own(self, peer: Peer, engine: str) -> None:
        """The sessions of one engine may see and end its leases: they belong to one user, here or on other nodes."""
        users = {other.uid for other in self._sessions if other.engine == engine} if engine else set()
        if users - {peer.uid, REMOTE_UID} and not peer.host:
            raise NotPermitted(f"engine {engine!r} belongs to another user", "choose another engine name")

    def _make_room(self, peer: Peer) -> None:
        sessions = self._sessions.of_process(peer)
        if len(sessions) < SESSIONS_PER_PROCESS:
            return
        for session in sessions:
            engine = self._engines.get(session.engine)
            if engine is None or not engine.has(session):
                self._drop(session, "its process opened too many")
                return
        raise Busy(f"process {peer.pid} holds {len(sessions)} sessions", "close some of them")

    def _bye(self, peer: Peer, request: Request, session: Session) -> Body:  # noqa: ARG002
        self._drop(session, "said goodbye")
        return {}

    def _heartbeat(self, peer: Peer, request: Request, session: Session) -> Body:  # noqa: ARG002
        engine = self._engines.get(session.engine)
        told, session.counters = session.counters, request.body["counters"]
        self._engine_totals.told(engine.model if engine else "", told, session.counters)
        return {
            "epoch": self._identity.epoch,
            "ready": engine is not None and engine.ready,
            "problem": engine.problem if engine else "",
            "descriptors": self._wanted_at(engine, session) if engine else "",
        }

    def _on_death(self, session: Session) -> None:
        self._drop(session, "its process ended")

    def _drop(self, session: Session, why: str) -> None:
        self._sessions.close(session)
        self._leave_engine(session)
        self._events.tell("closed", engine=session.engine, name=session.name, pid=session.pid, why=why)
        log.info("session %r of %r closed: %s", session.name, session.engine or "a client", why)

    def _leave_engine(self, session: Session) -> None:
        engine = self._engines.get(session.engine)
        if engine is None:
            return
        if not engine.has(session):
            # Whoever asked for the leases is gone; copies that run for other sessions go on.
            self._store.drop(engine.name)
            return
        self._transfers.abandon(engine)
        for rank in engine.leave(session):
            self._movers.detach(rank.attachment)
        if not engine.ranks:
            self._engines.pop(engine.name, None)

    def _wanted_at(self, engine: Engine, session: Session) -> str:
        """The socket at which the mover waits for descriptors of a rank of this session."""
        waiting = (
            self._movers.descriptor_socket(rank.attachment)
            for rank in engine.ranks.values()
            if rank.session is session and not rank.attached
            if any(handle.kind == "cuda_fd" for handle in rank.regions)
        )
        return next(filter(None, waiting), "")

    # -- registration -------------------------------------------------------------------------------------

    def _register(self, peer: Peer, request: Request, session: Session) -> Body:
        body = request.body
        if not session.engine:
            raise UsageError("register needs a session with an engine", "name the engine in hello")
        self._movers.require(body["device"])
        handles = list(body["regions"]) + ([body["control"]] if body["control"] else [])
        foreign = [handle.kind for handle in handles if handle.kind != "memfd"]
        if body["device"] == "cpu" and foreign:
            raise NoSuchDevice(f"device 'cpu' maps memory of kind memfd, not {foreign[0]}")
        if body["device"] != "cpu" and any(handle.kind == "memfd" for handle in body["regions"]):
            raise NoSuchDevice(f"device {body['device']!r} maps memory of kind cuda_ipc or cuda_fd, not memfd")
        if any(handle.kind != "cuda_ipc" and handle.pid != peer.pid for handle in handles):
            raise NotPermitted(
                f"the memory belongs to another process than the sender (pid {peer.pid})",
                "register from the process that owns the memory, in the daemon's PID namespace",
            )
        shard = wire.shard_from_wire(body)
        if body["archive"]:
            require_owner(peer, "copy whole namespaces")
        self._take_over(peer, session, body["rank"])
        engine = self._engines.get(session.engine)
        if engine is None:
            engine = Engine(
                session.engine,
                body["world"],
                body["namespace"],
                body["model"],
                body["strategy"],
                body["block_tokens"],
            )
        rank = Rank(
            body["rank"],
            session,
            shard,
            tuple(body["regions"]),
            body["control"],
            body["device"],
            body["place"],
        )
        engine.admit(rank, body["world"], body["namespace"])
        engine.fields, engine.archive = body["fields"], body["archive"]
        engine.key_namespace, engine.group = body["key_namespace"] or b"", body["group"]
        self._engines[engine.name] = engine
        if engine.complete:
            self._complete(engine)
        if engine.problem:
            raise LayoutRefused(engine.problem)
        return {"ready": engine.ready}

    def _take_over(self, peer: Peer, session: Session, rank: int) -> None:
        """End what this session, or an earlier one of its process, registered before."""
        engine = self._engines.get(session.engine)
        if engine is None:
            return
        before = engine.ranks.get(rank)
        if before is not None and before.session is not session:
            if before.session.pid != peer.pid:
                raise Busy(f"rank {rank} of {engine.name!r} is registered by pid {before.session.pid}")
            self._drop(before.session, "its process registered anew")
        if engine.has(session):
            self._leave_engine(session)

    def _complete(self, engine: Engine) -> None:
        """All ranks are here: prove the layout, open the namespace, map every rank."""
        try:
            fingerprint = engine.prove()
            assert engine.layout is not None
            engine.namespace = self._store.open_namespace(fingerprint, engine.layout.block_bytes, engine.model)
            if not engine.archive:
                home = self._store.blocks.namespaces[engine.namespace]
                home.block_tokens, home.group = engine.block_tokens, engine.group
            self._explanations.opened(engine.namespace, engine)
            for rank in engine.ranks.values():
                if rank.attachment:
                    self._movers.detach(rank.attachment)
                rank.attached = False
                rank.attachment = self._movers.attach(
                    rank.device, engine.attachment_of(rank), self._attached(engine, rank)
                )
        except HpkvError as problem:
            engine.problem = str(problem)
            engine.namespace = None
            self._events.tell("refused", engine=engine.name, model=engine.model, problem=engine.problem)
            log.warning("engine %r is not cached: %s", engine.name, problem)

    def _attached(self, engine: Engine, rank: Rank) -> Callable[[Attached], None]:
        def tell(event: Attached) -> None:
            if event.attachment != rank.attachment:
                return
            rank.attached = not event.problem
            if event.problem:
                engine.problem = f"rank {rank.number}: {event.problem}"
                log.warning("engine %r: %s", engine.name, engine.problem)
            elif engine.ready:
                engine.problem = ""
                self._events.tell("ready", engine=engine.name, model=engine.model, ranks=engine.world)
                log.info("engine %r is ready: %d ranks of %r", engine.name, engine.world, engine.model)

        return tell

    def _unregister(self, peer: Peer, request: Request, session: Session) -> Body:  # noqa: ARG002
        self._leave_engine(session)
        return {}

    # -- blocks -------------------------------------------------------------------------------------------

    def _ready_engine(self, session: Session) -> Engine:
        engine = self._engines.get(session.engine)
        if engine is None:
            raise NotRegistered("no rank of this engine is registered", "register first")
        if not engine.ready:
            reason = engine.problem or "not all of its ranks are mapped yet"
            raise NotRegistered(f"engine {session.engine!r} is not ready: {reason}")
        return engine

    def _match(self, peer: Peer, request: Request, session: Session) -> Body:  # noqa: ARG002
        engine = self._ready_engine(session)
        assert engine.namespace is not None
        keys = Keys(request.body["keys"])
        counters = self._transfers.counters
        counters["requested_blocks"] += len(keys)
        lease = self._store.acquire(engine.namespace, keys, engine.name, self._lease_deadline())
        hit = lease.length if lease else 0
        self._tiering.used(engine.namespace, keys[:hit])
        coming = 0
        if hit < len(keys):
            coming = self._tiering.bring(engine.namespace, keys[hit - 1] if hit else None, keys[hit:])
        self._explanations.looked_up(engine, request.body["request"], keys, hit, coming, self._clock())
        counters["matched_blocks"] += hit
        self._store.blocks.namespaces[engine.namespace].counts.looked_up(len(keys), hit, coming)
        return {"hit": hit, "lease": lease.number if lease else 0, "coming": coming}

    def _acquire(self, peer: Peer, request: Request, session: Session) -> Body:  # noqa: ARG002
        engine = self._ready_engine(session)
        assert engine.namespace is not None
        keys = Keys(request.body["keys"])
        deadline = self._lease_deadline()
        lease, slots = self._store.acquire_each(engine.namespace, list(keys), engine.name, deadline)
        counters = self._transfers.counters
        counters["requested_blocks"] += len(keys)
        counters["matched_blocks"] += len(lease.pinned) if lease else 0
        found = bytes(slot != NONE for slot in slots)
        missed = [key for key, here in zip(keys, found, strict=True) if not here]
        hit = len(keys) - len(missed)
        hits = [key for key, here in zip(keys, found, strict=True) if here]
        self._tiering.used(engine.namespace, hits)
        asked = [*hits, *missed]
        coming = self._tiering.bring_each(engine.namespace, missed) if missed else 0
        self._explanations.looked_up(engine, request.body["request"], asked, hit, coming, self._clock())
        self._store.blocks.namespaces[engine.namespace].counts.looked_up(len(keys), hit, coming)
        return {"found": found, "lease": lease.number if lease else 0, "coming": coming}

    def _contains(self, peer: Peer, request: Request, session: Session) -> Body:  # noqa: ARG002
        engine = self._ready_engine(session)
        assert engine.namespace is not None
        namespace = engine.namespace
        return {"found": bytes(self._store.contains(namespace, key) for key in Keys(request.body["keys"]))}

    def _release(self, peer: Peer, request: Request, session: Session) -> Body:  # noqa: ARG002
        return {"released": self._store.release(request.body["lease"], session.engine)}

    def _caller(self, peer: Peer, request: Request, session: Session) -> Caller:
        engine = self._ready_engine(session)
        return Caller(peer.identity, request.id, engine, engine.rank_of(session))

    def _load(self, peer: Peer, request: Request, session: Session) -> None:
        self._transfers.load(self._caller(peer, request, session), request.body)

    def _get(self, peer: Peer, request: Request, session: Session) -> None:
        caller = self._caller(peer, request, session)
        namespace = caller.engine.namespace
        keys = list(Keys(request.body["keys"]))
        assert namespace is not None
        here = [self._store.contains(namespace, key) for key in keys]
        missed = [key for key, found in zip(keys, here, strict=True) if not found]
        self._tiering.used(namespace, [key for key, found in zip(keys, here, strict=True) if found])
        if not missed or not self._tiering.bring_each(namespace, missed):
            self._transfers.get(caller, request.body)
            return
        self._tiering.when_here(namespace, missed, lambda: self._get_late(caller, request.body))

    def _get_late(self, caller: Caller, body: Body) -> None:
        """What was on its way is here, or is not going to be."""
        try:
            self._transfers.get(caller, body)
        except HpkvError as problem:
            self._counters["refused_requests"] += 1
            self._answer(caller.identity, caller.request, problem)

    def _store_verb(self, peer: Peer, request: Request, session: Session) -> None:
        self._transfers.store(self._caller(peer, request, session), request.body, chained=True)

    def _put(self, peer: Peer, request: Request, session: Session) -> None:
        self._transfers.store(self._caller(peer, request, session), request.body, chained=False)

    def _reset(self, peer: Peer, request: Request, session: Session) -> Body:  # noqa: ARG002
        engine = self._ready_engine(session)
        cleared = self._store.clear(engine.namespace)
        self._tiering.forget(engine.namespace, everywhere=True)
        log.info("engine %r reset its namespace: %d blocks cleared", engine.name, cleared)
        return {"cleared_blocks": cleared}

    def _cancel(self, peer: Peer, request: Request, session: Session) -> Body:
        caller = self._caller(peer, request, session)
        return {"running": self._transfers.cancel(caller, request.body["job"])}

    # -- for operators ------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """All that is counted, as of now; the caller may read it in another thread."""
        return self._operators.snapshot(self._engine_totals)

    def stream_events(self, now: Callable[[], float], send: Callable[[int, bytes], None]) -> EventStream:
        """From now on tell of every block that comes into memory or leaves it. ``now`` is the wall clock."""
        stream = self._store.blocks.watcher = EventStream(self._store.blocks, self._reactor, now, send)
        return stream

    # -- time ---------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Call a few times a second: leases, silent sessions, late ranks, unresponsive movers."""
        now, awake = self._clock(), self._awake.tick()
        try:
            self._store.expire(now)
            self._store.blocks.settle_quotas()
            for session in self._sessions.silent_since(awake - SILENCE_SECONDS):
                self._drop(session, f"silent for {SILENCE_SECONDS:.0f} s")
            self._transfers.tick(list(self._engines.values()))
            self._movers.tick()
            self._tiering.tick()
            self._events.tick(self._store.blocks.counters)
        except Exception:  # (the next tick must come, whatever this one met)
            self._counters["internal_errors"] += 1
            log.exception("tick failed")

    def close(self) -> None:
        """Write out what the tier has not got yet, end all movers; sessions end with their sockets."""
        self._tiering.close(STORAGE_SECONDS, self._reactor.remove_reader)
        for session in self._sessions:
            self._sessions.close(session)
        self._movers.close()


def new_epoch() -> str:
    """Names one life of the pool."""
    return secrets.token_hex(8)
