"""Record a fan-out's queues and their jobs: a single queue, or many queues that the engine runs as one array."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuwarden.backends.base import ArrayBackend
from gpuwarden.core.fan_out import FanOutPlan, queue_spec
from gpuwarden.core.models import Cell, Place
from gpuwarden.ledger.events import ArrayIntent, JobSubmitting, QueueIntent, SubmitIntent
from gpuwarden.lifecycle.context import CAPS, Context
from gpuwarden.lifecycle.fan_out.records import FanOutRecord
from gpuwarden.lifecycle.submission.submit import CheckedSubmission, record_job, take_inputs
from gpuwarden.people import acting_as


def takes_arrays(ctx: Context, plan: FanOutPlan) -> bool:
    """Return whether a plan's cells are submitted as one array. Only unmetered engines with job arrays allow that."""
    profile = ctx.profile(plan.base.platform)
    if profile.kind != "engine" or profile.meter.metered:
        return False
    return isinstance(ctx.backend(profile.backend), ArrayBackend)


@dataclass(frozen=True)
class Queue:
    """A queue of cells for one machine, not yet recorded. `number` counts the fan-out's queues from 1."""

    number: int
    cells: tuple[int, ...]
    checked: CheckedSubmission

    def token(self, fan: FanOutRecord) -> str:
        """Return the token that ensures that this queue is recorded only once."""
        return f"{fan.id}-q{self.number}"

    def job_id(self, fan: FanOutRecord) -> str:
        """Return the id of the queue's job."""
        return "j" + hashlib.sha256(self.token(fan).encode()).hexdigest()[:10]


def queue_of(plan: FanOutPlan, cells: Sequence[Cell], checked: CheckedSubmission, number: int) -> Queue:
    """Return the queue for these cells; `checked` is the gate's result for one of them."""
    facts = replace(checked.facts, spec=queue_spec(plan, cells, f"{plan.base.name[:50]}-q{number}"))
    return Queue(number, tuple(cell.index for cell in cells), replace(checked, facts=facts))


def record_queue(ctx: Context, fan: FanOutRecord, queue: Queue) -> None:
    """Record a queue and its job. The job counts toward the caps of the user who requested the fan-out."""
    worst, job_id = queue.checked.facts.worst_cost, queue.job_id(fan)
    intent = QueueIntent(job=job_id, cells=queue.cells, worst_cost=worst)
    intended, since = (fan.subject, intent), fan.consented_at
    with acting_as(fan.person):
        record_job(ctx, queue.checked, job_id, fan.consent, token=queue.token(fan), with_it=intended, since=since)


async def record_array(
    ctx: Context, fan: FanOutRecord, queues: Sequence[Queue], place: Place, at_once: int
) -> list[str]:
    """Record that queues with one cell each will be submitted as one array. Return the ids of their jobs."""
    token, jobs = f"{fan.id}-r{queues[0].number}", tuple(queue.job_id(fan) for queue in queues)
    async with ctx.lock(CAPS):
        await take_inputs(ctx, queues[0].checked)
        with ctx.ledger.transaction():
            for queue, job_id in zip(queues, jobs, strict=True):
                record_queue(ctx, fan, queue)
                ctx.ledger.add(f"job/{job_id}", JobSubmitting(place=place, array=token))
                ctx.ledger.add(f"job/{job_id}", SubmitIntent(attempt=1), token=f"{job_id}-a1")
            ctx.ledger.add(fan.subject, ArrayIntent(array=token, jobs=jobs, at_once=at_once), token=token)
    return list(jobs)


def inside(fan: FanOutRecord, cells: list[Cell], checked: CheckedSubmission, number: int, cost: float) -> Queue | None:
    """Return a queue with as many cells as the remaining budget covers at maximum cost; None if it covers no cell."""
    while cells:
        queue = queue_of(fan.plan, cells, checked, number)
        worst = queue.checked.facts.worst_cost if checked.facts.metered else 0.0
        if worst is not None and (fan.budget is None or cost + worst <= fan.budget):
            return queue
        cells = cells[:-1]
    return None
