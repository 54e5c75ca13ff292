"""Blocks that are not in yet, and whose writers leave: whatever way, nobody ever sees them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tests.daemons import DaemonHandle
from tests.engines import piece, ready_engine, store_all
from tests.support import (
    ImpatientDaemon,
    Observed,
    Rank,
    hashes,
    observed_daemon,
    plain_shard,
    wait_until,
)


def unregisters(live: Observed, rank: Rank) -> None:
    """The session stays."""
    del live
    rank.call("unregister")


def says_goodbye(live: Observed, rank: Rank) -> None:
    """The process stays."""
    del live
    rank.call("bye")
    rank.channel.session = 0


def registers_anew(live: Observed, rank: Rank) -> None:
    """What its session had before ends."""
    del live
    rank.register()


def registers_from_a_new_session(live: Observed, rank: Rank) -> None:
    """Its old session ends."""
    del live
    rank.channel.session = 0
    rank.register()


def never_asks(live: Observed, rank: Rank) -> None:
    """Its part does not come in time."""
    del rank
    wait_until(lambda: live.stats()["abandoned_jobs"])


LEAVE = (unregisters, says_goodbye, registers_anew, registers_from_a_new_session)


@pytest.mark.parametrize(
    ("leaves", "asked"), [*((leave, asked) for leave in LEAVE for asked in (False, True)), (never_asks, False)]
)
def test_a_block_of_which_a_rank_left_before_its_part_was_in_never_becomes_visible(
    leaves: Callable[[Observed, Rank], None], asked: bool
) -> None:
    with (
        # Of those who leave something is heard: nobody waits for them to be late.
        observed_daemon(ImpatientDaemon if leaves is never_asks else DaemonHandle) as live,
        Rank(live.socket, plain_shard(100, 4), engine="reader").register() as reader,
        ExitStack() as stack,
    ):
        reader.ready()
        one, other = ready_engine(stack, [Rank(live.socket, piece(50 * n, 50), rank=n, world=2) for n in range(2)])
        chain = hashes("a", "b")
        assert one.reply(one.ask_store(chain, [0, 1], job=1)).result()["partial"]
        assert live.gauges()["pool_reserved_blocks"] == 2
        if asked:
            live.faults("store=delay:0.2")
            other.ask_store(chain, [0, 1], job=1)
            wait_until(lambda: not other.control.quiet())
        leaves(live, other)
        live.faults("")
        wait_until(lambda: live.gauges()["pool_reserved_blocks"] == 0)
        assert reader.match(chain)[0] == 0
        other.register()
        for rank in (one, other):
            rank.ready()
        assert reader.match(chain)[0] == 0
        assert store_all([one, other], chain, [0, 1], job=2) == 2
        hit, lease = reader.match(chain)
        assert hit == 2
        assert reader.call("release", lease=lease)["released"]
        assert live.ask("check")["ok"]
        assert live.stats()["internal_errors"] == 0
