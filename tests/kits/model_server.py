"""A model server on loopback with the vendors' APIs and behavior that a test defines.

Claude Code uses Anthropic's Messages format, Codex OpenAI's Responses format, and Gemini Google's, all streamed. A mind
receives a request's content (prompt, offered tools, results so far) and returns text or a tool call. It can use only
tools that the program offers: a missing tool is recorded as a fault, which fails the test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from chat_server import serving

SHELL = "Bash"


@dataclass(frozen=True)
class Say:
    """The final text."""

    text: str


@dataclass(frozen=True)
class Use:
    """A call to `SHELL` with a `command`, an MCP server's tool by its bare name, or one of the program's tools."""

    tool: str
    args: dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """One request: its prompt, the names of the offered tools, the results' texts so far, and the body."""

    words: str
    offered: tuple[str, ...]
    results: tuple[str, ...]
    body: dict[str, Any]


Step = Say | Use
Mind = Callable[[Asked], Step]


def plan(*steps: Step) -> Mind:
    """Return a mind that takes the steps in order, regardless of the results."""
    return lambda asked: steps[min(len(asked.results), len(steps) - 1)]


class Model(ThreadingHTTPServer):
    """The server. `asked` lists the answered requests, and `faults` the mind's steps that were not possible."""

    daemon_threads = True

    def __init__(self, mind: Mind) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.mind = mind
        self.asked: list[Asked] = []
        self.keys: set[str] = set()
        self.faults: list[str] = []
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def results(self) -> tuple[str, ...]:
        """Return all results that the model received."""
        return max((a.results for a in self.asked), key=len, default=())

    def think(self, asked: Asked) -> Step:
        self.asked.append(asked)
        try:
            return self.mind(asked)
        except Exception as error:
            self.faults.append(repr(error))
            return Say(f"I can't go on: {error!r}")

    def find(self, step: Use, offered: dict[str, Any]) -> str:
        """Return the full name of an offered tool."""
        for name in offered:
            if name == step.tool or name.endswith((f"__{step.tool}", f"_gpuwarden_{step.tool}")):
                return name
        self.faults.append(f"{step.tool} is not among {sorted(offered)}")
        return step.tool


@contextmanager
def model(mind: Mind) -> Iterator[Model]:
    with serving(Model(mind)) as server:
        yield server


class _Handler(BaseHTTPRequestHandler):
    server: Model
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._send(200, "")

    def do_GET(self) -> None:
        self._send(404, "{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers.get("x-api-key") or str(self.headers.get("authorization")).removeprefix("Bearer ")
        self.server.keys.add(key)
        path = self.path.partition("?")[0]
        if self.server.status != 200:
            self._send(
                self.server.status, '{"error": {"type": "invalid_request_error", "message": "not with this key"}}'
            )
        elif path == "/v1/messages":
            self._stream(_messages(self.server, body))
        elif path == "/v1/responses":
            self._stream(_responses(self.server, body))
        elif path.endswith(":streamGenerateContent"):
            self._send(200, f"data: {json.dumps(_gemini(self.server, body))}\n\n", "text/event-stream")
        elif path == "/v1/messages/count_tokens":
            self._send(200, '{"input_tokens": 10}')
        else:
            self.server.faults.append(f"asked for {self.path}")
            self._send(404, "{}")

    def _stream(self, events: list[dict[str, Any]]) -> None:
        self._send(200, "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events), "text/event-stream")

    def _send(self, status: int, text: str, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


# ----------------------------------------------------------------------------------------------- Anthropic's Messages


def _messages(server: Model, body: dict[str, Any]) -> list[dict[str, Any]]:
    offered = {tool["name"]: tool for tool in body.get("tools", ()) if "name" in tool}
    said = [b for m in body["messages"] for b in _blocks(m["content"])]
    results = tuple(_text(b.get("content")) for b in said if b.get("type") == "tool_result")
    words = "\n".join(str(b.get("text", "")) for b in said)
    step: Step = Say("A session.")  # a request without tools asks for a title or similar
    if offered:
        step = server.think(Asked(words, tuple(offered), results, body))
    if isinstance(step, Say):
        block: dict[str, Any] = {"type": "text", "text": ""}
        delta, stop = {"type": "text_delta", "text": step.text}, "end_turn"
    else:
        name = server.find(step, offered)
        block = {"type": "tool_use", "id": f"toolu_{len(results):04}", "name": name, "input": {}}
        delta, stop = {"type": "input_json_delta", "partial_json": json.dumps(step.args)}, "tool_use"
    head = {"id": f"msg_{len(results):04}", "type": "message", "role": "assistant", "model": body["model"]}
    head |= {"content": [], "stop_reason": None, "stop_sequence": None}
    head |= {"usage": {"input_tokens": 10, "output_tokens": 1}}
    return [
        {"type": "message_start", "message": head},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None}, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    ]


def _blocks(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _text(content: Any) -> str:
    return "\n".join(str(b.get("text", "")) for b in _blocks(content or ""))


# -------------------------------------------------------------------------------------------------- OpenAI's Responses


def _responses(server: Model, body: dict[str, Any]) -> list[dict[str, Any]]:
    given = [*body.get("tools", ()), *(t for i in body["input"] for t in i.get("tools", ()))]
    offered = dict(_flat(given))
    scripts = "functions__exec" in offered
    outputs = [i.get("output") for i in body["input"] if str(i.get("type", "")).endswith("_call_output")]
    results = tuple(_output(o) for o in outputs)
    words = "\n".join(_text(i.get("content")) for i in body["input"] if i.get("type") == "message")
    step = server.think(Asked(words, tuple(offered), results, body))
    n = f"{len(results):04}"
    if isinstance(step, Say):
        item: dict[str, Any] = {"type": "message", "role": "assistant", "id": f"m{n}"}
        item["content"] = [{"type": "output_text", "text": step.text}]
    elif scripts:  # the model writes a script, and the script calls the tools
        item = {"type": "custom_tool_call", "id": f"ct{n}", "call_id": f"call_{n}", "status": "completed"}
        item |= {"namespace": "functions", "name": "exec", "input": _script(step)}
    else:
        full = server.find(_shell(step), offered)
        item = {"type": "function_call", "id": f"fc{n}", "call_id": f"call_{n}", **offered.get(full, {"name": full})}
        item["arguments"] = json.dumps(_shell(step).args)
    usage = {"input_tokens": 10, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 5}
    usage |= {"output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 15}
    return [
        {"type": "response.created", "response": {"id": f"resp_{n}"}},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": {"id": f"resp_{n}", "usage": usage}},
    ]


def _flat(tools: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each tool's full name and its name in a call, including tools in namespaces."""
    for tool in tools:
        if tool["type"] == "namespace":
            for inner in tool["tools"]:
                yield f"{tool['name']}__{inner['name']}", {"namespace": tool["name"], "name": inner["name"]}
        elif "name" in tool:
            yield tool["name"], {"name": tool["name"]}


def _shell(step: Use) -> Use:
    """Return the step with the name and arguments of Codex's shell, if it calls the shell."""
    if step.tool != SHELL:
        return step
    return Use("exec_command", {{"command": "cmd"}.get(key, key): value for key, value in step.args.items()})


def _script(step: Use) -> str:
    use = _shell(step)
    find = f"ALL_TOOLS.map(t => t.name).find(n => n === {use.tool!r} || n.endsWith('__' + {use.tool!r}))"
    show = "r.content ? r.content.map(c => c.text).join('') : r.output ?? r"
    return f"const r = await tools[{find}]({json.dumps(use.args)}); text({show});"


def _output(output: Any) -> str:
    """Return a call's output without Codex's prefix."""
    texts = [str(b.get("text", "")) for b in _blocks(output)]
    text = "\n".join(texts[1:] if texts[0].startswith("Script ") else texts)
    return re.sub(r"\A(?:.+\n)*?Output:\n", "", text)


# ------------------------------------------------------------------------------------------------------------ Gemini's


def _gemini(server: Model, body: dict[str, Any]) -> dict[str, Any]:
    offered = {f["name"]: f for t in body.get("tools", ()) for f in t.get("functionDeclarations", ())}
    parts = [p for content in body["contents"] for p in content.get("parts", ())]
    results = tuple(json.dumps(p["functionResponse"]["response"]) for p in parts if "functionResponse" in p)
    words = "\n".join(str(p.get("text", "")) for p in parts)
    step: Step = server.think(Asked(words, tuple(offered), results, body)) if offered else Say("A session.")
    if isinstance(step, Say):
        return _gemini_says({"text": step.text})
    name = server.find(Use("run_shell_command", step.args) if step.tool == SHELL else step, offered)
    return _gemini_says({"functionCall": {"id": f"call{len(results)}", "name": name, "args": step.args}})


def _gemini_says(part: dict[str, Any]) -> dict[str, Any]:
    content = {"role": "model", "parts": [part]}
    usage = {"promptTokenCount": 10, "candidatesTokenCount": 5, "totalTokenCount": 15}
    return {"candidates": [{"content": content, "finishReason": "STOP", "index": 0}], "usageMetadata": usage}
