"""Whole namespaces, for who copies them out of the daemon or in."""

from __future__ import annotations

from collections.abc import Callable

from hpkv_client.errors import UsageError
from hpkv_client.types import KEY_BYTES
from hpkv_client.wire import Body, Request
from hpkv_daemon.core.index import NONE, State
from hpkv_daemon.core.store import BlockStore
from hpkv_daemon.service.access import require_owner
from hpkv_daemon.service.explain import Explanations
from hpkv_daemon.service.sessions import Peer

SLOTS_AT_A_TIME = 16_384
"""One answer looks at so many: a few milliseconds of the control loop, and a quarter of a frame."""
_NO_PARENT = bytes(KEY_BYTES)


class ArchiveVerbs:
    """``blocks``. Control loop only."""

    def __init__(self, store: BlockStore, explanations: Explanations) -> None:
        self._store = store
        self._explanations = explanations
        self.verbs: dict[str, Callable[[Peer, Request], Body | None]] = {"blocks": self._blocks}
        """Verb -> what answers it; raises ``HpkvError``."""

    def _blocks(self, peer: Peer, request: Request) -> Body:
        """Go through the pool slot by slot: what comes or leaves meanwhile may be told or not."""
        require_owner(peer, "list the blocks of others")
        wanted, first = request.body["namespace"], request.body["after"]
        number = self._store.find_namespace(wanted)
        if number is None:
            raise UsageError(f"no namespace {wanted.hex()}", "see 'hpkvd info'")
        blocks = self._store.blocks
        table, home = blocks.table, blocks.namespaces[number]
        end = min(first + SLOTS_AT_A_TIME, len(table.state))
        found = [
            slot
            for slot in range(first, end)
            if table.namespace[slot] == number and table.state[slot] == State.RESIDENT
        ]
        above = [table.parent[slot] for slot in found]
        return {
            "keys": b"".join(table.key_of(slot) for slot in found),
            "parents": b"".join(_NO_PARENT if slot == NONE else table.key_of(slot) for slot in above),
            "after": end if end < len(table.state) else 0,
            "model": self._explanations.model_of(number) or home.tenant,
            "block_bytes": home.block_bytes,
            "block_tokens": home.block_tokens,
            "fields": self._explanations.fields_of(number),
        }
