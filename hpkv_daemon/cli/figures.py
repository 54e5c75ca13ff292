"""Figures as people read them in narrow columns. JSON has the exact ones."""

from __future__ import annotations

_POWERS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float | None) -> str:
    """Bytes: ``1.5 GiB``; ``-`` for none."""
    if count is None:
        return "-"
    power = 0
    while count >= 1024 and power < len(_POWERS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.1f} {_POWERS[power]}" if power else f"{count:.0f} B"


def speed(bytes_per_second: float) -> str:
    """GB/s, decimal as links and memory are sold."""
    return f"{bytes_per_second / 1e9:.2f} GB/s"


def duration(seconds: float) -> str:
    """``4.2s``, ``3m07s``, ``2h05m``, ``3d04h``."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 24 else f"{hours // 24}d{hours % 24:02d}h"


def share(part: float, whole: float) -> str:
    """Percent; ``-`` of nothing."""
    return f"{100 * part / whole:.1f}%" if whole else "-"


def count(number: float | None) -> str:
    """``1,234``; ``-`` for what nobody knows."""
    if number is None:
        return "-"
    return f"{number:,.0f}"
