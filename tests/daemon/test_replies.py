"""One reply to every request, also when whoever works on it fails in a way that nobody expects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpkv_client.errors import HpkvError
from hpkv_client.wire import VERBS, Body, Reply, pack_blocks
from tests.support import Observed, PatchedDaemon, Rank, hashes, observed_daemon, plain_shard, wait_until

SIZE = 4096


class ClumsyDaemon(PatchedDaemon):
    """Raises before or after the work on a verb, or has a result that no frame can hold, as the file ``clumsy`` beside
    its socket says."""

    PATCH = """
import os
from pathlib import Path
from hpkv_client.wire import VERBS
from hpkv_daemon.service.archive import ArchiveVerbs
from hpkv_daemon.service.live import SettingVerbs
from hpkv_daemon.service.operators import Operators
from hpkv_daemon.service.pinning import PinVerbs
from hpkv_daemon.service.service import Service

file = Path(os.environ["HPKV_SOCKET"]).parent / "clumsy"

def clumsy(name, verb):
    owner = next(owner for owner in (Service, Operators, SettingVerbs, PinVerbs, ArchiveVerbs) if hasattr(owner, name))
    real = getattr(owner, name)
    def asked():
        return file.read_text() if file.exists() else ""
    def stumble(where):
        if asked() == f"{where} {verb}":
            raise LookupError(f"stumbled {where} {verb}")
    def method(self, *arguments):
        stumble("before")
        result = real(self, *arguments)
        stumble("after")
        return {"huge": 1 << 64} if asked() == f"unspeakable {verb}" else result
    setattr(owner, name, method)

for verb in VERBS:
    clumsy("_store_verb" if verb == "store" else "_" + verb, verb)
"""


@pytest.fixture(scope="module")
def clumsy() -> Iterator[Observed]:
    """The daemon of this module."""
    with (
        observed_daemon(ClumsyDaemon) as observed,
        Rank(observed.socket, plain_shard(SIZE, 1), engine="keeps the mover").register(),
    ):
        yield observed


def stumble(live: Observed, where: str) -> None:
    """From now on; empty for nowhere."""
    (live.socket.parent / "clumsy").write_text(where)


def right_body(rank: Rank, verb: str) -> Body:
    """A request that works."""
    keys, job = rank.keys(hashes("a")), 1000
    bodies: dict[str, Body] = {
        "hello": {"major": 1, "minor": 0, "name": "again"},
        "register": rank.registration(),
        "release": {"lease": rank.match(hashes("a"))[1]},
        "load": {"job": job, "lease": rank.match(hashes("a"))[1], "first": 0, "blocks": pack_blocks([1])},
        "store": {"job": job, "parent": None, "keys": rank.keys(hashes("b")), "blocks": pack_blocks([1])},
        "put": {"job": job, "keys": rank.keys(hashes("b")), "blocks": pack_blocks([1])},
        "get": {"job": job, "keys": keys, "blocks": pack_blocks([1])},
        "cancel": {"job": job},
        "blocks": {"namespace": bytes.fromhex(rank.call("info")["namespaces"][-1]["id"])},
        "set": {"name": "log_level", "value": "info"},
    }
    if verb == "pin":
        rank.call("match", keys=keys, request="r")
        return {"request": "r"}
    if verb in ("match", "acquire", "contains"):
        return {"keys": keys}
    return bodies.get(verb, {})


def all_replies(live: Observed, rank: Rank, verb: str, body: Body) -> list[Reply]:
    """Every reply to the request that comes before that to a copy which cannot overtake it."""
    replies: list[Reply] = []

    def heard(wanted: int) -> bool:
        replies.extend(rank.channel.replies(0.1))
        return any(reply.id == wanted for reply in replies)

    request = rank.ask(verb, **body)
    wait_until(lambda: heard(request), 30, "no reply")
    stumble(live, "")
    last = rank.ask("put", job=2000, keys=rank.keys(hashes("z")), blocks=pack_blocks([0]))
    wait_until(lambda: heard(last), 30, "no reply")
    return [reply for reply in replies if reply.id == request]


DEFERRED = ("load", "get", "store", "put", "reload")
ERRORS = {
    "": "",
    "before": "LookupError.'stumbled before",
    "after": "LookupError.'stumbled after",
    "unspeakable": "OverflowError",
}
# After the handler of a verb that is answered later its copy is under way: what that ends with is the reply.
FAILURES = [(verb, where) for verb in VERBS for where in ERRORS if where in ("", "before") or verb not in DEFERRED]


@pytest.mark.parametrize(("verb", "where"), FAILURES)
def test_a_request_gets_exactly_one_reply_though_its_handler_fails(clumsy: Observed, verb: str, where: str) -> None:
    clumsy.ask("clear")
    before = clumsy.stats()
    with Rank(clumsy.socket, plain_shard(SIZE, 4)).register() as rank:
        rank.ready()
        assert rank.store(hashes("a"), [0], job=1) == 1
        body = right_body(rank, verb)
        stumble(clumsy, f"{where} {verb}" if where else "")
        try:
            (reply,) = all_replies(clumsy, rank, verb, body)
        finally:
            stumble(clumsy, "")
        if where:
            with pytest.raises(HpkvError, match=f"internal error: {ERRORS[where]}"):
                reply.result()
        else:
            reply.result()
        # It goes on: for this client, after a new hello if need be, and for everybody.
        rank.channel.session = 0
        rank.register().ready()
        assert rank.store(hashes("c"), [0], job=3000) == 1
        assert rank.match(hashes("c"))[0] == 1
    assert clumsy.stats()["internal_errors"] - before["internal_errors"] == bool(where)
    clumsy.ask("clear")
    # Sessions that nobody ended stay as long as this process.
    clumsy.settle(sessions=clumsy.gauges()["sessions"], engines=1)


class ForgetfulDaemon(PatchedDaemon):
    """Its store fails once at the end of a load, and once at a commit."""

    PATCH = """
from hpkv_daemon.core.store import BlockStore

def fails_once(name):
    real, left = getattr(BlockStore, name), [1]
    def method(self, *arguments):
        if left:
            left.pop()
            raise KeyError(name)
        return real(self, *arguments)
    setattr(BlockStore, name, method)

fails_once("end_transfer")
fails_once("commit")
"""


def test_a_load_or_store_whose_end_fails_is_answered_once_and_the_next_one_works() -> None:
    with (
        observed_daemon(ForgetfulDaemon) as live,
        Rank(live.socket, plain_shard(SIZE, 4)).register() as rank,
    ):
        rank.ready()
        (reply,) = all_replies(live, rank, "put", right_body(rank, "put"))
        with pytest.raises(HpkvError, match=r"internal error: KeyError.'commit'"):
            reply.result()
        assert rank.store(hashes("a"), [0], job=3000) == 1
        (reply,) = all_replies(live, rank, "load", right_body(rank, "load"))
        with pytest.raises(HpkvError, match=r"internal error: KeyError.'end_transfer'"):
            reply.result()
        assert rank.load(rank.match(hashes("a"))[1], [1], job=3001) == 1
        assert live.stats()["internal_errors"] == 2
        assert live.handle.text().count("the end of a copy failed") == 2
