"""Fetch jobs' metrics and alerts from spool files on their machines, over the connection used to observe the jobs.

This works even for machines that can't connect to this computer. Points that the runner has already sent to the server
are recognized by job, step and time. A job can write any line to its spool, so all lines are stored under the job that
owns the run folder, even if a line names another job.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from anyio import to_thread
from anyio.lowlevel import checkpoint

from gpuwarden.backends.base import Spooling
from gpuwarden.core.errors import NotFound, WardenError
from gpuwarden.core.sanitize import scrubbed
from gpuwarden.core.states import TERMINAL_JOBS, Lease
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.meter import lease_now
from gpuwarden.lifecycle.leases.self_stopped import self_stopped
from gpuwarden.lifecycle.monitoring.inventory import error_message, unsettled
from gpuwarden.lifecycle.records import JobRecord, read_job
from gpuwarden.metrics.points import Malformed, PostedAlert, PostedPoints, alert_fields, read_alert, read_points
from gpuwarden.metrics.store import Batch

FILES: Final = ("job", "runner")
LATELY_S: Final = 86_400.0
"""Seconds after a job's end during which its metrics are fetched automatically."""
MAX_PIECES: Final = 16
"""Maximum number of spool parts that one round reads for one job. The next round continues from there."""


async def pull_reports(ctx: Context, job: JobRecord) -> bool:
    """Store the new part of a job's spool. Return whether there was a new part. Raises WardenError."""
    if job.handle is None or not isinstance(backend := ctx.backend(job.handle.backend), Spooling):
        return False
    came = False
    for _ in range(MAX_PIECES):
        known = await to_thread.run_sync(lambda: {name: ctx.metrics.cursor(job.id, name) for name in FILES})
        pieces = await backend.spooled(job.handle, known)
        news = {name: piece for name, piece in pieces.items() if name in FILES and piece.next != known[name]}
        if not news:
            break
        came = True
        batch = await to_thread.run_sync(_parsed, ctx, job.id, [piece.text for piece in news.values()])
        batch.cursors = {(job.id, name): piece.next for name, piece in news.items()}
        await to_thread.run_sync(ctx.metrics.write, batch)
    return came


def _parsed(ctx: Context, job_id: str, texts: Iterable[str]) -> Batch:
    """Return the points and alerts in spool text.

    Invalid lines are skipped, because the server would also reject them.
    """
    points: list[PostedPoints] = []
    alerts: list[PostedAlert] = []
    for text in texts:
        for line in text.splitlines():
            try:
                entry: Any = json.loads(line)
                kind, body = entry["kind"], {**entry["body"], "job_id": job_id}
                if kind == "metrics":
                    points += _points(job_id, body["metrics"])
                else:
                    known = alert_fields(body)
                    alerts.append(read_alert(scrubbed(known, ctx.hidden(known)), ctx.clock.now()))
            except (ValueError, TypeError, LookupError, RecursionError):
                continue
    return Batch(points, alerts)


def _points(job_id: str, listed: list[Any]) -> list[PostedPoints]:
    """Return the valid points in a list."""
    try:
        return [read_points({"job_id": job_id, "metrics": listed})]
    except Malformed:
        half = len(listed) // 2
        return [] if not half else _points(job_id, listed[:half]) + _points(job_id, listed[half:])


class ReportPuller:
    """Fetches reports from jobs that may have new ones. `trouble` maps job ids to the reasons for failures."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.trouble: dict[str, str] = {}
        self._done: set[str] = set()
        """Ended jobs whose spools were read to the end."""

    async def round(self) -> None:
        """Fetch once from every job that may have new reports. Failures are recorded in `trouble`, not raised."""
        ledger, lately = self.ctx.ledger, self.ctx.clock.now() - LATELY_S
        ended = (subject.removeprefix("job/") for subject in ledger.subjects("job", *TERMINAL_JOBS, since=lately))
        wanted = dict.fromkeys(name for name in (*unsettled(self.ctx), *ended) if name not in self._done)
        self.trouble = {name: why for name, why in self.trouble.items() if name in wanted}
        for job_id in wanted:
            await checkpoint()
            job = read_job(ledger, job_id)
            gone = job.lease is not None and lease_now(self.ctx, job.lease).state is Lease.STOPPED
            if gone:
                self._done.add(job_id)
            if job.handle is None or gone or self_stopped(self.ctx, job):
                continue
            try:
                came = await pull_reports(self.ctx, job)
                self.trouble.pop(job_id, None)
            except NotFound:  # the run folder is gone
                came = False
            except (WardenError, OSError) as error:
                if job_id not in self.ctx.blind:  # otherwise, the failed observation is already reported
                    self.trouble[job_id] = f"its metrics have not been fetched yet: {error_message(error)}"
                continue
            if job.state in TERMINAL_JOBS and not came:
                self._done.add(job_id)
