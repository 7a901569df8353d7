"""Read what Claude Code's two formats have in common: messages that consist of content blocks."""

from __future__ import annotations

from typing import Any

from evals.transcripts.fields import blocks, total, word
from evals.transcripts.transcript_builder import TranscriptBuilder

_USAGE = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
_SILENT = frozenset({"thinking", "redacted_thinking", "image", "document"})


class MessageReader:
    """Adds messages to a transcript and sums the tokens that the model used.

    One message of the model may span several lines with the same id; the last of them contains the usage of the whole
    message.
    """

    def __init__(self, builder: TranscriptBuilder) -> None:
        self.builder = builder
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
        """Add one message: its text, its calls and its results, in order."""
        if kind == "assistant":
            self.builder.meta.model = self.builder.meta.model or str(message.get("model", ""))
            used = total(message.get("usage"), *_USAGE)
            if used is not None:
                self._usage[str(message.get("id", len(self._usage)))] = used
        for block in blocks(message.get("content")):
            match word(block):
                case "text":
                    self.builder.say(role, block.get("text"), agent=agent)
                case "tool_use" | "mcp_tool_use":
                    server = block.get("server_name")
                    where = server if isinstance(server, str) else None
                    call, args = block.get("id"), block.get("input")
                    self.builder.call(call, block.get("name"), args, server=where, agent=agent, at=at, line=line)
                case "tool_result" | "mcp_tool_result":
                    # The flag is omitted if the call did not fail.
                    error = block.get("is_error") is True
                    self.builder.result(block.get("tool_use_id"), block.get("content"), error=error, raw=raw, line=line)
                case unknown if unknown not in _SILENT:
                    self.builder.problem("unreadable", f"a content block of the unknown type {unknown!r}", line)

    def close(self) -> None:
        """Write the total numbers of turns and tokens."""
        meta = self.builder.meta
        meta.turns = meta.turns if meta.turns is not None else len(self._usage) or None
        if meta.tokens is None and self._usage:
            meta.tokens = sum(self._usage.values())
