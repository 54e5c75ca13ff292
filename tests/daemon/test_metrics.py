"""``/metrics``, ``/healthz`` and ``/readyz`` of real daemons, and that what they count adds up."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator

import pytest

from hpkv_client.errors import CopyFailed
from hpkv_client.wire import pack_blocks
from hpkv_daemon.service.metrics import METRICS
from tests.daemons import DaemonFactory, refusal
from tests.scrape import Metrics, Scraper, fetch, invariants
from tests.support import ROOT, Observed, Rank, hashes, observed_daemon, plain_shard, wait_until

SIZE = 64 << 10
SLOTS = 16
TEXT = (ROOT / "docs" / "metrics.md").read_text()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """A daemon with room for 16 blocks in memory, and more on disk."""
    storage = tmp_path_factory.mktemp("storage")
    with observed_daemon(
        HPKV_METRICS="127.0.0.1:0",
        HPKV_KV_MEM_POOL_SIZE="1m",
        HPKV_KV_STORAGE_PATH=storage,
        HPKV_STORAGE_SIZE="64m",
    ) as observed:
        yield observed


@pytest.fixture
def scraper(live: Observed) -> Scraper:
    return Scraper(live.channel)


@pytest.fixture
def rank(live: Observed) -> Iterator[Rank]:
    with Rank(live.socket, plain_shard(SIZE, 64), engine="one", namespace="one").register(model="llama") as rank:
        yield rank.ready()


def namespaces(metrics: Metrics) -> set[str]:
    return metrics.values("namespace") - {""}


def broken(metrics: Metrics, settled: bool) -> list[str]:
    """The lines of the documentation that do not hold."""
    found = []
    for left, right, quiet in invariants(TEXT):
        for namespace in namespaces(metrics):
            values = [metrics.evaluate(side, {"namespace": namespace}) for side in (left, right)]
            if values[0] != values[1] and (settled or not quiet):
                found.append(f"{namespace}: {left} is {values[0]}, {right} is {values[1]}")
    return found


def put(rank: Rank, *names: str) -> int:
    """Store unrelated blocks; how many are kept."""
    body = {"keys": rank.keys(hashes(*names)), "blocks": pack_blocks(range(len(names)))}
    return int(rank.call("put", job=rank.next_job(), **body)["kept"])


def mixed_traffic(live: Observed, one: Rank, two: Rank) -> None:
    """Everything that can happen to a block."""
    assert one.store(hashes(*range(10)), range(10)) == 10
    assert one.store(hashes(*range(4)), range(4)) == 4
    assert put(two, "x", "y") == 2
    hit, lease = one.match(hashes(*range(10), "none"))
    assert hit == 10
    assert one.load(lease, range(10, 20)) == 10
    assert one.store(hashes("child"), [0], parent=hashes("no parent")[0]) == 0
    assert one.store(hashes(*range(100, 110)), range(10)) < 10
    one.call("release", lease=lease)
    live.faults("store=fail")
    assert put(two, "fails") == 0
    live.faults("load=fail")
    _, lease = one.match(hashes(0))
    with pytest.raises(CopyFailed):
        one.load(lease, [0])
    live.faults("")
    one.call("release", lease=lease)
    assert put(two, "z") == 1


def test_what_is_counted_adds_up_after_mixed_traffic_and_in_the_next_life(live: Observed, scraper: Scraper) -> None:
    with (
        Rank(live.socket, plain_shard(SIZE, 64), engine="one", namespace="one").register(model="llama") as one,
        Rank(live.socket, plain_shard(SIZE, 64), engine="two", namespace="two").register(model="qwen") as two,
    ):
        one.ready()
        two.ready()
        mixed_traffic(live, one, two)
        wait_until(lambda: live.ask("info")["storage"]["queued_blocks"] == 0, 30, "storage is not through")
        # New prefixes push the old ones out, and those are brought back from disk.
        for i in range(3):
            assert one.store(hashes(*(f"{i} {j}" for j in range(8))), range(8)) == 8
            wait_until(lambda: scraper.metrics().sum("hpkv_storage_queued_blocks") == 0, 30, "storage is not through")
        wait_until(lambda: one.match(hashes(*range(5)))[0] == 5, 15, "storage gives nothing back")
        metrics = scraper.metrics()
        assert not broken(metrics, settled=False)
        assert len(namespaces(metrics)) == 2
        assert metrics.values("model") == {"llama", "qwen", ""}
        happened = ("kept", "dropped", "reserved", "stored", "promoted", "aborted", "evicted")
        nothing = [name for name in happened if not metrics.sum(f"hpkv_{name}_blocks_total")]
        assert not nothing, nothing
        assert metrics.sum("hpkv_dropped_blocks_total", reason="orphan", model="llama") == 1
        assert metrics.sum("hpkv_transfer_blocks_total", tier="disk", direction="load") == metrics.sum(
            "hpkv_promoted_blocks_total"
        )
        assert metrics.sum("hpkv_transfer_bytes_total", tier="memory", direction="load") == 10 * SIZE
        assert metrics.sum("hpkv_transfer_duration_seconds_count", tier="memory", direction="load") == 1
        assert metrics.sum("hpkv_failed_jobs_total", kind="load") == 1
        assert metrics.sum("hpkv_resident_blocks") == live.stats()["pool_resident_blocks"]
        live.ask("clear", namespace=bytes.fromhex(live.ask("info")["namespaces"][0]["id"]))
        cleared = scraper.metrics()
        assert cleared.sum("hpkv_cleared_blocks_total") == live.stats()["cleared_blocks"] > 0
        assert one.store(hashes("last"), [0]) == 1
    live.settle()
    assert not broken(scraper.metrics(), settled=True)
    kept = scraper.metrics().sum("hpkv_resident_blocks")
    assert live.handle.stop() == 0
    live.handle.restart()
    again = Scraper(live.channel).metrics()
    assert again.sum("hpkv_restored_blocks_total") == again.sum("hpkv_resident_blocks") == kept > 0
    assert not broken(again, settled=True)


def test_look_ups_count_what_was_asked_for_as_hit_or_missed(scraper: Scraper, rank: Rank) -> None:
    assert rank.store(hashes("look", "up"), [0, 1]) == 2
    before = scraper.metrics()
    for names in (("look", "up", "none"), ("none",), ("look",)):
        _, lease = rank.match(hashes(*names))
        rank.call("release", lease=lease)
    assert list(rank.call("acquire", keys=rank.keys(hashes("up", "gone")))["found"]) == [1, 0]
    after = scraper.metrics()

    def grown(result: str) -> float:
        return after.sum("hpkv_lookup_blocks_total", result=result) - before.sum(
            "hpkv_lookup_blocks_total", result=result
        )

    assert (grown("hit"), grown("miss")) == (2 + 0 + 1 + 1, 1 + 1 + 0 + 1)
    assert after.sum("hpkv_lookups_total") - before.sum("hpkv_lookups_total") == 4


def test_what_engines_count_is_summed_by_model_and_stays_when_they_leave(live: Observed, scraper: Scraper) -> None:
    def total(name: str) -> float:
        return scraper.metrics().sum(f"hpkv_engine_{name}_total", model="counted")

    with Rank(live.socket, plain_shard(SIZE, 1), engine="counting").register(model="counted") as rank:
        told = {"hit_tokens_loaded": 640, "saved_prefill_microseconds": 2_500_000, "nobody_knows_this": 7}
        rank.call("heartbeat", counters=told)
        rank.call("heartbeat", counters=told | {"hit_tokens_loaded": 1000})
        assert total("hit_tokens_loaded") == 1000
        assert total("saved_prefill_seconds") == 2.5
    with Rank(live.socket, plain_shard(SIZE, 1), engine="counting").register(model="counted") as rank:
        rank.call("heartbeat", counters={"hit_tokens_loaded": 24})
    assert total("hit_tokens_loaded") == 1024
    assert not [name for name in scraper.metrics().names if "nobody_knows" in name]


def test_names_types_and_labels_are_those_of_the_table(scraper: Scraper) -> None:
    families = {
        f"{family.name}_total" if family.type == "counter" else family.name: family
        for family in scraper.metrics().families
        if family.name.startswith("hpkv_")
    }
    known = {metric.name: metric for metric in METRICS}
    assert families.keys() <= known.keys()
    # Quotas without a limit have none to show, and there is no store that nodes share.
    shared = {name for name in known if name.startswith("hpkv_remote_")}
    assert known.keys() - families.keys() <= {"hpkv_quota_limit_bytes", *shared}
    for name, family in families.items():
        assert family.type == known[name].kind
        assert {frozenset(sample.labels) - {"le"} for sample in family.samples} == {frozenset(known[name].labels)}


@pytest.mark.parametrize("asset", ["dashboard.json", "alerts.yml"])
def test_what_dashboard_and_alerts_ask_for_is_there(scraper: Scraper, asset: str) -> None:
    text = (ROOT / "hpkv_daemon" / "assets" / asset).read_text()
    asked = set(re.findall(r"\bhpkv_\w+", text))
    assert len(asked) > 10
    # A daemon with a store that nodes share shows these; test_remote.py looks for all of them.
    shared = {metric.name for metric in METRICS if metric.name.startswith("hpkv_remote_")}
    assert asked <= scraper.metrics().names | shared


def test_the_names_follow_the_rules_of_prometheus() -> None:
    for metric in METRICS:
        assert metric.name.startswith("hpkv_")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not [unit for unit in ("milli", "micro", "kilo", "mega") if unit in metric.name], metric.name
        if "bytes" in metric.name or "seconds" in metric.name:
            assert metric.name.removesuffix("_total").endswith(("bytes", "seconds")), metric.name


def test_many_namespaces_do_not_make_many_series(scraper: Scraper, live: Observed, rank: Rank) -> None:
    assert rank.call("heartbeat")["ready"]
    before = len(scraper.metrics().samples)
    for i in range(70):
        with Rank(live.socket, plain_shard(4096, 1), engine=f"m{i}", namespace=f"m{i}").register(model=f"m{i}") as rank:
            rank.ready()
            assert rank.store(hashes("a"), [0]) == 1
            rank.call("heartbeat", counters={"lookups": 1})
    metrics = scraper.metrics()
    assert len(namespaces(metrics)) == 64
    assert len(metrics.values("model")) <= 2 * 64 + 1
    assert metrics.sum("hpkv_engine_lookups_total") >= 70
    assert metrics.sum("hpkv_resident_blocks") == live.stats()["pool_resident_blocks"]
    assert metrics.sum("hpkv_stored_blocks_total", namespace="") >= 6
    assert metrics.sum("hpkv_resident_bytes") == live.stats()["pool_resident_bytes"]
    assert metrics.sum("hpkv_resident_bytes", namespace="") == 4096 * metrics.sum("hpkv_resident_blocks", namespace="")
    assert len(metrics.samples) - before < 64 * 60
    assert live.ask("check")["ok"]


def test_a_daemon_that_serves_is_alive_and_ready_and_tells_of_its_storage(scraper: Scraper) -> None:
    assert scraper.page("/healthz") == (200, {"alive": True, "serving": True})
    status, body = scraper.page("/readyz")
    assert (status, body["ready"], body["storage"]["state"]) == (200, True, "ready")
    assert scraper.get("/nothing")[0] == 404


def test_slow_and_silent_scrapers_keep_nobody_waiting(scraper: Scraper, live: Observed) -> None:
    place = ("127.0.0.1", int(scraper.place.rpartition(":")[2]))
    silent = [socket.create_connection(place) for _ in range(10)]
    try:
        began = time.monotonic()
        assert scraper.page("/healthz")[0] == 200
        assert time.monotonic() - began < 10
        # Beyond the limit a connection is closed at once; those before it end by themselves.
        crowd = [socket.create_connection(place) for _ in range(30)]
        try:
            crowd[-1].settimeout(5)
            assert crowd[-1].recv(1) == b""
        finally:
            for one in crowd:
                one.close()
        assert live.ask("ping")["pid"] == live.handle.pid
    finally:
        for one in silent:
            one.close()
    wait_until(lambda: _healthy(scraper), 30, "the server did not recover")


def _healthy(scraper: Scraper) -> bool:
    try:
        return scraper.page("/healthz")[0] == 200
    except OSError:
        return False


def test_a_port_that_was_chosen_must_be_free_and_the_default_need_not_be() -> None:
    factory = DaemonFactory()
    try:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            place = f"127.0.0.1:{taken.getsockname()[1]}"
            env = factory.environment(HPKV_METRICS=place)
            line = refusal("serve", env=env, exit_code=78)
            assert place in line
            assert "HPKV_METRICS" in line
        assert os.listdir(env["HPKV_SHARE_MEM_FILE_PATH"]) == []
        # The default: whether or not somebody has it, the daemon serves.
        daemon = factory(HPKV_METRICS="")
        channel = daemon.client()
        assert channel.call("ping", {}, 30.0)["pid"] == daemon.pid
        shown = channel.call("info", {}, 30.0)["metrics"]
        second = factory(HPKV_METRICS="")
        assert second.client().call("info", {}, 30.0)["metrics"] == ""
        assert "metrics are off: cannot serve metrics on 127.0.0.1:7631" in second.text()
        if shown:
            assert fetch(f"http://{shown}/healthz")[0] == 200
        named = factory(HPKV_METRICS="", HPKV_INSTANCE="blue")
        assert named.client().call("info", {}, 30.0)["metrics"] == ""
        assert "metrics" not in named.text()
    finally:
        factory.close()


def test_while_the_daemon_starts_it_is_alive_and_not_ready() -> None:
    from hpkv_daemon.server.http import HttpServer

    server = HttpServer("127.0.0.1:0")
    server.start()
    try:
        assert fetch(f"http://{server.place}/healthz")[0] == 200
        assert fetch(f"http://{server.place}/readyz")[0] == 503
        assert fetch(f"http://{server.place}/metrics")[0] == 503
    finally:
        server.close()


def test_a_loop_that_hangs_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpkv_daemon.server import http

    class Hung:
        def call_soon_threadsafe(self, callback: object) -> None:
            """It never will."""

    monkeypatch.setattr(http, "ANSWER_SECONDS", 0.1)
    server = http.HttpServer("127.0.0.1:0")
    server.start()
    try:
        server.serve(Hung(), lambda: None)  # type: ignore[arg-type,return-value]
        for path in ("/healthz", "/readyz", "/metrics"):
            status, body = fetch(f"http://{server.place}{path}")
            assert status == 503
            assert "control loop" in body
    finally:
        server.close()
