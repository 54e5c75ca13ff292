"""Look-ups of the scheduler connector: every part of a prefix is asked for at once, one answer comes of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger

from hpkv_client.address import Address, NodeAddress, read_key
from hpkv_client.errors import ConfigError, HpkvError, Unreachable
from hpkv_client.prefix import Found
from hpkv_client.session import SessionKeeper
from hpkv_client.settings import Settings
from hpkv_client.transport import Channel, await_any
from hpkv_client.wire import Reply
from hpkv_vllm.metadata import Part

log = init_logger("vllm.hpkv.lookup")

READY_WAIT_SECONDS = 10.0
STEP_WAIT_SECONDS = 0.002
"""Most time one scheduling step spends waiting for look-ups, over all requests."""
IDLE_WAIT_SECONDS = 0.01
"""The same, after a step that computed nothing: the answer is all there is to wait for."""
AGAIN_SECONDS = 0.01
"""Between two look-ups of one prefix of which blocks are on their way from storage."""
RESET_SECONDS = 2.0
MAX_KEYS = 1 << 15
MAX_ASKER = 128

_ANSWER: dict[str, Any] = {"hit": 0, "found": b"", "lease": 0, "coming": 0}
"""What of an answer counts, and what stands for it where it is missing: nothing was found."""


@dataclass(slots=True)
class Lookup:
    """One prefix that is asked for. ``found`` and ``leases`` are by part; complete when ``waiting`` is empty."""

    asked: float
    waiting: dict[int, int] = field(default_factory=dict)
    """Request id on the wire -> index of the part."""
    found: dict[int, Found] = field(default_factory=dict)
    leases: dict[int, int] = field(default_factory=dict)
    asked_keys: dict[int, int] = field(default_factory=dict)
    """How many keys each part was asked for."""
    keys: Sequence[Sequence[bytes]] = ()
    asker: str = ""
    patience: float = 0.0
    """Until when it is worth waiting for blocks that are read from storage."""
    coming: dict[int, float] = field(default_factory=dict)
    """Part of which blocks are on their way from storage -> when that was said."""
    fetched_since: float = 0.0
    """When that was said first, 0 if never."""
    leading: dict[int, int] = field(default_factory=dict)
    """Part -> how many leading blocks were here then."""
    given_up: bool = False
    """Nobody waits for it any more; leases that still come are given back at once."""

    @property
    def open(self) -> bool:
        """Whether an answer is still worth waiting for."""
        return bool(self.waiting or self.coming) and not self.given_up


class Directory:
    """The daemons as the scheduler sees them: one session for each part of the engine. Engine core's thread only.

    An engine on one node has one daemon; of one over several nodes, each node's daemon keeps parts of its own, and
    all are asked at once. ``counters`` are told to operators by the session of the first part.
    """

    def __init__(self, settings: Settings, parts: Sequence[Part], counters: Counter[str]) -> None:
        self.counters = counters
        self.parts = tuple(parts)
        self._settings = settings
        addresses = [_address(part, settings) for part in self.parts]
        self._channels = {address: Channel(address) for address in addresses}
        self._channel_of = [self._channels[address] for address in addresses]
        self._lookups: dict[int, Lookup] = {}
        self._sessions: list[int] = []
        self._wait_left = STEP_WAIT_SECONDS
        self._keepers = [
            SessionKeeper(
                address,
                {"name": "scheduler", "engine": part.engine, "instance": _instance(part, settings)},
                counters=None if index else counters,
            )
            for index, (part, address) in enumerate(zip(self.parts, addresses, strict=True))
        ]
        for keeper in self._keepers:
            keeper.start()
        deadline = time.monotonic() + READY_WAIT_SECONDS
        for keeper in self._keepers:
            keeper.wait(deadline - time.monotonic(), lambda link: link.usable or bool(link.problem))

    @property
    def usable(self) -> bool:
        """Whether every part can be asked for and moved."""
        return bool(self._keepers) and all(keeper.link.usable for keeper in self._keepers)

    def _suspect(self) -> None:
        for keeper in self._keepers:
            keeper.suspect()

    def ask(self, keys: Sequence[Sequence[bytes]], asker: str) -> Lookup | None:
        """Ask for the leading ``keys[i]`` of each part; None when there is nobody to ask. ``asker``: for operators."""
        if not self.usable:
            return None
        sessions = [keeper.link.session for keeper in self._keepers]
        if sessions != self._sessions:
            # Another life of the daemon: what the last one was asked is never answered.
            self._sessions = sessions
            self._lookups.clear()
        now = time.monotonic()
        lookup = Lookup(now, keys=keys, asker=asker, patience=now + self._settings.load_deadline_seconds)
        self.counters["lookups"] += 1
        for index in range(len(self.parts)):
            if not self._send(lookup, index):
                return None
        return lookup

    def _send(self, lookup: Lookup, index: int) -> bool:
        part, keys = self.parts[index], lookup.keys[index][:MAX_KEYS]
        verb = "acquire" if part.window_tokens else "match"
        body = {"keys": b"".join(keys), "request": lookup.asker[:MAX_ASKER]}
        try:
            request = self._channel_of[index].send(verb, body, self._keepers[index].link.session)
        except Unreachable:
            self._suspect()
            return False
        lookup.waiting[request] = index
        lookup.asked_keys[index] = len(keys)
        self._lookups[request] = lookup
        return True

    def _ask_again(self, lookup: Lookup) -> None:
        """Of parts that waited for storage: what is here by now."""
        now = time.monotonic()
        for index in [index for index, said in lookup.coming.items() if now - said >= AGAIN_SECONDS]:
            del lookup.coming[index]
            self.release({index: lookup.leases.pop(index, 0)})
            lookup.found.pop(index, None)
            lookup.asked = now
            if not self._send(lookup, index):
                self._give_up(lookup)
                return

    def answered(self, lookup: Lookup) -> bool:
        """Whether all answers are in; waits for them within the step's budget.

        A daemon that stays silent for longer than the submit deadline counts as down: the answer is then that
        nothing was found.
        """
        started = time.monotonic()
        self.receive()
        self._ask_again(lookup)
        if lookup.open and self._wait_left > 0:
            self.receive(self._wait_left)
            self._wait_left -= time.monotonic() - started
        if not lookup.open:
            return True
        if not lookup.waiting or time.monotonic() - lookup.asked < self._settings.submit_deadline_ms / 1000:
            return False
        self.counters["lookup_timeouts"] += 1
        silent_ones = sorted({str(self._channel_of[index].address) for index in lookup.waiting.values()})
        log.warning(
            "HPKV: no answer to a look-up within %d ms from %s",
            self._settings.submit_deadline_ms,
            " and ".join(silent_ones),
        )
        for silent in self._lookups.values():
            self._give_up(silent)
        self._suspect()
        return True

    def _give_up(self, lookup: Lookup) -> None:
        lookup.given_up = True
        self.release(lookup.leases)
        lookup.leases = {}
        lookup.found.clear()

    def receive(self, timeout: float = 0.0) -> None:
        """Take the replies that are here, waiting up to ``timeout`` seconds for the first."""
        if timeout > 0:
            await_any(self._channels.values(), timeout)
        for channel in self._channels.values():
            for reply in channel.replies():
                lookup = self._lookups.pop(reply.id, None)
                if lookup is not None:
                    self._take(lookup, lookup.waiting.pop(reply.id), reply)

    def _take(self, lookup: Lookup, index: int, reply: Reply) -> None:
        part = self.parts[index]
        if not reply.ok:
            # The daemon restarted or lost a rank: look at once, not at the next heartbeat.
            self._suspect()
            lookup.found[index] = Found(part.block_tokens, part.window_tokens)
            return
        hit, found, lease, coming = (reply.body.get(name, default) for name, default in _ANSWER.items())
        asked = lookup.asked_keys[index]
        sane = type(hit) is int and 0 <= hit <= asked and type(lease) is int and type(coming) is int
        if not (sane and isinstance(found, bytes) and len(found) <= asked):
            log.warning("HPKV: %s answers look-ups with nonsense", self._channel_of[index].address)
            self._suspect()
            hit, found, lease, coming = _ANSWER.values()
        lookup.found[index] = Found(part.block_tokens, part.window_tokens, hit, found)
        now = time.monotonic()
        if coming > 0 and now < lookup.patience:
            lookup.coming[index] = now
            lookup.fetched_since = lookup.fetched_since or now
            lookup.leading.setdefault(index, lookup.found[index].leading)
        if lease and lookup.given_up:
            self.release({index: lease})
        elif lease:
            lookup.leases[index] = lease

    def new_step(self, idle: bool) -> None:
        """The next scheduling step has its own budget for waiting. ``idle``: this one computes nothing."""
        if self._lookups:
            # Asking a socket in vain costs a decode step more than all else here.
            self.receive()
        self._wait_left = IDLE_WAIT_SECONDS if idle else STEP_WAIT_SECONDS

    def drop(self, lookup: Lookup | None) -> None:
        """Nobody needs the look-up any more: give its leases back, also those that are still to come."""
        if lookup is not None:
            self._give_up(lookup)

    def release(self, leases: dict[int, int]) -> None:
        """Give leases back, by part."""
        for index, lease in leases.items():
            if not lease:
                continue
            link = self._keepers[index].link
            if not link.usable:
                continue
            try:
                self._channel_of[index].send("release", {"lease": lease}, link.session)
            except Unreachable:
                self._suspect()
                return

    def reset(self) -> bool:
        """Forget the engine's blocks in the daemon; False if that could not be confirmed."""
        if not self.usable:
            return False
        for keeper, address in zip(self._keepers, [channel.address for channel in self._channel_of], strict=True):
            channel = Channel(address)
            channel.session = keeper.link.session
            try:
                channel.call("reset", {}, RESET_SECONDS)
            except HpkvError as problem:
                log.warning("HPKV: reset failed: %s", problem)
                return False
            finally:
                channel.close()
        return True

    def close(self) -> None:
        """Leave the daemon politely."""
        for keeper in self._keepers:
            keeper.stop()
        for channel in self._channels.values():
            channel.close()

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)


def _address(part: Part, settings: Settings) -> Address:
    if not part.place:
        return settings.socket
    if settings.key_file is None:
        raise ConfigError(f"no key for the daemon at {part.place}", "set HPKV_KEY_FILE on every node")
    return NodeAddress(part.place, read_key(settings.key_file))


def _instance(part: Part, settings: Settings) -> str:
    """Names of instances are a node's own."""
    return "" if part.place else settings.instance
