"""A daemon's answers, made up: every view is tested on the same ones. Tests hold them against real answers."""

from __future__ import annotations

from typing import Any

INFO: dict[str, Any] = {
    "pid": 4242,
    "epoch": "00112233445566ff",
    "version": "0.1.0",
    "instance": "",
    "uptime_seconds": 93784.5,
    "socket": "/run/hpkv/hpkvd.sock",
    "pool": {
        "path": "/dev/shm/hpkv/pool",
        "size_bytes": 8 << 30,
        "policy": "lru",
        "extent_bytes": 16 << 20,
        "extents": 512,
        "free_extents": 64,
        "restored_blocks": 0,
        "resident_blocks": 800,
        "resident_bytes": 800 * (8 << 20),
        "reserved_blocks": 2,
        "pinned_blocks": 3,
    },
    "namespaces": [
        {"id": "ab" * 32, "model": "tiny", "block_bytes": 8 << 10, "block_tokens": 64, "blocks": 1000},
        {"id": "cd" * 32, "model": "llama [8b]", "block_bytes": 8 << 20, "block_tokens": 64, "blocks": 800},
    ],
    "quotas": [{"model": "(all others)", "held_bytes": 800 << 23, "reserved_bytes": 0, "maximum_bytes": None}],
    "engines": [
        {
            "engine": "e1",
            "model": "llama [8b]",
            "strategy": "TP2",
            "world": 2,
            "ready": False,
            "problem": "",
            "namespace": None,
            "block_tokens": 64,
            "block_bytes": 8 << 20,
            "counters": {"lookups": 7},
            "ranks": [
                {
                    "rank": 0,
                    "place": "tp0",
                    "pid": 77,
                    "device": "cpu",
                    "layers": 32,
                    "first_layer": "l.0",
                    "last_layer": "l.31",
                    "block_bytes": 4 << 20,
                    "replicas": 1,
                    "replica": 0,
                    "written_blocks": 9,
                }
            ],
        }
    ],
    "sessions": [
        {
            "name": "worker",
            "engine": "e1",
            "pid": 77,
            "uid": 1000,
            "host": "",
            "rank": 0,
            "age_seconds": 61.0,
            "idle_seconds": 0.25,
        },
        {
            "name": "scheduler",
            "engine": "e1",
            "pid": 0,
            "uid": -1,
            "host": "10.0.0.2",
            "rank": None,
            "age_seconds": 7300.0,
            "idle_seconds": 1.0,
        },
    ],
    "leases": {"count": 1},
    "movers": [{"device": "cpu", "pid": 4300, "alive": True, "jobs": 0}],
    "storage": {
        "state": "ready",
        "reason": "",
        "budget_bytes": 100 << 30,
        "used_bytes": 25 << 30,
        "live_bytes": 20 << 30,
        "blocks": 2500,
        "queued_blocks": 0,
        "queued_bytes": 0,
        "pid": 4301,
    },
    "remote": {"state": "ready"},
}

LEASES: dict[str, Any] = {
    "leases": [{"engine": "e1", "model": "llama [8b]", "blocks": 1200, "loads": 1, "seconds_left": 28.5}]
}


HOT: dict[str, Any] = {
    "prefixes": [
        {
            "prefix": "0123456789abcdef",
            "namespace": "cd" * 32,
            "model": "llama [8b]",
            "uses": 12345,
            "resident": True,
            "blocks": 32,
            "bytes": 32 * (8 << 20),
        },
        {
            "prefix": "fedcba9876543210",
            "namespace": "ab" * 32,
            "model": "tiny",
            "uses": 7,
            "resident": False,
            "blocks": None,
            "bytes": None,
        },
    ]
}

PINS: dict[str, Any] = {
    "pins": [
        {
            "prefix": "0123456789abcdef",
            "namespace": "cd" * 32,
            "model": "llama [8b]",
            "blocks": 32,
            "bytes": 32 * (8 << 20),
        }
    ],
    "pinned_bytes": 32 * (8 << 20),
    "limit_bytes": 2 << 30,
}

EVENTS: list[dict[str, Any]] = [
    {"age_seconds": 4.5, "kind": "opened", "engine": "e1", "name": "worker", "pid": 77, "uid": 1000},
    {
        "age_seconds": 0.25,
        "kind": "lookup",
        "engine": "e1",
        "request": "cmpl-1",
        "asked": 10,
        "hit": 8,
        "coming": 0,
        "reason": "evicted: the pool was full",
    },
    {"age_seconds": 0.1, "kind": "loaded", "engine": "e1", "rank": 0, "blocks": 8, "bytes": 8 << 20, "seconds": 0.002},
    {"age_seconds": 0.0, "kind": "evicted", "evicted_blocks": 3, "evicted_bytes": 3 << 20},
]

BENCH: dict[str, Any] = {
    "block_bytes": 1 << 20,
    "blocks": 64,
    "memcpy_bytes_per_second": 10_000_000_000,
    "put_bytes_per_second": 8_000_000_000,
    "get_bytes_per_second": 9_000_000_000,
    "put_to_memcpy_ratio": 0.8,
    "get_to_memcpy_ratio": 0.9,
}


def stats(seconds: int) -> dict[str, Any]:
    """The counters of that daemon so many seconds after it began to be used."""
    return {
        "uptime_seconds": 93784.5 + seconds,
        "sessions": 2,
        "leases": 1,
        "requests": 1500 * seconds,
        "requested_blocks": 400 * seconds,
        "matched_blocks": 300 * seconds,
        "loaded_bytes": 2_500_000_000 * seconds,
        "stored_bytes": 1_250_000_000 * seconds,
        "evicted_blocks": 12 * seconds,
        "storage_read_bytes": 800_000_000 * seconds,
        "storage_written_bytes": 640_000_000 * seconds,
        "storage_evicted_blocks": 3 * seconds,
    }
