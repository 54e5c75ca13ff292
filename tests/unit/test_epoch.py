"""When blocks of changed weights may be cached, and under which salt."""

from __future__ import annotations

from hpkv_vllm.reloads import Epoch, watch


def test_an_engine_that_changes_nothing_has_no_salt() -> None:
    epoch = Epoch()
    epoch.computes(1)
    assert not epoch.told(0, 0)
    assert (epoch.salt, epoch.settled, epoch.forget()) == (b"", True, False)


def test_a_change_after_something_was_computed_needs_an_empty_cache() -> None:
    epoch = Epoch()
    epoch.computes(1)
    epoch.computes(2)
    assert epoch.told(1, 2)
    assert not epoch.settled
    assert epoch.salt
    epoch.emptied()
    assert epoch.settled


def test_a_change_of_a_cache_that_is_empty_settles_at_once() -> None:
    epoch = Epoch()
    epoch.computes(1)
    epoch.emptied()
    epoch.computes(5)
    # The ranks noticed before they computed that step; two more were planned before they could say so.
    epoch.computes(6)
    assert epoch.told(1, 5)
    assert epoch.settled


def test_a_second_change_finds_a_cache_that_is_not_empty_any_more() -> None:
    epoch = Epoch()
    epoch.computes(1)
    assert epoch.told(1, 1)
    assert epoch.settled
    first = epoch.salt
    assert epoch.told(2, 2)
    assert not epoch.settled
    assert epoch.salt != first


def test_what_is_told_twice_changes_nothing() -> None:
    epoch = Epoch()
    epoch.computes(1)
    assert epoch.told(1, 1)
    salt = epoch.salt
    assert not epoch.told(1, 2)
    assert not epoch.told(0, 3)
    assert (epoch.salt, epoch.settled) == (salt, True)


def test_forgetting_what_has_a_salt_takes_another_one() -> None:
    epoch = Epoch()
    epoch.told(1, 1)
    salt = epoch.salt
    assert epoch.forget()
    assert epoch.salt != salt


class _Model:
    loaded = 0

    def load_weights(self, weights: int) -> int:
        self.loaded += weights
        return weights


class _Runner:
    def __init__(self) -> None:
        self.model = _Model()

    def register(self, changed: list[int]) -> None:
        watch(lambda: changed.append(self.model.loaded))


class _Worker:
    def __init__(self) -> None:
        self.model_runner = _Runner()

    def start(self, changed: list[int]) -> None:
        self.model_runner.register(changed)

    def reload_weights(self, weights: int) -> int:
        return self.model_runner.model.load_weights(weights)


def test_loads_of_weights_are_told_before_they_happen_on_every_way_in() -> None:
    worker, changed = _Worker(), []
    worker.start(changed)
    assert worker.model_runner.model.load_weights(3) == 3
    assert changed == [0]
    assert worker.reload_weights(4) == 4
    assert changed == [0, 3, 3]
    worker.start(changed)
    worker.model_runner.model.load_weights(1)
    assert len(changed) == 4
