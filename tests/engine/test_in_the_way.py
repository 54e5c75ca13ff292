"""A daemon that is frozen, slow, mad or of another version: right answers, with little delay, and hits afterwards."""

from __future__ import annotations

import os
import signal
import statistics
from collections.abc import Iterator

import pytest
from garbage import ANSWERS, Garbage
from node import Node, node_of
from vllm_server import Answer, Topology

from tests.conftest import DaemonFactory

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

DEADLINE_SECONDS = 0.5
SLACK_SECONDS = 4.0
"""What a busy test machine may add to a request by itself."""
LENGTH = 640
REQUESTS = 6


@pytest.fixture(scope="module")
def node(start_engine, daemons: DaemonFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    directory = tmp_path_factory.mktemp("in-the-way")
    deadline = DEADLINE_SECONDS * 1000
    with node_of(start_engine, daemons, directory, Topology("tp1"), HPKV_SUBMIT_DEADLINE_MS=deadline) as made:
        yield made


@pytest.fixture(scope="module")
def known(node: Node) -> tuple[list[int], list[int], float]:
    """A prompt, its answer, and the seconds it takes to compute."""
    tokens = node.fresh(LENGTH)
    answer = node.warm(tokens)
    node.engine.reset_everything()
    seconds = []
    for _ in range(REQUESTS):
        seconds.append(node.engine.ask(tokens).seconds)
        node.quiet()
        node.engine.reset_everything()
    return tokens, answer, statistics.median(seconds)


@pytest.fixture(autouse=True)
def _sound_afterwards(node: Node) -> Iterator[None]:
    yield
    node.heal()
    assert node.engine.running()
    node.quiet()
    node.check()


def counted(node: Node, name: str) -> int:
    """One of the engine's own counters."""
    engines = node.info()["engines"]
    return int(engines[0]["counters"].get(name, 0)) if engines else 0


def ask_again_and_again(node: Node, tokens: list[int]) -> list[Answer]:
    """The prompt several times, each time computed: the engine's own cache is emptied before."""
    answers = []
    for _ in range(REQUESTS):
        node.engine.reset_local()
        answers.append(node.engine.ask(tokens))
    return answers


def assert_in_nobodys_way(answers: list[Answer], known: tuple[list[int], list[int], float]) -> None:
    """All right; the first may wait for the deadline, the others are not even asked for."""
    _, right, seconds = known
    assert [answer.tokens for answer in answers] == [right] * REQUESTS
    assert max(answer.seconds for answer in answers) < seconds + DEADLINE_SECONDS + SLACK_SECONDS
    assert statistics.median(answer.seconds for answer in answers) < seconds + SLACK_SECONDS


def test_a_frozen_daemon_delays_one_request_by_its_deadline_and_no_other(node: Node, known) -> None:
    tokens = known[0]
    opened = counted(node, "breaker_opened")
    os.kill(node.daemon.pid, signal.SIGSTOP)
    try:
        answers = ask_again_and_again(node, tokens)
    finally:
        os.kill(node.daemon.pid, signal.SIGCONT)
    assert_in_nobodys_way(answers, known)
    assert {answer.cached for answer in answers} == {0}
    node.until(lambda _: node.hits(tokens))
    node.until(lambda _: counted(node, "breaker_opened") > opened)
    assert counted(node, "lookup_timeouts") > 0


def test_a_slow_daemon_is_given_up_at_the_deadline(node: Node, known) -> None:
    tokens = known[0]
    node.set_faults(f"match=delay:{4 * DEADLINE_SECONDS}")
    timeouts = counted(node, "lookup_timeouts")
    answers = ask_again_and_again(node, tokens)
    assert [answer.tokens for answer in answers] == [known[1]] * REQUESTS
    assert max(answer.seconds for answer in answers) < known[2] + DEADLINE_SECONDS + SLACK_SECONDS
    node.set_faults("")
    node.until(lambda _: node.hits(tokens))
    node.until(lambda _: counted(node, "lookup_timeouts") > timeouts)


@pytest.mark.parametrize("kind", ANSWERS)
def test_what_is_no_daemon_costs_misses_only(node: Node, known, kind: str) -> None:
    tokens = known[0]
    node.daemon.kill()
    with Garbage(node.daemon.socket, ANSWERS[kind]):
        answers = ask_again_and_again(node, tokens)
    assert_in_nobodys_way(answers, known)
    assert {answer.cached for answer in answers} == {0}
    node.heal()
    node.until(lambda _: node.hits(tokens), 90)


def test_another_version_is_said_once(node: Node) -> None:
    log = node.engine.text()
    assert log.count("speaks hpkv/99.0") in (1, 2), "once for the scheduler, once for the rank"
