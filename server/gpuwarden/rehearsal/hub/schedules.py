"""The rehearsal Hub's scheduled jobs. Jobs that are due are started when a client lists or inspects scheduled jobs."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute

from gpuwarden.rehearsal.hub.access import HubError
from gpuwarden.rehearsal.hub.job_requests import JobBody, LabelsBody, ScheduleBody, ScheduledBody
from gpuwarden.rehearsal.hub.job_runs import FINAL, RunningJob
from gpuwarden.rehearsal.hub.jobs import HubJobs, shown, spec_of
from gpuwarden.rehearsal.hub.store import User, iso
from gpuwarden.rehearsal.hub.strict import parsed, route

_NAMED: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_DAYS: Final = 366 * 8 + 1  # the next February 29 can be eight years away


@dataclass
class Schedule:
    """One scheduled job."""

    id: str
    owner: str
    user: User
    spec: dict[str, Any]
    schedule: str
    suspend: bool
    concurrency: bool
    created_at: float
    next_at: float
    last: RunningJob | None = None


class HubSchedules:
    """The routes for scheduled jobs."""

    def __init__(self, jobs: HubJobs) -> None:
        self.jobs = jobs
        self.schedules: dict[str, Schedule] = {}

    def routes(self) -> list[BaseRoute]:
        """Return the routes for scheduled jobs."""
        space = "/api/scheduled-jobs/{namespace}"
        one = space + "/{id}"
        return [
            route(space, self.create, methods=["POST"]),
            route(space, self.listing, query=("label",)),
            route(one, self.inspect),
            route(one, self.delete, methods=["DELETE"]),
            route(one + "/suspend", self.suspend, methods=["POST"]),
            route(one + "/resume", self.resume, methods=["POST"]),
            route(one + "/run", self.run, methods=["POST"]),
            route(one + "/schedule", self.change, methods=["POST"]),
            route(one + "/labels", self.labels, methods=["PUT"]),
        ]

    # --------------------------------------------------------------------------------------------------- answers

    async def create(self, request: Request) -> Response:
        """POST a new scheduled job."""
        user, raw = self.jobs.caller(request, write=True), await request.json()
        body = parsed(ScheduledBody, raw)
        if body.jobSpec.ssh.enabled:
            raise HubError(400, "SSH is not available for scheduled jobs")
        self.jobs.check(body.jobSpec, user)
        now = self._now()
        made = Schedule(
            secrets.token_hex(12),
            request.path_params["namespace"],
            user,
            raw["jobSpec"],
            body.schedule,
            body.suspend,
            body.concurrency,
            now,
            next_time(body.schedule, now),
        )
        self.schedules[made.id] = made
        return JSONResponse(_shown(made))

    async def listing(self, request: Request) -> Response:
        """GET the scheduled jobs in a namespace."""
        self.jobs.caller(request)
        self.tick()
        found = [s for s in self.schedules.values() if s.owner == request.path_params["namespace"]]
        for label in request.query_params.getlist("label"):
            key, _, value = label.partition("=")
            found = [s for s in found if s.spec.get("labels", {}).get(key) == value]
        return JSONResponse([_shown(s) for s in found])

    async def inspect(self, request: Request) -> Response:
        """GET one scheduled job."""
        self.tick()
        return JSONResponse(_shown(self._one(request)))

    async def delete(self, request: Request) -> Response:
        """DELETE a scheduled job. Jobs that have already been started continue."""
        del self.schedules[self._one(request, write=True).id]
        return PlainTextResponse("OK")

    async def suspend(self, request: Request) -> Response:
        """POST to suspend the schedule, so that it starts no more jobs."""
        self._one(request, write=True).suspend = True
        return PlainTextResponse("OK")

    async def resume(self, request: Request) -> Response:
        """POST to resume the schedule from the next scheduled time."""
        one = self._one(request, write=True)
        one.suspend, one.next_at = False, next_time(one.schedule, self._now())
        return PlainTextResponse("OK")

    async def run(self, request: Request) -> Response:
        """POST to start one job now."""
        one = self._one(request, write=True)
        job = self._start(one)
        if job is None:
            raise HubError(
                409,
                "Another job is already running at the same time, set `concurrency` to allow multiple instances of "
                "scheduled jobs to run concurrently",
            )
        return JSONResponse(shown(job))

    async def change(self, request: Request) -> Response:
        """POST a new schedule for a scheduled job."""
        one = self._one(request, write=True)
        one.schedule = parsed(ScheduleBody, await request.json()).schedule
        one.next_at = next_time(one.schedule, self._now())
        return JSONResponse(_shown(one))

    async def labels(self, request: Request) -> Response:
        """PUT new labels for a scheduled job."""
        one = self._one(request, write=True)
        one.spec["labels"] = parsed(LabelsBody, await request.json()).labels
        return JSONResponse(_shown(one))

    # ----------------------------------------------------------------------------------------------------- times

    def tick(self) -> None:
        """Start due jobs. A scheduled time is skipped if an earlier job from the schedule is still running."""
        now = self._now()
        for one in self.schedules.values():
            if not one.suspend and one.next_at <= now:
                self._start(one)
                one.next_at = next_time(one.schedule, now)

    def _start(self, one: Schedule) -> RunningJob | None:
        if one.last is not None and one.last.stage not in FINAL and not one.concurrency:
            return None
        JobBody.model_validate(one.spec)
        one.last = self.jobs.runs.start(one.owner, one.user, {**one.spec}, {"type": "scheduled-job", "id": one.id})
        return one.last

    def _now(self) -> float:
        return self.jobs.store.clock.now()

    def _one(self, request: Request, *, write: bool = False) -> Schedule:
        self.jobs.caller(request, write=write)
        found = self.schedules.get(request.path_params["id"])
        if found is None or found.owner != request.path_params["namespace"]:
            raise HubError(404, "Scheduled job not found")
        return found


def _shown(one: Schedule) -> dict[str, Any]:
    last = {"id": one.last.id, "at": iso(one.last.created_at)} if one.last else None
    owner = {"id": "1" * 24, "name": one.owner, "avatarUrl": "", "type": "user"}
    answer = {"id": one.id, "createdAt": iso(one.created_at), "schedule": one.schedule, "suspend": one.suspend}
    answer |= {"concurrency": one.concurrency, "type": "scheduled-job", "owner": owner}
    return answer | {"status": {"lastJob": last, "nextJobRunAt": iso(one.next_at)}, "jobSpec": spec_of(one.spec)}


def next_time(schedule: str, now: float) -> float:
    """Return the next scheduled time, in seconds since the epoch. Schedules are in UTC."""
    fields = _NAMED.get(schedule, schedule).split()
    if len(fields) != 5:
        raise HubError(400, "only schedules with five fields are simulated")
    try:
        minutes, hours, days, months, weekdays = (
            set(_numbers(text, low, high))
            for text, (low, high) in zip(fields, ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7)), strict=True)
        )
    except ValueError:
        raise HubError(400, f"Invalid schedule {schedule!r}") from None
    after = datetime.fromtimestamp(now, UTC).replace(second=0, microsecond=0) + timedelta(minutes=1)
    day = after.replace(hour=0, minute=0)
    for _ in range(_DAYS):
        by_date, by_week = day.day in days, day.isoweekday() % 7 in {w % 7 for w in weekdays}
        # As in cron, if a day of the month and a weekday are given, a date needs to match only one of them.
        fits = (by_date or by_week) if "*" not in (fields[2], fields[4]) else (by_date and by_week)
        if fits and day.month in months:
            for hour in sorted(hours):
                for minute in sorted(minutes):
                    if (at := day.replace(hour=hour, minute=minute)) >= after:
                        return at.timestamp()
        day += timedelta(days=1)
    raise HubError(400, f"{schedule!r} never occurs")


def _numbers(text: str, low: int, high: int) -> Iterator[int]:
    if text == "*":
        yield from range(low, high + 1)
    elif "/" in text:
        start, step = text.split("/")
        yield from range(low if start == "*" else int(start), high + 1, int(step))
    elif "-" in text:
        first, last = text.split("-")
        yield from range(int(first), int(last) + 1)
    else:
        yield from (int(part) for part in text.split(","))
