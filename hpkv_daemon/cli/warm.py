"""``hpkvd warm``: a prompt is computed by an engine, so that the daemon has it, and pinned if that is wanted.

Only the engine knows the tokens and the hashes of a prompt, so it is asked, and the daemon tells what came of it.
"""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import Any

import click

from hpkv_client.errors import HpkvError, UsageError
from hpkv_daemon.cli.engine_api import EngineApi
from hpkv_daemon.cli.options import (
    CLIENT_SETTINGS,
    Connection,
    as_json,
    client_settings,
    connected,
    reply_timeout,
    setting_options,
)
from hpkv_daemon.cli.output import emit, note

_ASK_AGAIN_SECONDS = 0.1


def prompt_of(text: str | None, file: Path | None, tokens: Path | None) -> str | list[int]:
    """The prompt: a text, the text of a file, or the token ids of a JSON file. Raises ``UsageError``."""
    if sum(given is not None for given in (text, file, tokens)) != 1:
        raise UsageError("warm needs one prompt", "give --prompt, --file or --tokens")
    if text is not None:
        return text
    if file is not None:
        return file.read_text()
    assert tokens is not None
    try:
        found = json.loads(tokens.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(type(token) is int for token in found):
        raise UsageError(f"{tokens} is not a JSON list of token ids", "write [1, 2, 3]")
    return found


def _warmed(
    connection: Connection, engine: EngineApi, model: str, prompt: str | list[int], deadline: float
) -> dict[str, Any]:
    """Ask for the prompt until the daemon finds all of it, or no more of it than before.

    An engine stores a prompt after it has answered, and its next look-up for it tells how much arrived.
    """
    before = 0
    while True:
        request = f"hpkvd-warm-{secrets.token_hex(8)}"
        tokens = engine.complete(model, prompt, request)
        # Engines put words of their own around the request's id.
        latest = connection.call("explain", {"last": 256})["lookups"]
        lookups = [lookup for lookup in latest if request in lookup["request"]]
        asked = sum(lookup["asked_blocks"] for lookup in lookups)
        hit = sum(lookup["hit_blocks"] for lookup in lookups)
        over = time.monotonic() > deadline
        if asked and (hit == asked or (over and hit == before)):
            return {"request": request, "prompt_tokens": tokens, "asked_blocks": asked, "hit_blocks": hit}
        if over:
            raise HpkvError(
                f"the daemon heard of {asked} blocks of the prompt and has {hit}",
                "'hpkvd clients' shows whether the engine uses this daemon; a prompt needs more tokens than a block",
            )
        before = hit
        time.sleep(_ASK_AGAIN_SECONDS)


@click.command()
@as_json
@reply_timeout(60.0)
@click.option("--url", required=True, help="Of the engine's API, as in http://127.0.0.1:8000.")
@click.option("--model", default="", help="As the engine serves it; its first one if not given.")
@click.option("--api-key", default="", envvar="VLLM_API_KEY", help="Of the engine's API (VLLM_API_KEY).")
@click.option("--prompt", "text", help="The prompt.")
@click.option("--file", type=click.Path(path_type=Path, exists=True), help="A file with the text of the prompt.")
@click.option("--tokens", type=click.Path(path_type=Path, exists=True), help="A JSON file with its token ids.")
@click.option("--pin", "pinned", is_flag=True, help="Pin it, too.")
@setting_options(*CLIENT_SETTINGS)
def warm(
    as_json: bool,
    timeout: float,
    url: str,
    model: str,
    api_key: str,
    text: str | None,
    file: Path | None,
    tokens: Path | None,
    pinned: bool,
    **flags: Any,
) -> None:
    """Let an engine compute a prompt, so that every engine of its model finds it here. Waits until it is stored."""
    prompt = prompt_of(text, file, tokens)
    engine = EngineApi(url, api_key, timeout)
    with connected(client_settings(flags).socket, timeout) as connection:
        served = model or engine.model()
        found = {"model": served} | _warmed(connection, engine, served, prompt, time.monotonic() + timeout)
        found["pins"] = connection.call("pin", {"request": found["request"]})["pins"] if pinned else []
    if as_json:
        emit(found, as_json)
    else:
        blocks = f"{found['hit_blocks']} of {found['asked_blocks']} blocks"
        names = ", ".join(pin["prefix"] for pin in found["pins"])
        note(f"{blocks} of the prompt are in memory{f', pinned as {names}' if names else ''}")
