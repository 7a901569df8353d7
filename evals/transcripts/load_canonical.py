"""Load the canonical format: one event per line, with `meta` first and `end` last (see `canonical.events`)."""

from __future__ import annotations

from typing import Any, get_args

from evals.transcripts.canonical import FORMAT, MAIN, Ended, Transcript
from evals.transcripts.fields import number, whole, word
from evals.transcripts.source import Source
from evals.transcripts.transcript_builder import TranscriptBuilder

_KEYS = {
    "meta": {"format", "session", "model"},
    "call": {"id", "server", "tool", "args", "agent", "at"},
    "result": {"id", "ok", "result"},
    "say": {"role", "text", "agent"},
    "end": {"ended", "why", "tokens", "usd", "turns"},
}


def claims(source: Source) -> bool:
    """Return whether the first line names the canonical format."""
    return source.head.get("type") == "meta" and source.head.get("format") == FORMAT


def load(source: Source) -> list[Transcript]:
    """Read the events; an unknown type or key is a problem, because only this package writes the format."""
    return [of_rows(source.rows, bare=source.bare)]


def of_rows(rows: list[tuple[int, dict[str, Any]]], bare: str | None = None) -> Transcript:
    """Load a transcript from parsed lines."""
    builder = TranscriptBuilder("canonical", bare=bare)
    for line, row in rows:
        kind = word(row)
        extra = set(row) - _KEYS.get(kind, set()) - {"type"}
        if kind not in _KEYS or extra:
            builder.problem("unreadable", f"not a canonical line: type {kind!r}, unknown keys {sorted(extra)}", line)
            continue
        match kind:
            case "meta":
                builder.meta.session, builder.meta.model = str(row.get("session", "")), str(row.get("model", ""))
            case "call":
                server, agent = row.get("server"), str(row.get("agent", MAIN))
                if not isinstance(server, str):
                    builder.problem("unreadable", "a call without a server (empty for the harness's own tools)", line)
                    continue
                args, at = row.get("args", {}), number(row.get("at"))
                builder.call(row.get("id"), row.get("tool"), args, server=server, agent=agent, at=at, line=line)
            case "result":
                ok = row.get("ok")
                error = None if ok is None else ok is not True
                builder.result(row.get("id"), row.get("result"), error=error, literal=True, line=line)
            case "say":
                builder.say(str(row.get("role", "")), row.get("text"), agent=str(row.get("agent", MAIN)))
            case "end":
                builder.meta.tokens, builder.meta.turns = whole(row.get("tokens")), whole(row.get("turns"))
                builder.meta.usd = number(row.get("usd"))
                ended: Ended = row["ended"] if row.get("ended") in get_args(Ended) else "unknown"
                builder.end(ended, str(row.get("why", "")))
    if rows and rows[-1][1].get("type") != "end":
        builder.problem("unfinished", "the last line is not of the type `end`: the file may be truncated", rows[-1][0])
    return builder.finish()
