"""An OpenAI-compatible endpoint on loopback that returns scripted replies and records its requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

Answer = dict[str, Any] | tuple[int, dict[str, str], str]
Script = Callable[[int, dict[str, Any]], Answer]
"""(number of earlier requests, the request's body) -> a completion, or (status, headers, body)."""
CUT: Answer = (-1, {}, "")
"""A reply that is cut off in the middle."""

S = TypeVar("S", bound=ThreadingHTTPServer)


class Chat(ThreadingHTTPServer):
    """The server. `asked` holds each request's body, `seen` its headers."""

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.asked: list[dict[str, Any]] = []
        self.seen: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Chat

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        n = len(self.server.asked)
        self.server.asked.append(body)
        self.server.seen.append(dict(self.headers))
        answer = self.server.script(n, body)
        if isinstance(answer, dict):
            answer = (200, {"Content-Type": "application/json"}, json.dumps(answer))
        status, headers, text = answer
        data = text.encode()
        self.send_response(200 if status < 0 else status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) + (500 if status < 0 else 0)))
        self.end_headers()
        self.wfile.write(data or b'{"choices": [{"mess')

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def chat(script: Script) -> Iterator[Chat]:
    with serving(Chat(script)) as server:
        yield server


@contextmanager
def serving(server: S) -> Iterator[S]:
    """Run a server in a separate thread, and close it at the end."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def completion(text: str | None = None, *calls: tuple[str, Any], usage: bool = True) -> dict[str, Any]:
    """Return a completion in the documented format. A call's arguments are encoded as JSON unless they are text."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        made = [
            {"id": f"call_{tool}_{n}", "type": "function", "function": {"name": tool, "arguments": _text(args)}}
            for n, (tool, args) in enumerate(calls)
        ]
        message["tool_calls"] = made
    reply: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "tiny-1"}
    reply["choices"] = [{"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}]
    if usage:
        reply["usage"] = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    return reply


def _text(args: Any) -> str:
    return args if isinstance(args, str) else json.dumps(args)
