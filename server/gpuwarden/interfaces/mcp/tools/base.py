"""The annotations and the result format that all tools share."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Annotated, Any, Final

from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult, TextContent, ToolAnnotations
from pydantic import Field, ValidationError

from gpuwarden.core.errors import Refused, WardenError, as_warden_error
from gpuwarden.core.inputs import bad_arguments
from gpuwarden.core.sanitize import scrubbed
from gpuwarden.interfaces.mcp.wording import in_calls
from gpuwarden.interfaces.results import Result, error_reply, warned, worded

if TYPE_CHECKING:
    from gpuwarden.lifecycle.context import Context

ASK_OUTSIDE: Final = "Ask the user to run gpuwarden approve with the ticket, outside this client."
READ: Final = ToolAnnotations(read_only_hint=True, open_world_hint=True)
LOOK: Final = ToolAnnotations(read_only_hint=True, open_world_hint=False)
WRITE: Final = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=True, open_world_hint=True)
ENDS: Final = ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=True)

JobId = Annotated[str, Field(description="Job id from submit_job", max_length=64)]

logger = logging.getLogger(__name__)


def answer(ctx: Context, reply: Result, secrets: tuple[str, ...] = ()) -> CallToolResult:
    """Return a reply as short text and as structured content, without tokens or the user's secrets."""
    from gpuwarden.lifecycle.leases.auto_teardown import notices

    reply = worded(warned(reply, notices(ctx), in_calls), in_calls)
    full = _structured(reply)
    values = ctx.hidden(full, secrets)
    body, short = scrubbed(full, values), scrubbed(reply.short(), values)
    return CallToolResult(content=[_text(short)], structured_content=body, is_error=not reply.ok)


def failure(ctx: Context, error: WardenError) -> CallToolResult:
    """Return an error in the format of `answer`."""
    reply = worded(error_reply(error), in_calls)
    full = _structured(reply)
    try:
        values = ctx.hidden(full)
    except WardenError:  # the server can't start; `error` already reports that
        values = ()
    body, short = scrubbed(full, values), scrubbed(reply.short(), values)
    return CallToolResult(content=[_text(short)], structured_content=body, is_error=True)


def edited(result: CallToolResult, **changes: Any) -> CallToolResult:
    """Return a result with some fields changed in both its text and its structured content."""
    body = {**(result.structured_content or {}), **changes}
    short = {k: v for k, v in body.items() if k != "next" and (v not in (None, "", [], {}) or k == "ok")}
    return CallToolResult(content=[_text(short)], structured_content=body)


def _structured(reply: Result) -> dict[str, Any]:
    """Return the full reply. The next steps of findings are kept only as text, because a model reads the text."""
    return reply.model_dump(mode="json", exclude={"findings": {"__all__": {"next"}}})


def _text(body: dict[str, Any]) -> TextContent:
    return TextContent(type="text", text=json.dumps(body, ensure_ascii=False, separators=(",", ":")))


def cause(error: ToolError | MCPError) -> WardenError:
    """Return the cause of an SDK exception as a WardenError. An unexpected exception is logged."""
    raised = error.__cause__
    if isinstance(raised, WardenError):
        return raised
    if isinstance(error, MCPError) or (isinstance(raised, ToolError) and not isinstance(raised, UnexpectedToolError)):
        return Refused("the client's answer is invalid and was ignored; nothing was changed", ASK_OUTSIDE)
    if isinstance(raised, ValidationError) and not isinstance(error, UnexpectedToolError):
        return bad_arguments(raised)
    logger.error("a tool crashed", exc_info=raised or error)
    return as_warden_error(raised or error)
