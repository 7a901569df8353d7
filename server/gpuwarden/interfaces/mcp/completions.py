"""Complete the arguments of prompts and resource templates: jobs, platforms, profiles, entries and templates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from anyio import to_thread
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp_types import CompleteRequestParams, CompleteResult, Completion, PromptReference

from gpuwarden.core.states import Job
from gpuwarden.interfaces.mcp.live import JOB_TEMPLATE
from gpuwarden.interfaces.mcp.resources import ENTRY_TEMPLATE, FILLED_URI, PROFILE_TEMPLATE

if TYPE_CHECKING:
    from gpuwarden.lifecycle.context import Context

LIMIT: Final = 100
"""Maximum number of values in one response, as set by the protocol."""
JOBS_LOOKED_AT: Final = 1_000
Names: TypeAlias = Callable[["Context", str], Iterable[str]]


def _jobs(ctx: Context, typed: str) -> Iterable[str]:
    """Yield the ids of recent jobs whose id starts with the typed text or whose name contains it."""
    for row in ctx.ledger.page("job", *(s for s in Job if s is not Job.REFUSED), limit=JOBS_LOOKED_AT):
        job_id = row.subject.removeprefix("job/")
        if job_id.startswith(typed) or (typed and typed.lower() in (row.name or "").lower()):
            yield job_id


def _starting(names: Iterable[str], typed: str) -> list[str]:
    return [name for name in names if name.lower().startswith(typed.lower())]


def _platforms(ctx: Context, typed: str) -> Iterable[str]:
    return _starting(ctx.platforms(), typed)


def _entries(_ctx: Context, typed: str) -> Iterable[str]:
    from gpuwarden.knowledge.catalog import shipped

    return _starting(sorted(shipped().gotchas), typed)


def _profiles(ctx: Context, typed: str) -> Iterable[str]:
    from gpuwarden.profiles import profile_names

    return _starting(sorted(profile_names(ctx.own_profiles)), typed)


def _trainers(_ctx: Context, typed: str) -> Iterable[str]:
    from gpuwarden.static_analysis.shipped_trainers import trainer_names

    return _starting(trainer_names(), typed)


COMPLETED: Final[Mapping[tuple[str, str], Names]] = {
    ("start_training_run", "platform"): _platforms,
    ("debug_run", "job_id"): _jobs,
    ("finish_run", "job_id"): _jobs,
    (JOB_TEMPLATE, "job_id"): _jobs,
    (PROFILE_TEMPLATE, "name"): _profiles,
    (ENTRY_TEMPLATE, "id"): _entries,
    (FILLED_URI, "name"): _trainers,
    (FILLED_URI, "platform"): _platforms,
}
"""Functions that complete an argument, keyed by the prompt or resource template and the argument's name."""


def serve(ctx: Context, server: Server[Any]) -> None:
    """Register the handler for `completion/complete`."""

    async def handle(_: ServerRequestContext[Any, Any], params: CompleteRequestParams) -> CompleteResult:
        of = params.ref.name if isinstance(params.ref, PromptReference) else params.ref.uri
        return CompleteResult(completion=await complete(ctx, of, params.argument.name, params.argument.value))

    server.add_request_handler("completion/complete", CompleteRequestParams, handle)


async def complete(ctx: Context, of: str, argument: str, typed: str) -> Completion:
    """Return possible values for an argument of a prompt or resource template. Free text, such as a goal, has none."""
    names = COMPLETED.get((of, argument))
    if names is None:
        return Completion(values=[], total=0, has_more=False)
    if names is _entries:
        await to_thread.run_sync(_entries, ctx, "")  # the first call parses every page
    found = list(names(ctx, typed[:200]))
    return Completion(values=found[:LIMIT], total=len(found), has_more=len(found) > LIMIT)
