"""Load Inspect logs, version 2: JSON files and `.eval` archives. There is one transcript for each sample and epoch."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

from evals.transcripts.canonical import Problem, Transcript
from evals.transcripts.fields import blocks, number, sub, total
from evals.transcripts.source import MAX_FILE, ZIP, Source
from evals.transcripts.transcript_builder import TranscriptBuilder


def claims(source: Source) -> bool:
    """Return whether the file is a zip archive, or one document with `version` and `eval`."""
    if source.data.startswith(ZIP):
        return True
    return isinstance(source.shape, dict) and isinstance(source.shape.get("eval"), dict) and "version" in source.shape


def load(source: Source) -> list[Transcript]:
    """Load all samples, in the order of the log."""
    if not source.data.startswith(ZIP):
        return [_sample(s, source.bare) for s in _list(sub(source.shape, "samples")) if isinstance(s, dict)]
    samples = []
    try:
        with zipfile.ZipFile(io.BytesIO(source.data)) as archive:
            members = [i for i in archive.infolist() if i.filename.startswith("samples/")]
            if sum(i.file_size for i in members) > MAX_FILE:
                raise ValueError(f"has unpacked samples of more than {MAX_FILE >> 20} MiB")
            samples = [json.loads(archive.read(i)) for i in sorted(members, key=lambda i: i.filename)]
    except (ValueError, NotImplementedError, zipfile.BadZipFile, RecursionError, OSError) as error:
        remedy = "`inspect log convert --to json` writes a format that can be read"
        source.problems.append(Problem("unreadable", f"{error}; {remedy}", file=source.path.name))
    return [_sample(s, source.bare) for s in samples if isinstance(s, dict)]


def _sample(sample: dict[str, Any], bare: str | None) -> Transcript:
    builder = TranscriptBuilder("inspect", bare=bare)
    builder.meta.session = f"{sample.get('id')}/{sample.get('epoch')}"
    usages = sample.get("model_usage")
    for usage in usages.values() if isinstance(usages, dict) else ():
        builder.meta.tokens = (builder.meta.tokens or 0) + (total(usage, "total_tokens") or 0)
        cost = number(sub(usage, "total_cost"))
        builder.meta.usd = builder.meta.usd if cost is None else (builder.meta.usd or 0.0) + cost
    for line, message in enumerate(_list(sample.get("messages")), 1):
        role = sub(message, "role")
        if role == "tool":
            error = message.get("error")
            content = message.get("content") or sub(error, "message")
            builder.result(message.get("tool_call_id"), content, error=True if error else None, line=line)
        elif role in ("user", "assistant", "system"):
            for block in blocks(message.get("content")):
                builder.say("meta" if role == "system" else role, block.get("text"))
            for call in _list(message.get("tool_calls")):
                if sub(call, "parse_error"):
                    builder.problem("unreadable", f"Inspect could not read the arguments: {call['parse_error']}", line)
                builder.call(sub(call, "id"), sub(call, "function"), sub(call, "arguments"), line=line)
        else:
            builder.problem("unreadable", f"a message with the unknown role {role!r}", line)
    if sample.get("error"):
        builder.end("error", str(sub(sample, "error", "message")))
    elif sample.get("limit"):
        builder.end("limit", str(sub(sample, "limit", "type")))
    return builder.finish()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
