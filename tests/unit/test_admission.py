"""What is worth a write, and how much of it a day takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpkv_daemon.core.admission import Admission, IdleTicks, KeyMemory, WriteAllowance, coldest_quarter

DAY = 86_400.0


def test_everything_is_admitted_unless_a_second_touch_is_asked_for() -> None:
    assert Admission(second_touch=False).admits(b"never seen")


@pytest.mark.parametrize("second", ["stored", "used"])
def test_a_second_touch_is_a_second_store_or_a_use(second: str) -> None:
    admission = Admission(second_touch=True)
    admission.stored(b"key")
    assert not admission.admits(b"key")
    getattr(admission, second)(b"key")
    assert admission.admits(b"key")
    assert not admission.admits(b"other")


@given(st.lists(st.integers(0, 60), max_size=300), st.integers(1, 20))
def test_the_newest_keys_are_remembered_and_no_more_than_twice_as_many(names: list[int], remembered: int) -> None:
    memory = KeyMemory(remembered)
    for name in names:
        memory.add(b"%d" % name)
    newest = list(dict.fromkeys(reversed(names)))[:remembered]
    assert all(b"%d" % name in memory for name in newest)
    assert sum(b"%d" % name in memory for name in set(names)) <= 2 * remembered


def test_without_a_limit_any_number_of_bytes_may_be_written() -> None:
    allowance = WriteAllowance(None, 0.0)
    allowance.spend(1 << 60)
    assert allowance.left(1.0) > 1 << 60


@given(st.lists(st.tuples(st.floats(0, DAY), st.integers(0, 1 << 20)), max_size=50))
def test_a_day_of_writes_never_exceeds_what_a_day_allows_and_what_was_left(steps: list[tuple[float, int]]) -> None:
    daily, now, spent = 24 << 20, 0.0, 0
    allowance = WriteAllowance(daily, now)
    for pause, size in steps:
        now += pause
        if allowance.left(now) > 0:
            allowance.spend(size)
            spent += size
    # One batch may exceed what was left; the next waits for it.
    assert spent <= daily / 24 + daily * now / DAY + (1 << 20)


def test_a_restart_does_not_bring_a_whole_day_back_but_time_does() -> None:
    allowance = WriteAllowance(2400, 0.0)
    assert allowance.left(0.0) == 100
    assert allowance.left(DAY / 2) == pytest.approx(1300)
    assert allowance.left(10 * DAY) == 2400


def test_what_was_used_before_the_idle_time_began_is_idle() -> None:
    idle = IdleTicks(10.0)
    assert [idle.sample(float(now), 100 * now) for now in (0, 5, 9)] == [0, 0, 0]
    assert idle.sample(10.0, 1000) == 0
    assert idle.sample(15.0, 1500) == 500
    assert idle.sample(100.0, 1500) == 1500


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=100, unique=True))
def test_about_a_quarter_is_cold(uses: list[int]) -> None:
    cold = sum(use <= coldest_quarter(uses) for use in uses)
    assert len(uses) / 4 <= cold <= len(uses) / 4 + 1


def test_nothing_is_cold_where_nothing_is() -> None:
    assert coldest_quarter([]) == 0


def test_the_allowance_changes_and_keeps_what_was_saved_up() -> None:
    allowance = WriteAllowance(2400, 0.0)
    assert allowance.left(3600.0) == pytest.approx(200)
    allowance.change(24_000, 3600.0)
    assert allowance.left(3600.0) == pytest.approx(200)
    assert allowance.left(7200.0) == pytest.approx(1200)
    allowance.change(240, 7200.0)
    assert allowance.left(7200.0) == pytest.approx(240)
    allowance.change(None, 7200.0)
    assert allowance.left(7200.0) == float("inf")
    allowance.change(2400, 7200.0)
    assert allowance.left(7200.0) == pytest.approx(100)
