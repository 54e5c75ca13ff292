"""The service against hostile clients, movers that fail and die, and time that jumps.

    python -m tests.fuzz.service -max_total_time=60

An input is a program: which peer sends what, what movers do, how time goes on. Whatever it does, each request is
answered once, nothing fails inside, no copy meets another in the pool, and nothing stays when everybody has left.
"""

from __future__ import annotations

if __name__ == "__main__":
    from tests.fuzz.engine import main

    main("service")

import copy
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from hpkv_client import wire
from hpkv_client.errors import BY_CODE
from hpkv_client.settings import load
from hpkv_client.types import Keys, Layer, RankShard, Run
from hpkv_client.wire import VERBS, Body
from hpkv_daemon.core.policy import POLICIES
from hpkv_daemon.core.store import BlockStore
from hpkv_daemon.faults import Faults
from hpkv_daemon.movers.base import CopyJob, Direction, Outcome
from hpkv_daemon.service import engines, service
from hpkv_daemon.service.live import LiveSettings
from hpkv_daemon.service.movers import CONFIRM_SECONDS
from hpkv_daemon.service.report import Identity
from hpkv_daemon.service.service import Service
from hpkv_daemon.service.sessions import REMOTE_UID, Peer
from hpkv_daemon.tiers.noop import NoopTier
from tests.fuzz.entropy import Entropy
from tests.fuzz.node import FIRST_MOVER_FD, Node, Reactor
from tests.golden import BODIES

_ME = os.getpid()
_PEERS = (
    Peer(b"a", 1000, _ME),
    Peer(b"b", 1000, _ME),
    Peer(b"c", 1000, 1),
    Peer(b"d", 2000, _ME),
    Peer(b"e", 2000, 0),
    Peer(b"f", 1000, 0),
    Peer(b"g", 0, 0),
    Peer(b"h", REMOTE_UID, 0, "10.0.0.2"),
    Peer(b"i", REMOTE_UID, 0, "10.0.0.3"),
    Peer(b"j", 1000, (1 << 31) - 1),
)
"""Processes that can be watched (one with two connections), such that cannot, other nodes, one that has ended."""

_ENGINES = ("e", "f", "", "g")
_CHAINS, _LENGTH = 4, 16
_POOLS = (1 << 17, 1 << 16, 1 << 18)
_FAULTS = ("", "", "commit@2=fail", "commit=delay:0.5")
_LEASE_SECONDS = 5.0
_SESSIONS, _JOBS = 6, 8
"""Limits of the service that an input could not reach as they are."""

_CODES = frozenset(BY_CODE) - {"failed"}
"""What a client may be refused with. ``failed`` is for bugs, and for a store that finds itself broken."""

_SESSION = frozenset(
    {"bye", "heartbeat", "register", "unregister", "reset", "match", "acquire", "release"}
    | {"load", "store", "cancel", "contains", "put", "get"}
)
_OPEN = frozenset(VERBS) - _SESSION
"""Verbs that need no session."""

_IDENTITY = Identity(_ME, "epoch", "0", "one", "/socket", "/pool", 0, "lru")


_EDGES = (0, 1, 2, 8, 4096, 12288, 1 << 16, 1 << 20, 1 << 39, 1 << 40, wire.MAX_INT)


def _layer(name: str, size: int, *runs: Run) -> Layer:
    return Layer(name, size, runs)


def _whole(name: str, size: int) -> Layer:
    return _layer(name, size, Run(0, 0, size, 0, size))


_SHARDS: tuple[tuple[RankShard, ...], ...] = (
    (RankShard((_whole("l.0", 4096),), 16),),
    tuple(RankShard((_layer("l.0", 4096, Run(0, 0, 2048, rank * 2048, 2048)),), 16) for rank in range(2)),
    tuple(RankShard((_whole("l.0", 4096),), 16, 2, rank) for rank in range(2)),
    tuple(RankShard((_whole(f"l.{rank}", 6000),), 16) for rank in range(2)),
    (RankShard((_whole("l.0", 40000),), 16),),
    (RankShard((_whole("l.0", 100),), 16), RankShard((), 16)),
    tuple(RankShard((_layer("l.0", 64, Run(0, 0, 32, rank * 8, 8, 4, 8, 16)),), 16) for rank in range(2)),
    (RankShard((_whole("l.0", 70000),), 16),),
)
"""Engines of one size each, by their ranks: whole, split by heads, replicated, staged, with an empty stage."""


def key(chain: int, position: int) -> bytes:
    """The key of a block in one of the chains that clients have in common."""
    return bytes([1 + chain % _CHAINS, position % _LENGTH]) * 16


@dataclass(frozen=True, slots=True)
class _Asked:
    verb: str
    body: Body
    peer: Peer
    engine: str
    allowed: bool = True
    """Not a verb in a session of somebody else."""


class World:
    """A service, its node, and the clients that an input speaks for."""

    def __init__(self, entropy: Entropy) -> None:
        self._entropy = entropy
        pool, policy = entropy.pick(_POOLS), entropy.pick(sorted(POLICIES))
        self.reactor = Reactor()
        self.node = Node(self.reactor, pool)
        self.node.on_copy = self._check_copy
        self.store = BlockStore(pool, POLICIES[policy], first_lease=1 << 20)
        self.tier = NoopTier()
        self.service = Service(
            self.store,
            {"cpu": self.node.start_mover},
            _IDENTITY,
            self.reactor,
            self.reactor.clock,
            self._receive,
            LiveSettings(*load({"HPKV_LEASE_SECONDS": str(_LEASE_SECONDS)})),
            Faults(entropy.pick(_FAULTS)),
            lambda _: self.tier,
        )
        self.node.awake = self.service._awake
        self._sessions: list[tuple[int, Peer, str]] = []
        self._owners: dict[int, int] = {}
        """Session -> the uid of who opened it."""
        self._leases: dict[int, tuple[list[bytes], bool]] = {}
        """Lease -> its keys, and whether they are a prefix."""
        self._asked: defaultdict[tuple[bytes, int], list[_Asked | None]] = defaultdict(list)
        self._numbers = 0
        self._current: _Asked | None = None
        self._labels: dict[int, tuple[int, bytes]] = {}
        """Pool offset -> what was written there last."""
        self._honest = True
        """No client told a chain other than it is: then each block of a prefix is known by its key."""

    # -- the wire -----------------------------------------------------------------------------------------

    def send(self, peer: Peer, frame: bytes, asked: _Asked | None = None) -> None:
        """Hand a frame to the service; its answer is read at once or when it comes."""
        number = wire.request_id_of(frame)
        if number is not None:
            self._asked[peer.identity, number].append(asked)
        self._current = asked
        reply = self.service.handle(peer, frame)
        self._current = None
        if reply is not None:
            self._receive(peer.identity, reply)

    def ask(self, session: tuple[int, Peer, str], verb: str, **body: Any) -> None:
        """Send a request of a session, as it should be or with some of its fields changed."""
        token, peer, engine = session
        changes = self._entropy.below(256)
        for _ in range(max(0, changes - 250)):
            self._honest = False
            body = self._entropy.changed(body)
        self._numbers += 1
        allowed = verb in _OPEN or self._owners.get(token) == peer.uid
        asked = None if changes > 250 else _Asked(verb, body, peer, engine, allowed)
        self.send(peer, wire.encode_request(verb, self._numbers, token, body), asked)

    def _receive(self, identity: bytes, frame: bytes) -> None:
        reply = wire.decode_reply(frame)
        waiting = self._asked.get((identity, reply.id))
        assert waiting, f"{identity!r} gets {reply}, and did not ask"
        asked = waiting.pop(0)
        assert len(frame) <= wire.MAX_FRAME, f"the reply to {asked} has {len(frame)} bytes"
        assert asked is None or asked.allowed or not reply.ok, f"{asked} was answered: {reply.body}"
        if not reply.ok:
            code = reply.body["code"]
            assert code in _CODES, f"{asked} failed: {reply.body}"
        elif "session" in reply.body:
            engine = asked.body["engine"] if asked else ""
            peer = asked.peer if asked else next(peer for peer in _PEERS if peer.identity == identity)
            self._sessions.append((reply.body["session"], peer, engine))
            self._owners[reply.body["session"]] = peer.uid
            self._check_engines()
        elif asked is not None:
            self._check_reply(asked, reply.body)

    def _check_engines(self) -> None:
        users: defaultdict[str, set[int]] = defaultdict(set)
        for session in self.service._sessions:
            if session.engine and not session.host:
                users[session.engine].add(session.uid)
        assert all(len(found) == 1 for found in users.values()), f"an engine of several users: {dict(users)}"

    def _check_reply(self, asked: _Asked, body: Body) -> None:
        keys = list(Keys(asked.body.get("keys", b"")))
        verb = asked.verb
        if verb == "match":
            assert bool(body["hit"]) == bool(body["lease"])
            assert body["hit"] <= len(keys)
            if body["lease"]:
                self._leases[body["lease"]] = keys[: body["hit"]], True
        elif verb in ("acquire", "contains", "get"):
            assert len(body["found"]) == len(keys)
            if body.get("lease"):
                self._leases[body["lease"]] = keys, False
        elif verb in ("store", "put"):
            assert body["partial"] or body["kept"] + body["dropped"] == len(keys), f"{asked}: {body}"
        elif verb == "load":
            assert body["loaded"] == len(asked.body["blocks"]) // 4

    def _check_copy(self, job: CopyJob) -> None:
        """What a load copies are the blocks that it names."""
        asked = self._current
        if asked is None:
            for offset in job.offsets if job.direction is Direction.STORE else ():
                self._labels.pop(offset, None)
            return
        namespace = self.service._engines[asked.engine].namespace
        assert namespace is not None
        if job.direction is Direction.STORE:
            names = dict(zip(wire.unpack_blocks(asked.body["blocks"]), Keys(asked.body["keys"]), strict=True))
            for offset, block in zip(job.offsets, job.blocks, strict=True):
                self._labels[offset] = namespace, names[block]
            return
        for offset, name in zip(job.offsets, self._named(asked, namespace, len(job.blocks)), strict=False):
            found = self._labels.get(offset, (namespace, name))
            assert found == (namespace, name), f"{asked} would load {found}"

    def _named(self, asked: _Asked, namespace: int, count: int) -> list[bytes]:
        """The keys that a load asks for, as far as they are known."""
        if asked.verb == "get":
            return [name for name in Keys(asked.body["keys"]) if self.store.contains(namespace, name)]
        keys, chained = self._leases.get(asked.body["lease"], ([], False))
        return [] if chained and not self._honest else keys[asked.body["first"] :][:count]

    # -- what an input can do -----------------------------------------------------------------------------

    def _session(self) -> tuple[int, Peer, str]:
        """One of the sessions that were opened so far, now and then through the connection of somebody else."""
        number = self._entropy.below(256)
        if not self._sessions:
            return number, _PEERS[0], ""
        token, peer, engine = self._sessions[(number & 31) % len(self._sessions)]
        if number >= 240:
            return token, self._entropy.pick(_PEERS), engine
        return token, peer, engine

    def _names(self) -> tuple[list[bytes], bytes | None]:
        """Neighbours of one chain, and the key before them."""
        chain, first = self._entropy.below(_CHAINS), self._entropy.below(_LENGTH)
        names = [key(chain, first + i) for i in range(min(self._entropy.below(12), _LENGTH - first))]
        return names, key(chain, first - 1) if first else None

    def _blocks(self, count: int) -> bytes:
        start = self._entropy.below(16)
        return wire.pack_blocks([(start + i) % 16 for i in range(count)])

    def hello(self) -> None:
        peer, engine = self._entropy.pick(_PEERS), self._entropy.pick(_ENGINES)
        self.ask(
            (0, peer, engine), "hello", major=1, minor=self._entropy.below(2), name="n", instance="", engine=engine
        )

    def register(self) -> None:
        session = self._session()
        shape, rank = self._entropy.below(256), self._entropy.below(2)
        ranks = _SHARDS[shape % len(_SHARDS)]
        shard = ranks[rank % len(ranks)]
        handle = {"kind": "memfd", "size": 16 * max(1, shard.block_bytes), "pid": session[1].pid, "fd": 3, "name": "m"}
        self.ask(
            session,
            "register",
            rank=rank % len(ranks),
            world=len(ranks),
            namespace=bytes([shape // 128]) * 32,
            model="m",
            device="cpu",
            regions=[handle],
            control=dict(handle) if shape & 64 else None,
            **copy.deepcopy(wire.shard_to_wire(shard)),
        )

    def register_oddly(self) -> None:
        """A shard made of numbers at the edges of what runs may say."""
        session, size = self._session(), self._entropy.pick(_EDGES) or 1
        runs = []
        for _ in range(1 + self._entropy.below(3)):
            region, fragment, count = (self._entropy.pick(_EDGES) for _ in range(3))
            strides = [self._entropy.pick(_EDGES) for _ in range(5)]
            runs.append([region, strides[0], strides[1], strides[2], fragment, count, strides[3], strides[4]])
        self.ask(
            session,
            "register",
            rank=0,
            world=1 + self._entropy.below(2),
            namespace=bytes(32),
            model="m",
            device="cpu",
            regions=[{"kind": "memfd", "size": 1 << 50, "pid": session[1].pid, "fd": 3, "name": "m"}],
            layers=[["l.0", min(size, 1 << 40), runs]],
            blocks=1 + self._entropy.below(16),
        )

    def plain(self) -> None:
        verb = self._entropy.pick(
            ("heartbeat", "info", "stats", "check", "config", "ping", "bye", "unregister", "reset")
        )
        self.ask(self._session(), verb)

    def bye(self) -> None:
        self.ask(self._session(), "bye")

    def clear(self) -> None:
        session, wanted = self._session(), self._entropy.below(3)
        body: Body = {"namespace": bytes(32)} if wanted == 2 else {"namespace": None} if wanted else {}
        self.ask((session[0], self._entropy.pick(_PEERS), session[2]), "clear", **body)

    def look(self) -> None:
        verb = self._entropy.pick(("match", "acquire", "contains"))
        self.ask(self._session(), verb, keys=b"".join(self._names()[0]))

    def release(self) -> None:
        self.ask(self._session(), "release", lease=self._lease()[0])

    def _lease(self) -> tuple[int, list[bytes]]:
        number = self._entropy.below(256)
        if not self._leases:
            return number, []
        lease = list(self._leases)[number % len(self._leases)]
        return lease, self._leases[lease][0]

    def load(self) -> None:
        session, (lease, keys) = self._session(), self._lease()
        first = self._entropy.below(max(1, len(keys)))
        count = max(0, len(keys) - first - self._entropy.below(3))
        self.ask(session, "load", job=self._entropy.below(16), lease=lease, first=first, blocks=self._blocks(count))

    def store_(self) -> None:
        session, (keys, parent) = self._session(), self._names()
        blocks = self._blocks(len(keys))
        self.ask(session, "store", job=self._entropy.below(16), parent=parent, keys=b"".join(keys), blocks=blocks)

    def put(self) -> None:
        session, (keys, _) = self._session(), self._names()
        # A block that is put has no parent: as a link of a chain it is another block.
        self._honest = self._honest and not keys
        blocks = self._blocks(len(keys))
        self.ask(session, "put", job=self._entropy.below(16), keys=b"".join(keys), blocks=blocks)

    def get(self) -> None:
        session, (keys, _) = self._session(), self._names()
        blocks = self._blocks(len(keys))
        self.ask(session, "get", job=self._entropy.below(16), keys=b"".join(keys), blocks=blocks)

    def cancel(self) -> None:
        self.ask(self._session(), "cancel", job=self._entropy.below(16))

    def any_verb(self) -> None:
        """A golden body of a verb, which fits nothing here, with some of it changed."""
        token, peer, _ = self._session()
        verb = self._entropy.pick(sorted(VERBS))
        body: Any = copy.deepcopy(BODIES[verb])
        for _ in range(self._entropy.below(3)):
            body = self._entropy.changed(body)
        self._honest = False
        self._numbers += 1
        self.send(peer, wire.encode_request(verb, self._numbers, token, body))

    def raw(self) -> None:
        """Bytes as they come."""
        self._honest = False
        peer = self._entropy.pick(_PEERS)
        self.send(peer, self._entropy.bytes(self._entropy.below(64)))

    def die(self) -> None:
        """A watched process ends."""
        watched = [fd for fd in self.reactor.readers if fd < FIRST_MOVER_FD]
        if watched:
            self.reactor.readers[self._entropy.pick(watched)]()

    def mood(self) -> None:
        """Movers answer at once, or only when told; can be started, or not."""
        mood = self._entropy.below(4)
        self.node.eager = mood == 0
        self.node.lame = mood == 3

    def answer(self) -> None:
        """One mover answers one of its questions."""
        if live := self.node.live:
            mover, which = self._entropy.pick(live), self._entropy.below(8)
            mover.answer(which, Outcome(self._entropy.below(3)))

    def fall(self) -> None:
        """One mover dies."""
        if live := self.node.live:
            self._entropy.pick(live).die("told so")

    def hear(self) -> None:
        """The loop hears what movers said."""
        self.node.deliver()

    def tick(self) -> None:
        self.pass_time(0.25 * self._entropy.below(8))

    def wait(self) -> None:
        for _ in range(self._entropy.below(33)):
            self.pass_time(1.0)

    def leap(self) -> None:
        """The machine was suspended."""
        self.pass_time(1.0 * self._entropy.below(256))

    def pass_time(self, seconds: float) -> None:
        """Time goes on, and the service gets its tick."""
        self.reactor.advance(seconds)
        self.service.tick()
        assert not self.store.leases.expired(self.reactor.now), "a lease outlives its time"
        assert self.node.oldest_cancelled() <= CONFIRM_SECONDS, "a mover that does not confirm lives on"
        if self.node.eager:
            self.node.deliver()

    # -- an input as a whole ------------------------------------------------------------------------------

    def live(self) -> None:
        """Do what the input says, to its end."""
        while self._entropy.left:
            OPS[self._entropy.below(len(OPS))](self)
            if self.node.eager:
                self.node.deliver()

    def end(self) -> None:
        """Movers are well again and everybody leaves: all is answered and nothing stays."""
        patient = self._numbers % 2
        self.store.check()
        self.node.eager, self.node.lame = True, False
        self.node.deliver()
        if patient:
            for _ in range(40):
                self.pass_time(1.0)
            self._check_answered()
        for fd in [fd for fd in self.reactor.readers if fd < FIRST_MOVER_FD]:
            self.reactor.readers[fd]()
        for session in list(self.service._sessions):
            peer = Peer(b"z", session.uid, session.pid, session.host)
            self._numbers += 1
            self.send(peer, wire.encode_request("bye", self._numbers, session.token, {}))
        self.node.deliver()
        for _ in range(6):
            self.pass_time(1.0)
        self._check_answered()
        self._check_empty()
        self.service.close()

    def _check_answered(self) -> None:
        open_ = {asker: asked for asker, asked in self._asked.items() if asked}
        assert not open_, f"never answered: {open_}"

    def _check_empty(self) -> None:
        served, usage, movers = self.service, self.store.blocks.usage, self.service._movers
        self.store.check()
        left = {
            "internal errors": served._counters["internal_errors"],
            "sessions": len(served._sessions),
            "processes": served._sessions._processes,
            "engines": served._engines,
            "loads": served._transfers._loads,
            "unsettled stores": served._transfers._unsettled,
            "leases": len(self.store.leases),
            "pinned blocks": usage.pinned_blocks,
            "reserved blocks": usage.reserved_blocks,
            "reservations": self.store._reservations,
            "devices": movers._devices,
            "attachments": movers._home,
            "movers that end": movers._ending,
            "processes of movers": self.node.live,
            "copies": self.node.copies,
            "descriptors": self.reactor.readers.keys() - {self.tier.fileno()},
        }
        self.tier.close(0.0)
        assert not any(left.values()), f"what stays: { {name: value for name, value in left.items() if value} }"


OPS: tuple[Callable[[World], None], ...] = (
    World.hello,
    World.register,
    World.plain,
    World.bye,
    World.clear,
    World.look,
    World.release,
    World.load,
    World.store_,
    World.put,
    World.get,
    World.cancel,
    World.any_verb,
    World.raw,
    World.die,
    World.mood,
    World.answer,
    World.fall,
    World.hear,
    World.tick,
    World.wait,
    World.leap,
    World.register_oddly,
)


class _Bugs(logging.Handler):
    """An error that is logged is one that should not be: it comes out with its trace."""

    def emit(self, record: logging.LogRecord) -> None:
        problem = record.exc_info[1] if record.exc_info else None
        raise AssertionError(record.getMessage()) from problem


_LOG = logging.getLogger("hpkv_daemon")


def run(data: bytes) -> None:
    """Let a world live through the input and end. Raises whatever should not be."""
    world = World(Entropy(data))
    level, bugs = _LOG.level, _Bugs()
    _LOG.setLevel(logging.ERROR)
    _LOG.addHandler(bugs)
    try:
        with (
            patch.object(service, "SESSIONS_PER_PROCESS", _SESSIONS),
            patch.object(engines, "_REMEMBERED_JOBS", _JOBS),
        ):
            world.live()
            world.end()
    finally:
        _LOG.removeHandler(bugs)
        _LOG.setLevel(level)


def _script(*steps: tuple[int | Callable[[World], None], ...], config: tuple[int, int, int] = (0, 0, 0)) -> bytes:
    numbers = [*config]
    for step in steps:
        numbers += [OPS.index(part) if callable(part) else part for part in step]
    return bytes(numbers)


def seeds() -> Iterator[bytes]:
    """Engines of every shape that store, match and load; with failing, slow and dying movers; and ends of all kinds."""
    w = World
    hellos = ((w.hello, 0, 0, 0, 0), (w.hello, 1, 0, 0, 0))
    # verb, session, chain, first, count, first block, job, no change
    store = tuple((w.store_, rank, 0, 0, 5, 0, 1, 0) for rank in range(2))
    more = tuple((w.store_, rank, 0, 5, 5, 5, 2, 0) for rank in range(2))
    read = ((w.look, 0, 0, 0, 0, 11, 0), (w.load, 0, 0, 0, 0, 7, 3, 0), (w.load, 1, 0, 0, 0, 7, 3, 0))
    over = ((w.release, 0, 0, 0), (w.bye, 0, 0))
    for shape in range(len(_SHARDS)):
        both = (*hellos, (w.register, 0, shape, 0, 0), (w.register, 1, shape, 1, 0))
        for pool in range(len(_POOLS)):
            yield _script(*both, *store, *more, *read, *over, config=(pool, shape % 2, 0))
    two = (*hellos, (w.register, 0, 1, 0, 0), (w.register, 1, 1, 1, 0))
    one = (hellos[0], (w.register, 0, 0, 0, 0))
    for fault in range(len(_FAULTS)):
        yield _script(*two, *store, *more, (w.tick, 4), *read, config=(0, 1, fault))
    slow = ((w.mood, 1),)
    good = ((w.answer, 0, 0, 0), (w.hear,))
    yield _script(*two, *slow, *store, *good, *good, *read, *good, *good, *over)
    yield _script(*two, *slow, store[0], (w.answer, 0, 0, 1), (w.hear,), store[1], (w.hear,), *more, (w.wait, 32))
    yield _script(*two, *slow, *store, (w.fall, 0), (w.hear,), (w.wait, 3), *good, *good, *store, *read)
    yield _script(*two, *store, *slow, *read, (w.cancel, 0, 7, 0), (w.wait, 3), (w.die, 0), (w.hear,), *hellos)
    yield _script(*two, *slow, *store, (w.bye, 0, 0), (w.bye, 1, 0), (w.wait, 3))
    yield _script(*two, store[0], (w.wait, 32), store[1])
    yield _script(*two, (w.mood, 3), (w.fall, 0), (w.hear,), (w.wait, 4), (w.mood, 0), (w.wait, 4), *store)
    yield _script(*hellos, (w.mood, 3), (w.register, 0, 0, 0, 0), (w.mood, 0), (w.register, 0, 0, 0, 0), *store[:1])
    # All that a process may open, each with a rank; then one more, and another process that wants a rank of it.
    full = tuple((w.hello, 0, engine, 0, 0) for engine in (0, 0, 1, 1, 3, 3))
    ranks = tuple((w.register, session, 1, session % 2, 0) for session in range(_SESSIONS))
    yield _script(*full, *ranks, hellos[0], (w.hello, 2, 0, 0, 0), (w.register, 6, 1, 0, 0), (w.register, 1, 1, 0, 0))
    # The lease under a load that runs is given back or expires, and others want the room.
    crowd = tuple((w.store_, 0, chain, 0, 11, 0, 8 + chain, 0) for chain in range(1, 4))
    begun = (*one, store[0], read[0], *slow, read[1])
    yield _script(*begun, over[0], *good, *crowd, *good, *good, *good, config=(1, 0, 0))
    yield _script(*begun, (w.release, 0, 0, 0), *crowd, *good, *good, *good, *good, config=(1, 0, 0))
    yield _script(*begun, (w.leap, 9), *crowd, *good, *good, *good, *good, config=(1, 0, 0))
    yield _script(*begun, (w.cancel, 0, 7, 0), *(((w.tick, 3),) * 4), *good)
    yield _script(*begun, read[1], *good, *good, read[1], (w.hear,))
    yield _script(*one, *slow, store[0], (w.bye, 0, 0), (w.tick, 7), (w.tick, 7), (w.tick, 7))
    yield _script(
        *one, *store[:1], (w.look, 0, 240, 3, 0, 0, 3, 0), (w.look, 2, 240, 4, 0, 0, 3, 0), (w.bye, 240, 3, 0)
    )
    unrelated = ((w.put, 0, 1, 0, 6, 0, 4, 0), (w.look, 0, 1, 1, 2, 8, 0), (w.load, 0, 0, 0, 0, 0, 5, 0))
    yield _script(*one, *unrelated, (w.get, 0, 1, 1, 8, 0, 6, 0), (w.look, 0, 2, 1, 0, 9, 0), (w.clear, 0, 0, 6, 0))
    yield _script(*one, *(((w.store_, 0, chain, 0, 9, 0, chain, 0)) for chain in range(4)), *read, config=(1, 1, 0))
    yield _script(*((w.hello, peer, 2, 0, 0) for peer in range(len(_PEERS))), *((w.plain, s, s, 0) for s in range(9)))
    yield _script(*((w.hello, 4, 0, 0, 0) for _ in range(9)), (w.wait, 20), (w.hello, 0, 0, 0, 0))
    yield _script(*one, (w.hello, 7, 0, 0, 0), (w.look, 1, 0, 0, 0, 4, 0), (w.hello, 3, 0, 0, 0), (w.leap, 60))
    for position in range(len(VERBS)):
        yield _script(*one, (w.any_verb, 0, position, 0), (w.any_verb, 0, position, 1, 3, 1, 2, 7))
    for place in range(6):
        yield _script(*hellos, (w.register, 0, 1, 0, 251, 5, place, 4, 0, 1, 3, 1, 0, 0, 19), (w.plain, 1, 0, 0))
    # Sizes, then region, fragment, count and strides of each run, by their places among the edges.
    whole, endless = (0, 4, 1, 0, 4, 0, 0, 0), (0, 9, 10, 0, 0, 0, 0, 0)
    yield _script(hellos[0], (w.register_oddly, 0, 4, 0, *whole, 0, 0, 0), (w.plain, 1, 0, 0), *store[:1], *read)
    yield _script(hellos[0], (w.register_oddly, 0, 9, 0, *endless, 1, 0, 0), (w.plain, 1, 0, 0))
    yield _script((w.raw, 0, 7, *wire.encode_request("bye", 1, 0, {})), (w.raw, 3, 3, 0x93, 1, 2))
