"""Read what Claude Code's two formats share: messages made of content blocks."""

from __future__ import annotations

from typing import Any

from evals.transcripts.fields import blocks, total, word
from evals.transcripts.transcript_builder import Tape

_USAGE = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
_SILENT = frozenset({"thinking", "redacted_thinking", "image", "document"})


class Talk:
    """Feeds messages to a tape and adds up what the model used.

    One model message may come in several lines with the same id; the last line's usage is the whole message's.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self._usage: dict[str, int] = {}

    def message(
        self,
        kind: str,
        message: dict[str, Any],
        role: str,
        agent: str,
        at: float | None,
        raw: Any,
        line: int,
    ) -> None:
        """One message: its words, its calls and its results, in order."""
        if kind == "assistant":
            self.tape.meta.model = self.tape.meta.model or str(message.get("model", ""))
            used = total(message.get("usage"), *_USAGE)
            if used is not None:
                self._usage[str(message.get("id", len(self._usage)))] = used
        for block in blocks(message.get("content")):
            match word(block):
                case "text":
                    self.tape.say(role, block.get("text"), agent=agent)
                case "tool_use" | "mcp_tool_use":
                    server = block.get("server_name")
                    where = server if isinstance(server, str) else None
                    call, args = block.get("id"), block.get("input")
                    self.tape.call(call, block.get("name"), args, server=where, agent=agent, at=at, line=line)
                case "tool_result" | "mcp_tool_result":
                    # The flag is left out where nothing failed.
                    error = block.get("is_error") is True
                    self.tape.result(block.get("tool_use_id"), block.get("content"), error=error, raw=raw, line=line)
                case unknown if unknown not in _SILENT:
                    self.tape.problem("unreadable", f"a content block of the unknown type {unknown!r}", line)

    def close(self) -> None:
        """Write the totals."""
        meta = self.tape.meta
        meta.turns = meta.turns if meta.turns is not None else len(self._usage) or None
        if meta.tokens is None and self._usage:
            meta.tokens = sum(self._usage.values())
