"""Eviction policies against naive models: who is named next, who never is, and that naming ends."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpkv_daemon.core.policy import POLICIES, Lru, Policy, S3Fifo
from hpkv_daemon.core.policy.s3fifo import Ghost

SLOTS = 10
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

commands = st.lists(
    st.tuples(
        st.sampled_from(("store", "store", "touch", "touch", "hide", "expose", "after_child", "forget", "evict")),
        st.integers(0, SLOTS - 1),
    ),
    min_size=30,
    max_size=90,
)


class Model:
    """Drives a policy as the store does, and keeps the plain truth beside it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.used: dict[int, int] = {}
        self.exposed: set[int] = set()
        self.tick = 0

    def apply(self, command: str, slot: int) -> None:
        """One call, if the store could make it now."""
        here, exposed, key = slot in self.used, slot in self.exposed, bytes([slot]) * 32
        self.tick += 1
        if command == "store" and not here:
            self.used[slot] = self.tick
            self.policy.admit(slot, key, self.tick)
            self.exposed.add(slot)
            self.policy.expose(slot, 0)
        elif command == "touch" and here:
            self.used[slot] = self.tick
            self.policy.touch(slot, self.tick)
        elif command == "expose" and here and not exposed:
            self.exposed.add(slot)
            self.policy.expose(slot, 0)
        elif command == "after_child" and here and not exposed:
            child = self.tick - slot
            self.exposed.add(slot)
            self.used[slot] = max(child, self.used[slot])
            self.policy.expose(slot, child)
        elif command == "hide" and exposed:
            self.exposed.discard(slot)
            self.policy.hide(slot)
        elif command == "forget" and here:
            self.remove(slot)
        elif command == "evict" and (victim := self.policy.victim()) is not None:
            self.remove(victim)

    def remove(self, slot: int) -> None:
        """The block leaves its slot."""
        del self.used[slot]
        self.exposed.discard(slot)
        self.policy.forget(slot, bytes([slot]) * 32)


@settings(patient, max_examples=300)
@given(commands)
def test_lru_names_the_exposed_slot_that_was_not_used_for_longest(script: list[tuple[str, int]]) -> None:
    model = Model(Lru())
    for command, slot in script:
        model.apply(command, slot)
        victim = model.policy.victim()
        if not model.exposed:
            assert victim is None
        else:
            assert victim in model.exposed
            assert model.used[victim] == min(model.used[exposed] for exposed in model.exposed)
        for known, tick in model.used.items():
            assert model.policy.last_use(known) == tick


@settings(patient, max_examples=300)
@given(commands)
def test_s3fifo_names_an_exposed_slot_exactly_when_there_is_one(script: list[tuple[str, int]]) -> None:
    model = Model(S3Fifo())
    for command, slot in script:
        model.apply(command, slot)
        victim = model.policy.victim()
        assert (victim in model.exposed) if model.exposed else (victim is None)
        for known, tick in model.used.items():
            assert model.policy.last_use(known) == tick


@settings(patient, max_examples=100)
@given(st.sampled_from(sorted(POLICIES)), commands)
def test_every_exposed_slot_is_named_in_the_end(name: str, script: list[tuple[str, int]]) -> None:
    model = Model(POLICIES[name]())
    for command, slot in script:
        model.apply(command, slot)
    left = set(model.exposed)
    while left:
        victim = model.policy.victim()
        assert victim in left
        left.discard(victim)
        model.remove(victim)
    assert model.policy.victim() is None


@settings(patient, max_examples=60)
@given(hot=st.integers(1, 60), scan=st.integers(100, 400), uses=st.integers(1, 5))
def test_s3fifo_keeps_used_blocks_through_a_scan_of_blocks_that_are_used_once(hot: int, scan: int, uses: int) -> None:
    policy, capacity, tick = S3Fifo(), 100, 0
    resident: dict[int, int] = {}
    free = list(range(capacity))
    for number in range(hot + scan):
        if not free:
            victim = policy.victim()
            assert victim is not None
            policy.forget(victim, number_key(resident.pop(victim)))
            free.append(victim)
        slot, tick = free.pop(), tick + 1
        resident[slot] = number
        policy.admit(slot, number_key(number), tick)
        policy.expose(slot, 0)
        for _ in range(uses if number < hot else 0):
            tick += 1
            policy.touch(slot, tick)
    assert set(range(hot)) <= set(resident.values())


def test_s3fifo_takes_back_a_block_it_just_evicted_as_a_used_one() -> None:
    policy = S3Fifo()
    for slot in range(20):
        policy.admit(slot, number_key(slot), slot + 1)
        policy.expose(slot, 0)
    assert policy.victim() == 0
    policy.forget(0, number_key(0))
    for slot, number in ((0, 0), (20, 20)):
        policy.admit(slot, number_key(number), 100 + number)
        policy.expose(slot, 0)
    order = []
    while (victim := policy.victim()) is not None:
        order.append(victim)
        policy.forget(victim, number_key(victim))
    assert order == [*range(1, 21), 0]


def test_s3fifo_leaves_new_blocks_their_tenth_of_the_room() -> None:
    policy = S3Fifo()
    for slot in range(50):
        policy.admit(slot, number_key(slot), slot + 1)
        policy.expose(slot, 0)
        policy.touch(slot, slot + 1)
    assert policy.victim() == 0
    for slot in range(50, 55):
        policy.admit(slot, number_key(slot), slot + 1)
        policy.expose(slot, 0)
    assert policy.victim() == 0
    policy.admit(55, number_key(55), 56)
    policy.expose(55, 0)
    assert policy.victim() == 50


def test_s3fifo_stops_sparing_when_every_block_of_a_large_pool_is_hot() -> None:
    policy = S3Fifo()
    for slot in range(5_000):
        policy.admit(slot, number_key(slot), slot)
        policy.expose(slot, 0)
        policy.touch(slot, slot)
    victim = policy.victim()
    # A search without end would have spared all of them once and come back to the first.
    assert victim is not None
    assert 0 < victim < 1_000


def test_ghost_remembers_the_newest_half_of_its_limit_and_never_more_than_the_limit() -> None:
    ghost, limit = Ghost(), 20
    for number in range(1000):
        ghost.add(number_key(number), limit)
    remembered = [number for number in range(1000) if ghost.take(number_key(number))]
    assert set(range(990, 1000)) <= set(remembered)
    assert len(remembered) <= limit
    assert not any(ghost.take(number_key(number)) for number in remembered)


def test_lru_and_s3fifo_take_a_prefix_from_its_tail_in_one_piece() -> None:
    for name in sorted(POLICIES):
        policy = POLICIES[name]()
        for slot in (0, 1, 2, 10):
            policy.admit(slot, number_key(slot), slot + 1)
        policy.expose(2, 0)
        policy.expose(10, 0)
        order = []
        for parent in (1, 0, None):
            victim = policy.victim()
            assert victim is not None
            order.append(victim)
            last_use = policy.last_use(victim)
            policy.forget(victim, number_key(victim))
            if parent is not None:
                policy.expose(parent, last_use)
        assert order == [2, 1, 0], name


def number_key(number: int) -> bytes:
    return number.to_bytes(32, "little")
