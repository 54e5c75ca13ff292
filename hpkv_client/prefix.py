"""How long a prefix is usable when a model keeps its KV in several groups. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Found:
    """What the daemons hold of one group, as answers to a look-up of its keys from the start of the prompt.

    ``window_tokens`` is 0 for full attention, where ``leading`` blocks are resident; a group with a sliding window
    needs only the blocks under the window, and ``resident`` says of each block whether it is there.
    """

    block_tokens: int
    window_tokens: int = 0
    leading: int = 0
    resident: bytes = b""

    def window_blocks(self, tokens: int) -> range:
        """Blocks that a hit of so many tokens needs: those that hold any of the last ``window - 1`` tokens."""
        first = max(0, tokens - self.window_tokens + 1) // self.block_tokens
        return range(first, tokens // self.block_tokens)


def usable_tokens(groups: Sequence[Found], limit: int, alignment: int) -> int:
    """Most tokens, a multiple of ``alignment`` and at most ``limit``, for which every group has what it needs."""
    tokens = min([limit, *(group.leading * group.block_tokens for group in groups if not group.window_tokens)])
    tokens -= tokens % alignment
    windows = [group for group in groups if group.window_tokens]
    while tokens > 0:
        missing = [block for group in windows if (block := _last_missing(group, tokens)) is not None]
        if not missing:
            return tokens
        # The window of a shorter hit must end before the missing block.
        tokens = min(missing)
        tokens -= tokens % alignment
    return 0


def _last_missing(group: Found, tokens: int) -> int | None:
    """First token of the last block that the window needs and nobody has."""
    for block in reversed(group.window_blocks(tokens)):
        if block >= len(group.resident) or not group.resident[block]:
            return block * group.block_tokens
    return None
