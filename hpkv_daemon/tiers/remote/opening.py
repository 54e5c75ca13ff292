"""Which backend a URL means. Packages are imported only then: no daemon needs those of stores it does not use."""

from __future__ import annotations

import importlib.util
import mmap

from hpkv_client.errors import ConfigError
from hpkv_daemon.tiers.remote.backend import Backend

_NEEDED = {
    "s3": ("obstore", "object"),
    "gs": ("obstore", "object"),
    "az": ("obstore", "object"),
    "file": ("obstore", "object"),
    "mooncake": ("mooncake", "mooncake"),
}
"""Scheme -> module and the extra of HPKV that brings it."""


def require_packages(url: str) -> None:
    """Raise ``ConfigError`` that says what to install if the backend of this URL cannot be loaded."""
    scheme = url.partition(":")[0]
    module, extra = _NEEDED[scheme]
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{scheme}:// needs the package {module}", f"run 'pip install hpkv[{extra}]'")


def open_backend(url: str, pool: mmap.mmap | None = None) -> Backend:
    """The backend of a URL that ``parse_remote`` took. ``pool``: memory that pieces lie in. Raises ``ConfigError``."""
    require_packages(url)
    if url.startswith("mooncake:"):
        from hpkv_daemon.tiers.remote.mooncake import MooncakeBackend

        return MooncakeBackend(url, pool)
    from hpkv_daemon.tiers.remote.objects import ObjectBackend

    return ObjectBackend(url)
