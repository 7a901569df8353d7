"""Serve HTML cards for tool results through the MCP Apps extension (SEP-1865), to the clients that support it.

Only a client that declares the extension receives references to cards and the cards' data. The text and the structured
content of results are the same with and without the extension.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mcp.server.apps import APP_MIME_TYPE, Apps, ResourceCsp, client_supports_apps
from mcp.server.context import ServerRequestContext
from mcp.server.mcpserver import Context as ClientContext
from mcp.server.mcpserver.resources import FunctionResource
from mcp_types import CallToolResult

if TYPE_CHECKING:
    from gpuwarden.interfaces.results.inventory import InstancesReply
    from gpuwarden.lifecycle.context import Context
    from gpuwarden.lifecycle.monitoring.check import CheckedJob

CARDS: Final = {"check_job": "ui://gpuwarden/job.html", "list_instances": "ui://gpuwarden/machines.html"}
VIEW: Final = "gpuwarden/card"
"""Key of a card's data in a result's metadata, which models do not read."""
CLOSED: Final = ResourceCsp(connect_domains=[], resource_domains=[], frame_domains=[], base_uri_domains=[])

logger = logging.getLogger(__name__)


def cards() -> Apps:
    """Return the extension with an HTML document for each card. A document is built when it is read."""

    def read(kind: Any) -> str:
        from gpuwarden.interfaces.http.pages.cards import document  # imports Jinja, which few clients need

        return document(kind)

    found = Apps()
    for uri in CARDS.values():
        name = uri.rpartition("/")[2]
        resource = FunctionResource(
            uri=uri,
            name=f"cards/{name}",
            mime_type=APP_MIME_TYPE,
            meta={"ui": {"csp": CLOSED.model_dump(by_alias=True, exclude_none=True), "prefersBorder": True}},
            fn=partial(read, name.removesuffix(".html")),
        )
        found.add_resource(resource)
    return found


async def offer_cards(ctx: ServerRequestContext[Any, Any], call_next: Any) -> Any:
    """Add the cards to the list of tools for a client that declares the extension.

    Cards can't call tools: all tools are declared visible to the model only.
    """
    result = await call_next(ctx)
    if ctx.method == "tools/list" and isinstance(result, dict) and client_supports_apps(ctx):
        for tool in result["tools"]:
            card = {"resourceUri": CARDS[tool["name"]]} if tool["name"] in CARDS else {}
            tool["_meta"] = {**tool.get("_meta", {}), "ui": {**card, "visibility": ["model"]}}
        if "cacheScope" in result:
            result["cacheScope"] = "private"  # not cached for other clients, which may not support the extension
    return result


async def with_card(
    client: ClientContext[Any, Any] | None, result: CallToolResult, ctx: Context, seen: CheckedJob | InstancesReply
) -> CallToolResult:
    """Add a card's data to the result if the client supports cards. On an error, omit the data."""
    if client is None or result.is_error or not client_supports_apps(client):
        return result
    try:
        from gpuwarden.interfaces.http.pages.cards import card_of

        return result.model_copy(update={"meta": {**(result.meta or {}), VIEW: await card_of(ctx, seen)}})
    except Exception:
        logger.exception("a card could not be built; the result is returned without it")
        return result
