"""The ring of events: numbered, bounded, and off while nobody follows."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hpkv_daemon.service.events import FOLLOWED_SECONDS, KEPT_EVENTS, EventLog


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def numbers(found: dict[str, Any]) -> list[int]:
    return [event["n"] for event in found["events"]]


def test_nothing_is_kept_until_somebody_follows_nor_long_after() -> None:
    clock = Clock()
    log = EventLog(clock)
    log.tell("stored", n=0)
    assert log.follow(-1, 9) == {"latest": 0, "lost": 0, "events": []}
    log.tell("stored", n=1)
    clock.now += FOLLOWED_SECONDS
    log.tick(Counter())
    assert numbers(log.follow(0, 9)) == [1]
    clock.now += FOLLOWED_SECONDS + 0.1
    log.tick(Counter())
    assert not log.followed
    log.tell("stored", n=2)
    assert log.follow(1, 9) == {"latest": 1, "lost": 0, "events": []}


def test_events_come_once_in_order_and_in_portions() -> None:
    clock = Clock()
    log = EventLog(clock)
    log.follow(-1, 1)
    for n in range(5):
        log.tell("stored", n=n)
        clock.now += 1
    first = log.follow(0, 2)
    assert (numbers(first), first["events"][0]["age_seconds"]) == ([0, 1], 5.0)
    rest = log.follow(first["latest"], 9)
    assert numbers(rest) == [2, 3, 4]
    assert numbers(log.follow(rest["latest"], 9)) == []


def test_who_is_too_slow_is_told_how_much_it_missed() -> None:
    log = EventLog(Clock())
    log.follow(-1, 1)
    for n in range(KEPT_EVENTS + 7):
        log.tell("stored", n=n)
    found = log.follow(0, 1)
    assert (found["lost"], numbers(found)) == (7, [7])


def test_a_number_of_an_earlier_daemon_starts_anew() -> None:
    log = EventLog(Clock())
    log.tell("stored", n=1)
    assert log.follow(10**6, 9) == {"latest": 0, "lost": 0, "events": []}


def test_evictions_are_summed_up_from_tick_to_tick() -> None:
    log, counters = EventLog(Clock()), Counter(evicted_blocks=7, evicted_bytes=70)
    log.follow(-1, 1)
    log.tick(counters)
    counters.update(evicted_blocks=3, evicted_bytes=30)
    log.tick(counters)
    log.tick(counters)
    (event,) = log.follow(0, 9)["events"]
    assert event == {"age_seconds": 0.0, "kind": "evicted", "evicted_blocks": 3, "evicted_bytes": 30}
