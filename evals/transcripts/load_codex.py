"""Codex rollout files (`~/.codex/sessions/YYYY/MM/DD/rollout-<time>-<id>.jsonl`).

Their results carry no error flag; that is why every reply of the server under test carries `ok`.
"""

from __future__ import annotations

import shlex
from typing import Any

from evals.transcripts.canonical import Transcript
from evals.transcripts.fields import blocks, seconds, sub, whole, word
from evals.transcripts.source import Source
from evals.transcripts.transcript_builder import Tape

_TYPES = ("session_meta", "response_item", "turn_context", "event_msg", "compacted")
_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")
_QUIET = frozenset({"reasoning", "web_search_call", "ghost_snapshot", "compaction"})


def claims(source: Source) -> bool:
    """The first line has `timestamp`, a known `type` and a `payload`."""
    head = source.head
    return head.get("type") in _TYPES and isinstance(head.get("payload"), dict) and "timestamp" in head


def load(source: Source) -> list[Transcript]:
    """One transcript. Words are taken from the response items; the event lines repeat them."""
    tape = Tape("codex", bare=source.bare)
    for line, row in source.rows:
        payload = row.get("payload")
        if not isinstance(payload, dict):
            tape.problem("unreadable", f"a {row.get('type')!r} line without a payload", line)
            continue
        kind, event, at = str(row.get("type")), payload.get("type", ""), seconds(row.get("timestamp"))
        if kind == "response_item":
            item(tape, payload, at, line)
            continue
        tape.ignore(f"{kind}/{event}".rstrip("/"))
        if kind == "session_meta":
            tape.meta.session = str(payload.get("id", ""))
        elif kind == "turn_context":
            tape.meta.model = str(payload.get("model", tape.meta.model))
            tape.meta.turns = (tape.meta.turns or 0) + 1
        elif event == "token_count":
            used = whole(sub(payload, "info", "total_token_usage", "total_tokens"))
            tape.meta.tokens = used if used is not None else tape.meta.tokens
        elif event == "task_complete" and isinstance(payload.get("last_agent_message"), str):
            tape.end("completed")
        elif event in ("turn_aborted", "task_aborted", "error", "stream_error"):
            tape.end("error", str(payload.get("message") or payload.get("reason") or event))
        _nested(tape, payload, at, line)
    return [tape.finish()]


def item(tape: Tape, payload: dict[str, Any], at: float | None, line: int) -> None:
    """One response item: a message, a call or a result. OpenAI's Responses API has the same items."""
    kind = word(payload) or ("message" if "role" in payload else "")
    if kind == "message":
        role = str(payload.get("role", ""))
        for block in blocks(payload.get("content")):
            tape.say("meta" if role in ("developer", "system") else role, block.get("text"))
    elif kind in _CALLS:
        args = payload.get("arguments", payload.get("action"))
        if kind == "custom_tool_call":
            args = {"input": payload.get("input")}
        name = payload.get("name", "local_shell")
        space = payload.get("namespace")
        mcp = isinstance(space, str) and space.startswith("mcp__")  # some versions end it with a mark, some don't
        full = f"{str(space).removesuffix('__')}__{name}" if mcp else name
        tape.call(payload.get("call_id"), full, args, at=at, line=line)
    elif kind in _RESULTS:
        tape.result(payload.get("call_id"), payload.get("output"), line=line)
    elif kind == "mcp_call":
        label, error = payload.get("server_label"), payload.get("error")
        server = label if isinstance(label, str) else None
        tape.call(payload.get("id"), payload.get("name"), payload.get("arguments"), server=server, at=at, line=line)
        reply = payload.get("output") if error is None else error
        tape.result(payload.get("id"), reply, error=error is not None, line=line)
    elif kind in _QUIET or not ({"call_id", "arguments"} & payload.keys()):
        tape.ignore(kind)
    else:
        tape.problem("unreadable", f"a call in an item of the unknown type {kind!r}", line)


def _nested(tape: Tape, payload: dict[str, Any], at: float | None, line: int) -> None:
    """A call that a script of the model made: where Codex lets it write scripts, calls are reported only when done."""
    done = payload.get("item")
    if payload.get("type") != "item_completed" or not isinstance(done, dict) or tape.knows(done.get("id")):
        return
    id, kind = done.get("id"), done.get("type")  # noqa: A001
    if kind == "McpToolCall":
        failed = done.get("status") != "completed" or None
        server = done.get("server")
        where = server if isinstance(server, str) else None
        tape.call(id, done.get("tool"), done.get("arguments"), server=where, at=at, line=line)
        reply = done.get("result") if isinstance(done.get("result"), dict) else sub(done, "error", "message")
        tape.result(id, reply, error=failed, line=line)
    elif kind == "CommandExecution":
        words = done.get("command")
        command = shlex.join(words) if isinstance(words, list) and all(isinstance(w, str) for w in words) else words
        tape.call(id, "shell", {"command": command}, server="", at=at, line=line)
        tape.result(id, done.get("aggregated_output"), error=done.get("exit_code") != 0, line=line)
