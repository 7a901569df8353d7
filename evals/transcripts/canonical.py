"""Define the canonical format. Every transcript is converted to it before scoring.

A transcript is a sequence of events: a call is issued, its result arrives, or a message is sent. All events share one
counter, so `a.done_seq < b.seq` means that `a`'s result arrived before `b` was issued.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

OURS = frozenset({"gpuwarden", "plugin_gpuwarden_gpuwarden", "plugin:gpuwarden:gpuwarden"})
"""The names under which clients list the server under test, installed alone or as part of a plug-in."""

MAIN = "main"
FORMAT = "gpuwarden-transcript/1"

Ended = Literal["completed", "limit", "error", "unknown"]
ProblemKind = Literal["unreadable", "unmatched", "duplicate", "unfinished", "shape", "seal"]


REMEDIES: Final[dict[ProblemKind, str]] = {
    "unreadable": "Record the session again; if the file has another format, specify it with --format",
    "unmatched": "Provide the complete file: the call or the result that belongs to this line is missing",
    "duplicate": "Provide a separate file for each session, so that every id is unique",
    "unfinished": "Record the session to its end",
    "shape": "See 'How a trial is judged' in evals/README.md",
    "seal": "Run the trial again: a transcript must be complete and unchanged since its replies were sealed",
}
"""The remedy for each kind of problem."""


@dataclass(slots=True)
class Call:
    """One tool call. `server` is empty for tools that are built into the harness; `ok` is None if the status is
    unknown.
    """

    seq: int
    id: str
    server: str
    tool: str
    args: Any
    agent: str = MAIN
    at: float | None = None
    result: Any = None
    ok: bool | None = None
    done_seq: int | None = None

    @property
    def ours(self) -> bool:
        """Return true if the call went to the server under test."""
        return self.server in OURS

    @property
    def command(self) -> str | None:
        """Return the command line if the call is to the harness's own shell tool; None for any other call."""
        if self.server or not isinstance(self.args, dict):
            return None
        for key in ("command", "cmd", "script", "chars"):
            value = self.args.get(key)
            if isinstance(value, str):
                return value
            if isinstance(value, list):
                return " ".join(str(word) for word in value)
        return None


@dataclass(slots=True)
class Say:
    """A message from the user, the assistant or the harness; `meta` if a skill or a compaction inserted it."""

    seq: int
    role: str
    text: str
    agent: str = MAIN


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason not to trust a transcript. A single problem makes a trial invalid.

    `line` counts from 1; 0 stands for the whole file.
    """

    kind: ProblemKind
    text: str
    line: int = 0
    file: str = ""

    def __str__(self) -> str:
        parts = [self.file, str(self.line) if self.line else "", f" {self.text}"]
        return f"{':'.join(part for part in parts if part).strip()}. {REMEDIES[self.kind]}"


@dataclass(slots=True)
class Meta:
    """A transcript's metadata. None means unknown; `ignored` counts lines that are not part of the conversation."""

    format: str = ""
    session: str = ""
    model: str = ""
    ended: Ended = "unknown"
    why: str = ""
    tokens: int | None = None
    usd: float | None = None
    turns: int | None = None
    denied: int = 0
    servers: tuple[str, ...] = ()
    ignored: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Transcript:
    """An agent's actions and messages, and the problems found while reading the transcript."""

    meta: Meta
    calls: list[Call]
    says: list[Say]
    problems: list[Problem]

    def final_words(self) -> str:
        """Return the main agent's messages after its last call to the server under test."""
        last = max((c.seq if c.done_seq is None else c.done_seq for c in self.calls if c.ours), default=-1)
        return "\n".join(s.text for s in self.says if s.role == "assistant" and s.agent == MAIN and s.seq > last)


def events(transcript: Transcript) -> Iterator[dict[str, Any]]:
    """Yield the canonical lines of a transcript in order. `load_canonical` reads them back into the same transcript."""
    meta = transcript.meta
    head = {"session": meta.session, "model": meta.model}
    yield {"type": "meta", "format": FORMAT, **{k: v for k, v in head.items() if v}}
    rows: list[tuple[int, dict[str, Any]]] = []
    for call in transcript.calls:
        row = {"type": "call", "id": call.id, "server": call.server, "tool": call.tool, "args": call.args}
        extra = {"agent": call.agent if call.agent != MAIN else None, "at": call.at}
        rows.append((call.seq, row | {k: v for k, v in extra.items() if v is not None}))
        if call.done_seq is not None:
            rows.append((call.done_seq, {"type": "result", "id": call.id, "ok": call.ok, "result": call.result}))
    for say in transcript.says:
        agent = {"agent": say.agent} if say.agent != MAIN else {}
        rows.append((say.seq, {"type": "say", "role": say.role, "text": say.text} | agent))
    for _, row in sorted(rows, key=lambda pair: pair[0]):
        yield row
    tail = {"why": meta.why or None, "tokens": meta.tokens, "usd": meta.usd, "turns": meta.turns}
    yield {"type": "end", "ended": meta.ended, **{k: v for k, v in tail.items() if v is not None}}


def dump(transcript: Transcript) -> str:
    """Return the transcript as canonical JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in events(transcript))
