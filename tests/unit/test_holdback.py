"""Stores of blocks that fill up token by token wait for each other, but for nobody who may ask for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hpkv_vllm.holdback import HOLD_SECONDS, MOST_BLOCKS, Holdback


def store(job: int, blocks: int = 1) -> Any:
    return SimpleNamespace(job=job, blocks=list(range(blocks)))


def jobs(stores: list[Any]) -> list[int]:
    return [each.job for each in stores]


def test_stores_wait_until_the_oldest_has_waited_long_enough() -> None:
    held = Holdback()
    held.add("a", store(-1), 10.0)
    held.add("b", store(-2), 11.0)
    assert held.take(11.5, due=False) == []
    assert jobs(held.take(10.0 + HOLD_SECONDS, due=False)) == [-1, -2]
    assert held.take(100.0, due=True) == []
    held.add("c", store(-3), 100.0)
    assert held.take(101.0, due=False) == []


def test_many_blocks_go_at_once() -> None:
    held = Holdback()
    held.add("a", store(-1, MOST_BLOCKS - 1), 0.0)
    assert held.take(0.1, due=False) == []
    held.add("a", store(-2), 0.1)
    assert jobs(held.take(0.1, due=False)) == [-1, -2]
    held.add("a", store(-3, MOST_BLOCKS - 1), 0.2)
    assert held.take(0.2, due=False) == []


def test_all_of_it_goes_when_something_is_due_and_in_its_order() -> None:
    held = Holdback()
    for job in (-1, -2, -3):
        held.add("ab"[job % 2], store(job), 0.0)
    assert jobs(held.take(0.0, due=True)) == [-1, -2, -3]


def test_what_a_request_leaves_behind_does_not_wait() -> None:
    held = Holdback()
    held.hurry("a")
    held.add("a", store(-1), 0.0)
    held.hurry("b")
    assert held.take(0.1, due=False) == []
    held.hurry("a")
    assert jobs(held.take(0.1, due=False)) == [-1]
    held.add("a", store(-2), 0.2)
    assert held.take(0.3, due=False) == []


def test_what_is_dropped_never_goes() -> None:
    held = Holdback()
    held.add("a", store(-1), 0.0)
    held.hurry("a")
    assert jobs(held.drop()) == [-1]
    held.add("a", store(-2), 1.0)
    assert held.take(1.5, due=False) == []
