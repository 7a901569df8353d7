"""POST /api/training/local/metrics and POST /api/alerts/trigger: reports from jobs.

The response is sent after the commit, so every acknowledged post is stored. A repeated post changes nothing, and its
response counts its points as `known`. The key identifies the job; a body that names another job is refused.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from gpuwarden.core.errors import AuthFailed, BadRequest, NotFound, Refused
from gpuwarden.core.sanitize import scrubbed
from gpuwarden.core.states import TERMINAL_JOBS
from gpuwarden.interfaces.http.access import Protected, principal_of
from gpuwarden.interfaces.http.answers import error_answer
from gpuwarden.interfaces.http.principals import Kind
from gpuwarden.interfaces.http.serving import Serving
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.reporting import ALERTS_PATH, METRICS_PATH
from gpuwarden.lifecycle.records import read_job
from gpuwarden.metrics.batching import Batches
from gpuwarden.metrics.points import (
    Malformed,
    PostedAlert,
    PostedPoints,
    Problem,
    alert_fields,
    job_of,
    read_alert,
    read_points,
)

JOBS: Final[tuple[Kind, ...]] = ("job",)
LATE_S: Final = 7 * 86_400.0
"""Seconds after a job's end during which it may still report, because a lost connection may delay its reports."""
LOOK_S: Final = 60.0
"""Seconds between two checks of whether a job may still report."""
LARGE: Final = 64 << 10
"""Size in bytes above which a post is parsed in a thread, so that it does not delay other requests."""
MAX_KNOWN: Final = 10_000
SHOWN: Final = 20
"""Maximum number of ignored values that one response names."""
WORDS: Final = {
    Problem.NO_OBJECT: "it is not a JSON object",
    Problem.NO_JOB: "it names no job",
    Problem.NO_POINTS: "it has no list of points",
    Problem.TOO_MANY_POINTS: "it exceeds the maximum number of points per post",
    Problem.BAD_STEP: "it is not a non-negative integer",
    Problem.BAD_TIME: "it is neither an ISO 8601 time nor seconds since 1970",
    Problem.UNPLACED: "it has neither a step nor a timestamp",
    Problem.BAD_TYPE: "it is not one of the six alert types",
}


class Reporters:
    """The jobs that may report, each with its accepted names. Cached for a minute."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._known: dict[str, tuple[float, frozenset[str]]] = {}

    def names(self, job_id: str) -> frozenset[str]:
        """Return a job's accepted names.

        Raises AuthFailed if the job is unknown here or ended more than LATE_S ago.
        """
        now = self.ctx.clock.now()
        looked_at, names = self._known.get(job_id, (0.0, frozenset()))
        if not 0 <= now - looked_at < LOOK_S:
            try:
                job = read_job(self.ctx.ledger, job_id)
            except NotFound:
                raise AuthFailed("the key belongs to a job that this ledger does not contain") from None
            if job.state in TERMINAL_JOBS and now - job.since > LATE_S:
                raise AuthFailed("the key has expired: its job ended long ago")
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            # A serverless platform may set JOB_ID itself; the platform's job id is the last part of the handle's path.
            theirs = job.handle.run_dir.rpartition("/")[2] if job.handle else None
            names = frozenset(filter(None, (job_id, job.spec.env.get("JOB_ID"), theirs)))
            self._known[job_id] = now if job.handle or job.state in TERMINAL_JOBS else 0.0, names
        return names


def routes(serving: Serving) -> list[BaseRoute]:
    """Return both routes. Their posts are committed in shared batches."""
    ctx, reporters = serving.ctx, Reporters(serving.ctx)
    batches = Batches(ctx.metrics)

    @asynccontextmanager
    async def committing() -> AsyncIterator[None]:
        async with batches.running():
            yield

    serving.lifespans.append(committing)

    async def metrics(request: Request) -> Response:
        """Store the points in one post."""
        try:
            job, body, large = await _own(request, reporters)
            post = await to_thread.run_sync(read_points, body) if large else read_points(body)
        except Malformed as wrong:
            return _refused(wrong)
        written = await batches.add(PostedPoints(job, post.rows, post.ignored))
        reply: dict[str, Any] = {"ok": True, "stored": written.stored, "known": written.known}
        if written.ignored:
            reply["ignored"] = [{"field": field, "problem": problem} for field, problem in written.ignored[:SHOWN]]
            reply["ignored_count"] = len(written.ignored)
        return _answer(reply)

    async def alert(request: Request) -> Response:
        """Store one alert."""
        try:
            job, body, _ = await _own(request, reporters)
            known = alert_fields(body)
            clean = scrubbed(known, await to_thread.run_sync(ctx.hidden, known))
            found = read_alert(clean, ctx.clock.now())
        except Malformed as wrong:
            return _refused(wrong)
        await batches.add(PostedAlert(job, found.type, found.at, found.key, found.fields))
        return _answer({"ok": True})

    return [
        Protected(METRICS_PATH, metrics, needs="metrics", kinds=JOBS, methods=["POST"]),
        Protected(ALERTS_PATH, alert, needs="alerts", kinds=JOBS, methods=["POST"]),
    ]


async def _own(request: Request, reporters: Reporters) -> tuple[str, dict[str, Any], bool]:
    """Return the sender, its post, and whether the post is large.

    Raises Malformed if the post is not a JSON object, and Refused if it names another job.
    """
    sender = principal_of(request).job_id or ""
    names = reporters.names(sender)
    raw = await request.body()
    large = len(raw) > LARGE
    try:
        body = await to_thread.run_sync(json.loads, raw) if large else json.loads(raw)
    except (ValueError, RecursionError):
        raise Malformed(Problem.NO_OBJECT, "body") from None
    if job_of(body) not in names:
        raise Refused("the post names a different job than its key")
    return sender, body, large


def _refused(wrong: Malformed) -> Response:
    """Return a 422 response with the invalid field and the problem's code."""
    error = BadRequest(f"{wrong.field}: {WORDS[wrong.problem]}; the post was not stored")
    answer: dict[str, Any] = json.loads(bytes(error_answer(error).body))
    return _answer({**answer, "field": wrong.field, "problem": wrong.problem}, 422)


def _answer(body: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(body), status, media_type="application/json")
