"""The block store against a plain model that also owns the pool's pages: whatever happens, no reader and no
writer ever meets a foreign byte, and residency changes only where the model says it may."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hpkv_client.errors import LeaseLost, UsageError
from hpkv_client.types import Keys, typed_digest
from hpkv_daemon.core.policy import POLICIES
from hpkv_daemon.core.slots import ALIGNMENT
from hpkv_daemon.core.store import KEPT, NO_ROOM, ORPHAN, BlockStore, Reservation

EXTENT = 4 * ALIGNMENT
BLOCK_BYTES = (ALIGNMENT, 3 * ALIGNMENT, 5 * ALIGNMENT - 100, ALIGNMENT - 7)
"""Classes of one, three and four extents per span; the last namespace shares its class with the first."""

OWNERS = ("one", "two")
GARBAGE = -1

namespaces = st.sampled_from(range(len(BLOCK_BYTES)))
owners = st.sampled_from(OWNERS)
paths = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
many_paths = st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=6).map(tuple), min_size=1, max_size=5)
starts = st.sampled_from((0, 0, 0, 1, 2, 5))
loners = st.lists(st.integers(100, 108), min_size=1, max_size=6)
picks = st.integers(0, 7)

Path = tuple[int, ...]


@dataclass
class Block:
    """A visible block of the model."""

    namespace: int
    path: Path
    chained: bool
    slot: int
    state: str = "reserved"

    @property
    def parent(self) -> Path | None:
        """The path of the block above, if it has one."""
        return self.path[:-1] if self.chained and len(self.path) > 1 else None


@dataclass
class Writer:
    """An open reservation and the model's blocks of it; a block that lost its place is hidden for good."""

    reservation: Reservation
    blocks: list[Block]


@dataclass
class Reader:
    """A lease as the model sees it."""

    number: int
    owner: str
    namespace: int
    covered: list[Path]
    slots: list[int]
    deadline: float
    scattered: list[tuple[Path, int]] | None = None
    """Blocks that form no prefix, as they were asked for: the slot of each, or -1."""
    released: bool = False
    reading: list[list[tuple[Path, int]]] = field(default_factory=list)
    """Running copies: the blocks and slots each of them reads."""


def key(namespace: int, path: Path) -> bytes:
    return typed_digest(namespace, *path)


def chain(path: Path, namespace: int, first: int = 0) -> Keys:
    return Keys.of([key(namespace, path[: end + 1]) for end in range(first, len(path))])


class StoreMachine(RuleBasedStateMachine):
    """Random life of a small pool with four namespaces."""

    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.visible: dict[tuple[int, Path], Block] = {}
        self.writers: list[Writer] = []
        self.readers: list[Reader] = []
        self.ids: dict[tuple[int, Path], int] = {}

    @initialize(extents=st.integers(4, 9))
    def start(self, extents: int) -> None:
        self.pages = [0] * (extents * EXTENT // ALIGNMENT)
        self.store = self.new_store(extents * EXTENT)
        for number, size in enumerate(BLOCK_BYTES):
            assert self.store.open_namespace(bytes([number]) * 32, size) == number

    def new_store(self, pool_bytes: int) -> BlockStore:
        return BlockStore(pool_bytes, POLICIES[self.policy], EXTENT)

    # -- the pool's bytes ---------------------------------------------------------------------------------

    def span(self, namespace: int, slot: int) -> range:
        first, rest = divmod(self.store.offset(slot), ALIGNMENT)
        assert rest == 0
        count = -(-BLOCK_BYTES[namespace] // ALIGNMENT)
        assert 0 <= first <= first + count <= len(self.pages)
        return range(first, first + count)

    def content(self, namespace: int, path: Path) -> int:
        return self.ids.setdefault((namespace, path), len(self.ids) + 1)

    def fill(self, block: Block, value: int) -> None:
        for page in self.span(block.namespace, block.slot):
            self.pages[page] = value

    # -- what the model knows -----------------------------------------------------------------------------

    def resident(self, namespace: int, path: Path) -> bool:
        block = self.visible.get((namespace, path))
        return block is not None and block.state == "resident"

    def linear_match(self, namespace: int, path: Path) -> int:
        length = 0
        while length < len(path) and self.resident(namespace, path[: length + 1]):
            length += 1
        return length

    def pinned(self) -> set[tuple[int, Path]]:
        """Blocks that must not be evicted, because someone may read them or stands under them."""
        held = set()
        for reader in self.readers:
            for path, slot in zip(reader.covered, reader.slots, strict=True):
                # After a clear the same block may be here anew, in another slot, while the old one is read.
                block = self.visible.get((reader.namespace, path))
                if block is not None and block.slot == slot:
                    held.add((reader.namespace, path))
        for block in self.visible.values():
            if block.state != "resident" and block.parent is not None:
                held.add((block.namespace, block.parent))
        for namespace, path in list(held):
            block = self.visible.get((namespace, path))
            while block is not None and block.parent is not None:
                held.add((namespace, block.parent))
                block = self.visible.get((namespace, block.parent))
        return held

    def note_evictions(self) -> set[tuple[int, Path]]:
        """Take over what the store dropped to make room; only unused resident blocks may go."""
        pinned = self.pinned()
        gone = {
            place
            for place, block in self.visible.items()
            if block.state == "resident" and not self.store.contains(place[0], key(*place))
        }
        assert not gone & pinned
        for place in gone:
            del self.visible[place]
        return gone

    def hide_subtree(self, top: Block) -> None:
        """Remove a block and all blocks below it from the model's view."""
        below = [top]
        for above in below:
            below += [b for b in self.visible.values() if (b.namespace, b.parent) == (above.namespace, above.path)]
        for block in below:
            del self.visible[block.namespace, block.path]

    def is_visible(self, block: Block) -> bool:
        return self.visible.get((block.namespace, block.path)) is block

    # -- writing ------------------------------------------------------------------------------------------

    @rule(namespace=namespaces, wanted=many_paths)
    def store_chains(self, namespace: int, wanted: list[Path]) -> None:
        for path in wanted:
            self.reserve(namespace, path, 0, "one")
            self.commit(len(self.writers) - 1)

    @rule(namespace=namespaces, numbers=loners)
    def store_loners(self, namespace: int, numbers: list[int]) -> None:
        self.reserve_each(namespace, numbers, "two")
        self.commit(len(self.writers) - 1)

    @rule(namespace=namespaces, path=paths, first=starts, owner=owners)
    def reserve(self, namespace: int, path: Path, first: int, owner: str) -> None:
        first = min(first, len(path) - 1)
        parent = key(namespace, path[:first]) if first else None
        before = dict(self.visible)
        reservation = self.store.reserve(namespace, parent, chain(path, namespace, first), owner)
        self.note_evictions()
        orphan = first > 0 and (namespace, path[:first]) not in before
        full, blocks = False, []
        above = (namespace, path[:first])
        for end, entry in enumerate(reservation.slots, first + 1):
            place = (namespace, path[:end])
            if orphan:
                assert entry == ORPHAN
            elif full:
                assert entry == NO_ROOM
            elif place in before:
                assert entry == KEPT
                above = place
            elif entry == NO_ROOM:
                full = True
                self.require_no_victim(namespace, above)
            else:
                assert entry >= 0
                blocks.append(self.add_reserved(namespace, path[:end], True, entry))
                above = place
        self.writers.append(Writer(reservation, blocks))

    @rule(namespace=namespaces, numbers=loners, owner=owners)
    def reserve_each(self, namespace: int, numbers: list[int], owner: str) -> None:
        before = dict(self.visible)
        keys = [key(namespace, (number,)) for number in numbers]
        reservation = self.store.reserve_each(namespace, keys, owner)
        gone = self.note_evictions()
        blocks: list[Block] = []
        for number, entry in zip(numbers, reservation.slots, strict=True):
            place = (namespace, (number,))
            mine = any(block.path == (number,) for block in blocks)
            if entry == KEPT:
                assert place in before or mine
            elif entry == NO_ROOM:
                assert not mine
                self.require_no_victim(namespace, None)
            else:
                assert entry >= 0
                assert place not in before or place in gone
                blocks.append(self.add_reserved(namespace, (number,), False, entry))
        self.writers.append(Writer(reservation, blocks))

    def add_reserved(self, namespace: int, path: Path, chained: bool, slot: int) -> Block:
        block = Block(namespace, path, chained, slot)
        self.visible[namespace, path] = block
        self.fill(block, GARBAGE)
        return block

    def require_no_victim(self, namespace: int, above: tuple[int, Path] | None) -> None:
        """No room means it: every block of this size is in use, or is the one to hang under."""
        pinned = self.pinned()
        for writer in self.writers:
            # A block whose parent's writer gave up keeps its place in the tree until its own writer is done.
            for block in writer.blocks:
                pinned |= {(block.namespace, block.path[:end]) for end in range(1, len(block.path))}
        parents = {(block.namespace, block.parent) for block in self.visible.values()}
        size_class = -(-BLOCK_BYTES[namespace] // ALIGNMENT)
        for place, block in self.visible.items():
            same = -(-BLOCK_BYTES[place[0]] // ALIGNMENT) == size_class
            unused = block.state == "resident" and place not in pinned and place not in parents
            assert not (same and unused and place != above), f"{place} could have been evicted"

    @precondition(lambda self: self.writers)
    @rule(pick=picks)
    def write_some(self, pick: int) -> None:
        writer = self.writers[pick % len(self.writers)]
        for block in writer.blocks:
            self.fill(block, GARBAGE)

    @precondition(lambda self: self.writers)
    @rule(pick=picks)
    def commit(self, pick: int) -> None:
        writer = self.writers.pop(pick % len(self.writers))
        for block in writer.blocks:
            self.fill(block, self.content(block.namespace, block.path))
            if self.is_visible(block):
                block.state = "complete"
        became = 0
        for block in sorted(self.visible.values(), key=lambda b: len(b.path)):
            above = block.parent
            if block.state == "complete" and (above is None or self.resident(block.namespace, above)):
                block.state = "resident"
                became += 1
        assert self.store.commit(writer.reservation) == became
        with pytest.raises(UsageError):
            self.store.commit(writer.reservation)

    @precondition(lambda self: self.writers)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        writer = self.writers.pop(pick % len(self.writers))
        for block in writer.blocks:
            self.fill(block, GARBAGE)
            if self.is_visible(block):
                self.hide_subtree(block)
        self.store.abort(writer.reservation)

    # -- reading ------------------------------------------------------------------------------------------

    @rule(namespace=namespaces, path=paths, first=starts)
    def match(self, namespace: int, path: Path, first: int) -> None:
        assert self.store.match(namespace, chain(path, namespace)) == self.linear_match(namespace, path)
        first = min(first, len(path) - 1)
        below = max(0, self.linear_match(namespace, path) - first)
        assert self.store.match(namespace, chain(path, namespace, first)) == below

    def some_chain(self, pick: int, beyond: Path) -> tuple[int, Path]:
        """A path that leads through blocks that are here, as far as there are any, and beyond them."""
        places = [place for place, block in self.visible.items() if block.chained]
        namespace, path = places[pick % len(places)] if places else (0, ())
        return namespace, path + beyond

    @rule(pick=st.integers(0, 99), beyond=paths | st.just(()), owner=owners, seconds=st.integers(0, 9))
    def acquire(self, pick: int, beyond: Path, owner: str, seconds: int) -> None:
        namespace, path = self.some_chain(pick, beyond)
        length = self.linear_match(namespace, path)
        lease = self.store.acquire(namespace, chain(path, namespace), owner, self.now + seconds)
        assert (lease is None) == (length == 0)
        if lease is not None:
            assert lease.length == length
            covered = [path[: end + 1] for end in range(length)]
            slots = [self.visible[namespace, part].slot for part in covered]
            self.readers.append(Reader(lease.number, owner, namespace, covered, slots, self.now + seconds))

    @rule(numbers=loners, pick=st.integers(0, 99), owner=owners, seconds=st.integers(0, 9))
    def acquire_each(self, numbers: list[int], pick: int, owner: str, seconds: int) -> None:
        namespace, path = self.some_chain(pick, (0,))
        wanted: list[Path] = [*((number,) for number in numbers), path]
        keys = [key(namespace, each) for each in wanted]
        lease, slots = self.store.acquire_each(namespace, keys, owner, self.now + seconds)
        covered = [each for each in wanted if self.resident(namespace, each)]
        found = [each for each, slot in zip(wanted, slots, strict=True) if slot >= 0]
        assert found == covered
        assert (lease is None) == (not covered)
        if lease is not None:
            asked = list(zip(wanted, slots, strict=True))
            held = [slot for slot in slots if slot >= 0]
            reader = Reader(lease.number, owner, namespace, covered, held, self.now + seconds, asked)
            self.readers.append(reader)

    @precondition(lambda self: self.readers)
    @rule(pick=picks, owner=owners, first=st.integers(0, 6), length=st.integers(0, 6))
    def begin_transfer(self, pick: int, owner: str, first: int, length: int) -> None:
        reader = self.readers[pick % len(self.readers)]
        entries = reader.scattered or list(zip(reader.covered, reader.slots, strict=True))
        wanted = entries[first : first + length]
        if owner != reader.owner or reader.released:
            with pytest.raises(LeaseLost):
                self.store.begin_transfer(reader.number, owner, first, length)
        elif first + length > len(entries) or any(slot < 0 for _, slot in wanted):
            with pytest.raises(UsageError):
                self.store.begin_transfer(reader.number, owner, first, length)
        else:
            slots = self.store.begin_transfer(reader.number, owner, first, length)
            assert slots == [slot for _, slot in wanted]
            reader.reading.append(wanted)

    @precondition(lambda self: any(reader.scattered and not reader.released for reader in self.readers))
    @rule(pick=picks)
    def hold(self, pick: int) -> None:
        readers = [reader for reader in self.readers if reader.scattered and not reader.released]
        reader = readers[pick % len(readers)]
        lease = self.store.leases.get(reader.number, reader.owner)
        assert lease is not None
        self.store.hold(lease)
        reader.reading.append(list(zip(reader.covered, reader.slots, strict=True)))

    @precondition(lambda self: self.readers)
    @rule(pick=picks, seconds=st.integers(0, 9))
    def end_transfer(self, pick: int, seconds: int) -> None:
        reader = self.readers[pick % len(self.readers)]
        self.store.end_transfer(reader.number, self.now + seconds)
        if reader.reading:
            reader.reading.pop()
            reader.deadline = max(reader.deadline, self.now + seconds)
        self.forget_ended()

    @precondition(lambda self: self.readers)
    @rule(pick=picks, owner=owners)
    def release(self, pick: int, owner: str) -> None:
        reader = self.readers[pick % len(self.readers)]
        held = owner == reader.owner and not reader.released
        assert self.store.release(reader.number, owner) is held
        assert self.store.release(reader.number, owner) is False
        reader.released = reader.released or held
        self.forget_ended()

    @rule(seconds=st.integers(1, 5))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        over = [r for r in self.readers if not r.released and not r.reading and r.deadline <= self.now]
        assert self.store.expire(self.now) == len(over)
        for reader in over:
            reader.released = True
        self.forget_ended()

    @rule(owner=owners, sure=st.integers(0, 2))
    def drop(self, owner: str, sure: int) -> None:
        if sure:
            return
        mine = [reader for reader in self.readers if reader.owner == owner and not reader.released]
        assert self.store.drop(owner) == len(mine)
        for reader in mine:
            reader.released = True
        self.forget_ended()

    def forget_ended(self) -> None:
        self.readers = [reader for reader in self.readers if not reader.released or reader.reading]

    # -- forgetting ---------------------------------------------------------------------------------------

    @rule(namespace=st.none() | namespaces, sure=st.integers(0, 3))
    def clear(self, namespace: int | None, sure: int) -> None:
        if sure:
            return
        cleared = {p: b for p, b in self.visible.items() if namespace is None or p[0] == namespace}
        resident = sum(block.state == "resident" for block in cleared.values())
        assert self.store.clear(namespace) == resident
        for place in cleared:
            del self.visible[place]
        for reader in self.readers:
            if namespace is None or reader.namespace == namespace:
                reader.released = True
        self.forget_ended()

    # -- what always holds --------------------------------------------------------------------------------

    @invariant()
    def store_is_sound(self) -> None:
        self.store.check()
        assert len(self.store.leases) == len(self.readers)

    @invariant()
    def residency_is_what_the_model_says(self) -> None:
        resident = {place for place, block in self.visible.items() if block.state == "resident"}
        for namespace, path in self.visible:
            found = self.store.contains(namespace, key(namespace, path))
            assert found == ((namespace, path) in resident)
        usage = self.store.blocks.usage
        assert usage.resident_blocks == len(resident)
        assert usage.resident_bytes == sum(BLOCK_BYTES[namespace] for namespace, _ in resident)
        for namespace, path in resident:
            parent = self.visible[namespace, path].parent
            assert parent is None or (namespace, parent) in resident

    @invariant()
    def every_visible_block_keeps_its_slot(self) -> None:
        for (namespace, path), block in self.visible.items():
            assert self.store.blocks.find(namespace, key(namespace, path)) == block.slot

    @invariant()
    def slots_in_use_never_overlap(self) -> None:
        users: dict[int, int] = {}
        for block in self.visible.values():
            users[block.slot] = block.namespace
        for writer in self.writers:
            for block in writer.blocks:
                users[block.slot] = block.namespace
        for reader in self.readers:
            for copy in reader.reading:
                users.update({slot: reader.namespace for _, slot in copy})
        taken = [page for slot, namespace in users.items() for page in self.span(namespace, slot)]
        assert len(taken) == len(set(taken))

    @invariant()
    def nobody_meets_foreign_bytes(self) -> None:
        wanted = [(b.namespace, b.path, b.slot) for b in self.visible.values() if b.state == "resident"]
        for reader in self.readers:
            for copy in reader.reading:
                wanted += [(reader.namespace, path, slot) for path, slot in copy]
            if not reader.released:
                pairs = zip(reader.covered, reader.slots, strict=True)
                wanted += [(reader.namespace, path, slot) for path, slot in pairs]
        for namespace, path, slot in wanted:
            expected = self.content(namespace, path)
            assert all(self.pages[page] == expected for page in self.span(namespace, slot))

    @invariant()
    def leased_blocks_stay(self) -> None:
        for reader in self.readers:
            if not reader.released:
                for path, slot in zip(reader.covered, reader.slots, strict=True):
                    assert self.store.blocks.resident(reader.namespace, key(reader.namespace, path)) == slot

    def teardown(self) -> None:
        """When everybody is done, nothing is in use and the whole pool can be had again."""
        if not hasattr(self, "store"):
            return
        for writer in self.writers:
            self.store.abort(writer.reservation)
        for reader in self.readers:
            for _ in reader.reading:
                self.store.end_transfer(reader.number, 0)
        self.store.clear()
        self.store.check()
        usage = self.store.blocks.usage
        assert (usage.resident_blocks, usage.reserved_blocks, usage.pinned_blocks) == (0, 0, 0)
        everything = len(self.pages) // 4 * 4
        keys = [typed_digest("refill", number) for number in range(everything + 1)]
        assert len(self.store.reserve_each(0, keys, "one").reserved) == everything


class S3FifoMachine(StoreMachine):
    """The same with the other policy."""

    policy = "s3fifo"


_settings = settings(
    max_examples=150,
    stateful_step_count=70,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestStoreWithLru = StoreMachine.TestCase
TestStoreWithLru.settings = _settings
TestStoreWithS3Fifo = S3FifoMachine.TestCase
TestStoreWithS3Fifo.settings = _settings
