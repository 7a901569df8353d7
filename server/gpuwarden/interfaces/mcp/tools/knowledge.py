"""Register the tool search_references, the resource templates and the prompts."""

# No `from __future__ import annotations` here: the SDK evaluates the annotations of tools defined in a function.
from typing import TYPE_CHECKING, Annotated, Any

import anyio
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ResourceNotFoundError
from mcp_types import CallToolResult
from pydantic import Field

from gpuwarden.core.errors import NotFound, WardenError
from gpuwarden.core.sanitize import line
from gpuwarden.interfaces.mcp import prompts
from gpuwarden.interfaces.mcp.live import JOB_TEMPLATE, job_text
from gpuwarden.interfaces.mcp.resources import ENTRY_TEMPLATE, FILLED_URI, MARKDOWN, PROFILE_TEMPLATE, entry_text
from gpuwarden.interfaces.mcp.tools.base import LOOK, answer
from gpuwarden.interfaces.mcp.wording import in_calls
from gpuwarden.interfaces.results import worded
from gpuwarden.interfaces.results.references import LEAD, SearchReply, look_up

if TYPE_CHECKING:
    from gpuwarden.lifecycle.context import Context


def add(server: MCPServer[Any], ctx: "Context") -> None:
    """Add the tool, the resource templates and the prompts to a server."""

    @server.tool(annotations=LOOK)
    async def search_references(
        query: Annotated[str, Field(description="A symptom in any words, an id, or log lines")],
        limit: Annotated[int, Field(description="Up to 10")] = 5,
    ) -> Annotated[CallToolResult, SearchReply]:
        """Search known failures and how-to pages: cause, fix, page."""
        reply = await anyio.to_thread.run_sync(look_up, query, limit)
        if reply.hits:
            reply.hint = f"{LEAD} Read {ENTRY_TEMPLATE} for a full entry, or the uri for its page."
        return answer(ctx, reply)

    @server.resource(ENTRY_TEMPLATE, name="entry", title="One known failure", mime_type=MARKDOWN)
    async def entry(id: str) -> str:  # noqa: A002 - the template's variable
        """Return a full reference entry by its id."""
        try:
            return await anyio.to_thread.run_sync(entry_text, id)
        except NotFound as error:
            raise ResourceNotFoundError(line(error.message)) from error

    @server.resource(JOB_TEMPLATE, name="job", title="One job, live", mime_type="application/json")
    async def job(job_id: str) -> str:
        """Return a job's current state, step, loss, cost and clocks. Subscribe to be notified of changes."""
        try:
            return job_text(ctx, job_id)
        except NotFound as error:
            raise ResourceNotFoundError(line(error.message)) from error

    @server.resource(PROFILE_TEMPLATE, name="profile", title="One platform's profile", mime_type=MARKDOWN)
    async def profile(name: str) -> str:
        """Return a platform's storage, billing and pitfalls. Every profile is listed as a resource."""
        raise ResourceNotFoundError(f"no profile is named {line(name, 80)!r}; list the resources to see all profiles")

    @server.resource(FILLED_URI, name="template", title="One training template", mime_type=MARKDOWN)
    async def template(name: str, model: str = "", dataset: str = "", platform: str = "", push: str = "") -> str:
        """Return a bundled training script or, for a model and a dataset on the Hub, the matching arguments."""
        from gpuwarden.hub.client import HubConfig
        from gpuwarden.interfaces.results.templates import filled_page, filled_reply, template_page
        from gpuwarden.lifecycle.templates.fill import TemplateRequest, fill
        from gpuwarden.static_analysis.shipped_trainers import trainer

        try:
            if not (model or dataset):
                return template_page(await anyio.to_thread.run_sync(trainer, name))
            profile = ctx.profile(platform) if platform else None
            request = TemplateRequest(name, model, dataset, push=push)
            filled = await fill(request, HubConfig.from_env(ctx.env), clock=ctx.clock, profile=profile)
            return filled_page(worded(filled_reply(filled, platform), in_calls))
        except WardenError as error:
            raise ResourceNotFoundError(f"{line(error.message)} {in_calls(error.next_steps)}") from error

    for prompt in (prompts.start_training_run, prompts.debug_run, prompts.finish_run):
        server.prompt()(prompt)
