"""Load the output of `codex exec --json`, which names the server, the error and the status of each call."""

from __future__ import annotations

from typing import Any

from evals.transcripts.canonical import Transcript
from evals.transcripts.fields import sub, total, word
from evals.transcripts.source import Source
from evals.transcripts.transcript_builder import TranscriptBuilder

_QUIET = frozenset({"reasoning", "file_change", "web_search", "todo_list", "error", "collab_tool_call"})


def claims(source: Source) -> bool:
    """Return whether the first line is `thread.started`, or a turn or item event if the start was not recorded."""
    kind = source.head.get("type")
    return isinstance(kind, str) and kind.startswith(("thread.", "turn.", "item.")) and "payload" not in source.head


def load(source: Source) -> list[Transcript]:
    """Load one transcript; it is incomplete without a closing turn event."""
    builder = TranscriptBuilder("codex_exec", bare=source.bare)
    running: dict[str, int] = {}  # shell commands that have not ended yet, according to Codex
    for line, row in source.rows:
        kind = row.get("type")
        if isinstance(kind, str) and kind.startswith("item.") and isinstance(row.get("item"), dict):
            item = row["item"]
            _item(builder, kind, item, line)
            if word(item) == "command_execution" and isinstance(item.get("id"), str):
                if kind == "item.completed":
                    running.pop(item["id"], None)
                else:
                    running[item["id"]] = line
        else:
            _turn(builder, str(kind), row, line)
    if any(row.get("type") == "turn.completed" for _, row in source.rows):
        for id, line in running.items():  # noqa: A001
            builder.result(id, "(it was still running when the session ended)", line=line)
    elif not any(row.get("type") in ("turn.failed", "error") for _, row in source.rows):
        builder.problem("unfinished", "no turn was completed: the stream was interrupted")
    return [builder.finish()]


def _turn(builder: TranscriptBuilder, kind: str, row: dict[str, Any], line: int) -> None:
    match kind:
        case "thread.started":
            builder.meta.session = str(row.get("thread_id", ""))
        case "turn.started":
            builder.meta.turns = (builder.meta.turns or 0) + 1
        case "turn.completed":
            used = total(row.get("usage"), "input_tokens", "output_tokens")
            builder.meta.tokens = used if builder.meta.tokens is None else builder.meta.tokens + (used or 0)
            builder.end("completed")
        case "turn.failed" | "error":
            builder.end("error", str(sub(row, "error", "message") or row.get("message") or kind))
        case _:
            builder.problem("unreadable", f"a line of unknown type {kind!r}", line)


def _item(builder: TranscriptBuilder, stage: str, item: dict[str, Any], line: int) -> None:
    kind, done = word(item), stage == "item.completed"
    if kind == "agent_message":
        if done:
            builder.say("assistant", item.get("text"))
    elif kind == "mcp_tool_call":
        server = item.get("server")
        where = server if isinstance(server, str) else None
        builder.call(item.get("id"), item.get("tool"), item.get("arguments"), server=where, line=line)
        if done:
            failed = item.get("status") != "completed" or item.get("error") is not None
            reply = item.get("result") if isinstance(item.get("result"), dict) else sub(item, "error", "message")
            builder.result(item.get("id"), reply, error=True if failed else None, line=line)
    elif kind == "command_execution":
        builder.call(item.get("id"), "shell", {"command": item.get("command")}, server="", line=line)
        if done:
            builder.result(item.get("id"), item.get("aggregated_output"), error=item.get("exit_code") != 0, line=line)
    elif kind in _QUIET:
        builder.ignore(kind)
    elif done:
        builder.problem("unreadable", f"an item of unknown type {kind!r}", line)
