"""The output of `codex exec --json`: the best-shaped of the foreign formats, with servers, errors and states."""

from __future__ import annotations

from typing import Any

from evals.transcripts.canonical import Transcript
from evals.transcripts.fields import sub, total, word
from evals.transcripts.source import Source
from evals.transcripts.transcript_builder import Tape

_QUIET = frozenset({"reasoning", "file_change", "web_search", "todo_list", "error", "collab_tool_call"})


def claims(source: Source) -> bool:
    """The first line is `thread.started`, or a turn or item event where the start was not recorded."""
    kind = source.head.get("type")
    return isinstance(kind, str) and kind.startswith(("thread.", "turn.", "item.")) and "payload" not in source.head


def load(source: Source) -> list[Transcript]:
    """One transcript; without a closing turn event it is cut off."""
    tape = Tape("codex_exec", bare=source.bare)
    running: dict[str, int] = {}  # commands of the shell: Codex says nothing more of those that run when it ends
    for line, row in source.rows:
        kind = row.get("type")
        if isinstance(kind, str) and kind.startswith("item.") and isinstance(row.get("item"), dict):
            item = row["item"]
            _item(tape, kind, item, line)
            if word(item) == "command_execution" and isinstance(item.get("id"), str):
                if kind == "item.completed":
                    running.pop(item["id"], None)
                else:
                    running[item["id"]] = line
        else:
            _turn(tape, str(kind), row, line)
    if any(row.get("type") == "turn.completed" for _, row in source.rows):
        for id, line in running.items():  # noqa: A001
            tape.result(id, "(it was still running when the session ended)", line=line)
    elif not any(row.get("type") in ("turn.failed", "error") for _, row in source.rows):
        tape.problem("unfinished", "no turn was completed: the stream was cut off")
    return [tape.finish()]


def _turn(tape: Tape, kind: str, row: dict[str, Any], line: int) -> None:
    match kind:
        case "thread.started":
            tape.meta.session = str(row.get("thread_id", ""))
        case "turn.started":
            tape.meta.turns = (tape.meta.turns or 0) + 1
        case "turn.completed":
            used = total(row.get("usage"), "input_tokens", "output_tokens")
            tape.meta.tokens = used if tape.meta.tokens is None else tape.meta.tokens + (used or 0)
            tape.end("completed")
        case "turn.failed" | "error":
            tape.end("error", str(sub(row, "error", "message") or row.get("message") or kind))
        case _:
            tape.problem("unreadable", f"a line of the unknown type {kind!r}", line)


def _item(tape: Tape, stage: str, item: dict[str, Any], line: int) -> None:
    kind, done = word(item), stage == "item.completed"
    if kind == "agent_message":
        if done:
            tape.say("assistant", item.get("text"))
    elif kind == "mcp_tool_call":
        server = item.get("server")
        where = server if isinstance(server, str) else None
        tape.call(item.get("id"), item.get("tool"), item.get("arguments"), server=where, line=line)
        if done:
            failed = item.get("status") != "completed" or item.get("error") is not None
            reply = item.get("result") if isinstance(item.get("result"), dict) else sub(item, "error", "message")
            tape.result(item.get("id"), reply, error=True if failed else None, line=line)
    elif kind == "command_execution":
        tape.call(item.get("id"), "shell", {"command": item.get("command")}, server="", line=line)
        if done:
            tape.result(item.get("id"), item.get("aggregated_output"), error=item.get("exit_code") != 0, line=line)
    elif kind in _QUIET:
        tape.ignore(kind)
    elif done:
        tape.problem("unreadable", f"an item of the unknown type {kind!r}", line)
