"""The settings of the running daemon, and the few that change while it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from hpkv_client.errors import ConfigError, HpkvError, UsageError
from hpkv_client.settings import Settings, parse_value, plain, report, setting_named
from hpkv_client.wire import Body, Request
from hpkv_daemon.service.access import require_owner
from hpkv_daemon.service.sessions import Peer

log = logging.getLogger(__name__)

ENGINES_OWN = frozenset({"submit_deadline_ms", "load_deadline_seconds", "load_when", "weights_id"})
"""Settings that engines read from their own environment."""
SET = "set while it runs"

Effect = Callable[[Any], None]
"""Makes a new value count; raises ``ConfigError``, with nothing changed, for one that cannot be."""
Loaded = tuple[Settings, dict[str, str]]
Load = Callable[[Callable[[Loaded | HpkvError], None]], None]
"""Reads all sources of settings anew, off the control loop, and calls back with what they say."""


class LiveSettings:
    """What the daemon runs with. Control loop only.

    ``load`` reads the configuration anew; without one it says what it said at the start.
    """

    def __init__(self, settings: Settings, origins: Mapping[str, str], load: Load | None = None) -> None:
        self.current = settings
        self._origins = dict(origins)
        self._effects: dict[str, Effect] = {}
        start = (settings, dict(origins))
        self._load = load or (lambda done: done(start))

    def on_change(self, name: str, effect: Effect) -> None:
        """This setting may change while the daemon runs; ``effect`` sees to it."""
        self._effects[name] = effect

    def describe(self) -> Body:
        """Every setting with its value and where that comes from."""
        return dict(report(self.current, self._origins))

    def set(self, name: str, text: str) -> Body:
        """Change one setting until the next ``reload`` or restart. Raises ``UsageError`` or ``ConfigError``."""
        setting = setting_named(name)
        if setting.name in ENGINES_OWN:
            raise UsageError(
                f"{setting.name} is read by engines, not by hpkvd", f"set {setting.env} where the engine is started"
            )
        if setting.name not in self._effects:
            raise UsageError(
                f"{setting.name} cannot change while hpkvd runs",
                f"set it in {self.current.config} and run 'hpkvd restart'",
            )
        before = plain(setting.name, getattr(self.current, setting.name))
        self._apply(setting.name, parse_value(setting.name, text, setting.name), SET)
        return {"name": setting.key, "before": before, "now": plain(setting.name, getattr(self.current, setting.name))}

    def _apply(self, name: str, value: Any, origin: str) -> None:
        self._effects[name](value)
        self.current = replace(self.current, **{name: value})
        self._origins[name] = origin

    def reload(self, done: Callable[[Body | HpkvError], None]) -> None:
        """Read the configuration anew and apply what may change; ``done`` hears what did, and what needs a restart."""

        def loaded(found: Loaded | HpkvError) -> None:
            if isinstance(found, HpkvError):
                log.warning("the configuration was not read anew: %s", found)
                done(found)
                return
            try:
                done(self._adopt(*found))
            except ConfigError as problem:
                log.warning("the configuration was not applied in full: %s", problem)
                done(problem)

        self._load(loaded)

    def _adopt(self, fresh: Settings, origins: Mapping[str, str]) -> Body:
        changed, waiting = [], []
        for name in (field.name for field in fields(Settings)):
            before, now = getattr(self.current, name), getattr(fresh, name)
            if name in self._effects and (before != now or self._origins.get(name) != origins.get(name)):
                self._apply(name, now, origins.get(name, ""))
            if before == now:
                continue
            if name in self._effects:
                changed.append(_change(name, before, now))
            elif name not in ENGINES_OWN:
                waiting.append(_change(name, before, now))
        names = ", ".join(str(change["name"]) for change in changed) or "nothing changed"
        late = ", ".join(str(change["name"]) for change in waiting)
        log.info("configuration read anew: %s%s", names, f"; after a restart only: {late}" if late else "")
        return {"changed": changed, "needs_restart": waiting}


def _change(name: str, before: object, now: object) -> Body:
    return {"name": setting_named(name).key, "before": plain(name, before), "now": plain(name, now)}


Answer = Callable[[bytes, int, Body | HpkvError], None]
"""Sends a deferred reply: (identity, request id, body or error)."""


class SettingVerbs:
    """What operators ask about settings."""

    def __init__(self, live: LiveSettings, answer: Answer) -> None:
        self._live = live
        self._answer = answer
        self.verbs: dict[str, Callable[[Peer, Request], Body | None]] = {
            "config": self._config,
            "set": self._set,
            "reload": self._reload,
        }
        """Verb -> what answers it, now or later; raises ``HpkvError``."""

    def _config(self, peer: Peer, request: Request) -> Body:  # noqa: ARG002
        return self._live.describe()

    def _set(self, peer: Peer, request: Request) -> Body:
        require_owner(peer, "change settings")
        changed = self._live.set(request.body["name"], request.body["value"])
        log.info("%s is now %s, by uid %d", changed["name"], changed["now"], peer.uid)
        return changed

    def _reload(self, peer: Peer, request: Request) -> None:
        require_owner(peer, "reload the configuration")
        self._live.reload(lambda result: self._answer(peer.identity, request.id, result))
