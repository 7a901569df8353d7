"""Start the MCP server on standard input and output: listen first, then load what it needs.

A server that can't start (a broken policy, a damaged ledger) answers each request with the reason, since an agent sees
its client's messages and not the server's standard error.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from gpuwarden.core.errors import WardenError
from gpuwarden.interfaces.mcp.first_answers import REPLAYED, FirstAnswers, load_answers
from gpuwarden.interfaces.mcp.malformed import error_line, fault_of, is_id
from gpuwarden.interfaces.mcp.stdio_lines import StdioLines

if TYPE_CHECKING:
    from gpuwarden.lifecycle.context import Context

INTERNAL_ERROR: Final = -32603


def start(open_context: Callable[[], Context]) -> int:
    """Serve until the client goes away. Raises what kept the server from starting."""
    lines = StdioLines(FirstAnswers(load_answers()))
    try:
        ctx = open_context()
    except WardenError as error:
        refuse_all(lines, error)
        raise
    import anyio

    from gpuwarden.interfaces.mcp.stdio import run_stdio

    gc.freeze()  # what is loaded by now stays: to look through it again takes the collector 70 ms each time
    anyio.run(run_stdio, ctx, lines)
    return 0


def refuse_all(lines: StdioLines, error: WardenError) -> None:
    """Answer what a client asks with the reason for which there is no server, for as long as it is there.

    Where nothing was answered yet, only what has been asked: the client learns from the exit.
    """
    lines.hand_over()
    if not lines.answered:
        lines.close()
    from gpuwarden.interfaces.mcp.wording import in_calls

    reason = f"gpuwarden can't start: {error.message}. {in_calls(error.next_steps)}".rstrip()
    while (line := lines.next()) is not None:
        try:
            message = json.loads(line.content)
        except (ValueError, RecursionError):
            message = {}
        request_id = message.get("id") if isinstance(message, dict) else None
        if "method" not in message or request_id is None or not is_id(request_id):
            fault = fault_of(line)
            reply = fault.reply if fault and not fault.response else None
        else:
            reply = None if request_id == REPLAYED else error_line(request_id, INTERNAL_ERROR, reason)
        if reply is not None:
            lines.write(reply)
