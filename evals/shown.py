"""JSON-RPC over the standard streams, as MCP speaks it: enough of a client to ask a server for its tools.

The older handshake (`initialize`) is used, which every server understands.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import IO, Any, Final, Self

from evals.errors import EvalError

PROTOCOL: Final = "2025-06-18"
MAX_LINE: Final = 32 << 20
_REMEDY: Final = "Start the command by hand to see what it says"


@dataclass(frozen=True)
class Surface:
    """What a server shows to a client: its instructions, and its tools as `tools/list` gives them."""

    instructions: str
    tools: list[dict[str, Any]]


class Client:
    """A small client of one server. A context manager; what goes wrong is an EvalError.

    `timeout_s` is for the whole conversation: a server that hangs is killed, and its answer never comes.
    """

    def __init__(self, command: list[str], env: dict[str, str], *, timeout_s: float = 60.0) -> None:
        try:
            self._server = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise EvalError(f"{command[0]} can't be started: {error}", _REMEDY) from error
        self._timer = threading.Timer(timeout_s, self._server.kill)
        self._timer.daemon = True
        self._timer.start()
        self._ids = count(1)

    def __enter__(self) -> Self:
        client = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": {"name": "evals", "version": "1"}}
        try:
            self.greeting = self.request("initialize", client)
            self._send({"method": "notifications/initialized"})
        except EvalError:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the server end."""
        self._timer.cancel()
        stop(self._server)
        assert self._server.stdout is not None
        self._server.stdout.close()

    def surface(self) -> Surface:
        """Ask what the server offers, page by page."""
        tools: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        for _ in range(100):
            page = self.request("tools/list", cursor)
            tools += page.get("tools", [])
            if not page.get("nextCursor"):
                return Surface(str(self.greeting.get("instructions") or ""), tools)
            cursor = {"cursor": page["nextCursor"]}
        raise EvalError("the server's list of tools does not end", "It gives a nextCursor again and again")

    def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """The result of one request."""
        id = next(self._ids)  # noqa: A001
        self._send({"id": id, "method": method, "params": params})
        assert self._server.stdout is not None
        for message in messages(self._server.stdout):
            if not isinstance(message, dict) or message.get("id") != id or "method" in message:
                continue
            if isinstance(message.get("result"), dict):
                found: dict[str, Any] = message["result"]
                return found
            raise EvalError(f"the server refuses {method}: {str(message.get('error'))[:300]}", _REMEDY)
        raise EvalError(f"the server stopped, or did not answer {method} in time", _REMEDY)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._server.stdin is not None
        try:
            self._server.stdin.write(line({"jsonrpc": "2.0", **message}))
            self._server.stdin.flush()
        except OSError as error:
            raise EvalError(f"the server stopped: {error}", _REMEDY) from error


def surface(command: list[str], env: dict[str, str]) -> Surface:
    """Start a server, ask what it offers, stop it."""
    with Client(command, env) as client:
        return client.surface()


def stop(process: subprocess.Popen[bytes], grace_s: float = 5.0) -> None:
    """End a server the way MCP asks for: close its input, wait, then insist."""
    if process.stdin is not None:
        try:
            process.stdin.close()
        except OSError:  # it is gone, with words of ours unread
            pass
    insist: Callable[[], None]
    for insist in (process.terminate, process.kill):
        try:
            process.wait(grace_s)
            return
        except subprocess.TimeoutExpired:
            insist()
    process.wait(grace_s)


def line(message: Any) -> bytes:
    """One message as it goes over the wire."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def messages(stream: IO[bytes]) -> Iterator[Any]:
    """The messages of a stream until it ends; None for a line that is none. A line that is too long ends it."""
    while data := stream.readline(MAX_LINE):
        if not data.endswith(b"\n") and len(data) >= MAX_LINE:
            return
        if data.strip():
            try:
                yield json.loads(data)
            except (ValueError, RecursionError):
                yield None
