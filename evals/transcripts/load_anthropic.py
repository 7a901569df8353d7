"""Load Anthropic messages, in which calls and results are content blocks (`tool_use`, `tool_result`) with an error
flag.
"""

from __future__ import annotations

from evals.transcripts.canonical import MAIN, Transcript
from evals.transcripts.claude_lines import MessageReader
from evals.transcripts.messages import dialect, messages
from evals.transcripts.source import Source
from evals.transcripts.transcript_builder import TranscriptBuilder


def claims(source: Source) -> bool:
    """Return whether every item has a role, and at least one content block belongs to a tool."""
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
