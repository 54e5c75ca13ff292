"""What a scraper sees of a daemon."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from hpkv_client.transport import Channel

SECONDS = 10.0
_TERM = re.compile(r"([+-]?)\s*(\w+)(\{[^}]*\})?")


class Scraper:
    """Asks the HTTP server of the daemon on this channel."""

    def __init__(self, channel: Channel) -> None:
        self.place = channel.call("info", {}, SECONDS)["metrics"]
        assert self.place

    def get(self, path: str) -> tuple[int, str]:
        """Status and body."""
        return fetch(f"http://{self.place}{path}")

    def page(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and body of a page in JSON."""
        status, body = self.get(path)
        return status, json.loads(body)

    def metrics(self) -> Metrics:
        """All samples."""
        status, body = self.get("/metrics")
        assert status == 200, body
        return Metrics(body)


def fetch(url: str) -> tuple[int, str]:
    """Status and body, also of an answer that is an error."""
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as problem:
        with problem:
            return problem.code, problem.read().decode()


class Metrics:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self.samples = [sample for family in self.families for sample in family.samples]

    @property
    def names(self) -> set[str]:
        """Of all samples, also those of histograms."""
        return {sample.name for sample in self.samples}

    def sum(self, name: str, **labels: str) -> float:
        """Over all samples that have these labels."""
        found = [
            sample.value for sample in self.samples if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return sum(found)

    def values(self, label: str) -> set[str]:
        """That a label has anywhere."""
        return {sample.labels[label] for sample in self.samples if label in sample.labels}

    def evaluate(self, terms: str, labels: Mapping[str, str]) -> float:
        """A sum of metrics, as docs/metrics.md has them."""
        total = 0.0
        for sign, name, chosen in _TERM.findall(terms):
            more = dict(re.findall(r'(\w+)="([^"]*)"', chosen))
            total += (-1 if sign == "-" else 1) * self.sum(name, **labels, **more)
        return total


def invariants(text: str) -> Iterator[tuple[str, str, bool]]:
    """Both sides of every line of docs/metrics.md that says what must add up, and whether it needs quiet."""
    block = text.partition("## What must add up")[2].split("```")[1]
    for line in filter(None, block.splitlines()):
        left, _, right = line.partition("#")[0].partition(" = ")
        yield left, right, line.endswith("# settled")
