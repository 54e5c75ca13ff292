"""Who may do what to the daemon itself."""

from __future__ import annotations

import os

from hpkv_client.errors import NotPermitted
from hpkv_daemon.service.sessions import Peer


def require_owner(peer: Peer, what: str) -> None:
    """Raise ``NotPermitted`` unless the peer is root or the daemon's own user."""
    if peer.uid not in (0, os.geteuid()):
        raise NotPermitted(f"uid {peer.uid} may not {what}", "run it as the owner of hpkvd")
