"""Object stores and shared directories, through obstore: ``s3://``, ``gs://``, ``az://``, ``file:///``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import obstore
from obstore import exceptions
from obstore.store import LocalStore, from_url

from hpkv_daemon.tiers.remote.backend import (
    CONNECT_SECONDS,
    MISSING,
    OK,
    REQUEST_SECONDS,
    Answer,
    BackendError,
    Fate,
    Piece,
)
from hpkv_daemon.tiers.remote.credentials import credentials_for

STREAMS = 16
"""Objects that are moved at once, and as many look-ups: a store far away needs many to be fast."""
_ENDPOINTS = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"), "az": ("AZURE_STORAGE_ENDPOINT",)}
_NO_ROOM = re.compile(r"os error (28|122)\b")
"""ENOSPC, EDQUOT."""
_DENIED = re.compile(r"os error (1|13|30)\b|\b40[13]\b")
_STATUS = re.compile(r"status code: (\d{3}[\w ]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://\S+")
_LONGEST = 160

Item = TypeVar("Item")


def describe(problem: BaseException) -> str:
    """A failure in one line, without any URL: there may be secrets in front of its host and behind its path."""
    whole = str(problem)
    status, code = _STATUS.search(whole), _CODE.search(whole)
    if status:
        return f"the store answers {status[1].strip()}" + (f" ({code[1]})" if code else "")
    first = _URL.sub("the store", whole.split("\n", 1)[0])
    return re.sub(r"^Object at location \S+ ", "", first)[:_LONGEST] or type(problem).__name__


def judge(problem: Exception) -> Answer:
    """What a failure of obstore means."""
    text = describe(problem)
    if isinstance(problem, FileNotFoundError):
        return Answer(Fate.MISSING, text)
    if isinstance(problem, exceptions.AlreadyExistsError | exceptions.PreconditionError):
        return Answer(Fate.EXISTS)
    if _NO_ROOM.search(str(problem)):
        return Answer(Fate.FULL, text)
    refused = isinstance(problem, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
    return Answer(Fate.DENIED if refused or _DENIED.search(text) else Fate.FAILED, text)


def open_store(url: str) -> Any:
    """The store of a URL. Raises ``BackendError``.

    Without TLS only if the endpoint, which is not part of the URL, says ``http://``.
    """
    scheme = url.partition(":")[0]
    try:
        if scheme == "file":
            # Not made if it is missing: where a file system should be mounted, nothing must be written beside it.
            return LocalStore.from_url(url)
        endpoint = next((os.environ[name] for name in _ENDPOINTS.get(scheme, ()) if os.environ.get(name)), "")
        plain = endpoint.startswith("http://")
        options: dict[str, Any] = dict(credentials_for(scheme, os.environ))
        if scheme == "s3" and not plain:
            # TLS and our own checksums protect the payload; a SHA-256 of it would cost more than both.
            options["unsigned_payload"] = True
        return from_url(
            url,
            client_options={
                "timeout": f"{REQUEST_SECONDS}s",
                "connect_timeout": f"{CONNECT_SECONDS}s",
                "allow_http": plain,
                "user_agent": "hpkv",
            },
            retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=REQUEST_SECONDS)},
            **options,
        )
    except (exceptions.BaseError, ValueError, OSError) as problem:
        raise BackendError(describe(problem)) from None


class ObjectBackend:
    """A ``Backend`` over one store of obstore. Opened when it is first needed, and again if that failed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._opened: Any = None
        self._movers = ThreadPoolExecutor(STREAMS, "move")
        self._lookups = ThreadPoolExecutor(STREAMS, "look-up")

    def _store(self) -> Any:
        if self._opened is None:
            self._opened = open_store(self._url)
        return self._opened

    def _each(
        self, pool: ThreadPoolExecutor, work: Callable[[Any, Item], Answer], items: Sequence[Item]
    ) -> list[Answer]:
        failed: list[Answer] = []

        def attempt(item: Item) -> Answer:
            if failed:
                # A store that does not answer is not waited for once more for each object.
                return failed[0]
            try:
                return work(self._store(), item)
            except BackendError as problem:
                answer = Answer(Fate.FAILED, str(problem))
            except (exceptions.BaseError, OSError) as problem:
                answer = judge(problem)
            if answer.fate is Fate.FAILED:
                failed.append(answer)
            return answer

        return list(pool.map(attempt, items)) if len(items) > 1 else [attempt(item) for item in items]

    def get(self, pieces: Sequence[Piece]) -> list[Answer]:
        """See ``Backend``."""
        return self._each(self._movers, _get, pieces)

    def put(self, pieces: Sequence[Piece]) -> list[Answer]:
        """See ``Backend``."""
        return self._each(self._movers, _put, pieces)

    def exists(self, names: Sequence[str]) -> list[Answer]:
        """See ``Backend``."""
        return self._each(self._lookups, _exists, names)

    def delete(self, names: Sequence[str]) -> list[Answer]:
        """See ``Backend``."""
        return self._each(self._lookups, _delete, names)

    def clear(self, folder: str) -> int:
        """See ``Backend``."""
        deleted = 0
        for batch in self._listed(folder):
            for answer in self.delete([name for name, _ in batch]):
                if answer.fate is not Fate.OK:
                    raise BackendError(answer.problem)
                deleted += 1
        return deleted

    def listing(self, folder: str) -> Iterator[tuple[str, int]]:
        """See ``Backend``."""
        for batch in self._listed(folder):
            yield from batch

    def _listed(self, folder: str) -> Iterator[list[tuple[str, int]]]:
        try:
            for batch in obstore.list(self._store(), prefix=folder or None):
                yield [(str(meta["path"]), int(meta["size"])) for meta in batch]
        except FileNotFoundError:
            return
        except (exceptions.BaseError, OSError) as problem:
            raise BackendError(describe(problem)) from None

    def close(self) -> None:
        """See ``Backend``."""
        self._movers.shutdown(cancel_futures=True)
        self._lookups.shutdown(cancel_futures=True)


def _get(store: Any, piece: Piece) -> Answer:
    found = obstore.get(store, piece.name)
    header, wanted = len(piece.header), len(piece.header) + len(piece.payload)
    if found.meta["size"] != wanted:
        return Answer(Fate.BAD, f"the object has {found.meta['size']} bytes, not {wanted}")
    body = memoryview(found.bytes())
    if len(body) != wanted:
        return Answer(Fate.BAD, f"{len(body)} bytes came, not {wanted}")
    piece.header[:] = body[:header]
    # The only copy, and one that lets other threads run.
    np.copyto(np.frombuffer(piece.payload, np.uint8), np.frombuffer(body[header:], np.uint8))
    return OK


def _put(store: Any, piece: Piece) -> Answer:
    obstore.put(store, piece.name, [piece.header, piece.payload], mode="create", use_multipart=False)
    return OK


def _exists(store: Any, name: str) -> Answer:
    try:
        obstore.head(store, name)
    except FileNotFoundError:
        return MISSING
    return OK


def _delete(store: Any, name: str) -> Answer:
    try:
        obstore.delete(store, name)
    except FileNotFoundError:
        return OK
    return OK
