"""Load or recompute: hits are left alone only on fresh evidence, and never for good."""

from __future__ import annotations

from hpkv_vllm.pace import LEAST_SAMPLES, LEAST_TOKENS, MARGIN, MEMORY_SECONDS, PROBE_EVERY, Pace
from hypothesis import given
from hypothesis import strategies as st


def pace_of(computing: float, loading: float, now: float = 0.0) -> Pace:
    """A pace that has seen enough of both speeds, in tokens per second."""
    made = Pace()
    for _ in range(LEAST_SAMPLES):
        made.computing.sample(1000, 1000 / computing, now)
        made.loading.sample(1000, 1000 / loading, now)
    return made


def test_hits_are_loaded_until_both_speeds_are_known() -> None:
    made = Pace()
    assert made.worth_loading(0.0)
    for _ in range(LEAST_SAMPLES):
        made.loading.sample(1000, 100.0, 0.0)
    assert made.worth_loading(0.0)
    for _ in range(LEAST_SAMPLES):
        made.computing.sample(1000, 0.1, 0.0)
    assert not made.worth_loading(0.0)


def test_computing_must_be_clearly_faster() -> None:
    assert pace_of(computing=1000 * MARGIN * 0.99, loading=1000).worth_loading(0.0)
    assert not pace_of(computing=1000 * MARGIN * 1.01, loading=1000).worth_loading(0.0)


def test_old_measures_say_nothing() -> None:
    made = pace_of(computing=100_000, loading=1000)
    assert not made.worth_loading(MEMORY_SECONDS)
    assert made.worth_loading(MEMORY_SECONDS + 1)
    made.loading.sample(1000, 1.0, MEMORY_SECONDS + 2)
    assert made.worth_loading(MEMORY_SECONDS + 2)


def test_one_odd_load_changes_nothing() -> None:
    made = pace_of(computing=100_000, loading=1_000_000)
    made.loading.sample(1000, 1000.0, 0.0)
    assert made.worth_loading(0.0)


def test_short_steps_and_loads_are_no_measure() -> None:
    made = pace_of(computing=100_000, loading=1000)
    made.loading.sample(LEAST_TOKENS - 1, 1e-6, 0.0)
    assert not made.worth_loading(0.0)


def test_a_tier_that_became_fast_is_noticed() -> None:
    made = pace_of(computing=10_000, loading=1000)
    asked = 1
    while not made.worth_loading(0.0):
        asked += 1
    assert asked == PROBE_EVERY
    for _ in range(LEAST_SAMPLES):
        made.loading.sample(1000, 1000 / 100_000, 0.0)
    assert made.worth_loading(0.0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 10**6), st.floats(0, 1e6), st.floats(0, 1e3))))
def test_one_hit_in_so_many_is_loaded_whatever_was_measured(samples: list[tuple[bool, int, float, float]]) -> None:
    made = Pace()
    now = 0.0
    for computing, tokens, seconds, later in samples:
        now += later
        (made.computing if computing else made.loading).sample(tokens, seconds, now)
    assert any(made.worth_loading(now) for _ in range(PROBE_EVERY))


def test_what_comes_slowly_from_other_nodes_is_not_waited_for_and_what_is_here_is_loaded() -> None:
    made = pace_of(computing=10_000, loading=1_000_000)
    assert made.worth_waiting(0.0)
    for _ in range(LEAST_SAMPLES):
        made.fetching.sample(1000, 1.0, 0.0)
    assert not made.worth_waiting(0.0)
    assert made.worth_loading(0.0)
    assert any(made.worth_waiting(0.0) for _ in range(PROBE_EVERY))
    for _ in range(LEAST_SAMPLES):
        made.fetching.sample(1000, 0.01, 0.0)
    assert made.worth_waiting(0.0)
