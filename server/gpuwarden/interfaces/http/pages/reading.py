"""Read-only routes for the web pages: each page as HTML, and its view as JSON for the script that updates the page."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Final
from urllib.parse import urlencode

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute

from gpuwarden.core.errors import BadRequest, NotFound, WardenError
from gpuwarden.core.sanitize import redact
from gpuwarden.core.states import Job
from gpuwarden.interfaces import results
from gpuwarden.interfaces.cli.wording import in_commands
from gpuwarden.interfaces.http.access import Protected
from gpuwarden.interfaces.http.answers import STATUS
from gpuwarden.interfaces.http.pages.curves import POINTS, Curves
from gpuwarden.interfaces.http.pages.following import Following
from gpuwarden.interfaces.http.pages.job import job_view
from gpuwarden.interfaces.http.pages.money import SPANS, money_view
from gpuwarden.interfaces.http.pages.now import job_row, jobs_view, now_view
from gpuwarden.interfaces.http.pages.platforms import entry_view, knowledge_view, platforms_view
from gpuwarden.interfaces.http.pages.polls import LOG_BYTES, Polls
from gpuwarden.interfaces.http.pages.rendering import View, clean, page, shown
from gpuwarden.interfaces.http.pages.static_files import HEADERS, static_file
from gpuwarden.interfaces.http.serving import Serving
from gpuwarden.interfaces.results.overview import job_line
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.auto_teardown import notices
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.lifecycle.monitoring.overview import cached_overview, job_page
from gpuwarden.lifecycle.records import read_job

Endpoint = Callable[[Request], Awaitable[Response]]
PAGE: Final = 50
"""Maximum number of jobs on one page."""
STATES: Final = tuple(state.value for state in Job if state not in {Job.DRAFT, Job.REFUSED})
LARGEST: Final = 1e15
"""Upper limit for numbers in a URL. Steps, bytes and seconds are always lower."""
SHARE: Final = 20.0
"""A view is reused for this multiple of the time that it took to build."""
MAX_RUNS: Final = 6
"""Maximum number of runs in one chart."""


def reading_routes(serving: Serving) -> list[BaseRoute]:
    """Return the routes that require the scope `read`."""
    pages = Pages(serving.ctx)
    serving.lifespans.append(pages.following.running)
    found: dict[str, Endpoint] = {
        "/": pages.now,
        "/now.json": pages.now_json,
        "/now.events": pages.now_events,
        "/jobs": pages.jobs,
        "/jobs.json": pages.jobs_json,
        "/jobs.events": pages.jobs_events,
        "/jobs/{job_id}.json": pages.job_json,
        "/jobs/{job_id}.events": pages.job_events,
        "/jobs/{job_id}/curve.json": pages.curve,
        "/jobs/{job_id}/log.json": pages.log,
        "/jobs/{job_id}": pages.job,
        "/money": pages.money,
        "/money.json": pages.money_json,
        "/money.events": pages.money_events,
        "/platforms": pages.platforms,
        "/knowledge": pages.knowledge,
        "/knowledge/{key}": pages.entry,
        "/static/{path:path}": static_file,
    }
    return [Protected(path, headed(endpoint), needs="read", methods=["GET"]) for path, endpoint in found.items()]


def headed(endpoint: Endpoint) -> Endpoint:
    """Add the page headers to every response, and return errors as a page or as JSON."""

    @wraps(endpoint)
    async def answer(request: Request) -> Response:
        try:
            response = await endpoint(request)
        except WardenError as error:
            reply = results.worded(results.error_reply(error), in_commands)
            view = {"code": reply.code, "message": redact(shown(reply.message)), "hint": redact(shown(reply.hint))}
            status = STATUS.get(error.code, 500)
            if request.url.path.endswith(".json"):
                response = JSONResponse({"ok": False, **view}, status)
            else:
                response = page("problem.html", view, status=status, here="")
        response.headers.update(HEADERS)
        return response

    return answer


def _number(request: Request, name: str) -> float | None:
    """Return a number from the query string; None if it is not given. Raises BadRequest."""
    text = request.query_params.get(name, "")
    try:
        value = float(text) if text else None
    except ValueError:
        value = math.nan
    if value is not None and not abs(value) < LARGEST:
        raise BadRequest(f"{name} is not a number", f"Pass {name} as digits, or omit it.")
    return value


def _days(request: Request) -> int:
    """Return the period for the Money page. Raises BadRequest."""
    asked = _number(request, "days")
    days = SPANS[1] if asked is None else int(asked)
    if not 1 <= days <= 366:
        raise BadRequest("days is out of range", "Choose a number from 1 to 366.")
    return days


def _filters(request: Request) -> dict[str, str]:
    """Return the job list's filters, and the job after which the list starts. Raises BadRequest."""
    asked = {name: request.query_params.get(name, "") for name in ("name", "state", "platform", "project", "after")}
    if asked["state"] and asked["state"] not in STATES:
        raise BadRequest("this state does not exist", f"Choose one of {', '.join(STATES)}.")
    return asked


def _set_filters(asked: dict[str, str]) -> dict[str, str]:
    """Return the filters that are set."""
    return {name: value for name, value in asked.items() if value and name != "after"}


class CachedView:
    """A view that is reused for `SHARE` times as long as it took to build, because many windows may request it."""

    def __init__(self, make: Callable[[], Awaitable[View]]) -> None:
        self._make = make
        self._last: View = {}
        self._until = 0.0

    async def __call__(self) -> View:
        """Return the view."""
        begun = time.perf_counter()
        if begun >= self._until:
            self._last = await self._make()
            done = time.perf_counter()
            self._until = done + SHARE * (done - begun)
        return self._last


class Pages:
    """One server's pages. Machines are polled in the background while a page is open."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.polls = Polls(ctx)
        self.curves = Curves(self.polls)
        self.following = Following(ctx)
        self._now = CachedView(self._look_now)
        self._money: dict[int, CachedView] = {}

    async def now(self, _request: Request) -> Response:
        """GET /: running jobs, open approvals and billing."""
        return page("now.html", await self._now(), here="Now")

    async def now_json(self, _request: Request) -> Response:
        """GET the start page's view as JSON."""
        return JSONResponse(await self._now())

    async def now_events(self, request: Request) -> Response:
        """GET the start page's view as a stream of updates."""
        return self.following.stream(request, self._now)

    async def _look_now(self) -> View:
        everything = self.polls.everything
        last = await everything.newest(patience_s=0)
        seen = cached_overview(self.ctx, last.unknown if last else {})
        if last is not None:
            seen = replace(seen, others=last.others)
        reply = results.status_of(seen)
        if everything.error is not None:
            reply.unknown["platforms"] = everything.error.message
        return clean(self.ctx, now_view(results.warned(reply, notices(self.ctx), in_commands)))

    async def jobs(self, request: Request) -> Response:
        """GET /jobs: all jobs, one page at a time."""
        asked = _filters(request)
        first = f"/jobs?{urlencode(_set_filters(asked))}"
        # Filters on fields other than the state have to read every job, which is too slow for repeated updates.
        follows = _set_filters(asked).keys() <= {"state"} and not asked["after"]
        live = f"/jobs.json?{urlencode({'state': asked['state']})}" if follows else ""
        return page("jobs.html", self._jobs(asked), here="Jobs", asked=asked, states=STATES, first=first, live=live)

    async def jobs_json(self, request: Request) -> Response:
        """GET the job list's view as JSON."""
        return JSONResponse(self._jobs(_filters(request)))

    async def jobs_events(self, request: Request) -> Response:
        """GET the view of the newest jobs, or of those in one state, as a stream of updates."""
        asked = {name: value if name == "state" else "" for name, value in _filters(request).items()}

        async def make() -> View:
            return self._jobs(asked)

        return self.following.stream(request, make, asked["state"])

    def _jobs(self, asked: dict[str, str]) -> View:
        found = job_page(
            self.ctx,
            states=(Job(asked["state"]),) if asked["state"] else (),
            platform=asked["platform"],
            project=asked["project"],
            name=asked["name"],
            limit=PAGE,
            after=asked["after"],
        )
        view = jobs_view(results.jobs_of(found))
        older = f"/jobs?{urlencode({**_set_filters(asked), 'after': view['after']})}"
        view["lists"]["older"] = [{"key": "older", "name": "Older jobs", "href": older}] if view["after"] else []
        return clean(self.ctx, view)

    async def job(self, request: Request) -> Response:
        """GET /jobs/ID: one job, and other runs whose curves can be compared with it."""
        job_id = request.path_params["job_id"]
        view = await self._job(job_id)
        runs = list(dict.fromkeys([job_id, *filter(None, request.query_params.getlist("with"))]))[:MAX_RUNS]
        for other in runs[1:]:
            read_job(self.ctx.ledger, other)  # raises for an unknown job
            await self.polls.job(other).newest()
        names = await to_thread.run_sync(self.curves.names, job_id)
        recent = [job_row(job_line(line)) for line in job_page(self.ctx, limit=12).lines]
        others = clean(self.ctx, {"rows": [row for row in recent if row["key"] != job_id]})["rows"]
        wanted = request.query_params.get("metric", "")
        metric = wanted if wanted in names else next(iter(names), "")
        more: dict[str, Any] = {"job_id": job_id, "runs": runs, "metrics": names, "metric": metric, "others": others}
        more["hours"] = request.query_params.get("x") == "time"
        return page("job.html", view, here="Jobs", **more)

    async def job_json(self, request: Request) -> Response:
        """GET a job's view as JSON."""
        return JSONResponse(await self._job_with_metrics(request.path_params["job_id"]))

    async def job_events(self, request: Request) -> Response:
        """GET a job's view as a stream of updates."""
        job_id = request.path_params["job_id"]
        read_job(self.ctx.ledger, job_id)  # raises for an unknown job
        return self.following.stream(request, lambda: self._job_with_metrics(job_id))

    async def _job_with_metrics(self, job_id: str) -> View:
        view, names = await self._job(job_id), await to_thread.run_sync(self.curves.names, job_id)
        return {**view, "metrics": clean(self.ctx, {"names": names})["names"]}

    async def _job(self, job_id: str) -> View:
        read_job(self.ctx.ledger, job_id)  # raises for an unknown job
        look = self.polls.job(job_id)
        seen = await look.newest()
        return clean(self.ctx, job_view(self.ctx, job_id, seen, look.error))

    async def curve(self, request: Request) -> Response:
        """GET one curve, or the part of it between two steps or times, with at most about `points` points.

        `x=time` adds each point's time.
        """
        job_id = request.path_params["job_id"]
        job = read_job(self.ctx.ledger, job_id)
        await self.polls.job(job_id).newest()
        low, high = _number(request, "from"), _number(request, "to")
        between = (low, high) if low is not None and high is not None else None
        metric = request.query_params.get("metric", "")
        # Run in a thread, because a million points take 0.2 s.
        limit = min(POINTS, max(2, int(_number(request, "points") or POINTS)))
        view = partial(self.curves.view, timed=request.query_params.get("x") == "time", limit=limit)
        found = await to_thread.run_sync(view, job_id, job.spec.name, metric, between)
        return JSONResponse(clean(self.ctx, found))

    async def log(self, request: Request) -> Response:
        """GET the part of a log that precedes a byte offset."""
        before = int(_number(request, "before") or 0)
        job_id = request.path_params["job_id"]
        start = max(0, before - LOG_BYTES)
        if before <= 0:
            return JSONResponse({"text": "", "start": 0})
        found = await check(self.ctx, job_id, cursor=start, limit=before - start)
        return JSONResponse({"text": found.log.text if found.log else "", "start": start})

    async def money(self, request: Request) -> Response:
        """GET /money: machine costs."""
        return page("money.html", await self._costs(_days(request))(), here="Money")

    async def money_json(self, request: Request) -> Response:
        """GET the view of machine costs as JSON."""
        return JSONResponse(await self._costs(_days(request))())

    async def money_events(self, request: Request) -> Response:
        """GET the view of machine costs as a stream of updates."""
        days = _days(request)
        return self.following.stream(request, self._costs(days), str(days))

    def _costs(self, days: int) -> CachedView:
        async def make() -> View:
            return clean(self.ctx, money_view(self.ctx, days))

        return self._money.setdefault(days, CachedView(make))

    async def platforms(self, _request: Request) -> Response:
        """GET /platforms: which storage persists on each platform, and the platforms' deadlines."""
        return page("platforms.html", clean(self.ctx, platforms_view(self.ctx)), here="Platforms")

    async def knowledge(self, request: Request) -> Response:
        """GET /knowledge: search the references."""
        # Run in a thread, because the first read of the references takes a second.
        view = await to_thread.run_sync(knowledge_view, request.query_params.get("q", "")[:4_000])
        return page("knowledge.html", clean(self.ctx, view), here="Knowledge")

    async def entry(self, request: Request) -> Response:
        """GET /knowledge/ID: one entry about a known failure."""
        view = await to_thread.run_sync(entry_view, request.path_params["key"])
        if view is None:
            raise NotFound("this entry does not exist", "Search for a symptom.")
        return page("entry.html", view, here="Knowledge")
