"""Prepare ledger events for a reply. Text from a job, a machine or a platform is marked as quoted text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gpuwarden.core.sanitize import named

FOREIGN: Final = frozenset(
    {"why", "observation", "problems", "missing", "not_taken", "findings", "text", "unread", "aside", "refusal"}
)
"""Fields of event bodies whose values, at any depth, may contain text from outside gpuwarden."""
MAX_TEXT: Final = 1_200


def quoted_events(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return events for a reply, with foreign text quoted. The ledger itself stores the original text."""
    return [{**row, "body": _marked(row["body"], foreign=False)} for row in rows]


def _marked(value: Any, *, foreign: bool) -> Any:
    if isinstance(value, dict):
        return {named(k) if foreign else k: _marked(v, foreign=foreign or k in FOREIGN) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item, foreign=foreign) for item in value]
    return named(value, MAX_TEXT) if foreign and isinstance(value, str) else value
