"""Find lists of chat messages in a file, and distinguish OpenAI's format from Anthropic's."""

from __future__ import annotations

from typing import Any

from evals.transcripts.fields import blocks, word
from evals.transcripts.source import Source

_PARTS = frozenset({"tool_use", "tool_result", "mcp_tool_use", "mcp_tool_result"})


def messages(source: Source) -> list[tuple[int, Any]]:
    """Return (line, message) pairs from a list, an object with `messages`, or JSON lines; [] for anything else."""
    shape = source.shape
    if isinstance(shape, dict) and shape.keys().isdisjoint({"schema_version", "eval"}):
        shape = shape.get("messages", [shape])
    rows = list(enumerate(shape, 1)) if isinstance(shape, list) else []
    conversation = bool(rows) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for _, m in rows)
    marked = any(not {"uuid", "type"}.isdisjoint(m) for _, m in rows) if conversation else True
    return [] if marked else rows


def dialect(rows: list[tuple[int, Any]]) -> str:
    """Return `anthropic` if a message contains tool blocks, `openai` for other messages with roles."""
    parts = {word(b) for _, m in rows for b in blocks(m.get("content"))}
    return "anthropic" if parts & _PARTS else "openai"
