"""Tools for the Hugging Face Hub: hub_repo_details and dataset_search."""

# No `from __future__ import annotations` here: the SDK evaluates the annotations of tools defined in a function.
from typing import TYPE_CHECKING, Annotated, Any

from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult
from pydantic import Field

from gpuwarden.core.repos import Operation, RepoType, Sort
from gpuwarden.interfaces import results
from gpuwarden.interfaces.mcp.tools.base import READ, answer

if TYPE_CHECKING:
    from gpuwarden.lifecycle.context import Context


def add(server: MCPServer[Any], ctx: "Context") -> None:
    """Add the tools to a server."""

    @server.tool(annotations=READ)
    async def hub_repo_details(
        repo_ids: Annotated[list[str], Field(description="1 to 10 ids, owner/name", max_length=10)],
        repo_type: Annotated[RepoType | None, Field(description="Omit to search both")] = None,
        operations: Annotated[list[Operation] | None, Field(description="Default: overview")] = None,
        config: Annotated[str | None, Field(description="Dataset config")] = None,
        split: Annotated[str | None, Field(description="Dataset split")] = None,
        offset: Annotated[int, Field(description="First row")] = 0,
        limit: Annotated[int, Field(description="Rows, up to 100")] = 5,
    ) -> Annotated[CallToolResult, results.ReposReply]:
        """Check that Hugging Face repos are readable; return revision, size, columns, rows, similar ids."""
        from gpuwarden.hub.client import HubClient, HubConfig
        from gpuwarden.hub.details import repo_details

        async with HubClient(HubConfig.from_env(ctx.env), clock=ctx.clock) as hub:
            wanted = operations or ["overview"]
            found = await repo_details(repo_ids, repo_type, wanted, config, split, offset, limit, hub=hub)
        return answer(ctx, results.repos_reply(found))

    @server.tool(annotations=READ)
    async def dataset_search(
        query: Annotated[str, Field(description="Words in the name")] = "",
        author: Annotated[str, Field(description="Owner")] = "",
        tags: Annotated[list[str] | None, Field(description="For example task_categories:text-generation")] = None,
        sort: Annotated[Sort, Field(description="Highest first")] = "downloads",
        limit: Annotated[int, Field(description="Rows, up to 50")] = 10,
    ) -> Annotated[CallToolResult, results.DatasetsReply]:
        """Find datasets on the Hugging Face Hub."""
        from gpuwarden.hub.client import HubClient, HubConfig
        from gpuwarden.hub.search import dataset_search as search_datasets

        async with HubClient(HubConfig.from_env(ctx.env), clock=ctx.clock) as hub:
            found = await search_datasets(query, author, tags or (), sort, limit, hub=hub)
        return answer(ctx, results.datasets_found(found))
