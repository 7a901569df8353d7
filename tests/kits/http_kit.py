"""Fixtures for the HTTP server's tests: the in-memory application, and a client with given headers."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx2
from mcp.client.streamable_http import streamable_http_client

from gpuwarden.interfaces.http import running
from gpuwarden.interfaces.http.application import build
from gpuwarden.interfaces.http.principals import Scope
from gpuwarden.interfaces.http.serving import Serving, Settings
from gpuwarden.lifecycle.context import Context

BASE = "http://localhost:8741"
JSON = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
MODERN = "2026-07-28"
META = "io.modelcontextprotocol/"


@asynccontextmanager
async def serving(ctx: Context, settings: Settings | None = None) -> AsyncIterator[Serving]:
    """Run the application in memory; the yielded object's `app` is the ASGI application."""
    parts = Serving.over(ctx, settings)
    app = build(parts)
    async with app.router.lifespan_context(app):
        parts.app = app  # type: ignore[attr-defined]
        yield parts


def bearer(parts: Serving, *scopes: Scope, name: str = "test", days: float = 1) -> dict[str, str]:
    """Return the authorization header for a fresh token."""
    return {"Authorization": f"Bearer {parts.tokens.create(name, scopes, days)[1]}"}


def client(parts: Serving, headers: dict[str, str] | None = None, **more: Any) -> httpx2.AsyncClient:
    """Return a client for the in-memory application."""
    transport = httpx2.ASGITransport(app=parts.app)  # type: ignore[attr-defined]
    return httpx2.AsyncClient(transport=transport, base_url=BASE, headers=headers, **more)


@contextmanager
def listening(ctx: Context, **limits: float) -> Iterator[tuple[Serving, int]]:
    """Run the application on uvicorn in a thread, without a watch."""
    with running.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        parts = Serving.over(ctx, Settings(port=port, **limits))  # type: ignore[arg-type]
        server = running.Server(parts)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield parts, port
        finally:
            server.should_exit = True
            thread.join(60)


def opened() -> dict[str, Any]:
    """Return the request that opens a session in the older protocol."""
    client_info = {"name": "test", "version": "1"}
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client_info}
    return {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}


def envelope() -> dict[str, Any]:
    """Return the metadata that every request in the newer protocol has."""
    info = {"name": "test", "version": "1"}
    return {f"{META}protocolVersion": MODERN, f"{META}clientCapabilities": {}, f"{META}clientInfo": info}


async def call(http: httpx2.AsyncClient, tool: str, /, **arguments: Any) -> dict[str, Any]:
    """Call a tool in the newer protocol, which needs no session, and return its structured content."""
    params = {"name": tool, "arguments": arguments, "_meta": envelope()}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    headers = {"MCP-Protocol-Version": MODERN, "Mcp-Method": "tools/call", "Mcp-Name": tool}
    answer = await http.post("/mcp", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    text = answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        text = [line for line in text.splitlines() if line.startswith("data: ")][-1].removeprefix("data: ")
    found: dict[str, Any] = json.loads(text)["result"]["structuredContent"]
    return found


def transport(parts: Serving, http: httpx2.AsyncClient) -> object:
    return streamable_http_client(f"{parts.settings.local_url}/mcp", http_client=http)


SECRET = re.compile(r"gwt_[A-Za-z0-9_-]{43}")
