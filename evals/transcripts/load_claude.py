"""Load Claude Code session files (`~/.claude/projects/<folder>/<session>.jsonl`) and the files of their subagents.

Abandoned branches of a session are kept, because the calls in them were made and paid for even if the user rewound the
session later.
"""

from __future__ import annotations

from typing import Any

from evals.transcripts.canonical import MAIN, Transcript
from evals.transcripts.claude_lines import MessageReader
from evals.transcripts.fields import seconds, word
from evals.transcripts.source import Source
from evals.transcripts.transcript_builder import TranscriptBuilder

_TALK = ("user", "assistant")


def claims(source: Source) -> bool:
    """Return whether one of the first lines has `uuid`, `sessionId` and `message`, without the keys of stream-json."""
    rows = source.shape if isinstance(source.shape, list) else [source.shape]
    early = [r for r in rows[:200] if isinstance(r, dict)]
    return any(r.get("type") in _TALK and "uuid" in r and "sessionId" in r and "message" in r for r in early)


_Line = tuple[str, int, dict[str, Any], str]
"""File, line, row, agent."""


def load(source: Source) -> list[Transcript]:
    """Load one transcript. Lines from subagents are merged by time."""
    builder, name = TranscriptBuilder("claude", bare=source.bare), source.path.name
    lines: list[_Line] = []
    for number, row in source.rows:
        sidechain = row.get("isSidechain") is True
        lines.append((name, number, row, str(row.get("agentId") or "sidechain") if sidechain else MAIN))
    for path in sorted((source.path.parent / source.path.stem / "subagents").glob("**/agent-*.jsonl")):
        extra, agent = Source(path), path.stem.removeprefix("agent-")
        lines += [(path.name, n, row, agent) for n, row in extra.rows]
        source.problems += extra.problems
    if any(agent != MAIN for *_, agent in lines):
        lines = _by_time(builder, lines)
    reader = MessageReader(builder)
    for builder.file, number, row, agent in lines:
        kind = word(row)
        if kind in _TALK and isinstance(row.get("message"), dict):
            builder.meta.session = builder.meta.session or str(row.get("sessionId", ""))
            role = "meta" if row.get("isMeta") or row.get("isCompactSummary") else kind
            at = seconds(row.get("timestamp"))
            reader.message(kind, row["message"], role, agent, at, row.get("toolUseResult"), number)
        elif "message" in row and kind != "progress":
            builder.problem("unreadable", f"a line of the unknown type {kind!r} has a message", number)
        else:
            builder.ignore(kind)
    builder.file = ""
    reader.close()
    return [builder.finish()]


def _by_time(builder: TranscriptBuilder, lines: list[_Line]) -> list[_Line]:
    """Merge the lines of several files by time; a line without a time keeps its position in its file."""
    timed, last = [], 0.0
    for line in lines:
        builder.file, number, row, _ = line
        at = seconds(row.get("timestamp"))
        if at is None and row.get("type") in _TALK:
            builder.problem("unreadable", "a message without a time can't be ordered among subagent messages", number)
        last = last if at is None else at
        timed.append((last, line))
    return [line for _, line in sorted(timed, key=lambda t: t[0])]
