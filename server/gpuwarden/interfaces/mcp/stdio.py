"""The MCP server over standard input and output: every line is answered, the first ones before the SDK is loaded."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, JSONRPCError, JSONRPCNotification, JSONRPCRequest, jsonrpc_message_adapter
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from gpuwarden.interfaces.mcp.background_watch import watch_in_background
from gpuwarden.interfaces.mcp.first_answers import (
    FILE,
    LISTS,
    META,
    MODERN,
    REPLAYED,
    Answers,
    dump_answers,
)
from gpuwarden.interfaces.mcp.malformed import Fault, error_line, fault_of
from gpuwarden.interfaces.mcp.server import WardenServer, make_server
from gpuwarden.interfaces.mcp.stdio_lines import Line, StdioLines
from gpuwarden.lifecycle.context import Context

logger = logging.getLogger(__name__)


async def run_stdio(ctx: Context, lines: StdioLines) -> None:
    """Serve until the client disconnects."""

    async def arriving() -> AsyncIterator[Line]:
        while (line := await to_thread.run_sync(lines.next, abandon_on_cancel=True)) is not None:
            yield line

    async def write(line: bytes) -> None:
        await to_thread.run_sync(lines.write, line)

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch_in_background, ctx)
            server = make_server(ctx)
            tasks.start_soon(server.live.run)
            lines.hand_over()
            await serve_lines(server, arriving(), write)
            tasks.cancel_scope.cancel()
    finally:
        lines.close()


async def serve_lines(
    server: WardenServer, lines: AsyncIterator[Line], write: Callable[[bytes], Awaitable[None]]
) -> None:
    """Serve one client's lines, and answer those that are not messages."""
    to_server, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, from_server = anyio.create_memory_object_stream[SessionMessage](0)

    async def read_all() -> None:
        async with to_server:
            async for line in lines:
                message = read(line)
                if isinstance(message, SessionMessage):
                    await to_server.send(message)
                elif message is not None:
                    await write(message.reply)

    async def write_all() -> None:
        async with from_server:
            async for sent in from_server:
                message = sent.message
                if getattr(message, "id", None) == REPLAYED:
                    if isinstance(message, JSONRPCError):
                        why = message.error.message
                        logger.error("the server rejected the opening request that the snapshot had answered: %s", why)
                    continue
                try:
                    line = message.model_dump_json(by_alias=True, exclude_unset=True).encode()
                except (PydanticSerializationError, UnicodeEncodeError):
                    logger.exception("an answer can't be encoded")
                    line = error_line(getattr(message, "id", None), INTERNAL_ERROR, "the answer can't be encoded")
                await write(line)

    low = server._lowlevel_server  # noqa: SLF001 - the SDK's own transport can't answer an invalid line
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write_all)
        tasks.start_soon(read_all)
        await low.run(incoming, outgoing, low.create_initialization_options())


def read(line: Line) -> SessionMessage | Fault | None:
    """Parse a line. Return its fault if it is invalid, or None for an invalid notification."""
    try:
        message = jsonrpc_message_adapter.validate_json(line.content, by_name=False) if line.whole else None
    except ValidationError:
        message = None
    odd = message is None or (isinstance(message, JSONRPCNotification) and b'"id"' in line.content)
    fault = fault_of(line) if odd else None
    if fault is None:
        return SessionMessage(message) if message is not None else None
    if not fault.response:
        return fault
    # An unreadable answer of the client becomes an error, so that the code waiting for it does not hang.
    refused = error_line(fault.id, fault.code, fault.message)
    return SessionMessage(jsonrpc_message_adapter.validate_json(refused)) if fault.id is not None else None


# ---------------------------------------------------------------------------------------------------- the snapshot


async def record_answers(ctx: Context) -> Answers:
    """Return the constant answers of a real server in each protocol version."""
    client = {"name": "snapshot", "version": "1"}
    meta = {f"{META}protocolVersion": MODERN, f"{META}clientInfo": client, f"{META}clientCapabilities": {}}
    answers: dict[str, dict[str, Any]] = {}
    for handshake in HANDSHAKE_PROTOCOL_VERSIONS:
        opening = {"protocolVersion": handshake, "capabilities": {}, "clientInfo": client}
        answers[handshake] = await _ask(ctx, {"initialize": opening, **{name: {} for name in LISTS}})
    answers[MODERN] = await _ask(ctx, {name: {"_meta": meta} for name in ("server/discover", *LISTS)})
    return answers


async def _ask(ctx: Context, requests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the results of some requests on one connection."""
    found: dict[str, Any] = {}
    answered = anyio.Event()

    async def lines() -> AsyncIterator[Line]:
        nonlocal answered
        for method, params in requests.items():
            answered = anyio.Event()
            yield Line(
                JSONRPCRequest(jsonrpc="2.0", id=method, method=method, params=params).model_dump_json().encode()
            )
            await answered.wait()

    async def write(line: bytes) -> None:
        response = jsonrpc_message_adapter.validate_json(line).model_dump()
        found[response["id"]] = response["result"]
        answered.set()

    await serve_lines(make_server(ctx), lines(), write)
    return found


async def write_answers(ctx: Context, file: Path = FILE) -> None:
    """Write the snapshot of the server's first answers next to the module that reads it."""
    text = dump_answers(await record_answers(ctx), version("mcp"))
    await to_thread.run_sync(file.write_text, text, "utf-8")
