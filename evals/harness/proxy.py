"""Run the proxy through which an external agent program calls the server. Each call is forwarded, signed and recorded.

    harness of the agent -- stdio --> relay.py -- loopback --> Door (in the runner) --> scene --> real server

While the agent runs, the signing key exists only in the runner's memory, not in a file, an environment variable or an
argument list. The harness starts the relay, which knows only a port and a password. Any program that can read these two
can call the server through the same proxy, but its calls are signed too, and their absence from the transcript is
detected.

Tool calls go to the scene, like the calls of scripted agents, so the simulated clock and the simulated user behave in
the same way. All other requests of a client (the handshake, lists and documents) are answered by a separate server
process. A reply is forwarded only as text that contains the signature, because some clients show a model the text,
others the structured content, and a transcript contains only the part that was shown. Unknown messages are refused.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

from evals.harness.recorder import AgentDied, LimitReached, Recorder, SceneDied
from evals.scoring.surface import HERE

_MAX_CONNECTIONS: Final = 8
"""Maximum number of connections. A harness needs several, because it probes a server before using it and reconnects."""

_MAX_LINE: Final = 32 << 20
_OF_THE_PACK: Final = ("resources", "prompts", "extensions")
_METHODS_OF_THE_PACK: Final = ("resources/", "prompts/", "skills/")
_CLIENT: Final = "io.modelcontextprotocol/clientCapabilities"
_REFUSED: Final = -32000
_BAD_REQUEST: Final = -32600
_NO_METHOD: Final = -32601


class Door:
    """A loopback port for the relays of one trial. As a context manager, it yields the relay's command.

    `bare` hides the skills that the server itself provides: see `skill_pack.py`.
    """

    def __init__(self, recorder: Recorder, folder: Path, *, bare: bool = False) -> None:
        self.recorder = recorder
        self.bare = bare
        self.fault = ""
        self._listed = False
        self.command, self.env = recorder.scene.server()
        self._file = folder / "door.json"
        self._word = secrets.token_urlsafe(32)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> list[str]:
        self._file.touch(0o600)
        self._file.write_text(json.dumps({"port": self._listener.getsockname()[1], "word": self._word}), "utf-8")
        self._start(self._accept)
        return [sys.executable, "-I", str(HERE / "harness" / "relay.py"), str(self._file)]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the port and wait until every pending call is recorded."""
        with self._lock:
            self._closed = True
            left = list(self._open)
        with contextlib.suppress(OSError):  # wakes the thread that accepts connections
            socket.create_connection(self._listener.getsockname(), timeout=1).close()
        self._listener.close()
        for connection in left:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
        for thread in self._threads:
            thread.join(60)
        if self.fault:
            raise SceneDied(self.fault) from error

    def was_used(self) -> None:
        """Raise AgentDied if the server's tools were never listed, because the agent then had no tools."""
        if not self._listed:
            raise AgentDied("the agent's harness never requested the server's tools, so the agent had none")

    def listed(self) -> None:
        """Record that the harness has listed the tools."""
        self._listed = True

    def _start(self, work: Any, *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        for _ in range(_MAX_CONNECTIONS):
            try:
                connection, _peer = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._open.append(connection)
                self._start(self._serve, connection)
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as words, contextlib.suppress(OSError):
            connection.settimeout(10)
            word = words.readline(200).strip()
            if hmac.compare_digest(word, self._word.encode()):
                connection.settimeout(None)
                Line(self, connection).carry(words)


class Line:
    """One connection of a harness, with a separate server for everything except calls."""

    def __init__(self, door: Door, connection: socket.socket) -> None:
        self._door, self._connection = door, connection
        self._methods: dict[str, str] = {}
        self._lock = threading.Lock()

    def carry(self, words: IO[bytes]) -> None:
        """Forward messages in both directions until the harness disconnects, then stop the server."""
        try:
            self._server = subprocess.Popen(
                self._door.command,
                env=self._door.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            self._door.fault = f"the server can't be started: {error}"
            return
        back = threading.Thread(target=self._back, daemon=True)
        back.start()
        try:
            for message in _messages(words):
                self._forth(message)
        finally:
            _end(self._server)
            back.join(10)
            if not back.is_alive() and self._server.stdout is not None:
                self._server.stdout.close()

    # ------------------------------------------------------------------------------------------- harness to server

    def _forth(self, message: Any) -> None:
        method = message.get("method") if isinstance(message, dict) else None
        if not isinstance(method, str):
            self._refuse(None, _BAD_REQUEST, "send one request per line; batches and answers are not supported")
        elif "id" not in message:
            if method.startswith("notifications/"):
                self._pass(message)
        elif method == "tools/call":
            self._call(message["id"], message.get("params"))
        elif self._door.bare and method.startswith(_METHODS_OF_THE_PACK):
            self._refuse(message["id"], _NO_METHOD, f"unknown method {method[:80]}")
        else:
            if method == "tools/list":
                self._door.listed()
            # The client can't answer the server's questions, because it has no user. The scenario simulates the user.
            params = message.get("params")
            meta = params.get("_meta") if isinstance(params, dict) else None
            for place, name in ((params, "capabilities"), (meta, _CLIENT)):
                if isinstance(place, dict) and isinstance(place.get(name), dict):
                    place[name].pop("elicitation", None)
            with self._lock:
                self._methods[_key(message["id"])] = method
            self._pass(message)

    def _call(self, id: Any, params: Any) -> None:  # noqa: A002
        tool = params.get("name") if isinstance(params, dict) else None
        args = (params.get("arguments") or {}) if isinstance(params, dict) else None
        if not isinstance(tool, str) or not isinstance(args, dict):
            self._refuse(id, _BAD_REQUEST, "a call needs the name of a tool, and its arguments as an object")
            return
        try:
            reply = self._door.recorder.sealed(tool, args)
        except LimitReached:
            self._refuse(id, _REFUSED, "the call limit of this session is reached")
            return
        except SceneDied as error:
            self._door.fault = str(error)
            self._refuse(id, _REFUSED, "the server has ended")
            return
        text = json.dumps(reply, ensure_ascii=False, separators=(",", ":"))
        result = {"content": [{"type": "text", "text": text}], "isError": reply.get("ok") is not True}
        self._send({"jsonrpc": "2.0", "id": id, "result": result})

    def _pass(self, message: dict[str, Any]) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(_line(message))
        self._server.stdin.flush()

    # ------------------------------------------------------------------------------------------- server to harness

    def _back(self) -> None:
        assert self._server.stdout is not None
        with contextlib.suppress(OSError):
            for message in _messages(self._server.stdout):
                # Drop the server's questions to the user. The client declared in the handshake that it has none.
                if not isinstance(message, dict) or ("method" in message and "id" in message):
                    continue
                with self._lock:
                    method = self._methods.pop(_key(message.get("id")), "")
                found = message.get("result")
                result: dict[str, Any] = found if isinstance(found, dict) else {}
                # Capabilities that this proxy does not forward are removed from lists and handshakes.
                if method == "tools/list" and isinstance(result.get("tools"), list):
                    for tool in result["tools"]:
                        tool.pop("outputSchema", None)
                elif self._door.bare and isinstance(result.get("capabilities"), dict):
                    for name in _OF_THE_PACK:
                        result["capabilities"].pop(name, None)
                self._send(message)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _refuse(self, id: Any, code: int, text: str) -> None:  # noqa: A002
        self._send({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": text}})

    def _send(self, message: dict[str, Any]) -> None:
        data = _line(message)
        with self._lock:
            self._connection.sendall(data)


def _key(id: Any) -> str:  # noqa: A002
    """Return a request id as a dictionary key that distinguishes 1 from "1"."""
    return json.dumps(id, sort_keys=True)


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _messages(stream: IO[bytes]) -> Iterator[Any]:
    """Yield the messages of a stream, or None for a line that is not JSON, until the stream ends or a line exceeds the
    limit.
    """
    while data := stream.readline(_MAX_LINE):
        if len(data) >= _MAX_LINE:
            return
        if data.strip():
            try:
                yield json.loads(data)
            except (ValueError, RecursionError):
                yield None


def _end(server: subprocess.Popen[bytes]) -> None:
    """Stop a server as the protocol specifies: close its input, wait, then terminate it."""
    assert server.stdin is not None
    with contextlib.suppress(OSError):
        server.stdin.close()
    for insist in (server.terminate, server.kill):
        try:
            server.wait(5)
            return
        except subprocess.TimeoutExpired:
            insist()
    server.wait()


def hide_memory() -> None:
    """Prevent other programs of this user from reading this process's memory, if the operating system supports it.

    Linux only; root can always read it. An untrusted agent must run in a container or as another user.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
