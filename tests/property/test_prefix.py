"""The longest usable prefix against a search that tries every length."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hpkv_client.prefix import Found, usable_tokens

full = st.builds(Found, st.sampled_from([16, 32, 64]), st.just(0), st.integers(0, 12))
window = st.builds(
    Found,
    st.sampled_from([16, 32]),
    st.sampled_from([1, 17, 40, 128]),
    st.just(0),
    st.lists(st.booleans(), max_size=40).map(bytes),
)


def naive(groups: list[Found], limit: int, alignment: int) -> int:
    for tokens in range(limit // alignment * alignment, 0, -alignment):
        if all(_enough(group, tokens) for group in groups):
            return tokens
    return 0


def _enough(group: Found, tokens: int) -> bool:
    if not group.window_tokens:
        return group.leading * group.block_tokens >= tokens
    needed = {token // group.block_tokens for token in range(max(0, tokens - group.window_tokens + 1), tokens)}
    return all(block < len(group.resident) and group.resident[block] for block in needed)


@settings(deadline=None, max_examples=400)
@given(st.lists(full, min_size=1, max_size=2), st.lists(window, max_size=3), st.integers(0, 700))
def test_equals_trying_every_length(fulls: list[Found], windows: list[Found], limit: int) -> None:
    assert usable_tokens([*fulls, *windows], limit, 64) == naive([*fulls, *windows], limit, 64)


def test_a_window_needs_only_its_own_blocks() -> None:
    full_group, window_group = Found(64, 0, 10), Found(64, 128, 0, bytes([0, 0, 0, 0, 0, 0, 0, 0, 1, 1]))
    assert usable_tokens([full_group, window_group], 640, 64) == 640
    assert usable_tokens([full_group, window_group], 639, 64) == 0
