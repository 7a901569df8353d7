"""A job that its engine drops from the queue waits again; only an attempt that has started uses up a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes import FakeClock
from gpuwarden.core.models import JobSpec
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job
from gpuwarden.ledger.fold import MOST_DROPPED
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.lifecycle.monitoring.watch import Watcher
from lifecycle_kit import launch, open_house
from pretend_queue import PretendQueue

pytestmark = pytest.mark.anyio


async def queued(tmp_path: Path, drops: int) -> tuple[Context, PretendQueue, str]:
    """Return a job that its engine has dropped from the queue `drops` times."""
    clock = FakeClock()
    ctx, queue = open_house(tmp_path / "home", clock), PretendQueue(clock)
    ctx._backends["slurm"] = queue
    queue.confine(lambda: ctx.policy.local, ())
    spec = JobSpec(platform="slurm/local", command=("train",), outputs=("out",), timeout_s=3600, max_restarts=0)
    job = await launch(ctx, spec)
    for attempt in range(2, drops + 2):
        queue.drop(queue.rows[-1])
        seen = (await check(ctx, job)).job
        assert (seen.state, seen.attempt, seen.restarts) == (Job.QUEUED, attempt, 1)
    return ctx, queue, job


async def test_a_job_dropped_before_its_start_requeues_without_using_a_restart(tmp_path: Path) -> None:
    ctx, queue, job = await queued(tmp_path, 3)
    watcher = Watcher(ctx)
    assert not (await watcher.round()).news
    queue.start(queue.rows[-1])
    await check(ctx, job)
    queue.rows[-1]["job_state"] = ["NODE_FAIL"]
    seen = (await check(ctx, job)).job
    assert (seen.state, seen.reason) == (Job.FAILED, Code.MAX_RESTARTS)
    assert [alert.kind for alert in (await watcher.round()).news] == ["failed", "preempted"]
    ctx.ledger.close()


async def test_resubmissions_of_a_dropped_job_are_limited(tmp_path: Path) -> None:
    ctx, queue, job = await queued(tmp_path, MOST_DROPPED)
    queue.drop(queue.rows[-1])
    seen = (await check(ctx, job)).job
    assert (seen.state, seen.reason) == (Job.FAILED, Code.MAX_RESTARTS)
    ctx.ledger.close()
