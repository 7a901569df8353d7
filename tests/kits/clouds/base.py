"""Base of the emulators: an account over a rehearsal cloud, network faults, and one web server.

An emulator represents one account. Its instances come from a rehearsal cloud, which holds state, storage tiers, money,
and time; the emulator adds the platform's API. `Fault` breaks individual replies on the wire.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar
from urllib.parse import parse_qs

import uvicorn

from gpuwarden.core.clock import Clock
from gpuwarden.core.models import Answer, Instance, InstanceState, Known, Resources
from gpuwarden.core.profile import Profile
from gpuwarden.profiles import load_profile
from gpuwarden.rehearsal.cloud import Cloud
from gpuwarden.rehearsal.model import Fault as CloudFault
from gpuwarden.rehearsal.model import Faults, Settings

T = TypeVar("T")
Send = Callable[[dict[str, Any]], Awaitable[None]]
KEY = "key-of-this-account-0123456789abcdef"
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIN0000000000000000000000000000000000000000TEST"
USD = {"NVIDIA H100 80GB HBM3": 2.99, "NVIDIA GeForce RTX 4090": 0.69, "NVIDIA L40S": 0.86, "NVIDIA L4": 0.43}
SETTINGS = Settings(boot_s=10, stop_s=5, resume_s=20, default_usd_per_hour=2.99, capacity=64)
Kind = Literal["lost_request", "lost_reply", "truncated", "html", "error_500", "limited", "empty", "other", "refused"]
KEY_2 = "key-of-other-account-9876543210fedcba"


@dataclass
class Fault:
    """Break the next `count` requests whose `METHOD /path` matches, after `skip` requests.

    `lost_request` is not carried out and `lost_reply` is; both end without a complete reply. `truncated`, `html`,
    `error_500`, and `empty` are carried out and get such a reply. `limited` is refused with 429, and `other` is
    answered with `body`; neither is carried out. `refused` is carried out and answered with `status` and `body`, or
    with the real body if `body` is empty.
    """

    kind: Kind
    match: str
    count: int = 1
    skip: int = 0
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def takes(self, line: str) -> bool:
        if self.count < 1 or not re.search(self.match, line):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.count -= 1
        return True


@dataclass(frozen=True)
class Request:
    """One request as the emulator received it."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any

    @property
    def line(self) -> str:
        """The method and the path; for GraphQL also the kind of operation, `query` or `mutation`."""
        query = self.body.get("query") if isinstance(self.body, dict) else None
        kind = re.match(r"\w+", query) if isinstance(query, str) else None
        return f"{self.method} {self.path} {kind[0]}" if kind else f"{self.method} {self.path}"


@dataclass
class Reply:
    """One reply. If `body` is None, it has no body."""

    status: int
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    type: str = "application/json"

    def raw(self) -> bytes:
        return b"" if self.body is None else json.dumps(self.body).encode()


class Refuse(Exception):
    """End a request with an error reply."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


Route = Callable[[Any, Request, Mapping[str, str]], Reply]


def route(method: str, pattern: str, *, query: str | None = None, body: str | None = None) -> Callable[[Route], Route]:
    """Mark an emulator's method as the handler for `METHOD /pattern`, which may contain {names}.

    `query` and `body` list the parameters and fields in the platform's description, separated by spaces; any others are
    refused. None accepts all.
    """

    def mark(handler: Route) -> Route:
        handler.route = (method, re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", pattern)))  # type: ignore[attr-defined]
        handler.described = [None if names is None else set(names.split()) for names in (query, body)]  # type: ignore[attr-defined]
        return handler

    return mark


class Emulator:
    """One account of one platform. Subclasses add routes and the platform's error messages."""

    profile_id: ClassVar[str]
    gpus: ClassVar[dict[str, float]] = USD
    """The platform's GPU names, with the hourly price of one GPU."""
    window: ClassVar[tuple[int, float] | None] = None
    """The rate limit as (requests, seconds); the next request is refused with 429."""
    tells_port: ClassVar[bool] = True
    """Whether the API reports a port. If not, every boot has a new address and port 22."""
    lag_s: ClassVar[float] = 2.0
    """The lag of lists in seconds: a new instance is not listed yet, and a deleted one is still listed as ending."""

    def __init__(self, folder: Path, clock: Clock, *faults: CloudFault, settings: Settings | None = None) -> None:
        self.clock = clock
        self.profile: Profile = load_profile(self.profile_id)
        lag = tuple(CloudFault(kind="stale", call=c, count=10**9, seconds=self.lag_s) for c in ("list", "find"))
        self.cloud = Cloud(
            folder,
            self.profile,
            clock,
            settings=settings or SETTINGS.model_copy(update={"catalog": self.gpus}),
            faults=Faults(faults=(*faults, *lag)),  # type: ignore[arg-type]
            supervise=False,
        )
        self.prices = dict(self.gpus)
        self.own: dict[str, dict[str, Any]] = {}
        self.recent: list[float] = []
        self.key, self.user = KEY, 7
        self.others: list[Emulator] = []
        """Other accounts at the same address, each with a separate key and user."""
        self.money = 1000.0
        """The account's balance in dollars; rentals are not deducted from it."""
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.exchanges: list[tuple[Request, Reply]] = []
        self.lock = threading.Lock()
        self.address: Callable[[str], tuple[str, int]] = self._pretend_address
        """The address of an instance's SSH server."""
        self.before: Callable[[], None] = lambda: None
        """Called before each request is carried out."""
        routes = [h for h in (getattr(type(self), n) for n in dir(type(self))) if hasattr(h, "route")]
        self.routes = sorted(routes, key=lambda h: h.route[1].groups)  # fixed segments before placeholders

    # ------------------------------------------------------------------------------------------------------ the cloud

    def rent(self, label: str, resources: Resources, **own: Any) -> Instance:
        """Rent an instance from the cloud, with additional platform data."""
        made = known(self.cloud.create(resources, label))
        self.own[made.id] = {"label": label, "boots": 0, **own}
        return made

    def see(self, ident: str) -> Instance | None:
        """Return an instance, which may be gone."""
        return known(self.cloud.get(ident))

    def listed(self) -> list[Instance]:
        return list(known(self.cloud.list()))

    def inner(self, ident: str) -> str:
        """Return the cloud's id of an instance."""
        return ident

    def number(self, inner: str) -> int:
        """Return a number for an instance, for platforms with numeric ids."""
        return 4_200_001 + list(self.own).index(inner)

    def numbered(self, ident: str) -> str:
        """Return the cloud's id of the instance with a number, or an empty string."""
        index = int(ident) - 4_200_001 if ident.isdigit() else -1
        return list(self.own)[index] if 0 <= index < len(self.own) else ""

    def full(self) -> bool:
        return len(self.listed()) >= self.cloud.settings.capacity

    def booted(self, ident: str) -> None:
        """Count a start; the emulated address changes with each one."""
        self.own[ident]["boots"] += 1

    def _pretend_address(self, ident: str) -> tuple[str, int]:
        return "127.0.0.1", 20000 + (list(self.own).index(ident) * 37 + self.own[ident]["boots"]) % 40000

    def iso(self, seconds: float | None) -> str:
        return datetime.fromtimestamp(seconds or 0, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    # ------------------------------------------------------------------------------------------------------- the wire

    def authorized(self, request: Request) -> bool:
        return request.headers.get("authorization") == f"Bearer {self.key}"

    def need(self, ident: str) -> Instance:
        """Return an existing instance. Raises Refuse with the platform's message."""
        raise NotImplementedError

    def unauthorized(self) -> Reply:
        raise NotImplementedError

    def unknown_route(self, request: Request) -> Reply:
        raise NotImplementedError

    def limited(self) -> Reply:
        raise NotImplementedError

    def undescribed(self, names: str) -> Reply:
        """Refuse parameters or fields that the platform's description lacks."""
        raise NotImplementedError

    def handle(self, request: Request) -> Reply:
        """Return the platform's reply."""
        with self.lock:
            self.requests.append(request)
            self.before()
            try:
                reply = self.limited() if self._too_often() else self._route(request)
            except Refuse as refusal:
                reply = refusal.reply
            self.exchanges.append((request, reply))
            return reply

    def _too_often(self) -> bool:
        if self.window is None:
            return False
        count, seconds = self.window
        now = self.clock.now()
        self.recent = [t for t in self.recent if now - t < seconds]
        self.recent.append(now)
        return len(self.recent) > count

    def _route(self, request: Request) -> Reply:
        if not self.authorized(request):
            return self.unauthorized()
        for handler in self.routes:
            method, pattern = handler.route  # type: ignore[attr-defined]
            if method == request.method and (found := pattern.fullmatch(request.path.rstrip("/"))):
                sent = (request.query, request.body or {})
                odd = [
                    n
                    for has, known in zip(sent, handler.described, strict=True)
                    if known is not None
                    for n in set(has) - known
                ]  # type: ignore[attr-defined]
                return self.undescribed(", ".join(sorted(odd))) if odd else handler(self, request, found.groupdict())
        return self.unknown_route(request)

    async def serve(self, request: Request, send: Send) -> None:
        for other in self.others:
            if any(other.key in text for text in request.headers.values()):
                return await other.serve(request, send)
        fault = next((f for f in self.faults if f.takes(request.line)), None)
        kind = fault.kind if fault else None
        if kind == "lost_request":
            return await _cut(send)
        if kind == "limited":
            reply = self.limited()
            assert fault is not None
            return await _reply(send, reply.status, reply.raw(), reply.type, reply.headers | fault.headers)
        if kind == "other":
            assert fault is not None
            self.requests.append(request)
            return await _reply(send, fault.status, fault.body, "application/json", fault.headers)
        reply = self.handle(request)
        if kind == "lost_reply":
            return await _cut(send)
        if kind == "refused":
            assert fault is not None
            return await _reply(send, fault.status, fault.body or reply.raw(), reply.type, fault.headers)
        if kind == "truncated":
            return await _reply(send, reply.status, reply.raw()[: len(reply.raw()) // 2], reply.type, reply.headers)
        if kind == "html":
            return await _reply(send, 200, b"<html><body>Sign in to the network</body></html>", "text/html", {})
        if kind == "error_500":
            return await _reply(send, 500, b'{"error": "internal"}', reply.type, {})
        if kind == "empty":
            return await _reply(send, 200, b"", reply.type, {})
        return await _reply(send, reply.status, reply.raw(), reply.type, reply.headers)


async def _reply(send: Send, status: int, raw: bytes, type: str, headers: dict[str, str]) -> None:
    lines = {"content-type": type, **headers} if status != 204 else dict(headers)
    encoded = [(k.encode(), v.encode()) for k, v in lines.items()]
    encoded += [(b"content-length", str(len(raw)).encode())] if status != 204 else []
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": b"" if status == 204 else raw})


async def _cut(send: Send) -> None:
    """Announce a body, and close the connection partway through it."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
    await send({"type": "http.response.body", "body": b"{", "more_body": False})


class Web:
    """One web server for all emulators of a test run, each under a separate path."""

    def __init__(self) -> None:
        self.emulators: dict[str, Emulator] = {}
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        config = uvicorn.Config(
            self.app,
            log_level="critical",
            lifespan="off",
            ws="none",
            loop="asyncio",
            interface="asgi3",
        )
        self.server = uvicorn.Server(config)

    def start(self) -> Web:
        """Start serving. Connections made earlier wait in the listener's queue."""
        threading.Thread(target=self.server.run, args=([self.listener],), daemon=True).start()
        return self

    def add(self, emulator: Emulator) -> str:
        """Add an emulator to the web server; return its address."""
        name = f"a{len(self.emulators)}"
        self.emulators[name] = emulator
        return f"http://127.0.0.1:{self.port}/{name}"

    async def app(self, scope: Mapping[str, Any], receive: Callable[[], Awaitable[dict[str, Any]]], send: Send) -> None:
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        _, name, rest = scope["path"].split("/", 2)
        query = {k: ",".join(v) for k, v in parse_qs(scope["query_string"].decode(), keep_blank_values=True).items()}
        headers = {k.decode().lower(): v.decode() for k, v in scope["headers"]}
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = raw
        await self.emulators[name].serve(Request(scope["method"], f"/{rest}", query, headers, body), send)


def known(answer: Answer[T]) -> T:
    assert isinstance(answer, Known), answer
    return answer.value


def alive(instance: Instance | None) -> bool:
    return instance is not None and instance.state is not InstanceState.GONE
