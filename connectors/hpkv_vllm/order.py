"""Messages that must not leave before the GPU has done what was in the engine's stream when they were given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from hpkv_vllm.cuda_export import ComputeStream

Message = TypeVar("Message")


class StreamOrder(Generic[Message]):
    """A queue that looks at events and never waits for one. ``stream`` names the stream in which the engine computes.

    Raises ``CudaError`` when the engine's context is lost. The engine's main thread only.
    """

    def __init__(self, compute: ComputeStream, stream: Callable[[], int]) -> None:
        self._compute = compute
        self._stream = stream
        self._held: deque[tuple[int, Message]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, message: Message) -> None:
        """Keep it until everything that is in the stream now is done."""
        self._held.append((self._compute.mark(self._stream()), message))

    def passed(self) -> Iterator[Message]:
        """Those that may leave now, in the order in which they came."""
        while self._held and self._compute.passed(self._held[0][0]):
            moment, message = self._held.popleft()
            self._compute.forget(moment)
            yield message

    def take(self, matches: Callable[[Message], bool]) -> list[Message]:
        """Those that need not leave any more."""
        taken = [entry for entry in self._held if matches(entry[1])]
        self._held = deque(entry for entry in self._held if not matches(entry[1]))
        for moment, _ in taken:
            self._compute.forget(moment)
        return [message for _, message in taken]
