"""Replicas take turns: every block is written by one of each, and their shares never differ by more than one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpkv_client.types import Keys, RankShard
from hpkv_daemon.core.store import Reservation
from hpkv_daemon.service.engines import StoreJob


@given(
    st.integers(1, 16),
    st.lists(st.lists(st.integers(-2, 50), min_size=1, max_size=20), min_size=1, max_size=12),
)
def test_each_block_is_written_once_and_the_shares_differ_by_one_at_most(
    replicas: int, reserved: list[list[int]]
) -> None:
    turn = 0
    shares = [0] * replicas
    for number, slots in enumerate(reserved):
        blocks = range(100, 100 + len(slots))
        reservation = Reservation(0, "engine", slots)
        job = StoreJob(number, Keys(b""), None, False, reservation, 0.0, set(), 0, turn)
        turn += sum(slot >= 0 for slot in slots)
        written = [job.part_of(RankShard((), 200, replicas, replica), blocks) for replica in range(replicas)]
        for replica, part in enumerate(written):
            shares[replica] += len(part)
        fresh = [(slot, block) for slot, block in zip(slots, blocks, strict=True) if slot >= 0]
        assert sorted(one for part in written for one in part) == sorted(fresh)
    assert max(shares) - min(shares) <= 1
