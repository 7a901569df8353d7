"""Load OpenAI chat completions: messages with `tool_calls`, and results in messages with the role `tool`."""

from __future__ import annotations

from evals.transcripts.canonical import Transcript
from evals.transcripts.fields import blocks, sub
from evals.transcripts.messages import dialect, messages
from evals.transcripts.source import Source
from evals.transcripts.transcript_builder import TranscriptBuilder


def claims(source: Source) -> bool:
    """Return whether every item has a role and no content block is a tool call or tool result."""
    rows = messages(source)
    return bool(rows) and dialect(rows) == "openai"


def load(source: Source) -> list[Transcript]:
    """Load one transcript."""
    builder = TranscriptBuilder("openai_chat", bare=source.bare)
    for line, message in messages(source):
        if message["role"] in ("tool", "function"):
            builder.result(message.get("tool_call_id"), message.get("content"), line=line)
        else:
            role = "meta" if message["role"] in ("system", "developer") else message["role"]
            for block in blocks(message.get("content")):
                builder.say(role, block.get("text"))
            calls = message.get("tool_calls")
            for call in calls if isinstance(calls, list) else []:
                name, args = sub(call, "function", "name"), sub(call, "function", "arguments")
                builder.call(sub(call, "id"), name, args, line=line)
    return [builder.finish()]
