"""A minimal Model Context Protocol client over stdio, for scripted agents. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evals.harness.json_process import JsonProcess, JsonProcessError

VERSION = "2025-06-18"
_MAX_PAGES = 100
Answer = Callable[[str], dict[str, Any]]
"""A function that answers a question from the server (an elicitation) in place of the user, and returns the result of
`elicitation/create`."""


class McpClient:
    """One session with one server. If `answer` is given, the client accepts questions from the server to the user."""

    def __init__(self, argv: list[str], env: dict[str, str], cwd: Path, answer: Answer | None = None) -> None:
        self._wire = JsonProcess(argv, env, cwd)
        self._answer = answer
        self._id = 0
        shown: dict[str, Any] = {"elicitation": {}} if answer else {}
        info = {"name": "gpuwarden-evals", "version": "1"}
        hello = {"protocolVersion": VERSION, "capabilities": shown, "clientInfo": info}
        try:
            self.greeting = self.request("initialize", hello)
            self._wire.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        except BaseException:
            self._wire.close()
            raise

    def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Send a request, and answer the server's requests until its reply arrives. Return a protocol error as
        `{"error": ...}`.
        """
        self._id += 1
        self._wire.send({"jsonrpc": "2.0", "id": self._id, "method": method, "params": params})
        while True:
            message = self._wire.receive()
            if "method" not in message:
                if message.get("id") == self._id:
                    return message.get("result") or {"error": message.get("error")}
            elif "id" in message:
                reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
                if message["method"] == "elicitation/create" and self._answer is not None:
                    reply["result"] = self._answer(str(message.get("params", {}).get("message", "")))
                elif message["method"] == "ping":
                    reply["result"] = {}
                else:
                    reply["error"] = {"code": -32601, "message": "not offered"}
                self._wire.send(reply)

    def tools(self) -> list[dict[str, Any]]:
        """Return all tools of the server, from all pages. Raises JsonProcessError if the list does not end."""
        tools: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        for _ in range(_MAX_PAGES):
            page = self.request("tools/list", cursor)
            tools += page.get("tools", [])
            if not page.get("nextCursor"):
                return tools
            cursor = {"cursor": page["nextCursor"]}
        raise JsonProcessError("the list of tools does not end")

    def call(self, tool: str, args: dict[str, Any]) -> dict[str, Any]:
        """Call a tool; return its reply, parsed from the text that a model would read.

        A call to an unknown tool returns a failure.
        """
        result = self.request("tools/call", {"name": tool, "arguments": args})
        if "error" in result:
            fault = result["error"] or {}
            return {"ok": False, "code": "protocol_error", "message": str(fault.get("message"))}
        text = "".join(block.get("text", "") for block in result.get("content", []))
        value = json.loads(text)
        if not isinstance(value, dict):
            raise JsonProcessError(f"the reply to {tool} is not an object: {text[:200]!r}")
        return value

    def close(self) -> None:
        """End the session and the server."""
        self._wire.close()
