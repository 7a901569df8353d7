"""POST /api/training/deploy/{platform} and GET /api/training/{job}/status, with the same gates as the tools."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute

from gpuwarden.core.errors import BadRequest, NoCapacity, Refused
from gpuwarden.core.inputs import build
from gpuwarden.core.models import JobSpec
from gpuwarden.interfaces import results
from gpuwarden.interfaces.cli.wording import in_commands
from gpuwarden.interfaces.http.access import Protected, principal_of
from gpuwarden.interfaces.http.bodies import json_object
from gpuwarden.interfaces.http.contract.reporting import Reporters
from gpuwarden.interfaces.http.pages.polls import Polls
from gpuwarden.interfaces.http.pages.rendering import clean
from gpuwarden.interfaces.http.principals import Kind
from gpuwarden.interfaces.http.serving import Serving
from gpuwarden.interfaces.results import Result, worded
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.lifecycle.submission.submit import submit

CLIENTS: Final[tuple[Kind, ...]] = ("token",)
LOG_BYTES: Final = 2_000
FIRST_LOOK_S: Final = 30.0
"""Seconds that a job's status request waits for the first poll of that job."""


def routes(serving: Serving) -> list[BaseRoute]:
    """Return both routes."""
    ctx, reporters = serving.ctx, Reporters(serving.ctx)
    # Polls are shared, so that a job that constantly requests its own status can't lock out the watch.
    polls = Polls(ctx, LOG_BYTES)

    async def deploy(request: Request) -> Response:
        """Check and launch a job. On a rented platform, a call without a receipt returns findings, price and receipt.

        The body contains the arguments of submit_job except the platform, which is in the path.
        """
        given = await json_object(request)
        receipt, dry_run = given.pop("receipt", None), given.pop("dry_run", False)
        if not isinstance(dry_run, bool) or not isinstance(receipt, str | None):
            raise BadRequest("dry_run is not a boolean, or receipt is not a string")
        if given.setdefault("platform", request.path_params["platform"]) != request.path_params["platform"]:
            raise BadRequest("the platform in the body differs from the platform in the path")
        found = await submit(ctx, build(JobSpec, given), dry_run=dry_run, receipt=receipt or None)
        return _reply(ctx, results.submitted(found), 202 if found.job is not None else 200)

    async def status(request: Request) -> Response:
        """Return a job's state, step, metrics, billing and the end of its log. A job may request its own status."""
        job_id, sender = request.path_params["job"], principal_of(request)
        if sender.kind == "job":
            if sender.job_id != job_id:
                raise Refused("a job may request only its own status")
            reporters.names(job_id)  # raises for a key that has expired
            look = polls.job(job_id)
            found = await look.newest(FIRST_LOOK_S)
            if found is None:
                raise look.error or NoCapacity("the first poll of the job is still running", "Retry in a few seconds.")
        else:
            found = await check(ctx, job_id, limit=LOG_BYTES)
        return _reply(ctx, results.checked(found, ctx.hidden(found.texts, found.job.spec.secrets)))

    return [
        Protected("/api/training/deploy/{platform:path}", deploy, needs="submit", kinds=CLIENTS, methods=["POST"]),
        Protected("/api/training/{job}/status", status, needs=("read", "metrics"), methods=["GET"]),
    ]


def _reply(ctx: Context, reply: Result, status: int = 200) -> Response:
    return JSONResponse(clean(ctx, worded(reply, in_commands).model_dump(mode="json")), status)
