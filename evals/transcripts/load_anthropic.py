"""Load Anthropic messages: content blocks `tool_use` and `tool_result`, with an error flag."""

from __future__ import annotations

from evals.transcripts.canonical import MAIN, Transcript
from evals.transcripts.claude_lines import MessageReader
from evals.transcripts.messages import dialect, messages
from evals.transcripts.source import Source
from evals.transcripts.transcript_builder import TranscriptBuilder


def claims(source: Source) -> bool:
    """Return whether every item has a role, and some content block is a tool's."""
    rows = messages(source)
    return bool(rows) and dialect(rows) == "anthropic"


def load(source: Source) -> list[Transcript]:
    """Load one transcript."""
    builder = TranscriptBuilder("anthropic", bare=source.bare)
    reader = MessageReader(builder)
    for line, message in messages(source):
        reader.message(message["role"], message, message["role"], MAIN, None, None, line)
    reader.close()
    return [builder.finish()]
