"""``hpkvd warm`` against a real daemon and something that speaks like an engine. tests/engine has the real one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.daemons import hpkvd, refusal
from tests.support import Observed, Rank, hashes, observed_daemon, plain_shard

SIZE, BLOCK_TOKENS = 64 << 10, 4


class Engine:
    """Speaks the API over a bare rank. It stores a prompt with the second request for it, as late as engines do."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.seen: list[str] = []
        self.key = ""
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Silent."""

            def do_GET(self) -> None:
                self.answer(200, {"data": [{"id": "tiny"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if engine.key and self.headers["Authorization"] != f"Bearer {engine.key}":
                    self.answer(401, {"error": "who are you?"})
                    return
                tokens = body["prompt"] if isinstance(body["prompt"], list) else list(body["prompt"].encode())
                engine.compute(tokens, self.headers["X-Request-Id"])
                self.answer(200, {"usage": {"prompt_tokens": len(tokens)}, "choices": [{"text": "a"}]})

            def answer(self, status: int, body: dict) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def compute(self, tokens: list[int], request: str) -> None:
        names = hashes(*(str(tokens[: (i + 1) * BLOCK_TOKENS]) for i in range((len(tokens) - 1) // BLOCK_TOKENS)))
        if names:
            answer = self.rank.call("match", keys=self.rank.keys(names), request=f"cmpl-{request}-0")
            if answer["lease"]:
                self.rank.call("release", lease=answer["lease"])
            if str(tokens) in self.seen:
                self.rank.store(names, range(len(names)))
        self.seen.append(str(tokens))

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def live() -> Iterator[Observed]:
    with observed_daemon(HPKV_KV_MEM_POOL_SIZE="8m") as made:
        yield made


@pytest.fixture
def engine(live: Observed) -> Iterator[Engine]:
    with Rank(live.socket, plain_shard(SIZE, 16), engine="e").hello().register(model="m").ready() as rank:
        made = Engine(rank)
        yield made
        made.close()
    live.ask("clear")


def test_a_prompt_is_stored_when_it_returns_and_pinned(live: Observed, engine: Engine, tmp_path: Path) -> None:
    tokens = tmp_path / "prompt.json"
    tokens.write_text(json.dumps(list(range(13))))
    done = hpkvd("warm", "--url", engine.url, "--tokens", str(tokens), "--pin", "--json", env=live.handle.env)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["model"], told["prompt_tokens"], told["asked_blocks"], told["hit_blocks"]) == ("tiny", 13, 3, 3)
    assert [pin["blocks"] for pin in told["pins"]] == [3]
    assert live.ask("pins")["pins"] == told["pins"]
    assert len(engine.seen) == 3


def test_a_text_from_a_file_through_a_url_with_its_version_and_a_key(
    live: Observed, engine: Engine, tmp_path: Path
) -> None:
    engine.key = "secret"
    text = tmp_path / "prompt.txt"
    text.write_text("a long prompt about nothing")
    arguments = ("warm", "--url", f"{engine.url}/v1/", "--file", str(text))
    done = hpkvd(*arguments, env=live.handle.env | {"VLLM_API_KEY": "secret", "http_proxy": "http://127.0.0.1:9"})
    assert done.stderr == "hpkvd: 6 of 6 blocks of the prompt are in memory\n"
    assert "answers 401" in refusal(*arguments, env=live.handle.env, exit_code=1)


def test_what_goes_wrong_is_told_with_what_to_do(live: Observed, engine: Engine, tmp_path: Path) -> None:
    env = live.handle.env
    short = ("warm", "--url", engine.url, "--prompt", "abc", "--timeout", "0.3")
    assert "more tokens than a block" in refusal(*short, env=env, exit_code=1)
    assert "check --url" in refusal("warm", "--url", "http://127.0.0.1:9", "--prompt", "abc", env=env, exit_code=69)
    assert "give --prompt" in refusal("warm", "--url", engine.url, env=env, exit_code=2)
    strange = tmp_path / "strange.json"
    strange.write_text('["a"]')
    assert "[1, 2, 3]" in refusal("warm", "--url", engine.url, "--tokens", str(strange), env=env, exit_code=2)
