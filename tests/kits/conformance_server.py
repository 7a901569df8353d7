"""Serve the product over HTTP for the conformance suite, which sends no token: this server adds one to each request.

`python tests/kits/conformance_server.py HOME [--fixtures]` prints the address and serves until stdin closes.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from doors import quick_warden
from gpuwarden.interfaces.http import running
from gpuwarden.interfaces.http.serving import Serving, Settings
from mcp_fixtures import mount


class WithToken:
    """ASGI middleware that adds the token, which the suite can't send."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self.app = app
        self.header = (b"authorization", f"Bearer {secret}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in {"http", "websocket"}:
            scope["headers"] = [*scope["headers"], self.header]
        await self.app(scope, receive, send)


def main() -> None:
    home, *options = sys.argv[1:]
    ctx = quick_warden(Path(home))
    with running.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        parts = Serving.over(ctx, Settings(port=port))
        if "--fixtures" in options:
            mount(parts.mcp.server)
        secret = parts.tokens.create(f"suite-{os.getpid()}", ("read", "submit"), 1)[1]
        server = running.Server(parts)
        server.config.app = WithToken(server.config.app, secret)  # type: ignore[arg-type]
        threading.Thread(target=lambda: (sys.stdin.read(), setattr(server, "should_exit", True)), daemon=True).start()
        print(f"http://localhost:{port}/mcp", flush=True)
        server.run(sockets=[listener])


if __name__ == "__main__":
    main()
