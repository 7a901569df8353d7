"""Read fields of untrusted records. Each function returns None instead of raising."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any


def sub(value: Any, *keys: str) -> Any:
    """Return `value[k1][k2]...`, or None if a key is missing or a value on the way is not an object."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def blocks(content: Any) -> list[dict[str, Any]]:
    """Return message content as a list of blocks. A string becomes one text block; other content is dropped."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [b for b in content if isinstance(b, dict)] if isinstance(content, list) else []


def word(row: dict[str, Any], key: str = "type") -> str:
    """Return the string under `key`, or "" for any other value, so that the result is always hashable."""
    value = row.get(key)
    return value if isinstance(value, str) else ""


def seconds(stamp: Any) -> float | None:
    """Return an ISO 8601 time, or a number of seconds, as seconds since the epoch."""
    if isinstance(stamp, (int, float)) and not isinstance(stamp, bool):
        return float(stamp)
    if not isinstance(stamp, str):
        return None
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return None


def whole(value: Any) -> int | None:
    """Return the value if it is an integer, otherwise None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: Any) -> float | None:
    """Return the value if it is a finite number, otherwise None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:  # an integer beyond the range of a float
        return None
    return found if math.isfinite(found) else None


def total(usage: Any, *keys: str) -> int | None:
    """Return the sum of the counts under `keys`, or None if all are missing."""
    counts = [usage[key] for key in keys if type(usage.get(key)) is int] if isinstance(usage, dict) else []
    return sum(counts) if counts else None
