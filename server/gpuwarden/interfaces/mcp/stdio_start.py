"""Start the MCP server on standard input and output: listen first, then load the SDK.

A server that can't start (an invalid policy, a damaged ledger) answers each request with the reason, since an agent
reads its client's messages but not the server's standard error. It retries the start at each request.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from gpuwarden.core.errors import WardenError
from gpuwarden.interfaces.mcp.first_answers import REPLAYED, FirstAnswers, load_answers
from gpuwarden.interfaces.mcp.malformed import error_line, fault_of, is_id
from gpuwarden.interfaces.mcp.stdio_lines import Line, StdioLines

if TYPE_CHECKING:
    from gpuwarden.lifecycle.context import Context

INTERNAL_ERROR: Final = -32603


def start(open_context: Callable[[], Context]) -> int:
    """Serve until the client disconnects. Raises the error that prevented the start."""
    lines = StdioLines(FirstAnswers(load_answers()))
    try:
        ctx = open_context()
    except WardenError as error:
        ctx = refuse(lines, error, open_context)
    import anyio

    from gpuwarden.interfaces.mcp.stdio import run_stdio

    gc.freeze()  # the loaded modules are never freed; scanning them would take the collector 70 ms each time
    anyio.run(run_stdio, ctx, lines)
    return 0


def refuse(lines: StdioLines, error: WardenError, open_context: Callable[[], Context]) -> Context:
    """Answer a client's requests with the reason why the server can't start, and retry the start at each request.

    Return the context once it opens; the server then reads the unanswered lines. Raises the last error if the client
    disconnects before. If no request was answered yet, do not retry: the client notices the exit of the process.
    """
    if not lines.answered:
        lines.hand_over()
        lines.close()
    from gpuwarden.interfaces.mcp.wording import in_calls

    unanswered: list[Line] = []
    while (line := lines.next()) is not None:
        try:
            message = json.loads(line.content)
        except (ValueError, RecursionError):
            message = {}
        request_id = message.get("id") if isinstance(message, dict) else None
        if "method" not in message or request_id is None or not is_id(request_id):
            fault = fault_of(line)
            if fault is None:
                unanswered.append(line)
            elif not fault.response:
                lines.write(fault.reply)
        elif request_id == REPLAYED:
            unanswered.append(line)
        else:
            try:
                ctx = open_context()
            except WardenError as again:
                error = again
            else:
                lines.unread([*unanswered, line])
                return ctx
            reason = f"gpuwarden can't start: {error.message}. {in_calls(error.next_steps)}".rstrip()
            lines.write(error_line(request_id, INTERNAL_ERROR, reason))
    raise error
