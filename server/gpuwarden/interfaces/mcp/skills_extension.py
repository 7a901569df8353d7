"""Provide the skills through an MCP extension (SEP-2640). Their files are also available as ordinary resources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mcp.server.apps import EXTENSION_ID as APPS
from mcp.server.caching import CacheHint
from mcp.server.context import ServerRequestContext
from mcp.server.extension import Extension, MethodBinding, RequestHandler
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, RequestParams

from gpuwarden.core.errors import NotFound
from gpuwarden.core.sanitize import line
from gpuwarden.interfaces.mcp import skills
from gpuwarden.interfaces.mcp.wording import in_calls

SHIPPED = CacheHint(ttl_ms=300_000, scope="public")
"""Bundled documents change only when another version is installed."""


class SkillsParams(RequestParams):
    """Parameters for the skills extension's methods."""

    uri: str = ""
    cursor: str | None = None


class Skills(Extension):
    """The MCP extension for skills, with its methods."""

    identifier = skills.EXTENSION

    def settings(self) -> dict[str, Any]:
        """Return the extension's optional capabilities."""
        return {"directoryRead": True}

    def methods(self) -> Sequence[MethodBinding]:
        """Return the extension's three methods. All results fit on one page, so no cursor is returned."""
        return [
            MethodBinding("skills/list", SkillsParams, _answering(lambda _: {"skills": skills.listed()})),
            MethodBinding("skills/get", SkillsParams, _answering(lambda uri: {"skill": skills.found(uri)})),
            MethodBinding(
                "resources/directory/read",
                SkillsParams,
                _answering(lambda uri: {"resources": skills.folder(uri)}),
            ),
        ]


def _answering(look: Callable[[str], dict[str, Any]]) -> RequestHandler:
    async def handle(_: ServerRequestContext[Any, Any], params: SkillsParams) -> dict[str, Any]:
        if params.cursor is not None:
            raise MCPError(code=INVALID_PARAMS, message="unknown cursor; all results are on one page, so omit it")
        try:
            found = look(params.uri)
        except NotFound as error:
            raise MCPError(
                code=INVALID_PARAMS, message=line(f"{error.message}. {in_calls(error.next_steps)}")
            ) from error
        return {"resultType": "complete", **found, "ttlMs": SHIPPED.ttl_ms, "cacheScope": SHIPPED.scope}

    return handle


async def tell_legacy_clients(ctx: ServerRequestContext[Any, Any], call_next: Any) -> Any:
    """List the extensions in the result of `initialize`, where clients that use the older protocol expect them."""
    result = await call_next(ctx)
    if ctx.method == "initialize" and isinstance(result, dict):
        extensions = {skills.EXTENSION: Skills().settings(), APPS: {}}
        result.setdefault("capabilities", {})["extensions"] = extensions
    return result
