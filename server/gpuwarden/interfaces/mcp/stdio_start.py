"""Start the MCP server on standard input and output: listen first, then load what it needs.

A server that can't start (a broken policy, a damaged ledger) answers each request with the reason, since an agent sees
its client's messages and not the server's standard error. It tries again at each request.
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
    """Serve until the client goes away. Raises what kept the server from starting."""
    lines = StdioLines(FirstAnswers(load_answers()))
    try:
        ctx = open_context()
    except WardenError as error:
        ctx = refuse(lines, error, open_context)
    import anyio

    from gpuwarden.interfaces.mcp.stdio import run_stdio

    gc.freeze()  # what is loaded by now stays: to look through it again takes the collector 70 ms each time
    anyio.run(run_stdio, ctx, lines)
    return 0


def refuse(lines: StdioLines, error: WardenError, open_context: Callable[[], Context]) -> Context:
    """Answer a client's requests with the reason for which there is no server, and try to start at each of them.

    Return the context once it opens: the server then reads what was not answered. Raises the last error where the
    client goes away before. A client that was never answered gets no second try, and learns from the exit.
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
