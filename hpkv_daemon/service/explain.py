"""Why prompts missed: the latest look-ups, and where namespaces that could have served them differ."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hpkv_client.errors import UsageError
from hpkv_client.types import BlockKey, typed_digest
from hpkv_client.wire import Body
from hpkv_daemon.core.departures import REASONS
from hpkv_daemon.core.index import NONE, State
from hpkv_daemon.core.popularity import REMEMBERED, Popularity
from hpkv_daemon.core.store import BlockStore
from hpkv_daemon.service.engines import Engine
from hpkv_daemon.service.events import EventLog

REMEMBERED_LOOKUPS = 256
MOST_NAMESPACES = 8
"""Namespaces that one is compared with: those that differ least."""

_BEING_STORED = "being stored right now"
_WAITING = "stored, but the block before it is not yet"
_OTHER_CHAIN = "stored under another prefix"
_COMING = "being read from storage right now"
_NEVER = "never stored here, or too long ago to tell"
_NEVER_ANY = "nothing was ever stored in this namespace"


@dataclass(frozen=True, slots=True)
class Lookup:
    """One look-up. ``reason`` says why the first block that was not found was not; empty for a full hit."""

    moment: float
    engine: str
    request: str
    asked: int
    hit: int
    reason: str
    namespace: int | None = None
    deepest: BlockKey | None = None
    """The last block that was found."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """What a namespace is made of, as its engines told: names of fields and their values."""

    model: str
    fields: dict[str, str]


def prefix_name(key: BlockKey) -> str:
    """How operators name the prefix that ends with this block: the key itself stays inside."""
    return typed_digest("hpkv-prefix", key).hex()[:16]


class Explanations:
    """Remembers the latest look-ups, the prefixes found most, and every namespace. Control loop only."""

    def __init__(self, store: BlockStore, events: EventLog) -> None:
        self._store = store
        self._events = events
        self._popularity = Popularity()
        self._lookups: deque[Lookup] = deque(maxlen=REMEMBERED_LOOKUPS)
        self._namespaces: dict[int, Namespace] = {}

    def opened(self, number: int, engine: Engine) -> None:
        """An engine is complete in this namespace."""
        assert engine.layout is not None
        if engine.archive:
            self._namespaces.setdefault(number, Namespace(engine.model, engine.fields))
            return
        layout = typed_digest(engine.layout.description).hex()[:12]
        fields = engine.fields | {"block tokens": str(engine.block_tokens), "layout": f"#{layout}"}
        self._namespaces[number] = Namespace(engine.model, fields)

    def model_of(self, number: int) -> str:
        """The model of a namespace, empty if no engine told."""
        known = self._namespaces.get(number)
        return known.model if known else ""

    def fields_of(self, number: int) -> dict[str, str]:
        """What a namespace is made of, empty if no engine told."""
        known = self._namespaces.get(number)
        return known.fields if known else {}

    def looked_up(
        self, engine: Engine, request: str, keys: Sequence[BlockKey], hit: int, coming: int, moment: float
    ) -> None:
        """An engine asked for keys, of which the first ``hit`` were found, and ``coming`` more are being read."""
        reason = _COMING
        if hit == len(keys) or engine.namespace is None:
            reason = ""
        elif not coming:
            reason = self._why(engine.namespace, keys[hit])
        if hit and engine.namespace is not None:
            self._popularity.used(engine.namespace, keys[hit - 1])
        if self._events.followed:
            self._events.tell(
                "lookup", engine=engine.name, request=request, asked=len(keys), hit=hit, coming=coming, reason=reason
            )
        self._lookups.append(
            Lookup(
                moment, engine.name, request, len(keys), hit, reason, engine.namespace, keys[hit - 1] if hit else None
            )
        )

    def _why(self, namespace: int, key: BlockKey) -> str:
        blocks = self._store.blocks
        slot = blocks.find(namespace, key)
        if slot != NONE:
            known = {State.RESERVED: _BEING_STORED, State.COMPLETE: _WAITING}
            return known.get(State(blocks.table.state[slot]), _OTHER_CHAIN)
        reason = blocks.departures.why(key)
        if reason is not None:
            return REASONS[reason]
        return _NEVER if blocks.namespaces[namespace].used else _NEVER_ANY

    def describe(self, engine: str, request: str, last: int, now: float, engines: Sequence[Engine]) -> Body:
        """The body of ``explain``: look-ups, newest first, and namespaces beside those of the engines."""
        wanted = [
            {
                "age_seconds": round(now - lookup.moment, 3),
                "engine": lookup.engine,
                "request": lookup.request,
                "asked_blocks": lookup.asked,
                "hit_blocks": lookup.hit,
                "reason": lookup.reason,
            }
            for lookup in reversed(self._lookups)
            if engine in ("", lookup.engine) and request in ("", lookup.request)
        ]
        asked = [one for one in engines if one.namespace is not None and engine in ("", one.name)]
        return {
            "lookups": wanted[:last],
            "other_namespaces": [other for one in asked for other in self._others(one)],
        }

    def prefixes_named(self, name: str) -> list[tuple[int, BlockKey]]:
        """Namespace and last block of the prefix that ``hot`` shows under this name. Raises ``UsageError``."""
        found = [(home, key) for home, key, _ in self._popularity.most(REMEMBERED) if prefix_name(key) == name]
        if not found:
            raise UsageError(f"no prefix {name!r} is remembered", "see 'hpkvd hot'")
        return found

    def prefixes_of(self, request: str) -> list[tuple[int, BlockKey]]:
        """The same of what the latest look-ups found whose request's id has this text in it. Raises ``UsageError``."""
        named = [lookup for lookup in self._lookups if request in lookup.request]
        latest = [lookup for lookup in named if lookup.request == named[-1].request]
        found: dict[tuple[int, BlockKey], None] = {}
        for lookup in latest:
            if lookup.namespace is not None and lookup.deepest is not None:
                found[lookup.namespace, lookup.deepest] = None
        if not found:
            raise UsageError(f"no look-up of {request!r} found anything", "see 'hpkvd explain'")
        return list(found)

    def hot(self, last: int) -> Body:
        """The body of ``hot``: the prefixes that were found most."""
        blocks = self._store.blocks
        rows = []
        for number, key, uses in self._popularity.most(last):
            home, slot = blocks.namespaces[number], blocks.resident(number, key)
            here = slot != NONE
            rows.append(
                {
                    "prefix": prefix_name(key),
                    "namespace": home.fingerprint.hex(),
                    "model": self.model_of(number) or home.tenant,
                    "uses": uses,
                    "resident": here,
                    "blocks": blocks.table.depth[slot] + 1 if here else None,
                    "bytes": (blocks.table.depth[slot] + 1) * home.block_bytes if here else None,
                }
            )
        return {"prefixes": rows}

    def _others(self, engine: Engine) -> list[Body]:
        """Other namespaces that hold blocks, those that differ least first."""
        assert engine.namespace is not None
        mine = self._namespaces[engine.namespace]
        found = []
        for number, other in self._namespaces.items():
            blocks = len(self._store.blocks.namespaces[number].slots)
            names = sorted(mine.fields.keys() | other.fields.keys())
            differ = [name for name in names if mine.fields.get(name) != other.fields.get(name)]
            if number != engine.namespace and blocks:
                found.append((len(differ), number, other, blocks, differ))
        found.sort(key=lambda one: one[:2])
        return [
            {
                "engine": engine.name,
                "id": self._store.blocks.namespaces[number].fingerprint.hex(),
                "model": other.model,
                "blocks": blocks,
                "differs_in": ", ".join(
                    f"{name} ({mine.fields.get(name, 'none')} here, {other.fields.get(name, 'none')} there)"
                    for name in differ
                ),
            }
            for _, number, other, blocks, differ in found[:MOST_NAMESPACES]
        ]
