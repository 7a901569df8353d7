"""The MCP server over standard input and output.

A server that can't open its context, for example because the policy is invalid or the ledger is damaged, still accepts
the session and tries again on each call. If this fails, the call's result contains the reason, because an agent reads
its client's messages but not the server's standard error.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any, Final, cast

import anyio
from anyio import to_thread

from gpuwarden.core.errors import WardenError
from gpuwarden.interfaces.mcp.server import WardenServer, make_server

if TYPE_CHECKING:
    from gpuwarden.lifecycle.context import Context

START_S: Final = 1.0
"""Time in seconds in which the server answers the client's first requests before it loads most of the package."""


class LateContext:
    """A context that is opened on first use.

    While the context can't be opened, every use raises a WardenError with the reason.
    """

    def __init__(self, open_context: Callable[[], Context]) -> None:
        # `__setattr__` forwards to the context, so these attributes are set without it.
        vars(self).update(_open=open_context, _context=None, _opened=anyio.Event())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._get(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._get(), name, value)

    def __copy__(self) -> Context:
        return copy(self._get())

    def _get(self) -> Context:
        own = vars(self)
        if own["_context"] is None:
            own["_context"] = own["_open"]()
            own["_opened"].set()
        context: Context = own["_context"]
        return context

    async def opening(self) -> None:
        """Wait until a client's call has opened the context. If none has after `START_S`, try to open it, once."""
        with anyio.move_on_after(START_S):
            return await self._wait()
        try:
            self._get()
        except WardenError:
            await self._wait()

    async def _wait(self) -> None:
        await vars(self)["_opened"].wait()


def serve_stdio(open_context: Callable[[], Context], *, channel: bool = False) -> None:
    """Serve until the client disconnects. If the context has not been opened by then, raise the error that
    prevented it.
    """
    gc.freeze()  # the loaded modules are never freed; scanning them would add 70 ms to each garbage collection
    context = anyio.run(_serve, open_context, channel)
    _ = context.ledger


async def _serve(open_context: Callable[[], Context], channel: bool) -> Context:
    late = LateContext(open_context)
    server = make_server(cast("Context", late), channel=channel)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_run_beside, server, late)
        await server.run_stdio_async()
        tasks.cancel_scope.cancel()
    return server.warden


async def _run_beside(server: WardenServer, late: LateContext) -> None:
    """Wait until the context is open, then watch the jobs and notify the client of their changes."""
    await late.opening()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.live.run)
        watch = await to_thread.run_sync(_load_watch)
        tasks.start_soon(watch, server.warden)


def _load_watch() -> Callable[[Context], Any]:
    """Import the watch, and with it most of the package, while the server is already responding."""
    from gpuwarden.interfaces.mcp.background_watch import watch_in_background

    return watch_in_background
