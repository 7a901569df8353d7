"""Load Codex rollout files (`~/.codex/sessions/YYYY/MM/DD/rollout-<time>-<id>.jsonl`).

Results in these files have no error flag, which is why every reply of the server under test has an `ok` field.
"""

from __future__ import annotations

import shlex
from typing import Any

from evals.transcripts.canonical import Transcript
from evals.transcripts.fields import blocks, seconds, sub, whole, word
from evals.transcripts.source import Source
from evals.transcripts.transcript_builder import TranscriptBuilder

_TYPES = ("session_meta", "response_item", "turn_context", "event_msg", "compacted")
_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")
_QUIET = frozenset({"reasoning", "web_search_call", "ghost_snapshot", "compaction"})


def claims(source: Source) -> bool:
    """Return whether the first line has `timestamp`, a known `type` and a `payload`."""
    head = source.head
    return head.get("type") in _TYPES and isinstance(head.get("payload"), dict) and "timestamp" in head


def load(source: Source) -> list[Transcript]:
    """Load one transcript. Messages are taken from the response items; the event lines repeat them."""
    builder = TranscriptBuilder("codex", bare=source.bare)
    for line, row in source.rows:
        payload = row.get("payload")
        if not isinstance(payload, dict):
            builder.problem("unreadable", f"a {row.get('type')!r} line without a payload", line)
            continue
        kind, event, at = str(row.get("type")), payload.get("type", ""), seconds(row.get("timestamp"))
        if kind == "response_item":
            item(builder, payload, at, line)
            continue
        builder.ignore(f"{kind}/{event}".rstrip("/"))
        if kind == "session_meta":
            builder.meta.session = str(payload.get("id", ""))
        elif kind == "turn_context":
            builder.meta.model = str(payload.get("model", builder.meta.model))
            builder.meta.turns = (builder.meta.turns or 0) + 1
        elif event == "token_count":
            used = whole(sub(payload, "info", "total_token_usage", "total_tokens"))
            builder.meta.tokens = used if used is not None else builder.meta.tokens
        elif event == "task_complete" and isinstance(payload.get("last_agent_message"), str):
            builder.end("completed")
        elif event in ("turn_aborted", "task_aborted", "error", "stream_error"):
            builder.end("error", str(payload.get("message") or payload.get("reason") or event))
        _nested(builder, payload, at, line)
    return [builder.finish()]


def item(builder: TranscriptBuilder, payload: dict[str, Any], at: float | None, line: int) -> None:
    """Add one response item: a message, a call or a result. OpenAI's Responses API has the same items."""
    kind = word(payload) or ("message" if "role" in payload else "")
    if kind == "message":
        role = str(payload.get("role", ""))
        for block in blocks(payload.get("content")):
            builder.say("meta" if role in ("developer", "system") else role, block.get("text"))
    elif kind in _CALLS:
        args = payload.get("arguments", payload.get("action"))
        if kind == "custom_tool_call":
            args = {"input": payload.get("input")}
        name = payload.get("name", "local_shell")
        space = payload.get("namespace")
        mcp = isinstance(space, str) and space.startswith("mcp__")  # some versions append a marker
        full = f"{str(space).removesuffix('__')}__{name}" if mcp else name
        builder.call(payload.get("call_id"), full, args, at=at, line=line)
    elif kind in _RESULTS:
        builder.result(payload.get("call_id"), payload.get("output"), line=line)
    elif kind == "mcp_call":
        label, error = payload.get("server_label"), payload.get("error")
        server = label if isinstance(label, str) else None
        builder.call(payload.get("id"), payload.get("name"), payload.get("arguments"), server=server, at=at, line=line)
        reply = payload.get("output") if error is None else error
        builder.result(payload.get("id"), reply, error=error is not None, line=line)
    elif kind in _QUIET or not ({"call_id", "arguments"} & payload.keys()):
        builder.ignore(kind)
    else:
        builder.problem("unreadable", f"a call in an item of unknown type {kind!r}", line)


def _nested(builder: TranscriptBuilder, payload: dict[str, Any], at: float | None, line: int) -> None:
    """Add a call made by a script that the model wrote. Codex reports these calls only after they end."""
    done = payload.get("item")
    if payload.get("type") != "item_completed" or not isinstance(done, dict) or builder.knows(done.get("id")):
        return
    id, kind = done.get("id"), done.get("type")  # noqa: A001
    if kind == "McpToolCall":
        failed = done.get("status") != "completed" or None
        server = done.get("server")
        where = server if isinstance(server, str) else None
        builder.call(id, done.get("tool"), done.get("arguments"), server=where, at=at, line=line)
        reply = done.get("result") if isinstance(done.get("result"), dict) else sub(done, "error", "message")
        builder.result(id, reply, error=failed, line=line)
    elif kind == "CommandExecution":
        words = done.get("command")
        command = shlex.join(words) if isinstance(words, list) and all(isinstance(w, str) for w in words) else words
        builder.call(id, "shell", {"command": command}, server="", at=at, line=line)
        builder.result(id, done.get("aggregated_output"), error=done.get("exit_code") != 0, line=line)
