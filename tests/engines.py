"""Engines of one rank or of several, as tests of transfers make them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

from hpkv_client.types import Layer, RankShard, Run
from tests.support import Observed, Rank, plain_shard

_engines = count()


def engine_name() -> str:
    """One that no test used before."""
    return f"engine-{next(_engines)}"


def rank_of(live: Observed, block_bytes: int, blocks: int, **more: Any) -> Rank:
    """A ready engine of one rank with plain blocks."""
    return Rank(live.socket, plain_shard(block_bytes, blocks), engine=engine_name(), **more).register().ready()


def ready_engine(stack: ExitStack, ranks: Sequence[Rank]) -> list[Rank]:
    """Register all ranks of an engine."""
    for rank in ranks:
        stack.enter_context(rank).register()
    for rank in ranks:
        rank.ready()
    return list(ranks)


def store_all(ranks: Sequence[Rank], prefix_hashes: Sequence[bytes], blocks: Sequence[int], **more: Any) -> int:
    """One store over all ranks of an engine; how many blocks are kept in the end."""
    requests = [rank.ask_store(prefix_hashes, blocks, **more) for rank in ranks]
    answers = [rank.reply(request).result() for rank, request in zip(ranks, requests, strict=True)]
    return int(max(answer["kept"] for answer in answers))


def piece(offset: int, size: int, of: int = 100) -> RankShard:
    """A rank's share of a layer: one run."""
    return RankShard((Layer("layer.0", of, (Run(0, 0, size, offset, size),)),), 4)
