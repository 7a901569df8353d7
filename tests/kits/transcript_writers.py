"""Write a canonical transcript in each foreign format, with the documented field layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from evals.transcripts.canonical import Call, Say, Transcript, dump
from evals.transcripts.export_atif import export

Event = tuple[str, Call | Say]


def in_order(transcript: Transcript) -> list[Event]:
    """Yield ("call" | "result" | "say", object) in chronological order."""
    rows: list[tuple[int, Event]] = [(s.seq, ("say", s)) for s in transcript.says]
    for call in transcript.calls:
        rows.append((call.seq, ("call", call)))
        if call.done_seq is not None:
            rows.append((call.done_seq, ("result", call)))
    return [event for _, event in sorted(rows, key=lambda r: r[0])]


def name(call: Call) -> str:
    return f"mcp__{call.server}__{call.tool}" if call.server else call.tool


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(r) + "\n" for r in rows)


def stamp(at: float | None) -> str:
    return datetime.fromtimestamp(at or 1_780_000_000.0, UTC).isoformat().replace("+00:00", "Z")


def _claude_message(kind: str, item: Any, n: int) -> dict[str, Any]:
    usage = {"input_tokens": 10, "output_tokens": 5, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 0}
    base = {"id": f"msg_{n}", "type": "message", "role": "assistant", "model": "m", "usage": usage, "stop_reason": None}
    if kind == "say" and item.role == "assistant":
        return {**base, "content": [{"type": "text", "text": item.text}]}
    if kind == "say":
        return {"role": "user", "content": item.text}
    if kind == "call":
        return {**base, "content": [{"type": "tool_use", "id": item.id, "name": name(item), "input": item.args}]}
    block = {"type": "tool_result", "tool_use_id": item.id, "content": [{"type": "text", "text": as_text(item.result)}]}
    if item.ok is False:
        block["is_error"] = True
    return {"role": "user", "content": [block]}


def claude(transcript: Transcript) -> str:
    rows: list[dict[str, Any]] = [{"type": "summary", "summary": "s", "leafUuid": "u0"}]
    at = 1_780_000_000.0
    for n, (kind, item) in enumerate(in_order(transcript)):
        at = getattr(item, "at", None) or at
        message = _claude_message(kind, item, n)
        chain = {"uuid": f"u{n}", "parentUuid": f"u{n - 1}" if n else None, "sessionId": "s1", "isSidechain": False}
        rows.append(
            {"type": message["role"], **chain, "timestamp": stamp(at), "cwd": "/w", "version": "2", "message": message}
        )
    rows.append({"type": "system", "subtype": "turn_duration", "uuid": "z", "sessionId": "s1", "content": "x"})
    return lines(rows)


def claude_stream(transcript: Transcript) -> str:
    init = {"type": "system", "subtype": "init", "session_id": "s1", "model": "m", "cwd": "/w", "tools": []}
    rows: list[dict[str, Any]] = [{**init, "mcp_servers": [{"name": "gpuwarden", "status": "connected"}]}]
    for n, (kind, item) in enumerate(in_order(transcript)):
        message = _claude_message(kind, item, n)
        rows.append({"type": message["role"], "message": message, "parent_tool_use_id": None, "session_id": "s1"})
    usage = {"input_tokens": transcript.meta.tokens or 0, "output_tokens": 0}
    done = {"type": "result", "subtype": "success", "is_error": False, "num_turns": transcript.meta.turns}
    tail = {"session_id": "s1", "total_cost_usd": transcript.meta.usd, "usage": usage, "permission_denials": []}
    return lines([*rows, {**done, **tail, "result": "done"}])


def codex(transcript: Transcript) -> str:
    rows: list[dict[str, Any]] = [{"type": "session_meta", "payload": {"id": "s1", "cwd": "/w", "cli_version": "0"}}]
    rows.append({"type": "turn_context", "payload": {"model": "m", "cwd": "/w"}})
    at = 1_780_000_000.0
    for kind, item in in_order(transcript):
        at = getattr(item, "at", None) or at
        rows.append({"type": "response_item", "payload": _responses_item(kind, item), "timestamp": stamp(at)})
    used = {"total_token_usage": {"total_tokens": transcript.meta.tokens}}
    rows.append({"type": "event_msg", "payload": {"type": "token_count", "info": used}})
    return lines([{"timestamp": stamp(at), **r} for r in rows])


def _responses_item(kind: str, item: Any) -> dict[str, Any]:
    if kind == "say":
        part = "output_text" if item.role == "assistant" else "input_text"
        return {"type": "message", "role": item.role, "content": [{"type": part, "text": item.text}]}
    if kind == "call":
        return {"type": "function_call", "call_id": item.id, "name": name(item), "arguments": json.dumps(item.args)}
    return {"type": "function_call_output", "call_id": item.id, "output": as_text(item.result)}


def codex_exec(transcript: Transcript) -> str:
    rows: list[dict[str, Any]] = [{"type": "thread.started", "thread_id": "t1"}, {"type": "turn.started"}]
    for n, (kind, item) in enumerate(in_order(transcript)):
        if kind == "say":
            # Codex does not repeat the prompt; only assistant messages are items.
            if item.role == "assistant":
                done = {"id": f"m{n}", "type": "agent_message", "text": item.text}
                rows.append({"type": "item.completed", "item": done})
            continue
        begun = kind == "call"
        rows.append({"type": f"item.{'started' if begun else 'completed'}", "item": _exec_item(item, begun)})
    usage = {"input_tokens": transcript.meta.tokens or 0, "cached_input_tokens": 0, "output_tokens": 0}
    return lines([*rows, {"type": "turn.completed", "usage": usage}])


def _exec_item(call: Call, begun: bool) -> dict[str, Any]:
    # Codex shows a built-in tool of the harness as an MCP call to a server named "".
    base = {"id": call.id, "type": "mcp_tool_call", "server": call.server, "tool": call.tool, "arguments": call.args}
    if begun:
        return {**base, "result": None, "error": None, "status": "in_progress"}
    content = [{"type": "text", "text": as_text(call.result)}]
    structured = call.result if isinstance(call.result, dict) else None
    failed = call.ok is False and not isinstance(call.result, dict)
    reply = {"content": content, "structured_content": structured}
    return {**base, "result": reply, "error": None, "status": "failed" if failed else "completed"}


def openai_chat(transcript: Transcript) -> str:
    rows: list[dict[str, Any]] = [{"role": "system", "content": "be careful"}]
    for kind, item in in_order(transcript):
        if kind == "say":
            rows.append({"role": item.role, "content": item.text})
        elif kind == "call":
            call = {
                "id": item.id,
                "type": "function",
                "function": {"name": name(item), "arguments": json.dumps(item.args)},
            }
            rows.append({"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            rows.append({"role": "tool", "tool_call_id": item.id, "content": as_text(item.result)})
    return json.dumps({"messages": rows}, indent=1)


def openai_responses(transcript: Transcript) -> str:
    return json.dumps([_responses_item(kind, item) for kind, item in in_order(transcript)])


def anthropic(transcript: Transcript) -> str:
    rows = [_claude_message(kind, item, n) for n, (kind, item) in enumerate(in_order(transcript))]
    return json.dumps([{"role": r["role"], "content": r["content"]} for r in rows])


def atif(transcript: Transcript) -> str:
    return json.dumps(export(transcript, agent="claude-code"))


def inspect(transcript: Transcript) -> str:
    messages: list[dict[str, Any]] = []
    for kind, item in in_order(transcript):
        if kind == "say":
            messages.append({"role": item.role, "content": item.text})
        elif kind == "call":
            call = {"id": item.id, "function": name(item), "arguments": item.args, "type": "function"}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        else:
            error = {"type": "unknown", "message": "failed"} if item.ok is False else None
            row = {"role": "tool", "tool_call_id": item.id, "function": name(item), "content": as_text(item.result)}
            messages.append({**row, "error": error} if error else row)
    usage = {"m": {"total_tokens": transcript.meta.tokens}}
    sample = {
        "id": "x",
        "epoch": 1,
        "input": "",
        "target": "",
        "messages": messages,
        "scores": {},
        "model_usage": usage,
    }
    return json.dumps({"version": 2, "status": "success", "eval": {"task": "t"}, "samples": [sample]})


WRITERS: dict[str, Callable[[Transcript], str]] = {
    "canonical": dump,
    "claude": claude,
    "claude_stream": claude_stream,
    "codex": codex,
    "codex_exec": codex_exec,
    "openai_chat": openai_chat,
    "openai_responses": openai_responses,
    "anthropic": anthropic,
    "atif": atif,
    "inspect": inspect,
}
