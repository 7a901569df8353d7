"""The door through which an agent that is a program reaches the server: each call is passed on, sealed and recorded.

    harness of the agent -- stdio --> relay.py -- loopback --> Door (in the runner) -- stdio --> the real server

While the agent lives, the key of the seals is in the memory of the runner and nowhere else: no file, no environment, no
argument list. What the harness starts is the relay, which knows a port and a word. Whoever reads those can call the
server through the same door; such a call is sealed like any other, and leaving it out of the transcript is seen.

Every reply leaves in one form, its text with the seal in it: clients differ in whether they show a model the text or
the structured content, and a transcript holds what was shown. Nothing passes that is not understood.
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
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

from evals.recorder import LimitReached, Recorder, SceneDied
from evals.surface import HERE
from evals.wire import line, messages, stop

_MAX_CONNECTIONS: Final = 8
"""Harnesses look at a server before they use it, and reconnect; a program that knocks more often is up to something."""

_OF_THE_PACK: Final = ("resources", "prompts", "extensions")
_METHODS_OF_THE_PACK: Final = ("resources/", "prompts/", "skills/")
_CLIENT: Final = "io.modelcontextprotocol/clientCapabilities"
_REFUSED, _UNKNOWN_METHOD, _PARSE_ERROR = -32000, -32601, -32700


class Door:
    """A port on loopback for the relays of one trial. A context manager that gives the command of the relay.

    `bare` hides the skills that the server itself serves: see `pack.py`.
    """

    def __init__(self, recorder: Recorder, folder: Path, *, bare: bool = False) -> None:
        self.recorder = recorder
        self.bare = bare
        self.fault = ""
        self._command, self._env = recorder.scene.server()
        self._file = folder / "door.json"
        self._word = secrets.token_urlsafe(32)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._lines: list[Line] = []
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> list[str]:
        self._file.touch(0o600)
        self._file.write_text(json.dumps({"port": self._listener.getsockname()[1], "word": self._word}), "utf-8")
        self._start(self._accept)
        return [sys.executable, "-I", str(HERE / "relay.py"), str(self._file)]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the door, and wait until every reply that is under way is written down."""
        with self._lock:
            self._closed = True
            lines = list(self._lines)
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            socket.create_connection(self._listener.getsockname(), timeout=1).close()
        self._listener.close()
        for one in lines:
            one.close()
        for thread in self._threads:
            thread.join(30)
        if self.fault and error is None:
            raise SceneDied(self.fault)

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
                self._start(self._serve, connection)
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as words:
            connection.settimeout(10)
            try:
                word = words.readline(200).strip()
            except OSError:
                return
            if not hmac.compare_digest(word, self._word.encode()):
                return
            connection.settimeout(None)
            with self._lock:
                if self._closed:
                    return
                try:
                    one = Line(self, connection, self._command, self._env)
                except OSError as error:
                    self.fault = f"the server can't be started: {error}"
                    return
                self._lines.append(one)
            one.carry(words)


class Line:
    """One connection of a harness, with a server of its own behind it."""

    def __init__(self, door: Door, connection: socket.socket, command: list[str], env: dict[str, str]) -> None:
        self._door, self._recorder = door, door.recorder
        self._connection = connection
        self._server = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._calls: dict[str, tuple[str, str, Any, float]] = {}
        self._others: dict[str, str] = {}
        self._late: set[str] = set()
        self._gone = False
        self._lock = threading.Lock()

    def carry(self, words: IO[bytes]) -> None:
        """Carry messages both ways until the harness hangs up, then let the server end."""
        back = threading.Thread(target=self._back, daemon=True)
        back.start()
        try:
            for message in messages(words):
                self._forth(message)
        except OSError:  # one of the two is gone
            pass
        finally:
            self._gone = True
            stop(self._server)
            back.join(10)
            if not back.is_alive() and self._server.stdout is not None:
                self._server.stdout.close()

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)

    # ------------------------------------------------------------------------------------------- harness to server

    def _forth(self, message: Any) -> None:
        if not isinstance(message, dict):
            self._refuse(None, _PARSE_ERROR, "one JSON object a line, please: batches are not carried")
            return
        method, id = message.get("method"), message.get("id")  # noqa: A001
        params = message.get("params")
        if id is None and isinstance(method, str) and method.startswith("notifications/"):
            self._notify(message, method, params)
        elif method is None and id is not None:
            self._pass(message)  # an answer to a question of the server
        elif id is None or not isinstance(method, str):
            self._refuse(None, _REFUSED, "neither a request nor a notification")
        elif self._door.bare and method.startswith(_METHODS_OF_THE_PACK):
            self._refuse(id, _UNKNOWN_METHOD, f"there is no method {method[:80]}")
        elif method == "tools/call":
            self._call(message, id, params if isinstance(params, dict) else {})
        else:
            self._unasking(params)
            with self._lock:
                self._others[_key(id)] = method
            self._pass(message)

    def _call(self, message: dict[str, Any], id: Any, params: dict[str, Any]) -> None:  # noqa: A002
        tool, args = params.get("name"), params.get("arguments")
        args = {} if args is None else args
        if not isinstance(tool, str) or _key(id) in self._calls:
            self._refuse(id, _REFUSED, "a call needs a name, and an id that is not in use")
            return
        try:
            call, at = self._recorder.begin(tool, args)
        except LimitReached:
            self._refuse(id, _REFUSED, "no more calls: the limit of this session is reached")
            return
        self._unasking(params)
        with self._lock:
            self._calls[_key(id)] = (call, tool, args, at)
        self._pass(message)

    def _notify(self, message: dict[str, Any], method: str, params: Any) -> None:
        if method == "notifications/cancelled" and isinstance(params, dict):
            with self._lock:
                self._late.add(_key(params.get("requestId")))
        self._pass(message)

    @staticmethod
    def _unasking(params: Any) -> None:
        """Take away the client's power to answer the server's questions: no person sits at this client."""
        places = [params, params.get("_meta") if isinstance(params, dict) else None]
        for place, name in zip(places, ("capabilities", _CLIENT), strict=True):
            if isinstance(place, dict) and isinstance(place.get(name), dict):
                place[name].pop("elicitation", None)

    def _pass(self, message: dict[str, Any]) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(line(message))
        self._server.stdin.flush()

    # ------------------------------------------------------------------------------------------- server to harness

    def _back(self) -> None:
        assert self._server.stdout is not None
        try:
            for message in messages(self._server.stdout):
                if isinstance(message, dict):
                    answer = self._answer(message) if "method" not in message else message
                    self._send(answer)
        finally:
            self._unanswered()
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        key = _key(message.get("id"))
        with self._lock:
            call, method = self._calls.pop(key, None), self._others.pop(key, "")
        result = message.get("result")
        if call is not None and (self._gone or key in self._late):
            self._loose(call, f"came after the harness had stopped waiting: {str(result)[:2000]}")
        elif call is not None and isinstance(result, dict):
            return {**message, "result": self._seal(call, result)}
        elif call is not None:
            self._loose(call, str(message.get("error"))[:2000])
        elif isinstance(result, dict):
            self._plain(method, result)
        return message

    def _seal(self, call: tuple[str, str, Any, float], result: dict[str, Any]) -> dict[str, Any]:
        id, tool, args, at = call  # noqa: A001
        sealed = self._recorder.sealed(id, tool, args, _body(result), at)
        text = json.dumps(sealed, ensure_ascii=False, separators=(",", ":"))
        kept = {k: v for k, v in result.items() if k != "structuredContent"}
        return {**kept, "content": [{"type": "text", "text": text}]}

    def _plain(self, method: str, result: dict[str, Any]) -> None:
        """The lists and greetings that promise what this door does not carry."""
        if method == "tools/list" and isinstance(result.get("tools"), list):
            for tool in result["tools"]:
                tool.pop("outputSchema", None)
        elif self._door.bare and isinstance(result.get("capabilities"), dict):
            for name in _OF_THE_PACK:
                result["capabilities"].pop(name, None)

    def _unanswered(self) -> None:
        """The server is gone: its open calls got no reply."""
        with self._lock:
            calls = list(self._calls.values())
            self._calls.clear()
        for call in calls:
            self._loose(call, "the server stopped before it answered")

    def _loose(self, call: tuple[str, str, Any, float], why: str) -> None:
        """The server got a call and the harness no reply of it: the transcript has to own up to it all the same."""
        self._recorder.loose(call[0], call[1], call[2], why)

    def _refuse(self, id: Any, code: int, text: str) -> None:  # noqa: A002
        self._send({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": text}})

    def _send(self, message: dict[str, Any]) -> None:
        """Send to the harness; where it hung up, what the server does is written down all the same."""
        data = line(message)
        try:
            with self._lock:
                self._connection.sendall(data)
        except OSError:
            self._gone = True


def _key(id: Any) -> str:  # noqa: A002
    """An id as a key: 1 and "1" are two."""
    return json.dumps(id, sort_keys=True)


def _body(result: dict[str, Any]) -> dict[str, Any]:
    """What the server answered, as the model is told it: the JSON object in the text."""
    content = result.get("content")
    blocks = content if isinstance(content, list) else []
    text = "\n".join(str(block.get("text", "")) for block in blocks if isinstance(block, dict))
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    return body if isinstance(body, dict) else {"ok": result.get("isError") is not True, "text": text}


def hide_memory() -> None:
    """Keep other programs of this user from reading this process's memory, where the operating system can.

    Linux only; root reads everything anyway. An agent that is not trusted runs in a container or as another user.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
