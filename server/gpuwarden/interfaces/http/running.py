"""Run the application on uvicorn, with a limit on connections and with a watch in a separate process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import anyio
import uvicorn
from anyio import to_thread
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpuwarden.core.errors import BadRequest, Conflict
from gpuwarden.interfaces.http.application import build
from gpuwarden.interfaces.http.record import recorded
from gpuwarden.interfaces.http.serving import Serving

logger = logging.getLogger(__name__)
MAX_HEADER_BYTES: Final = 64 << 10
MAX_CONNECTIONS: Final = 900
"""Maximum number of connections, below the usual limit of 1,024 open files."""
STOP_S: Final = 5
"""Time in seconds for open requests to finish when the server stops."""
WATCH: Final = (sys.executable, "-P", "-m", "gpuwarden", "watch", "--beside", str(os.getpid()))
WATCH_PAUSE_S: Final = 5.0
"""Seconds between checks of whether the watch is still running."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on the time and size of request headers, which uvicorn lacks."""

    header_s: float = 10.0
    _timer: asyncio.TimerHandle | None = None
    _header_bytes: int = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first request's headers."""
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Parse received data. Disconnect a client whose headers are too large."""
        if self._timer is not None:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._timer is not None and self._header_bytes > MAX_HEADER_BYTES:
            self.send_400_response("The headers are too large.")

    def on_message_begin(self) -> None:
        """Start the timer for the next request's headers."""
        super().on_message_begin()
        if self._timer is None:
            self._arm()

    def on_headers_complete(self) -> None:
        """Stop the timer."""
        self._disarm()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of a closed connection."""
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        self._header_bytes = 0
        self._timer = self.loop.call_later(self.header_s, self.transport.close)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises Conflict for a port in use, BadRequest for an unknown host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except socket.gaierror as error:
        raise BadRequest(f"{host} is not one of this machine's addresses", "Omit --host.") from error
    except OSError as error:
        raise Conflict(
            f"port {port} on {host} can't be used: {error.strerror or error}", "Choose another port with --port."
        ) from error


def listen_on_ipv6(listener: socket.socket) -> socket.socket | None:
    """Return a socket on ::1 for a listener on 127.0.0.1; None for another address or a machine without IPv6.

    For localhost, a browser tries ::1 first, so another user's program that listens there would receive the one-time
    links. Raises Conflict if a program listens there.
    """
    host, port = listener.getsockname()[:2]
    if host != "127.0.0.1" or not socket.has_ipv6:
        return None
    try:
        return socket.create_server(("::1", port), family=socket.AF_INET6, backlog=512)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Conflict(f"another program uses port {port} on ::1", "Choose another port with --port.") from error
        return None


@asynccontextmanager
async def watching(argv: Sequence[str] = WATCH, pause_s: float = WATCH_PAUSE_S) -> AsyncIterator[None]:
    """Run the watch in a separate process, so that a busy server can't delay it.

    A watch that ends is restarted, at most once every `pause_s` seconds, because it monitors billing.
    """

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    watch = await to_thread.run_sync(start)

    async def again() -> None:
        nonlocal watch
        while True:
            await anyio.sleep(pause_s)
            if (status := watch.poll()) is not None:
                logger.warning("the watch ended with status %s; restarting it", status)
                with contextlib.suppress(OSError):  # the system is temporarily out of processes or memory
                    watch = start()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(again)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()
            watch.terminate()
            with anyio.CancelScope(shield=True):
                try:
                    await to_thread.run_sync(watch.wait, STOP_S)
                except subprocess.TimeoutExpired:
                    watch.kill()
                    await to_thread.run_sync(watch.wait)


def config_of(serving: Serving) -> uvicorn.Config:
    """Return uvicorn's configuration. The access log is disabled, because URLs may contain secrets."""
    protocol = type("Protocol", (BoundedProtocol,), {"header_s": serving.settings.header_s})
    return uvicorn.Config(
        build(serving),
        http=protocol,
        ws="websockets-sansio",
        ws_max_size=64 << 10,
        lifespan="on",
        log_config=None,
        access_log=False,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=STOP_S,
    )


class Server(uvicorn.Server):
    """A uvicorn server that ends event streams before it waits for open requests."""

    def __init__(self, serving: Serving) -> None:
        super().__init__(config_of(serving))
        self.serving = serving

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and wait a few seconds for open requests."""
        self.serving.end_streams()
        await super().shutdown(sockets)


def run(
    serving: Serving, listener: socket.socket, *, watch: bool = True, ready: Callable[[], None] = lambda: None
) -> None:
    """Serve until interrupted. `ready` is called once the server is recorded. Raises Conflict if another is running."""
    sockets = [one for one in (listener, listen_on_ipv6(listener)) if one is not None]
    if watch:
        serving.lifespans.append(watching)
    # uvicorn re-raises the signal that stopped it, which must not skip the cleanup in `recorded`.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = serving.settings
    with recorded(serving.ctx.home, settings.local_url, settings.public_url), contextlib.suppress(KeyboardInterrupt):
        ready()
        Server(serving).run(sockets=sockets)
