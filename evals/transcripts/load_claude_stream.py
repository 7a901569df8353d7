"""Load the output of `claude -p --output-format stream-json --verbose`."""

from __future__ import annotations

from typing import Any

from evals.transcripts.canonical import MAIN, Transcript
from evals.transcripts.claude_lines import MessageReader
from evals.transcripts.fields import number, seconds, total, whole, word
from evals.transcripts.source import Source
from evals.transcripts.transcript_builder import TranscriptBuilder

_LIMITS = ("error_max_turns", "error_max_budget_usd")
_QUIET = frozenset({"stream_event", "rate_limit_event", "system", "auth_status", "tool_progress"})


def claims(source: Source) -> bool:
    """Return whether the lines have `session_id`, and one is an init, a result, or a message with
    `parent_tool_use_id`.
    """
    rows = source.shape if isinstance(source.shape, list) else [source.shape]
    early = [r for r in rows[:50] if isinstance(r, dict) and "session_id" in r]
    marks = (_is_init, _is_result, lambda r: "message" in r and "parent_tool_use_id" in r)
    return any(mark(row) for row in early for mark in marks)


def _is_init(row: dict[str, Any]) -> bool:
    return row.get("type") == "system" and row.get("subtype") == "init"


def _is_result(row: dict[str, Any]) -> bool:
    return row.get("type") == "result" and "subtype" in row


def load(source: Source) -> list[Transcript]:
    """Load one transcript; it is incomplete without the closing `result` line."""
    builder = TranscriptBuilder("claude_stream", bare=source.bare)
    reader = MessageReader(builder)
    closed = False
    for line, row in source.rows:
        closed = closed or _is_result(row)
        kind = word(row)
        if kind in ("user", "assistant") and isinstance(row.get("message"), dict):
            agent = str(row.get("parent_tool_use_id") or MAIN)
            role = "meta" if row.get("isSynthetic") else kind
            at = seconds(row.get("timestamp"))
            reader.message(kind, row["message"], role, agent, at, row.get("tool_use_result"), line)
        elif _is_init(row):
            builder.meta.session, builder.meta.model = str(row.get("session_id", "")), str(row.get("model", ""))
            servers = row.get("mcp_servers")
            rows = servers if isinstance(servers, list) else []
            builder.meta.servers = tuple(str(s.get("name")) for s in rows if isinstance(s, dict))
        elif _is_result(row):
            _end(builder, row)
        elif kind in _QUIET:
            builder.ignore(f"{kind}/{row.get('subtype', '')}".rstrip("/"))
        else:
            builder.problem("unreadable", f"a line of unknown type {kind!r}", line)
    if not closed:
        builder.problem("unfinished", "the `result` line is missing: the stream was interrupted")
    reader.close()
    return [builder.finish()]


def _end(builder: TranscriptBuilder, row: dict[str, Any]) -> None:
    """Record the end of the session and its usage, from the closing `result` line."""
    subtype = str(row.get("subtype", ""))
    if subtype in _LIMITS:
        builder.end("limit", subtype)
    elif row.get("is_error") or subtype != "success":
        builder.end("error", f"{subtype}: {row.get('result') or row.get('errors') or ''}")
    else:
        builder.end("completed")
    denied = row.get("permission_denials")
    builder.meta.denied = len(denied) if isinstance(denied, list) else 0
    builder.meta.usd, builder.meta.turns = number(row.get("total_cost_usd")), whole(row.get("num_turns"))
    keys = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    builder.meta.tokens = total(row.get("usage"), *keys)
