"""Run the rehearsal Hub as a server on loopback: `HubServer` for tests and demos, `serve` for a terminal.

`Conditions` simulates latency, a rate limit and faults.
"""

from __future__ import annotations

import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuwarden.core.clock import Clock, SystemClock
from gpuwarden.core.errors import Unreachable
from gpuwarden.rehearsal.hub.app import make_app
from gpuwarden.rehearsal.hub.buckets import HubBuckets
from gpuwarden.rehearsal.hub.jobs import HubJobs
from gpuwarden.rehearsal.hub.schedules import HubSchedules
from gpuwarden.rehearsal.hub.store import HubStore
from gpuwarden.rehearsal.hub.viewer import HubViewer

VIEWER = "/datasets-server"


@dataclass
class Fault:
    """A fault that applies to requests whose `METHOD path` matches `match`.

    If `drop` is true, the request is processed, but no reply is sent.
    """

    match: str
    status: int = 500
    body: bytes = b'{"error": "Internal Error"}'
    content_type: str = "application/json"
    delay_s: float = 0.0
    drop: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1_000_000


@dataclass
class Conditions:
    """The Hub's network conditions. In each window of `window_s` seconds, `quota` requests are answered and all others
    get a 429.
    """

    latency_s: float = 0.0
    quota: int | None = None
    window_s: int = 300
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    clock: Clock = field(default_factory=SystemClock)
    _window: tuple[float, int] = (0.0, 0)

    def clear(self) -> None:
        """Reset all conditions, and forget the recorded requests."""
        self.latency_s, self.quota, self._window = 0.0, None, (0.0, 0)
        self.faults.clear()
        self.requests.clear()

    def fault_for(self, line: str) -> Fault | None:
        """Return the first matching fault that has not been used up."""
        for fault in self.faults:
            if fault.times > 0 and re.search(fault.match, line):
                fault.times -= 1
                return fault
        return None

    def limited(self) -> dict[str, str] | None:
        """Count a request. Return the headers of a 429 response if the request exceeds the quota, or None."""
        if self.quota is None:
            return None
        now = self.clock.now()
        start, used = self._window
        if now - start >= self.window_s:
            start, used = now, 0
        self._window = (start, used + 1)
        if used < self.quota:
            return None
        left = max(1, round(start + self.window_s - now))
        policy = f'"fixed window";"api";q={self.quota};w={self.window_s}'
        return {"RateLimit": f'"api";r=0;t={left}', "RateLimit-Policy": policy}


class ConditionsMiddleware:
    """ASGI middleware that applies the simulated network conditions."""

    def __init__(self, app: ASGIApp, conditions: Conditions) -> None:
        self.app = app
        self.conditions = conditions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it to the application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        line = f"{scope['method']} {scope['path']}"
        self.conditions.requests.append(line)
        fault = self.conditions.fault_for(line)
        await anyio.sleep(self.conditions.latency_s + (fault.delay_s if fault else 0.0))
        if limit := self.conditions.limited():
            await _answer(send, 429, b'{"error": "Too Many Requests"}', "application/json", limit)
        elif fault and fault.drop:
            await self.app(scope, receive, _nowhere)
            # This reply's headers announce one byte, which is never sent, so the server closes the connection.
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        elif fault:
            await _answer(send, fault.status, fault.body, fault.content_type, fault.headers)
        else:
            await self.app(scope, receive, send)


async def _nowhere(_message: Message) -> None:
    """Discard a message from the application's reply."""


async def _answer(send: Send, status: int, body: bytes, kind: str, headers: dict[str, str]) -> None:
    rows = {"content-type": kind, "content-length": str(len(body)), **headers}
    raw = [(k.lower().encode(), v.encode()) for k, v in rows.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


class HubServer:
    """A context manager that runs the Hub in a separate thread on a free loopback port."""

    def __init__(self, root: Path, *, port: int = 0, clock: Clock | None = None, unsandboxed: bool = False) -> None:
        self.store = HubStore(root, clock)
        self.buckets = HubBuckets(self.store)
        self.jobs = HubJobs(self.store, self.buckets, unsandboxed=unsandboxed)
        self.schedules = HubSchedules(self.jobs)
        self.conditions = Conditions(clock=self.store.clock)
        parts = (self.jobs, self.schedules, self.buckets)
        viewer = HubViewer(self.store).routes(VIEWER)
        self.app: ASGIApp = make_app(self.store, [*viewer, *(row for part in parts for row in part.routes())])
        self._port = port
        self.url = ""

    @property
    def viewer_url(self) -> str:
        """Return the dataset viewer's address."""
        return self.url + VIEWER

    @property
    def env(self) -> dict[str, str]:
        """Return the environment variables that make clients use this Hub instead of the real Hub."""
        return {"HF_ENDPOINT": self.url, "GPUWARDEN_DATASET_VIEWER": self.viewer_url}

    def __enter__(self) -> Self:
        import uvicorn

        listener = socket.create_server(("127.0.0.1", self._port))
        self.url = self.store.xet.hub = self.jobs.runs.endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            ConditionsMiddleware(self.app, self.conditions),
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        ready = threading.Event()
        for _ in range(500):
            if self._server.started or ready.wait(0.01):
                return self
        raise Unreachable("the rehearsal Hub did not start within five seconds")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.jobs.runs.close()
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(timeout=5)


def serve(root: Path, port: int, say: Callable[[str], None] = print, *, unsandboxed: bool = False) -> None:
    """Print the environment variables for clients, and serve the initial repos until a signal ends the process.

    Each call creates a new token, because any caller with the token can run programs here as jobs.
    """
    from gpuwarden.rehearsal.hub.seed import seed

    token = f"hf_{secrets.token_hex(17)}"
    with HubServer(root, port=port, unsandboxed=unsandboxed) as hub:
        seed(hub.store, token)
        for name, value in {**hub.env, "HF_TOKEN": token}.items():
            say(f"export {name}={value}")
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: ended.set())  # by default, the process would exit without cleanup
        with suppress(KeyboardInterrupt):
            ended.wait()
