"""Slots with blocks in them: pins, residency, eviction and the balance between size classes. Pure."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpkv_client.errors import ConfigError
from hpkv_client.types import KEY_BYTES, BlockKey
from hpkv_client.values import Quota, format_size
from hpkv_daemon.core.counts import MOST_APART, BlockCounts
from hpkv_daemon.core.departures import Departures, Reason
from hpkv_daemon.core.index import NONE, BlockTable, Namespace, State
from hpkv_daemon.core.ledger import Ledger, NoLedger, Recorded, parents_first
from hpkv_daemon.core.policy import Policy
from hpkv_daemon.core.quotas import Account, Accounts, reserved_bytes
from hpkv_daemon.core.slots import SlotPool

_SEARCH_SLOTS = 20_000
"""One search for a span to move looks at about this many blocks: a few milliseconds of the control loop."""

_MAX_DOOMED = 8_192
"""A span is not moved if more blocks than this, or twice its slots, would have to be evicted for it."""

_SEARCH_PAUSE = 256
"""Evictions, at least, between a search in vain and the next one."""


@dataclass(slots=True)
class Usage:
    """What the pool holds right now, in blocks and payload bytes."""

    resident_blocks: int = 0
    resident_bytes: int = 0
    reserved_blocks: int = 0
    """Being written, complete but waiting for a parent, or condemned and still in use."""
    pinned_blocks: int = 0


class Watcher(Protocol):
    """Whoever wants to know what is resident."""

    def came(self, slot: int) -> None:
        """The block in this slot is resident now."""

    def left(self, slot: int) -> None:
        """The block in this slot is about to be resident no more."""


def _oldest(policies: Iterable[Policy]) -> int | None:
    """Of the next victims of some policies the one that was used last longest ago."""
    victims = [(policy.last_use(slot), slot) for policy in policies if (slot := policy.victim()) is not None]
    return min(victims)[1] if victims else None


class Blocks:
    """The blocks of one pool.

    Keeps three things true at all times: a resident block's parent is resident; the policies know exactly the
    evictable slots; the usage counters equal a full count.
    """

    def __init__(
        self,
        pool_bytes: int,
        policy: Callable[[], Policy],
        extent_bytes: int | None,
        quotas: Sequence[Quota],
        ledger: Ledger | None = None,
    ) -> None:
        self.slots = SlotPool(pool_bytes, extent_bytes)
        self.table = BlockTable()
        self.namespaces: list[Namespace] = []
        self.usage = Usage()
        self.counters: Counter[str] = Counter()
        self.counts = [BlockCounts("", "")]
        """By namespace; the first one is of all that are not counted apart."""
        self.watcher: Watcher | None = None
        self.departures = Departures()
        self.restored_blocks = 0
        self.tick = 0
        self._pool_bytes = pool_bytes
        self._ledger = ledger or NoLedger()
        self._make_policy = policy
        self.accounts = Accounts(quotas, pool_bytes)
        self._policies: list[list[tuple[Account, Policy]]] = []
        """By size class: whose blocks, and in which order they leave."""
        self._exposed = bytearray()
        self._extent_use = array("q", bytes(8 * self.slots.extents))
        """Tick of the last use of a block in each extent; may be too old, never too young."""
        self._search_pause: Counter[int] = Counter()
        self._searched: Counter[int] = Counter()
        """Windows that the last searches of a class tried in vain: the next one goes on behind them."""

    def open_namespace(self, fingerprint: bytes, block_bytes: int, tenant: str) -> int | None:
        """Number of a new namespace, or None if not one of its blocks fits into the pool."""
        size_class = self.slots.open_class(block_bytes)
        if size_class is None:
            return None
        if size_class == len(self._policies):
            self._policies.append([])
        account = self.accounts.of(tenant)
        policy = self._policy_of(size_class, account)
        self.namespaces.append(Namespace(fingerprint, block_bytes, size_class, tenant, account, policy, self.counts[0]))
        number = len(self.namespaces) - 1
        self._ledger.opened(number, fingerprint, block_bytes, tenant)
        return number

    def _policy_of(self, size_class: int, account: Account) -> Policy:
        known = next((policy for owner, policy in self._policies[size_class] if owner is account), None)
        if known is None:
            known = self._make_policy()
            self._policies[size_class].append((account, known))
        return known

    def count_apart(self, home: Namespace) -> None:
        """From now on the namespace has counts of its own, unless it has blocks already or too many others have."""
        if home.counts is self.counts[0] and not home.used and len(self.counts) <= MOST_APART:
            home.counts = BlockCounts(home.fingerprint.hex(), home.tenant, home.block_bytes)
            self.counts.append(home.counts)

    def namespace_of(self, slot: int) -> Namespace:
        """The namespace of the block in the slot."""
        return self.namespaces[self.table.namespace[slot]]

    def key_of(self, slot: int) -> BlockKey:
        """The key of the block in the slot."""
        return self.table.key_of(slot)

    def find(self, namespace: int, key: BlockKey) -> int:
        """Slot of the block in any visible state, or ``NONE``."""
        return self.namespaces[namespace].slots.get(key, NONE)

    def resident(self, namespace: int, key: BlockKey) -> int:
        """Slot of the resident block, or ``NONE``."""
        slot = self.find(namespace, key)
        return slot if slot != NONE and self.table.state[slot] == State.RESIDENT else NONE

    # -- use ----------------------------------------------------------------------------------------------

    def touch(self, slot: int) -> None:
        """The block was used now."""
        self.tick += 1
        self._policy(slot).touch(slot, self.tick)
        self._extent_use[self.slots.extent_of(slot)] = self.tick
        self._ledger.used(slot, self.tick)

    def pin(self, slot: int) -> None:
        """Forbid eviction until the matching ``unpin``."""
        if not self.table.pins[slot]:
            self.usage.pinned_blocks += 1
        self.table.pins[slot] += 1
        self._refresh(slot)

    def unpin(self, slot: int) -> None:
        """Undo one ``pin``; the last one frees a condemned block."""
        self.table.pins[slot] -= 1
        if not self.table.pins[slot]:
            self.usage.pinned_blocks -= 1
            self._collect(slot)
            if self.table.state[slot] == State.FREE:
                return
        self._refresh(slot)

    # -- life of a slot -----------------------------------------------------------------------------------

    def reserve(self, namespace: int, key: BlockKey, parent: int) -> int:
        """A slot in state RESERVED under ``parent``, evicting if needed; ``NONE``: all slots are in use."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a block key has {KEY_BYTES} bytes, not {len(key)}")
        home = self.namespaces[namespace]
        if parent != NONE:
            self.pin(parent)
        slot = self._free_slot(home) if self._keep_below_maximum(home.account, home.block_bytes) else NONE
        if slot != NONE:
            home.account.held += home.block_bytes
            self._ensure_columns()
            self.table.attach(slot, namespace, key, parent, State.RESERVED)
            home.slots[key] = slot
            self.usage.reserved_blocks += 1
        if parent != NONE:
            self.unpin(parent)
        return slot

    def _ensure_columns(self) -> None:
        self.table.ensure(self.slots.capacity)
        if len(self._exposed) < len(self.table.state):
            self._exposed.extend(bytes(len(self.table.state) - len(self._exposed)))

    def make_resident(self, slot: int) -> None:
        """Bytes and parent are there: the block is visible from now on, and immutable."""
        self.table.state[slot] = State.RESIDENT
        self.tick += 1
        number, key, offset = self.table.namespace[slot], self.key_of(slot), self.slots.offset(slot)
        home = self.namespaces[number]
        home.policy.admit(slot, key, self.tick)
        self._extent_use[offset // self.slots.extent_bytes] = self.tick
        self.usage.reserved_blocks -= 1
        self.usage.resident_blocks += 1
        self.usage.resident_bytes += home.block_bytes
        home.counts.resident += 1
        home.used = True
        self._refresh(slot)
        self._ledger.kept(slot, number, key, offset, self.table.parent[slot], self.tick)
        if self.watcher is not None:
            self.watcher.came(slot)

    def restore(self, recorded: Recorded, numbers: Sequence[int]) -> int:
        """Take over the blocks of an earlier life, in their slots; how many. Only in an empty pool.

        ``numbers``: of each recorded namespace, ``NONE`` for one that cannot be opened here. What makes no sense,
        and what lies below it, is struck out of the ledger and left out. So are blocks of an account that holds
        more than it may now, the oldest first.
        """
        homes = [numbers[home] for home in recorded.homes]
        classes = (self.namespaces[number].size_class if number != NONE else NONE for number in homes)
        usable = self.slots.adopt(zip(recorded.slots, classes, recorded.offsets, strict=True))
        self._ensure_columns()
        table, extent_bytes = self.table, self.slots.extent_bytes
        placed = array("q")
        for position in parents_first(recorded.slots, recorded.parents, usable):
            slot, number, key = recorded.slots[position], homes[position], recorded.key(position)
            parent, tick, home = recorded.parents[position], recorded.ticks[position], self.namespaces[number]
            strange = parent != NONE and (table.state[parent] != State.RESIDENT or table.namespace[parent] != number)
            if strange or key in home.slots:
                continue
            table.attach(slot, number, key, parent, State.RESIDENT)
            home.slots[key] = slot
            home.policy.admit(slot, key, tick)
            home.account.held += home.block_bytes
            self.count_apart(home)
            home.used = True
            home.counts.restored += 1
            home.counts.resident += 1
            self.usage.resident_blocks += 1
            self.usage.resident_bytes += home.block_bytes
            extent = recorded.offsets[position] // extent_bytes
            self._extent_use[extent] = max(tick, self._extent_use[extent])
            placed.append(position)
        for position, slot in enumerate(recorded.slots):
            if not usable[position]:
                self._ledger.gone(slot)
            elif table.state[slot] == State.FREE:
                self._ledger.gone(slot)
                self.slots.release(slot)
        for position in sorted(placed, key=recorded.ticks.__getitem__):
            self.tick = recorded.ticks[position]
            self._refresh(recorded.slots[position])
        for account in self.accounts:
            self._keep_below_maximum(account, 0)
        self.restored_blocks = self.usage.resident_blocks
        return self.restored_blocks

    def condemn(self, slot: int) -> None:
        """Hide a block at once and for good; it is freed when nobody reads, writes or hangs under it."""
        state = self.table.state[slot]
        if state in (State.VOID, State.CONDEMNED):
            return
        home = self.namespace_of(slot)
        if state == State.RESIDENT:
            home.counts.cleared += 1
            self._leave(slot)
            self.usage.reserved_blocks += 1
        else:
            home.counts.withdrawn += state == State.COMPLETE
            del home.slots[self.key_of(slot)]
        self.table.state[slot] = State.VOID if state == State.RESERVED else State.CONDEMNED
        self._collect(slot)

    def release_void(self, slot: int) -> None:
        """The writer of a VOID slot is done."""
        self.table.state[slot] = State.CONDEMNED
        self._collect(slot)

    def _collect(self, slot: int) -> None:
        """Free the slot, and then its ancestors, as far as they are condemned and unused."""
        table = self.table
        while table.state[slot] == State.CONDEMNED and not table.pins[slot] and not table.children[slot]:
            parent = table.parent[slot]
            self.usage.reserved_blocks -= 1
            self._detach(slot, 0)
            self._free(slot)
            if parent == NONE:
                return
            slot = parent

    def evict(self, slot: int) -> None:
        """Drop an exposed block."""
        self.departures.note(self.key_of(slot), Reason.EVICTED)
        self.counters["evicted_blocks"] += 1
        home = self.namespace_of(slot)
        self.counters["evicted_bytes"] += home.block_bytes
        home.counts.evicted += 1
        last_use = self._policy(slot).last_use(slot)
        self._leave(slot)
        self._detach(slot, last_use)
        self._free(slot)

    def _leave(self, slot: int) -> None:
        home, key = self.namespace_of(slot), self.key_of(slot)
        if self.watcher is not None:
            self.watcher.left(slot)
        # Before anything else may use the slot: a death right after this must not show its next bytes as this block.
        self._ledger.gone(slot)
        del home.slots[key]
        self._exposed[slot] = 0
        home.policy.forget(slot, key)
        self.usage.resident_blocks -= 1
        self.usage.resident_bytes -= home.block_bytes
        home.counts.resident -= 1

    def _detach(self, slot: int, last_use: int) -> None:
        parent = self.table.parent[slot]
        self.table.detach(slot)
        if parent != NONE:
            self._refresh(parent, last_use)

    def _free(self, slot: int) -> None:
        home = self.namespace_of(slot)
        home.account.held -= home.block_bytes
        self.table.state[slot] = State.FREE
        self.slots.release(slot)

    def _policy(self, slot: int) -> Policy:
        return self.namespace_of(slot).policy

    def _refresh(self, slot: int, last_use: int = 0) -> None:
        table = self.table
        evictable = table.state[slot] == State.RESIDENT and not table.children[slot] and not table.pins[slot]
        if evictable == self._exposed[slot]:
            return
        self._exposed[slot] = evictable
        if evictable:
            self._policy(slot).expose(slot, last_use)
        else:
            self._policy(slot).hide(slot)

    # -- shares -------------------------------------------------------------------------------------------

    def set_quotas(self, quotas: Sequence[Quota]) -> None:
        """Other quotas from now on. What an account holds too much of leaves now, or as soon as it may.

        Raises ``ConfigError``, with nothing changed, when they reserve more than the pool.
        """
        reserved = reserved_bytes(quotas, self._pool_bytes)
        if reserved > self._pool_bytes:
            raise ConfigError(
                f"{format_size(reserved)} are reserved of a pool of {format_size(self._pool_bytes)}", "reserve less"
            )
        self.accounts.change(quotas)
        moving = {
            number: account
            for number, home in enumerate(self.namespaces)
            if (account := self.accounts.of(home.tenant)) is not home.account
        }
        held: Counter[int] = Counter()
        for number, state in zip(self.table.namespace, self.table.state, strict=True):
            if number in moving and state != State.FREE:
                held[number] += 1
        for number, account in moving.items():
            self._move_to(self.namespaces[number], account, held[number])
        kept = {account.name for account in self.accounts}
        self._policies = [
            [(owner, policy) for owner, policy in policies if owner.name in kept] for policies in self._policies
        ]
        for account in self.accounts:
            account.waning = account.exceeds(0)
        self.settle_quotas()

    def _move_to(self, home: Namespace, account: Account, blocks: int) -> None:
        """The namespace, with so many blocks in any state, counts against another account."""
        home.account.held -= blocks * home.block_bytes
        account.held += blocks * home.block_bytes
        before, home.account = home.policy, account
        home.policy = self._policy_of(home.size_class, account)
        resident = [slot for slot in home.slots.values() if self.table.state[slot] == State.RESIDENT]
        for slot in sorted(resident, key=before.last_use):
            key, tick = self.key_of(slot), before.last_use(slot)
            before.forget(slot, key)
            home.policy.admit(slot, key, tick)
            if self._exposed[slot]:
                home.policy.expose(slot, 0)

    def settle_quotas(self) -> None:
        """Let go of what accounts hold too much of since quotas were lowered. Call now and then."""
        for account in self.accounts:
            if account.waning:
                account.waning = not self._keep_below_maximum(account, 0)

    # -- room ---------------------------------------------------------------------------------------------

    def _keep_below_maximum(self, account: Account, size: int) -> bool:
        """Whether the account may hold ``size`` bytes more, at the cost of its own oldest blocks if needed."""
        while account.exceeds(size):
            mine = [policy for policies in self._policies for owner, policy in policies if owner is account]
            victim = _oldest(mine)
            if victim is None:
                return False
            self.evict(victim)
        return True

    def _free_slot(self, home: Namespace) -> int:
        size_class = home.size_class
        slot = self.slots.allocate(size_class)
        if slot is None:
            victim = self._victim(home)
            if not self._grow(home, victim):
                if victim is None:
                    return NONE
                self.evict(victim)
                self._search_pause[size_class] -= 1
            slot = self.slots.allocate(size_class)
        return NONE if slot is None else slot

    def _victim(self, home: Namespace) -> int | None:
        """The oldest block of the same size class that may leave for one of ``home``."""
        account, size = home.account, home.block_bytes
        policies = self._policies[home.size_class]
        others = [policy for owner, policy in policies if owner is not account and owner.spares(size)]
        if account.needs(size) and (found := _oldest(others)) is not None:
            # Below its reserve an account grows; its own blocks are not the price.
            return found
        return _oldest([*others, *(policy for owner, policy in policies if owner is account)])

    def _grow(self, home: Namespace, victim: int | None) -> bool:
        """Get a span from other classes, unless the last search was in vain and ``victim`` can still go."""
        size_class = home.size_class
        if len(self._policies) == 1 or (victim is not None and self._search_pause[size_class] > 0):
            return False
        own = None if victim is None else self._policy(victim).last_use(victim)
        if self._take_span(home, own):
            return True
        span = self.slots.classes[size_class].slots_per_span
        self._search_pause[size_class] = max(_SEARCH_PAUSE, span, self.slots.extents)
        return False

    def _fair_share(self, taker: int) -> int:
        holders = sum(1 for number in range(len(self._policies)) if self.slots.extents_of(number))
        return self.slots.extents // (holders + (not self.slots.extents_of(taker)))

    def _take_span(self, home: Namespace, own: int | None) -> bool:
        """Empty the coldest movable window of extents, so that the size class of ``home`` can claim it.

        Fair: a class below its share takes from any class above its own; otherwise a span moves only when all
        of it was used before ``own``, the last use of the taker's next victim, so that the whole pool behaves
        like one LRU. One span is everybody's share. An account below its reserve takes from whom it can; one at its
        own loses nothing to others.
        """
        taker, needy = home.size_class, home.account.needs(home.block_bytes)
        wanted = self.slots.classes[taker].span_extents
        share = self._fair_share(taker)
        entitled = self.slots.extents_of(taker) + wanted <= max(share, wanted)
        windows = []
        for first in range(self.slots.extents - wanted + 1):
            spans = self.slots.spans_over(first, wanted)
            age = max((self._span_use(span) for span in spans), default=0)
            fair = needy or (entitled and all(self.slots.extents_of(number) > share for number, _ in spans))
            if all(number != taker for number, _ in spans) and (fair or (own is not None and age < own)):
                windows.append((age, first, fair))
        windows.sort()
        budget, skip = _SEARCH_SLOTS, self._searched[taker] % max(1, len(windows))
        for _, first, fair in windows[skip:] + windows[:skip]:
            doomed: list[int] = []
            if self._doom(self.slots.spans_over(first, wanted), home, None if fair else own, doomed):
                for slot in doomed:
                    self.evict(slot)
                self.counters["moved_spans"] += 1
                self._searched[taker] = 0
                return True
            self._searched[taker] += 1
            budget -= len(doomed) + 1
            if budget <= 0:
                break
        return False

    def _span_use(self, span: tuple[int, int]) -> int:
        number, first = span
        return max(self._extent_use[first : first + self.slots.classes[number].span_extents])

    def _used(self, span: tuple[int, int]) -> list[int]:
        state = self.table.state
        return [slot for slot in self.slots.slots_of(span) if slot < len(state) and state[slot] != State.FREE]

    def _doom(self, spans: list[tuple[int, int]], home: Namespace, before: int | None, doomed: list[int]) -> bool:
        """List what must be evicted to empty the spans for ``home``, children first.

        False, and the spans stay, if a block of it is in use, was used since ``before`` if that is given, or is
        another account's reserve, or if there is too much of it, as below a head that many prefixes share.
        """
        losses: Counter[str] = Counter()
        seen: set[int] = set()
        limit = max(_MAX_DOOMED, 2 * sum(len(self.slots.slots_of(span)) for span in spans))
        for span in spans:
            for top in self._used(span):
                if top in seen:
                    continue
                below = [top]
                for slot in below:
                    in_use = self.table.state[slot] != State.RESIDENT or self.table.pins[slot]
                    young = before is not None and self._policy(slot).last_use(slot) >= before
                    loser = self.namespace_of(slot)
                    losses[loser.account.name] += loser.block_bytes
                    kept = loser.account is not home.account and not loser.account.spares(losses[loser.account.name])
                    if in_use or young or kept or len(doomed) + len(below) > limit:
                        doomed.extend(below)
                        return False
                    below.extend(child for child in self.table.children_of(slot) if child not in seen)
                seen.update(below)
                doomed.extend(reversed(below))
        return True

    # -- proof --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ``AssertionError`` naming the first broken invariant. Cost: one pass over all slots."""
        count = Usage()
        found: Counter[int] = Counter()
        held: Counter[str] = Counter()
        for number in range(len(self._policies)):
            for span in self.slots.spans_of(number):
                for slot in self._used(span):
                    self._check_slot(slot, count, found)
                    held[self.namespace_of(slot).account.name] += self.namespace_of(slot).block_bytes
        for account in self.accounts:
            assert account.held == held[account.name], f"account {account.name!r} holds {held[account.name]} bytes"
            assert account.waning or not account.exceeds(0), f"account {account.name!r} holds more than it may"
        assert count == self.usage, f"counted {count}, kept {self.usage}"
        for number, namespace in enumerate(self.namespaces):
            assert len(namespace.slots) == found[number], f"namespace {number} lists slots not in use"
        resident = Counter(home.counts.name for home in self.namespaces for _ in self._resident_of(home))
        for counts in self.counts:
            assert counts.resident == resident[counts.name], f"namespace {counts.name} miscounts its blocks"
            counts.check(count.reserved_blocks > 0)
        self._ledger.check(self._resident())

    def _resident(self) -> Iterator[tuple[int, int, BlockKey, int, int]]:
        """What the ledger was told of every resident block."""
        for number, namespace in enumerate(self.namespaces):
            for key, slot in self._resident_of(namespace):
                yield slot, number, key, self.slots.offset(slot), self.table.parent[slot]

    def _resident_of(self, home: Namespace) -> Iterator[tuple[BlockKey, int]]:
        return ((key, slot) for key, slot in home.slots.items() if self.table.state[slot] == State.RESIDENT)

    def _check_slot(self, slot: int, count: Usage, found: Counter[int]) -> None:
        table, state = self.table, self.table.state[slot]
        number, parent = table.namespace[slot], table.parent[slot]
        if state == State.RESIDENT:
            count.resident_blocks += 1
            count.resident_bytes += self.namespaces[number].block_bytes
            assert parent == NONE or table.state[parent] == State.RESIDENT, f"slot {slot} without its parent"
        else:
            count.reserved_blocks += 1
        count.pinned_blocks += table.pins[slot] > 0
        assert table.pins[slot] >= 0, f"slot {slot} has {table.pins[slot]} pins"
        below = len(list(table.children_of(slot)))
        assert table.children[slot] == below, f"slot {slot} miscounts its children"
        evictable = state == State.RESIDENT and not table.children[slot] and not table.pins[slot]
        assert self._exposed[slot] == evictable, f"slot {slot} is evictable: {evictable}"
        if state not in (State.VOID, State.CONDEMNED):
            found[number] += 1
            assert self.namespaces[number].slots.get(self.key_of(slot)) == slot, f"slot {slot} is not listed"
