"""One engine and one daemon under everything users do to them: chats, crowds, aborts, failures, dead daemons."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.error
from collections.abc import Iterator

import pytest
from node import Node, node_of
from vllm_server import BLOCK_TOKENS, Topology, full_hit

from tests.conftest import DaemonFactory

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def node(start_engine, daemons: DaemonFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node_of(start_engine, daemons, tmp_path_factory.mktemp("behaviour"), Topology("tp1")) as made:
        yield made


@pytest.fixture(autouse=True)
def _sound_afterwards(node: Node) -> Iterator[None]:
    yield
    node.set_faults("")
    assert node.engine.running()
    node.quiet()
    node.check()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 640, 1000])
def test_prompts_of_every_length_leave_at_least_one_token_to_compute(node: Node, length: int) -> None:
    tokens = node.fresh(length)
    cold = node.warm(tokens)
    for _ in range(2):
        node.engine.reset_local()
        again = node.engine.ask(tokens)
        assert (again.tokens, again.cached) == (cold, full_hit(length))


def test_chat_of_five_turns_hits_what_the_turns_before_computed(node: Node) -> None:
    messages: list[dict[str, str]] = []
    known = 0
    for turn in range(5):
        text = f"turn {turn}: the quick brown fox jumps over the lazy dog " * 20
        messages.append({"role": "user", "content": text})
        reply, prompt_tokens, cached = node.engine.chat(messages, max_tokens=80)
        # A turn's text is tokenised anew; at its seams tokens may differ from the generated ones.
        assert cached >= known - BLOCK_TOKENS
        assert cached % BLOCK_TOKENS == 0
        if turn:
            assert cached > 0
        known = full_hit(prompt_tokens)
        messages.append({"role": "assistant", "content": reply})
        node.quiet()
        node.engine.reset_local()


def test_hit_on_top_of_the_engines_own_prefix_loads_only_the_missing_blocks(node: Node) -> None:
    tokens = node.fresh(640)
    cold = node.warm(tokens)
    for local_blocks in (1, 2, 3, 5):
        node.engine.reset_local()
        node.engine.ask(tokens[: local_blocks * BLOCK_TOKENS + 1], 1)
        before = node.stats()["loaded_blocks"]
        answer = node.engine.ask(tokens)
        assert (answer.tokens, answer.cached) == (cold, full_hit(640))
        assert node.stats()["loaded_blocks"] - before == full_hit(640) // BLOCK_TOKENS - local_blocks


def test_tokens_that_differ_only_in_high_bits_never_share(node: Node) -> None:
    tokens = node.fresh(512)
    node.warm(tokens)
    other = [tokens[0] ^ 256, *tokens[1:]]
    assert node.engine.ask(other).cached == 0
    assert node.engine.ask(tokens).cached == full_hit(512)


def test_cache_salt_isolates_and_still_hits_itself(node: Node) -> None:
    tokens = node.fresh(320)
    node.engine.ask(tokens, cache_salt="tenant-a")
    node.quiet()
    node.engine.reset_local()
    assert node.engine.ask(tokens, cache_salt="tenant-b").cached == 0
    assert node.engine.ask(tokens).cached == 0
    node.quiet()
    node.engine.reset_local()
    assert node.engine.ask(tokens, cache_salt="tenant-a").cached == full_hit(320)
    assert "tenant-a" not in node.daemon.text()


def test_prompt_logprobs_compute_every_token_and_load_nothing(node: Node) -> None:
    tokens = node.fresh(320)
    cold = node.warm(tokens)
    before = node.stats()["loaded_blocks"]
    answer = node.engine.ask(tokens, prompt_logprobs=1)
    assert (answer.tokens, answer.cached) == (cold, 0)
    assert node.stats()["loaded_blocks"] == before
    node.engine.reset_local()
    assert node.engine.ask(tokens).cached == full_hit(320)


def test_sixteen_requests_that_share_prefixes_get_the_answers_of_single_ones(node: Node) -> None:
    heads = [node.fresh(320) for _ in range(4)]
    prompts = [heads[i % 4] + node.fresh(100 + i) for i in range(16)]
    single = [node.engine.ask(tokens) for tokens in prompts]
    node.quiet()
    node.engine.reset_local()
    crowd = node.engine.ask_all(prompts)
    assert [answer.tokens for answer in crowd] == [answer.tokens for answer in single]
    assert [answer.cached for answer in crowd] == [full_hit(len(tokens)) for tokens in prompts]


def test_two_requests_for_one_prompt_at_once_store_it_once(node: Node) -> None:
    tokens = node.fresh(640)
    before = node.stats()["stored_blocks"]
    answers = node.engine.ask_all([tokens, tokens])
    assert answers[0].tokens == answers[1].tokens
    assert node.quiet()["stored_blocks"] - before == 640 // BLOCK_TOKENS


@pytest.mark.parametrize(("rule", "failed"), [("load@1", 1), ("load@9", 1), ("load", 2)])
def test_a_load_that_fails_is_tried_once_more_and_then_computed(node: Node, rule: str, failed: int) -> None:
    tokens = node.fresh(640)
    cold = node.warm(tokens)
    failures = node.stats()["load_failures"]
    node.set_faults(f"{rule}=fail")
    answer = node.engine.ask(tokens)
    assert (answer.tokens, answer.cached) == (cold, full_hit(640) if failed == 1 else 0)
    assert node.stats()["load_failures"] == failures + failed
    node.set_faults("")
    node.engine.reset_local()
    assert node.engine.ask(tokens).cached == full_hit(640)


def test_requests_that_share_a_failed_load_and_strangers_all_get_their_answers(node: Node) -> None:
    shared, strangers = node.fresh(640), [node.fresh(200), node.fresh(300)]
    alone = [node.warm(tokens) for tokens in (shared, *strangers)]
    node.set_faults("load@3=fail")
    crowd = node.engine.ask_all([shared, shared, *strangers])
    assert [answer.tokens for answer in crowd] == [alone[0], *alone]


def test_a_store_that_fails_never_becomes_a_hit(node: Node) -> None:
    tokens = node.fresh(640)
    failures = node.stats()["store_failures"]
    node.set_faults("store@4=fail")
    cold = node.engine.ask(tokens)
    node.until(lambda stats: stats["store_failures"] == failures + 1)
    node.set_faults("")
    node.quiet()
    node.engine.reset_local()
    answer = node.engine.ask(tokens)
    assert (answer.tokens, answer.cached) == (cold.tokens, 0)
    node.quiet()
    node.engine.reset_local()
    assert node.engine.ask(tokens).cached == full_hit(640)


def test_a_load_that_never_answers_is_given_up_at_its_deadline(node: Node) -> None:
    tokens = node.fresh(640)
    cold = node.warm(tokens)
    node.set_faults("reply=fail")
    answer = node.engine.ask(tokens)
    assert answer.tokens == cold
    assert answer.seconds < 20
    node.set_faults("")
    node.until(lambda _: node.hits(tokens))


def test_aborts_in_every_state_leak_nothing(node: Node) -> None:
    tokens = node.fresh(1000)
    cold = node.warm(tokens)
    node.set_faults("load=delay:0.02;store=delay:0.01")
    for i in range(12):
        node.engine.reset_local()
        wanted = tokens if i % 2 else node.fresh(640)
        with pytest.raises((TimeoutError, urllib.error.URLError)):
            node.engine.ask(wanted, max_tokens=400, timeout=0.05 + 0.04 * i)
    node.set_faults("")
    node.quiet()
    node.engine.reset_local()
    answer = node.engine.ask(tokens)
    assert (answer.tokens, answer.cached) == (cold, full_hit(1000))


def test_reset_with_the_connector_forgets_and_without_it_keeps(node: Node) -> None:
    tokens = node.fresh(320)
    node.warm(tokens)
    assert node.engine.ask(tokens).cached == full_hit(320)
    node.quiet()
    node.engine.reset_everything()
    assert node.stats()["pool_resident_blocks"] == 0
    assert node.engine.ask(tokens).cached == 0


def test_vllms_own_counters_agree_with_the_daemons(node: Node) -> None:
    tokens = node.fresh(640)
    node.warm(tokens)
    before = (node.engine.metric("vllm:external_prefix_cache_hits_total"), node.stats()["loaded_blocks"])
    node.engine.ask(tokens)
    after = (node.engine.metric("vllm:external_prefix_cache_hits_total"), node.stats()["loaded_blocks"])
    assert after[0] - before[0] == full_hit(640)
    assert (after[1] - before[1]) * BLOCK_TOKENS == full_hit(640)


class _Traffic:
    """Requests for known prompts in the background, each answer checked, while a test does harm."""

    def __init__(self, node: Node, known: dict[int, tuple[list[int], list[int]]]) -> None:
        self._node = node
        self._known = known
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers = 0
        self.slowest = 0.0
        self.wrong: list[str] = []

    def _run(self) -> None:
        while not self._stop.is_set():
            for tokens, expected in self._known.values():
                try:
                    answer = self._node.engine.ask(tokens, timeout=60)
                except (OSError, urllib.error.URLError) as problem:
                    self.wrong.append(f"no answer: {problem!r}")
                    return
                self.answers += 1
                self.slowest = max(self.slowest, answer.seconds)
                if answer.tokens != expected:
                    self.wrong.append(f"wrong tokens for a prompt of {len(tokens)}")
                if self._stop.is_set():
                    return

    def __enter__(self) -> _Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(90)
        assert not self._thread.is_alive()
        assert self.wrong == []

    def see(self, more: int) -> None:
        """Wait for so many more answers."""
        target, deadline = self.answers + more, time.monotonic() + 60
        while self.answers < target and not self.wrong:
            assert time.monotonic() < deadline, "requests hang"
            time.sleep(0.02)


def _known(node: Node) -> dict[int, tuple[list[int], list[int]]]:
    prompts = [node.fresh(length) for length in (200, 400, 640)]
    return {i: (tokens, node.warm(tokens)) for i, tokens in enumerate(prompts)}


def test_a_frozen_daemon_costs_misses_and_is_picked_up_again(node: Node) -> None:
    known = _known(node)
    with _Traffic(node, known) as traffic:
        traffic.see(3)
        node.engine.reset_local()
        os.kill(node.daemon.pid, signal.SIGSTOP)
        try:
            traffic.see(9)
        finally:
            os.kill(node.daemon.pid, signal.SIGCONT)
        traffic.see(3)
    tokens = known[2][0]
    node.until(lambda _: node.hits(tokens))


def test_a_killed_daemon_costs_misses_and_the_next_one_is_picked_up(node: Node) -> None:
    known = _known(node)
    with _Traffic(node, known) as traffic:
        traffic.see(3)
        node.daemon.kill()
        traffic.see(9)
        node.daemon.restart()
        traffic.see(9)
    node.until(lambda _: node.hits(known[2][0]))


def test_what_was_stored_is_a_hit_when_the_daemon_is_back(node: Node) -> None:
    tokens = node.fresh(640)
    cold = node.warm(tokens)
    stored = node.stats()["pool_resident_blocks"]
    node.daemon.kill()
    node.daemon.restart()
    node.until(lambda _: [engine["ready"] for engine in node.info()["engines"]] == [True])
    assert node.info()["pool"]["restored_blocks"] == node.stats()["pool_resident_blocks"] == stored
    # The engine's scheduler finds out with its next heartbeat.
    node.until(lambda _: node.hits(tokens))
    node.engine.reset_local()
    before = node.stats()
    answer = node.engine.ask(tokens)
    assert (answer.tokens, answer.cached) == (cold, full_hit(640))
    after = node.quiet()
    assert after["loaded_blocks"] - before["loaded_blocks"] == full_hit(640) // BLOCK_TOKENS
    # Nothing of the prompt was computed and stored anew: only a daemon that knew it has it.
    assert after["stored_blocks"] == 0


def test_a_stopped_daemon_stays_stopped_and_requests_go_on(node: Node) -> None:
    known = _known(node)
    assert node.daemon.stop() == 0
    for tokens, expected in known.values():
        assert node.engine.ask(tokens).tokens == expected
    assert not node.daemon.socket.exists()
    node.daemon.restart()
    node.until(lambda stats: stats["engines"] == 1)
    node.until(lambda _: node.hits(known[1][0]))


def test_a_daemon_killed_again_and_again_under_load_never_gives_a_wrong_answer(node: Node) -> None:
    known = _known(node)
    node.set_faults("load=delay:0.005;store=delay:0.005")
    with _Traffic(node, known) as traffic:
        for _ in range(4):
            traffic.see(2)
            node.engine.reset_local()
            node.daemon.kill()
            node.daemon.restart()
            node.until(lambda stats: stats["engines"] == 1)
    node.set_faults("")
    node.until(lambda _: node.hits(known[0][0]))


def test_a_mover_killed_in_the_middle_of_loads_is_replaced(node: Node) -> None:
    known = _known(node)
    node.set_faults("load=delay:0.03")
    with _Traffic(node, known) as traffic:
        for _ in range(3):
            node.engine.reset_local()
            traffic.see(1)
            movers = node.info()["movers"]
            restarts = node.stats()["mover_restarts"]
            os.kill(movers[0]["pid"], signal.SIGKILL)
            node.until(lambda stats, before=restarts: stats["mover_restarts"] > before)
            node.until(lambda _: node.info()["engines"][0]["ready"])
            traffic.see(2)
    node.set_faults("")
    node.until(lambda _: node.hits(known[2][0]))
