"""Load ATIF trajectories (schema `ATIF-v1.*`).

ATIF records results per step, so results are treated as if they arrived after all calls in the step.
"""

from __future__ import annotations

from typing import Any

from evals.transcripts.canonical import MAIN, Transcript
from evals.transcripts.fields import blocks, number, seconds, sub, total
from evals.transcripts.source import Source
from evals.transcripts.transcript_builder import TranscriptBuilder

_ROLES = {"system": "meta", "user": "user", "agent": "assistant"}


def claims(source: Source) -> bool:
    """Return whether the file is a single document with ATIF's `schema_version`."""
    version = sub(source.shape, "schema_version")
    return isinstance(version, str) and version.startswith("ATIF-")


def load(source: Source) -> list[Transcript]:
    """Load one transcript, including embedded subagents."""
    document = source.shape if isinstance(source.shape, dict) else {}
    builder = TranscriptBuilder("atif", bare=source.bare)
    builder.meta.session = str(document.get("session_id", ""))
    builder.meta.model = str(sub(document, "agent", "model_name") or "")
    builder.meta.usd = number(sub(document, "final_metrics", "total_cost_usd"))
    builder.meta.tokens = total(document.get("final_metrics"), "total_prompt_tokens", "total_completion_tokens")
    if document.get("continued_trajectory_ref"):
        builder.problem("unfinished", f"it is continued in another file, {document['continued_trajectory_ref']!r}")
    _steps(builder, document, MAIN)
    return [builder.finish()]


def _steps(builder: TranscriptBuilder, document: dict[str, Any], agent: str) -> None:
    inner = {str(t.get("trajectory_id")): t for t in _list(document.get("subagent_trajectories"))}
    for line, step in enumerate(_list(document.get("steps")), 1):
        if step.get("is_copied_context") is True:
            builder.ignore("copied context")
            continue
        role = _ROLES.get(str(step.get("source")))
        if role is None:
            builder.problem("unreadable", f"a step with the unknown source {step.get('source')!r}", line)
            continue
        for block in blocks(step.get("message")):
            builder.say(role, block.get("text"), agent=agent)
        at, mine = seconds(step.get("timestamp")), set()
        for call in _list(step.get("tool_calls")):
            mine.add(call.get("tool_call_id"))
            args = call.get("arguments")
            builder.call(call.get("tool_call_id"), call.get("function_name"), args, agent=agent, at=at, line=line)
        for result in _list(sub(step, "observation", "results")):
            for ref in _list(result.get("subagent_trajectory_ref")):
                name = str(ref.get("trajectory_id"))
                if name in inner:
                    _steps(builder, inner.pop(name), name)
                else:
                    builder.problem("unfinished", f"the subagent trajectory {name!r} is not in this file", line)
            source = result.get("source_call_id")
            if source is None:
                builder.ignore("observation without a call")
            elif source not in mine:
                builder.problem("unmatched", f"a result for the call {source!r}, which is not in this step", line)
            else:
                flag = sub(result, "extra", "tool_result_is_error")
                error = flag if isinstance(flag, bool) else None
                builder.result(source, result.get("content"), error=error, line=line)


def _list(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
