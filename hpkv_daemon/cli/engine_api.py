"""The part of an engine's OpenAI-compatible API that ``hpkvd warm`` needs."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from hpkv_client.errors import HpkvError, Unreachable

_SHOWN = 300


class EngineApi:
    """Requests to one engine over HTTP, past any proxy. ``url`` without ``/v1``."""

    def __init__(self, url: str, api_key: str, timeout: float) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def model(self) -> str:
        """The first model that it serves. Raises like ``complete``."""
        models = self._call("/v1/models", None, {}).get("data") or [{}]
        return str(models[0].get("id", ""))

    def complete(self, model: str, prompt: str | list[int], request_id: str) -> int:
        """Let it compute a prompt and one token; how many tokens the prompt has.

        Raises ``Unreachable``, or ``HpkvError`` with what the engine says.
        """
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = self._call("/v1/completions", body, {"X-Request-Id": request_id})
        return int((answer.get("usage") or {}).get("prompt_tokens") or 0)

    def _call(self, path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers | headers)
        try:
            with self._opener.open(request, timeout=self._timeout) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as problem:
            said = problem.read(_SHOWN).decode(errors="replace").replace("\n", " ")
            raise HpkvError(f"{self._url}{path} answers {problem.code}: {said}", "see the engine's log") from None
        except (OSError, ValueError) as problem:
            raise Unreachable(f"no engine answers on {self._url}: {problem}", "check --url") from None
        if not isinstance(answer, dict):
            raise HpkvError(f"{self._url}{path} is no engine's API", "check --url")
        return answer
