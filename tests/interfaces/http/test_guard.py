"""Requests that are refused before routing: foreign Host or Origin, large or slow bodies, and endless headers."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from doors import quick_warden
from gpuwarden.core.errors import BadRequest, Conflict, NotFound
from gpuwarden.interfaces.http import running
from gpuwarden.interfaces.http.application import build
from gpuwarden.interfaces.http.record import recorded, replaced, running_server
from gpuwarden.interfaces.http.serving import Serving, Settings
from gpuwarden.lifecycle.context import Context
from http_kit import BASE, JSON, bearer, client, listening, opened, serving

pytestmark = pytest.mark.anyio
MIB = 1 << 20


@pytest.fixture
def ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.chdir(tmp_path)
    return quick_warden(tmp_path / "home")


@pytest.fixture
async def server(ctx: Context) -> AsyncIterator[Serving]:
    async with serving(ctx) as parts:
        yield parts


class Body:
    """A client's body in blocks. Counts the bytes that were read, and can stop sending without ending the body."""

    def __init__(self, blocks: int, block: bytes, *, stalls: bool = False) -> None:
        self.left, self.block, self.stalls = blocks, block, stalls
        self.taken = 0

    async def __call__(self) -> dict[str, Any]:
        if self.left == 0:
            await anyio.sleep_forever()
        self.left -= 1
        self.taken += len(self.block)
        return {"type": "http.request", "body": self.block, "more_body": self.left > 0 or self.stalls}


async def raw(
    parts: Serving,
    receive: Any,
    *headers: tuple[str, str],
    kind: str = "http",
    path: str = "/mcp",
    deaf: bool = False,
) -> Any:
    """Call the application as a server does, and return the messages that it sent."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        if deaf:
            await anyio.sleep_forever()
        sent.append(dict(message))

    token = bearer(parts, "read", name=f"raw{len(parts.tokens.listed())}")["Authorization"]
    given = {"host": "localhost:8741", "authorization": token, "content-type": "application/json"}
    given |= {"accept": JSON["Accept"]}
    names = {name for name, _ in headers}
    rows = [(k.encode(), v.encode()) for k, v in [*((k, v) for k, v in given.items() if k not in names), *headers]]
    scope = {"type": kind, "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": rows, "http_version": "1.1", "scheme": "http", "root_path": "", "asgi": {"version": "3.0"}}
    await parts.app(scope, receive, send)  # type: ignore[attr-defined]
    return sent


# ------------------------------------------------------------------------------------------------- Host and Origin


@pytest.mark.attack("http", "rebinds a name to 127.0.0.1, or calls from a foreign page, with a valid token")
@pytest.mark.parametrize("path", ["/mcp", "/nothing", "/enter", "/leave"])
async def test_a_foreign_host_or_origin_reaches_no_route(server: Serving, path: str) -> None:
    async with client(server, bearer(server, "read") | JSON) as http:
        for host in ("evil.example", "evil.example:8741", "localhost.evil.example", "127.0.0.2", "", "[::2]:8741"):
            assert (await http.get(path, headers={"Host": host})).status_code == 421, host
        for host in ("localhost:8741", "127.0.0.1:9999", "[::1]:8741", "LOCALHOST"):
            assert (await http.get(path, headers={"Host": host})).status_code != 421, host
        for origin in ("https://evil.example", "null", "http://localhost:9999", "https://localhost:8741", "http://x"):
            assert (await http.get(path, headers={"Origin": origin})).status_code == 403, origin
        for origin in (BASE, "http://127.0.0.1:8741"):
            assert (await http.get(path, headers={"Origin": origin})).status_code != 403 or path == "/leave"


async def test_two_hosts_are_ambiguous_so_neither_counts(server: Serving) -> None:
    for hosts in (["localhost", "localhost"], ["localhost", "evil.example"], [""]):
        sent = await raw(server, Body(1, b"{}"), *(("host", host) for host in hosts))
        assert sent[0]["status"] == 421, hosts
    assert (await raw(server, Body(1, b"{}"), ("host", "localhost")))[0]["status"] != 421


@pytest.mark.attack("http", "sends a Host that other programs read differently")
async def test_malformed_host_is_refused(server: Serving) -> None:
    odd = (
        "evil.example@localhost", "localhost@evil.example", "evil.example#@localhost:8741", "[::1", "[::1]x", "::1",
        "localhost.", "localhost/", "localhost:8741:1", "localhost:x", "localhost evil.example", "http://localhost",
    )  # fmt: skip
    for host in odd:
        assert (await raw(server, Body(1, b"{}"), ("host", host)))[0]["status"] == 421, host
    for url in ("https://me@gpu.example.org", "https://[::1", "https://@", "https://a b"):
        with pytest.raises(BadRequest):
            Settings(public_url=url)


@pytest.mark.attack("http", "opens a WebSocket from a foreign page or without a token")
async def test_a_websocket_is_guarded_like_a_request(server: Serving) -> None:
    async def connect() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    for header in (("host", "evil.example"), ("origin", "https://evil.example"), ("authorization", "Bearer gwt_x")):
        sent = await raw(server, connect, header, kind="websocket", path="/api/events")
        assert [m["type"] for m in sent] == ["websocket.close"], header


async def test_a_public_address_adds_its_host_and_origin_and_needs_https(ctx: Context) -> None:
    async with serving(ctx, Settings(public_url="https://gpu.example.org")) as parts:
        link = parts.tokens.create_link()
        async with client(parts) as http:
            public = {"Host": "gpu.example.org", "Origin": "https://gpu.example.org"}
            answer = await http.get("/enter", params={"link": link}, headers=public)
            assert answer.status_code == 200 and "Secure" in answer.headers["set-cookie"]
            assert (await http.get("/enter", headers={"Host": "www.gpu.example.org"})).status_code == 421
            assert (await http.get("/enter", headers={"Origin": "http://gpu.example.org"})).status_code == 403
    for host, url in (("0.0.0.0", ""), ("192.168.1.2", ""), ("::", ""), ("127.0.0.1", "http://gpu.example.org")):
        with pytest.raises(BadRequest):
            Settings(host, 8741, url)
    Settings("0.0.0.0", 8741, "https://gpu.example.org")


# ----------------------------------------------------------------------------------------------------------- bodies


@pytest.mark.attack("http", "sends a body of 100 MB, declared or not")
async def test_a_large_body_is_refused_before_it_is_read(server: Serving) -> None:
    block = b" " * (64 << 10)
    declared = Body(1_600, block)
    sent = await raw(server, declared, ("content-length", str(1_600 * len(block))))
    assert sent[0]["status"] == 413 and declared.taken == 0
    assert (b"connection", b"close") in sent[0]["headers"]
    endless = Body(1_600, block)
    sent = await raw(server, endless, ("transfer-encoding", "chunked"))
    assert sent[0]["status"] == 413 and endless.taken <= 4 * MIB + len(block)
    for length in ("-1", "1e9", "9" * 400, "4194305"):
        assert (await raw(server, Body(1, b"{}"), ("content-length", length)))[0]["status"] == 413


@pytest.mark.attack("http", "holds a request open with a body that never ends")
async def test_stalled_body_times_out(ctx: Context) -> None:
    async with serving(ctx, Settings(body_s=0.05)) as parts:
        sent = await raw(parts, Body(1, b'{"jsonrpc":', stalls=True))
        assert sent[0]["status"] == 408
        async with client(parts, bearer(parts, "read") | JSON) as http:
            assert (await http.post("/mcp", json=opened())).status_code == 200


@pytest.mark.attack("http", "asks and never reads the answer")
async def test_client_that_does_not_read_is_dropped(ctx: Context) -> None:
    async with serving(ctx, Settings(send_s=0.05)) as parts:
        sent = await raw(parts, Body(1, b"{}"), deaf=True)
        assert sent == []


async def test_malformed_bodies_get_a_client_error(server: Serving) -> None:
    async with client(server, bearer(server, "read") | JSON) as http:
        for content in (
            b"",
            b"{",
            b"\xff\xfe",
            b"[" * 100_000,
            b"null",
            b"[]",
            b'{"jsonrpc":"2.0"}',
            b'"' + b"x" * MIB,
        ):
            answer = await http.post("/mcp", content=content)
            assert 400 <= answer.status_code < 500, (content[:20], answer.status_code, answer.text[:200])
            assert "Traceback" not in answer.text
        assert (await http.post("/mcp", json=opened(), headers={"Content-Type": "text/plain"})).status_code in {
            400,
            415,
        }


async def test_too_many_headers_are_refused_and_a_crash_reveals_nothing(
    server: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sent = await raw(server, Body(1, b"{}"), *((f"x-{n}", "1") for n in range(120)))
    assert sent[0]["status"] == 431

    async def crash(*_: object, **__: object) -> None:
        raise RuntimeError("the value is hunter2")

    monkeypatch.setattr(server.mcp, "handle", crash)
    async with client(server, bearer(server, "read") | JSON) as http:
        answer = await http.post("/mcp", json=opened())
    assert answer.status_code == 500 and answer.json()["code"] == "internal" and "hunter2" not in answer.text
    assert "the value is hunter2" in caplog.text, "the server's log keeps it"


@pytest.mark.attack("http", "leaves the routes' folders by dots, slashes and encodings")
async def test_path_traversal_reaches_no_file(server: Serving) -> None:
    for path in (
        "/mcp/../../etc/passwd",
        "/..%2f..%2fetc/passwd",
        "//etc/passwd",
        "/\x00",
        "/mcp\\..",
        "/MCP",
        "/mcp/",
    ):
        sent = await raw(server, Body(1, b"{}"), path=path)
        assert sent[0]["status"] in {307, 404}, path
        assert not any(b"root:" in m.get("body", b"") for m in sent)


# ------------------------------------------------------------------------------------------------------ a real server


def said(port: int, *blocks: bytes) -> bytes:
    """Send these bytes, and return everything that the server sends before it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=300) as line:
        found = b""
        try:
            for block in blocks:
                line.sendall(block)
            while part := line.recv(65_536):
                found += part
        except (BrokenPipeError, ConnectionResetError):  # the server closed the connection before it read everything
            pass
        return found


@pytest.mark.attack("http", "opens connections and sends headers slowly, without an end, or smuggles a request")
def test_connections_with_unfinished_headers_are_closed(ctx: Context) -> None:
    with listening(ctx, header_s=0.3) as (parts, port):
        head = b"GET /mcp HTTP/1.1\r\nHost: localhost\r\n"
        assert said(port) == b"", "a connection that says nothing"
        assert said(port, head + b"X-Slow: ") == b"", "headers that stop"
        assert b" 401 " in said(port, head + b"Connection: close\r\n\r\n")
        token = bearer(parts, "read", name="two")["Authorization"]
        kept = said(port, head + f"Authorization: {token}  \r\n\r\n".encode(), head)
        assert kept.count(b"HTTP/1.1 ") == 1 and b" 401 " not in kept, "the second request's headers stop"
        both = b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert b" 400 " in said(port, both + b"0\r\n\r\nGET /enter HTTP/1.1\r\nHost: x\r\n\r\n")[:20]
    with listening(ctx, header_s=30) as (_, port):
        assert said(port, head, *[b"X-Pad: " + b"a" * 8_000 + b"\r\n"] * 12)[:13] in {b"", b"HTTP/1.1 400 "}


def test_only_one_server_runs_per_ledger_and_can_be_found(ctx: Context) -> None:
    with pytest.raises(NotFound):
        running_server(ctx.home)
    with recorded(ctx.home, "http://localhost:1234"):
        assert running_server(ctx.home).url == "http://localhost:1234"
        with pytest.raises(Conflict), recorded(ctx.home, "http://localhost:1"):
            pass
    with pytest.raises(NotFound):
        running_server(ctx.home)
    with running.listen("127.0.0.1", 0) as one, pytest.raises(Conflict):
        running.listen("127.0.0.1", one.getsockname()[1])


@pytest.mark.attack("http", "listens on ::1, where a browser looks for localhost first")
def test_same_port_is_taken_on_the_ipv6_loopback_too() -> None:
    with running.listen("127.0.0.1", 0) as listener:
        other = running.listen_on_ipv6(listener)
        if other is None:
            pytest.skip("this machine has no IPv6")
        with other:
            assert other.getsockname()[:2] == ("::1", listener.getsockname()[1])
            with pytest.raises(Conflict):
                running.listen_on_ipv6(listener)


async def test_killed_watch_is_restarted(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    code = f"import os, time; open({str(starts)!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(600)"
    begun: list[int] = []
    async with running.watching((sys.executable, "-c", code), 0.05):
        for n in (1, 2, 3):
            while len(begun) < n:
                await anyio.sleep(0.01)
                begun = [int(pid) for pid in starts.read_text().split()] if starts.exists() else []
            if n < 3:
                os.kill(begun[-1], signal.SIGKILL)
    assert len(set(begun)) == 3
    for pid in begun:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
async def test_watch_of_a_killed_server_yields_to_the_next_server(ctx: Context) -> None:
    gone = os.getpid()  # not the parent of this process
    with anyio.move_on_after(0.2) as alone:
        await replaced(ctx.home, gone, 0.01)
    assert alone.cancelled_caught, "nobody else looks at the machines"
    with recorded(ctx.home, "http://localhost:1234"):
        await replaced(ctx.home, gone, 0.01)
        with anyio.move_on_after(0.2) as beside:
            await replaced(ctx.home, os.getppid(), 0.01)
    assert beside.cancelled_caught, "its own server runs"


def test_application_builds_with_every_route_protected(ctx: Context) -> None:
    paths = {getattr(route, "path", "") for route in build(Serving.over(ctx)).routes}
    assert {"/mcp", "/enter", "/leave"} <= paths
