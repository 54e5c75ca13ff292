"""Pinning by what operators see: prefixes that are hot, and requests that were looked up."""

from __future__ import annotations

import logging
from collections.abc import Callable

from hpkv_client.errors import UsageError
from hpkv_client.wire import Body, Request
from hpkv_daemon.core.pinned import PinnedPrefix
from hpkv_daemon.core.store import BlockStore
from hpkv_daemon.service.access import require_owner
from hpkv_daemon.service.explain import Explanations, prefix_name
from hpkv_daemon.service.report import fitted
from hpkv_daemon.service.sessions import Peer

log = logging.getLogger(__name__)


class PinVerbs:
    """``pins``, ``pin`` and ``unpin``. Control loop only."""

    def __init__(self, store: BlockStore, explanations: Explanations) -> None:
        self._store = store
        self._explanations = explanations
        self.verbs: dict[str, Callable[[Peer, Request], Body | None]] = {
            "pins": self._pins,
            "pin": self._pin,
            "unpin": self._unpin,
        }
        """Verb -> what answers it; raises ``HpkvError``."""

    def _described(self, prefix: PinnedPrefix) -> Body:
        home = self._store.blocks.namespaces[prefix.namespace]
        return {
            "prefix": prefix_name(prefix.key),
            "namespace": home.fingerprint.hex(),
            "model": self._explanations.model_of(prefix.namespace) or home.tenant,
            "blocks": prefix.blocks,
            "bytes": prefix.blocks * home.block_bytes,
        }

    def _pins(self, peer: Peer, request: Request) -> Body:  # noqa: ARG002
        pinned = self._store.pinned
        return fitted(
            {
                "pins": [self._described(prefix) for prefix in pinned],
                "pinned_bytes": pinned.held_bytes,
                "limit_bytes": pinned.limit_bytes,
            }
        )

    def _pin(self, peer: Peer, request: Request) -> Body:
        require_owner(peer, "pin prefixes")
        prefix, asker = request.body["prefix"], request.body["request"]
        if bool(prefix) == bool(asker):
            raise UsageError("pin needs either a prefix or a request", "see 'hpkvd hot' and 'hpkvd explain'")
        found = self._explanations.prefixes_named(prefix) if prefix else self._explanations.prefixes_of(asker)
        pinned = [self._store.pinned.pin(namespace, key) for namespace, key in found]
        log.info("pinned %d prefixes for uid %d", len(pinned), peer.uid)
        return {"pins": [self._described(one) for one in pinned]}

    def _unpin(self, peer: Peer, request: Request) -> Body:
        require_owner(peer, "unpin prefixes")
        name = request.body["prefix"]
        found = [one for one in self._store.pinned if name in ("", prefix_name(one.key))]
        if name and not found:
            raise UsageError(f"no pinned prefix {name!r}", "see 'hpkvd pins'")
        for one in found:
            self._store.pinned.unpin(one)
        log.info("unpinned %d prefixes for uid %d", len(found), peer.uid)
        return {"unpinned": len(found)}
