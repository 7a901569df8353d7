"""The output of `claude -p --output-format stream-json --verbose`."""

from __future__ import annotations

from typing import Any

from evals.transcripts.canonical import MAIN, Transcript
from evals.transcripts.claude_lines import Talk
from evals.transcripts.fields import number, seconds, total, whole, word
from evals.transcripts.source import Source
from evals.transcripts.transcript_builder import Tape

_LIMITS = ("error_max_turns", "error_max_budget_usd")
_QUIET = frozenset({"stream_event", "rate_limit_event", "system", "auth_status", "tool_progress"})


def claims(source: Source) -> bool:
    """Lines carry `session_id`; there is an init, a result, or a message with `parent_tool_use_id`."""
    rows = source.shape if isinstance(source.shape, list) else [source.shape]
    early = [r for r in rows[:50] if isinstance(r, dict) and "session_id" in r]
    marks = (_is_init, _is_result, lambda r: "message" in r and "parent_tool_use_id" in r)
    return any(mark(row) for row in early for mark in marks)


def _is_init(row: dict[str, Any]) -> bool:
    return row.get("type") == "system" and row.get("subtype") == "init"


def _is_result(row: dict[str, Any]) -> bool:
    return row.get("type") == "result" and "subtype" in row


def load(source: Source) -> list[Transcript]:
    """One transcript; without the closing `result` line it is cut off."""
    tape = Tape("claude_stream", bare=source.bare)
    talk = Talk(tape)
    closed = False
    for line, row in source.rows:
        closed = closed or _is_result(row)
        kind = word(row)
        if kind in ("user", "assistant") and isinstance(row.get("message"), dict):
            agent = str(row.get("parent_tool_use_id") or MAIN)
            role = "meta" if row.get("isSynthetic") else kind
            at = seconds(row.get("timestamp"))
            talk.message(kind, row["message"], role, agent, at, row.get("tool_use_result"), line)
        elif _is_init(row):
            tape.meta.session, tape.meta.model = str(row.get("session_id", "")), str(row.get("model", ""))
            servers = row.get("mcp_servers")
            rows = servers if isinstance(servers, list) else []
            tape.meta.servers = tuple(str(s.get("name")) for s in rows if isinstance(s, dict))
        elif _is_result(row):
            _end(tape, row)
        elif kind in _QUIET:
            tape.ignore(f"{kind}/{row.get('subtype', '')}".rstrip("/"))
        else:
            tape.problem("unreadable", f"a line of the unknown type {kind!r}", line)
    if not closed:
        tape.problem("unfinished", "there is no `result` line: the stream was cut off")
    talk.close()
    return [tape.finish()]


def _end(tape: Tape, row: dict[str, Any]) -> None:
    """Note how the session ended and what it used, as the closing `result` line has it."""
    subtype = str(row.get("subtype", ""))
    if subtype in _LIMITS:
        tape.end("limit", subtype)
    elif row.get("is_error") or subtype != "success":
        tape.end("error", f"{subtype}: {row.get('result') or row.get('errors') or ''}")
    else:
        tape.end("completed")
    denied = row.get("permission_denials")
    tape.meta.denied = len(denied) if isinstance(denied, list) else 0
    tape.meta.usd, tape.meta.turns = number(row.get("total_cost_usd")), whole(row.get("num_turns"))
    keys = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    tape.meta.tokens = total(row.get("usage"), *keys)
