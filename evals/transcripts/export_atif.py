"""Export a transcript as an ATIF v1.8 trajectory. ATIF stores results per step, so each call becomes a separate step.

Calls that overlapped share one step: ATIF can't express that the result of one call arrived before another was issued.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from evals.transcripts.canonical import Call, Say, Transcript

_SOURCES = {"user": "user", "assistant": "agent", "meta": "system"}


def export(transcript: Transcript, *, agent: str, version: str = "0") -> dict[str, Any]:
    """Return the trajectory as a dict."""
    steps: list[dict[str, Any]] = []
    for group in _groups(transcript):
        step: dict[str, Any]
        if isinstance(group, Say):
            step = {"source": _SOURCES.get(group.role, "system"), "message": group.text}
        else:
            made, results = [], []
            for call in group:
                name = f"mcp__{call.server}__{call.tool}" if call.server else call.tool
                made.append({"tool_call_id": call.id, "function_name": name, "arguments": call.args})
            for call in sorted((c for c in group if c.done_seq is not None), key=lambda c: c.done_seq or 0):
                content = call.result if isinstance(call.result, str) else json.dumps(call.result)
                flag = {} if call.ok is None else {"extra": {"tool_result_is_error": not call.ok}}
                results.append({"source_call_id": call.id, "content": content, **flag})
            step = {"source": "agent", "message": "", "tool_calls": made, "observation": {"results": results}}
            if group[0].at is not None:
                step["timestamp"] = datetime.fromtimestamp(group[0].at, UTC).isoformat()
        steps.append({"step_id": len(steps) + 1, **step})
    meta = transcript.meta
    metrics = {"total_prompt_tokens": meta.tokens, "total_cost_usd": meta.usd, "total_steps": len(steps)}
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": meta.session or "unknown",
        "agent": {"name": agent, "version": version, **({"model_name": meta.model} if meta.model else {})},
        "steps": steps,
        "final_metrics": {k: v for k, v in metrics.items() if v is not None},
    }


def _groups(transcript: Transcript) -> list[Say | list[Call]]:
    """Group overlapping calls; each message ends a group."""
    events: list[Say | Call] = sorted([*transcript.says, *transcript.calls], key=lambda e: e.seq)
    groups: list[Say | list[Call]] = []
    open_until = -1
    for event in events:
        if isinstance(event, Say):
            groups.append(event)
            open_until = -1
            continue
        last = groups[-1] if groups else None
        if isinstance(last, list) and event.seq < open_until:
            last.append(event)
        else:
            groups.append([event])
        open_until = max(open_until, event.done_seq or event.seq)
    return groups
