"""Quotas of a real daemon: settings in, shares of the pool out."""

from __future__ import annotations

import json

import pytest

from hpkv_client.client import BlockCache
from tests.daemons import DaemonFactory, hpkvd, refusal
from tests.support import observed_daemon

SIZE = 64 << 10
POOL = 4 << 20


def keys(count: int) -> list[bytes]:
    return [f"key {i}".encode() for i in range(count)]


def fill(cache: BlockCache, count: int) -> int:
    """Store blocks one after the other; how many of them are there afterwards."""
    for key in keys(count):
        cache.put({key: key.ljust(SIZE, b".")})
    return sum(cache.contains(keys(count)))


@pytest.mark.parametrize(("quotas", "kept"), [("steady=25%:, *=:75%", 16), ("", 0)])
def test_a_flood_leaves_the_reserve_of_another_and_takes_it_without_one(quotas: str, kept: int) -> None:
    with (
        observed_daemon(HPKV_KV_MEM_POOL_SIZE=POOL, HPKV_QUOTAS=quotas) as live,
        BlockCache("steady", SIZE, socket=live.socket) as steady,
        BlockCache("flood", SIZE, socket=live.socket) as flood,
    ):
        assert fill(steady, 16) == 16
        fill(flood, 200)
        assert sum(steady.contains(keys(16))) == kept
        held = {quota["model"]: quota["held_bytes"] for quota in live.ask("info")["quotas"]}
        assert sum(held.values()) == live.stats()["pool_resident_bytes"]
        assert held.get("flood", POOL) <= POOL * (0.75 if quotas else 1)
        assert live.ask("check")["ok"]


def test_quotas_are_shown_as_they_were_set() -> None:
    with observed_daemon(HPKV_KV_MEM_POOL_SIZE=POOL, HPKV_QUOTAS="steady=25%:50%") as live:
        shown = json.loads(hpkvd("config", "show", "--json", env=live.handle.env).stdout)
        assert shown["settings"]["quotas"] == "steady=25%:50%"
        with BlockCache("steady", SIZE, socket=live.socket):
            info = live.ask("info")
        quota = {"model": "steady", "held_bytes": 0, "reserved_bytes": POOL // 4, "maximum_bytes": POOL // 2}
        assert quota in info["quotas"]


def test_more_reserves_than_the_pool_are_refused_at_start() -> None:
    factory = DaemonFactory()
    try:
        said = refusal("serve", env=factory.environment(HPKV_QUOTAS="a=40m:, b=40m:"), exit_code=78)
        assert "80 MiB" in said
        assert "HPKV_QUOTAS" in said
    finally:
        factory.close()
