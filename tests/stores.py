"""Remote stores as tests need them: a real S3 server in a process of its own, and a remote tier that is open on one."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import obstore
from obstore.store import LocalStore, S3Store

from hpkv_client.memory import SharedMemory
from hpkv_client.types import typed_digest
from hpkv_daemon.tiers.base import BlockJob, Done, Event, Outcome, State
from hpkv_daemon.tiers.remote.format import object_name
from hpkv_daemon.tiers.remote.tier import RemoteTier
from tests.support import content, wait_until

SPACE = typed_digest("test", "remote")
"""A namespace."""
BLOCK_BYTES = 64 << 10
POOL_BYTES = 16 << 20
BUCKET = "blocks"
START_SECONDS = 60.0


def name(number: object) -> bytes:
    """A block key."""
    return typed_digest("test", "block", str(number))


class Folder:
    """A shared directory; ``objects`` looks at it from outside."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = path.as_uri()
        self.objects: Any = LocalStore(path)
        self.variables: dict[str, str] = {}


class S3Server:
    """moto's server on one port: it can be frozen, killed and started again, empty then. ``close`` it.

    ``variables`` are what makes a daemon use it: nothing of them is in a URL or a flag.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        with socket.socket() as probe:
            probe.bind((host, 0))
            self._address: tuple[str, int] = probe.getsockname()[:2]
        self._endpoint = "http://{}:{}".format(*self._address)
        self.url = f"s3://{BUCKET}/some/folder"
        self.variables = {
            "AWS_ACCESS_KEY_ID": "an-access-key",
            "AWS_SECRET_ACCESS_KEY": "a-secret-that-nobody-may-see",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self._endpoint,
        }
        self.objects: Any = S3Store(
            BUCKET,
            prefix="some/folder",
            endpoint=self._endpoint,
            access_key_id="tests",
            secret_access_key="tests",
            region="us-east-1",
            client_options={"allow_http": True},
        )
        self._process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        host, port = self._address
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._makes_bucket, START_SECONDS, "the S3 server did not start")
        return process

    def _makes_bucket(self) -> bool:
        try:
            self._send("PUT", f"/{BUCKET}", b"")
        except OSError:
            return False
        return True

    def _send(self, method: str, path: str, body: bytes) -> None:
        # Whoever it is: a request without a region goes to the server's first one.
        headers = {
            "Authorization": "AWS4-HMAC-SHA256 Credential=tests/20300101/us-east-1/s3/aws4_request",
            "Content-Type": "text/plain",
        }
        request = urllib.request.Request(self._endpoint + path, body, headers, method=method)
        with urllib.request.urlopen(request, timeout=10):
            pass

    def deny(self, everybody: bool = True) -> None:
        """Refuse every credential from now on; or take any again."""
        self._send("POST", "/moto-api/reset-auth", b"0" if everybody else b"inf")

    def freeze(self) -> None:
        """SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL: all its objects are gone."""
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """A new process on the same port."""
        self._process = self._spawn()

    def close(self) -> None:
        """End it."""
        self.kill()


class Remote:
    """A pool, and a remote tier that is open on a store. Time passes when it is told to. ``close`` it."""

    def __init__(self, url: str, variables: dict[str, str], **options: Any) -> None:
        self.memory = SharedMemory(POOL_BYTES)
        self.skew = 0.0
        """Seconds that the tier's clock is ahead."""
        self._hastened = time.monotonic()
        self.events: list[Event] = []
        handle = self.memory.handle
        self.tier = RemoteTier(url, handle.fd, handle.size, clock=lambda: time.monotonic() + self.skew, **options)
        before = dict(os.environ)
        os.environ.update(variables)
        try:
            self.tier.recover()
        finally:
            os.environ.clear()
            os.environ.update(before)
        self.until(lambda: self.tier.usage().state is State.READY, 60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the tier and drop the pool."""
        self.tier.close(5.0)
        self.memory.close()

    def kill(self) -> None:
        """Kill its process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.tier.usage().pid, signal.SIGKILL)

    def until(self, condition: Callable[[], Any], seconds: float = 30.0, what: str = "") -> Any:
        """Serve the tier until the condition is true."""
        deadline = time.monotonic() + seconds
        while not (answer := condition()):
            assert time.monotonic() < deadline, f"{what or condition} after {seconds} s: {self.tier.usage()}"
            self.tier.flush()
            select.select([self.tier], [], [], 0.05)
            self.events += self.tier.poll()
            self.tier.check()
        return answer

    def hasten(self) -> None:
        """Called again and again, it lets time pass three times as fast: its process has time to answer."""
        now = time.monotonic()
        self.skew += min(0.2, 2 * (now - self._hastened))
        self._hastened = now

    def state(self) -> State:
        """The tier's."""
        return self.tier.usage().state

    def counter(self, which: str) -> int:
        """One of the tier's counters."""
        return self.tier.usage().counters[which]

    def done(self, ticket: int | None, seconds: float = 30.0) -> Done:
        """Wait for the end of a batch."""
        assert ticket is not None, "refused"

        def over() -> list[Event]:
            return [each for each in self.events if isinstance(each, Done) and each.ticket == ticket]

        done = self.until(over, seconds, f"no end of {ticket}")[0]
        assert isinstance(done, Done)
        return done

    def jobs(self, numbers: Iterable[object], space: bytes = SPACE) -> list[BlockJob]:
        """One job per number, in one slot after another."""
        return [
            BlockJob(space, name(number), None, BLOCK_BYTES, slot * BLOCK_BYTES) for slot, number in enumerate(numbers)
        ]

    def ask_write(self, numbers: Iterable[object], space: bytes = SPACE) -> int | None:
        """Fill slots and begin to write them."""
        jobs = self.jobs(numbers, space)
        for job in jobs:
            self.memory.mapping[job.offset : job.offset + job.length] = content(space + job.key, job.length)
        return self.tier.write(jobs)

    def write(self, numbers: Iterable[object], space: bytes = SPACE) -> tuple[Outcome, ...]:
        """Write blocks and wait for it."""
        return self.done(self.ask_write(numbers, space)).outcomes

    def read(self, numbers: Sequence[object], space: bytes = SPACE, seconds: float = 30.0) -> tuple[Outcome, ...]:
        """Read blocks; what is OK has the right bytes."""
        jobs = self.jobs(numbers, space)
        for job in jobs:
            self.memory.mapping[job.offset : job.offset + job.length] = bytes(job.length)
        outcomes = self.done(self.tier.read(jobs), seconds).outcomes
        for job, outcome in zip(jobs, outcomes, strict=True):
            if outcome is Outcome.OK:
                found = self.memory.mapping[job.offset : job.offset + job.length]
                assert found == content(space + job.key, job.length), "foreign bytes were served"
        return outcomes

    def find(self, numbers: Iterable[object], space: bytes = SPACE, seconds: float = 30.0) -> int:
        """How many leading blocks the store has, once that is known."""
        keys = [name(number) for number in numbers]
        self.until(lambda: not self.tier.inquire(space, keys, True), seconds)
        return self.tier.match(space, keys)

    def find_each(self, numbers: Iterable[object], space: bytes = SPACE) -> list[bool]:
        """Which of these the store has, once that is known."""
        keys = [name(number) for number in numbers]
        self.until(lambda: not self.tier.inquire(space, keys, False))
        return self.tier.contains(space, keys)


def names_in(objects: Any) -> list[str]:
    """The names of all objects of a store."""
    return sorted(meta["path"] for batch in obstore.list(objects) for meta in batch)


def overwrite(objects: Any, number: object, change: Callable[[bytes], bytes], space: bytes = SPACE) -> None:
    """Replace the object of a block by something else, as a store that lies would."""
    path = object_name(space, name(number))
    before = bytes(obstore.get(objects, path).bytes())
    obstore.put(objects, path, change(before), use_multipart=False)
