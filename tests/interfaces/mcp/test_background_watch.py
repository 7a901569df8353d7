"""A server advances its jobs by itself: a machine must not boot and bill unused because no agent polls its job."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from gpuwarden.core.clock import SystemClock
from gpuwarden.core.states import TERMINAL_JOBS, Job
from gpuwarden.interfaces.mcp.background_watch import watch_in_background
from gpuwarden.lifecycle.records import read_job
from lifecycle_kit import launch, open_house, rent_cloud, training
from waiting import soon

pytestmark = pytest.mark.anyio


@pytest.mark.slow
async def test_unattended_job_is_launched_and_ends(tmp_path: Path) -> None:
    ctx = open_house(tmp_path, SystemClock())
    rent_cloud(ctx)
    job = await launch(ctx, training(tmp_path / "said"))
    assert read_job(ctx.ledger, job).state not in TERMINAL_JOBS  # running, if the machine boots during the launch
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch_in_background, ctx, 0.05)
        await soon(lambda: read_job(ctx.ledger, job).state is Job.SUCCEEDED)
        tasks.cancel_scope.cancel()
