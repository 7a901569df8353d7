"""Convert records from other programs into calls, results and messages. Loaders call the builder, which never guesses
missing data.

Duplicate ids, results before their call, calls without a result, a tool name that two servers share and a reply without
`ok` all become problems here, so that every format follows the same rules.
"""

from __future__ import annotations

import json
import re
from typing import Any

from evals.scoring.surface import TOOLS
from evals.transcripts.canonical import (
    MAIN,
    OURS,
    Call,
    Ended,
    Meta,
    Problem,
    ProblemKind,
    Say,
    Transcript,
)

_CODEX_HEADER = re.compile(r"\A(?:Wall time: [0-9.]+ seconds\n)?Output:\n")
_MAX_PROBLEMS = 50


def split_name(name: str) -> tuple[str, str]:
    """Split `mcp__server__tool` into (server, tool); return ("", name) for any other name."""
    if name.startswith("mcp__"):
        server, found, tool = name[5:].partition("__")
        if found and server and tool:
            return server, tool
    return "", name


def decode(content: Any, *, parse: bool) -> tuple[Any, bool | None]:
    """Decode a reply to (value, error flag or None). Unwraps MCP content blocks; parses JSON text if `parse` is
    true.
    """
    flag: bool | None = None
    if isinstance(content, dict) and isinstance(content.get("content"), list) and "ok" not in content:
        error = content.get("isError", content.get("is_error"))
        flag = error if isinstance(error, bool) else None
        structured = content.get("structuredContent", content.get("structured_content"))
        if structured is not None:
            return structured, flag
        content = content["content"]
    if isinstance(content, list) and all(isinstance(block, dict) and "type" in block for block in content):
        texts = [block.get("text") for block in content if block.get("type") in ("text", "input_text", "output_text")]
        if len(texts) != len(content):
            return content, flag
        content = "\n".join(t for t in texts if isinstance(t, str))
    if parse and isinstance(content, str):
        return _decode_text(content, flag)
    return content, flag


def _decode_text(text: str, flag: bool | None) -> tuple[Any, bool | None]:
    """Parse JSON text with or without a Codex header, and unwrap the MCP result or the text blocks in it."""
    header = _CODEX_HEADER.match(text)
    bare = text[header.end() :] if header else text
    if not bare.lstrip().startswith(("{", "[")):
        return text, flag
    try:
        value = json.loads(bare)
    except (ValueError, RecursionError):
        return text, flag
    if isinstance(value, dict):
        envelope = isinstance(value.get("content"), list) and "ok" not in value
    else:
        envelope = bool(value) and all(isinstance(b, dict) and b.get("type") == "text" for b in value)
    if not envelope:
        return value, flag
    inner, inner_flag = decode(value, parse=True)
    return inner, flag if inner_flag is None else inner_flag


class TranscriptBuilder:
    """Collects the events of one transcript in the order in which they happened."""

    def __init__(self, format: str, *, bare: str | None = None) -> None:  # noqa: A002
        """Start a transcript. `bare` is the server, if known, of the tools whose names do not contain a server."""
        self.meta = Meta(format=format)
        self.bare = bare
        self.file = ""
        """The file that is being read, if a session spans several files."""
        self._calls: dict[str, Call] = {}
        self._says: list[Say] = []
        self._problems: list[Problem] = []
        self._tick = 0
        self._last: str = ""

    def problem(self, kind: ProblemKind, text: str, line: int = 0) -> None:
        """Record a problem. At most fifty are recorded."""
        if len(self._problems) < _MAX_PROBLEMS:
            self._problems.append(Problem(kind, text[:500], line, self.file))

    def ignore(self, what: object) -> None:
        """Count a line that is not part of the conversation."""
        key = str(what)[:60]
        self.meta.ignored[key] = self.meta.ignored.get(key, 0) + 1

    def call(
        self,
        id: object,  # noqa: A002
        name: object,
        args: Any,
        *,
        server: str | None = None,
        agent: str = MAIN,
        at: float | None = None,
        line: int = 0,
    ) -> None:
        """Add a call. `args` may be JSON text, as in some formats."""
        if not isinstance(id, str) or not id or not isinstance(name, str) or not name:
            self.problem("unreadable", "a tool call without an id or a name", line)
            return
        server, tool = split_name(name) if server is None else (server, name)
        if not server and tool in TOOLS:
            if self.bare is None:
                text = f"the call to {tool} does not name a server; pass --bare SERVER if there is only one"
                self.problem("shape", text, line)
            server = self.bare or ""
        if isinstance(args, str):
            try:
                args = json.loads(args) if args.strip() else {}
            except (ValueError, RecursionError):
                self.problem("unreadable", f"the arguments of {tool} are not JSON", line)
        elif args is None:
            args = {}
        known = self._calls.get(id)
        if known is not None:
            if (known.server, known.tool, known.args, known.agent) != (server, tool, args, agent):
                self.problem("duplicate", f"two different calls share the id {id!r}", line)
            return
        self._calls[id] = Call(self._next("call"), id, server, tool, args, agent, at)

    def knows(self, id: object) -> bool:  # noqa: A002
        """Return true if a call with this id was issued."""
        return isinstance(id, str) and id in self._calls

    def result(
        self,
        id: object,  # noqa: A002
        content: Any,
        *,
        error: bool | None = None,
        raw: Any = None,
        literal: bool = False,
        line: int = 0,
    ) -> None:
        """Add a result. `error` is the format's own error flag, or None; `raw` is a second, more complete copy of the
        content.

        `literal` content is used unchanged; other content is unwrapped from MCP blocks and JSON text.
        """
        call = self._calls.get(id) if isinstance(id, str) else None
        if call is None:
            self.problem("unmatched", f"a result for the call {id!r}, which was not issued before the result", line)
            return
        value, flag = (content, None) if literal else decode(content, parse=bool(call.server))
        if call.server and not isinstance(value, dict) and isinstance(raw, dict):
            value = decode(raw, parse=True)[0]
        # A format's failure flag takes precedence over `ok` in the reply.
        failed = flag if error is None else error
        stated = value.get("ok") if isinstance(value, dict) else None
        ok = None if failed is None else not failed
        if not failed and isinstance(stated, bool):
            ok = stated
        elif not failed and call.server in OURS:
            self.problem("shape", f"the reply to {call.tool} ({call.id!r}) has no `ok`", line)
        if call.done_seq is not None:
            if (call.result, call.ok) != (value, ok):
                self.problem("duplicate", f"two different results for the call {call.id!r}", line)
            return
        call.result, call.ok, call.done_seq = value, ok, self._next("result")

    def say(self, role: str, text: object, *, agent: str = MAIN) -> None:
        """Add a message with a role; empty messages are dropped."""
        if isinstance(text, str) and text.strip():
            self._says.append(Say(self._next(role if agent == MAIN else "aside"), role, text, agent))

    def end(self, ended: Ended, why: str = "") -> None:
        """Record how the session ended, according to the format's own status."""
        self.meta.ended, self.meta.why = ended, why[:500]

    def finish(self) -> Transcript:
        """Close the transcript. A call without a result is recorded as a problem."""
        for call in self._calls.values():
            if call.done_seq is None:
                self.problem("unfinished", f"no result for the call {call.id!r} to {call.tool}")
        if self.meta.ended == "unknown":
            if self._last == "assistant":
                self.meta.ended = "completed"
            else:
                self.problem("unfinished", "no closing message or end marker: the session may be truncated")
        return Transcript(self.meta, list(self._calls.values()), self._says, self._problems)

    def _next(self, what: str) -> int:
        self._tick += 1
        if what != "aside":
            self._last = what
        return self._tick
