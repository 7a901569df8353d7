"""Load sessions from OpenAI's Responses API: a flat list of messages, calls and outputs, without an error flag."""

from __future__ import annotations

from typing import Any

from evals.transcripts.canonical import Transcript
from evals.transcripts.fields import word
from evals.transcripts.load_codex import item
from evals.transcripts.source import Source
from evals.transcripts.transcript_builder import TranscriptBuilder

_MARKS = frozenset({"function_call", "function_call_output", "mcp_call", "custom_tool_call"})


def claims(source: Source) -> bool:
    """Return whether at least one item is a call or a call's output."""
    return any(isinstance(i, dict) and word(i) in _MARKS for i in _items(source))


def load(source: Source) -> list[Transcript]:
    """Load one transcript from a list, JSON lines, or an object with `input` and `output`."""
    builder = TranscriptBuilder("openai_responses", bare=source.bare)
    for line, entry in enumerate(_items(source), 1):
        if isinstance(entry, dict):
            item(builder, entry, None, line)
        else:
            builder.problem("unreadable", "an item that is not an object", line)
    return [builder.finish()]


def _items(source: Source) -> list[Any]:
    shape = source.shape
    if isinstance(shape, dict):
        parts = [shape.get("input"), shape.get("output")]
        user = [{"role": "user", "content": p} for p in parts[:1] if isinstance(p, str)]
        return [*user, *(entry for p in parts if isinstance(p, list) for entry in p)]
    return shape if isinstance(shape, list) else []
