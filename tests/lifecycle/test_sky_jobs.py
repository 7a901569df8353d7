"""A managed job's whole life: SkyPilot's real SDK, a fake of its server, a real runner and a real S3 store."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from fakes import FakeClock
from gpuwarden.core.errors import NotSupported, Refused, Unreachable
from gpuwarden.core.fan_out import FanOutPlan, cells_of, grid
from gpuwarden.core.models import JobSpec
from gpuwarden.core.policy import Caps
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job, Lease
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.fan_out.accepting import fan_out
from gpuwarden.lifecycle.fan_out.launching import advance_fan_out
from gpuwarden.lifecycle.leases.meter import confirmed_end
from gpuwarden.lifecycle.monitoring.check import cancel, check, pause
from gpuwarden.lifecycle.records import read_job, read_lease
from gpuwarden.lifecycle.submission.submit import submit
from lifecycle_kit import WEALTHY, clock_of_today, launch, open_house, until
from sky_kit import SkyServer, sky_env
from store_kit import BUCKET, SAVE, S3Server, s3_server

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.prove, pytest.mark.usefixtures("patient_sky")]
KEEP = f"s3://{BUCKET}/team"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def ctx(sky_server: SkyServer, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    for name, value in sky_env(sky_server.folder, sky_server.url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    policy = WEALTHY.model_copy(update={"caps": Caps(per_job_usd=1_000, per_day_usd=10_000, per_instance_usd=1_000)})
    yield replace(open_house(tmp_path / "home", clock_of_today(), policy=policy), env=s3.environment())
    for job in sky_server.managed_jobs:
        job.end("CANCELLED")


def training(work: str, **changes: object) -> JobSpec:
    values: dict[str, object] = {
        "name": "train", "platform": "sky/aws", "options": {"managed": True}, "gpu": "A100", "outputs": ("out",),
        "command": ("python3", "-c", SAVE + work), "timeout_s": 600, "max_cost_usd": 50.0, "artifact_store": KEEP,
    }  # fmt: skip
    return JobSpec.model_validate(values | changes)


async def ended(ctx: Context, job: str) -> Job:
    return (await until(ctx, job)).job.state


async def gone(ctx: Context, job: str) -> None:
    """Poll until the machine is believed gone, which takes two polls apart in time."""
    lease = read_job(ctx.ledger, job).lease
    assert lease is not None
    for _ in range(2):
        await check(ctx, job)
        assert isinstance(ctx.clock, FakeClock)
        ctx.clock.time += 61
    await check(ctx, job)
    assert read_lease(ctx.ledger, lease).state is Lease.STOPPED and confirmed_end(ctx, lease) == "gone"


async def test_the_gate_refuses_outputs_without_a_store(ctx: Context) -> None:
    with pytest.raises(Refused) as refused:
        await submit(ctx, training("save(10)", artifact_store=""))
    assert {f.rule for f in refused.value.findings if f.blocks} == {"PF-OUT-002", "PF-PUSH-003"}
    found = await submit(ctx, training("save(10)", interruptible=True), dry_run=True)
    assert found.receipt and found.quote is not None and found.quote.platform == "sky-jobs/aws"
    assert found.quote.note


async def test_a_managed_jobs_outputs_are_pulled_from_its_store(ctx: Context, sky_server: SkyServer) -> None:
    job = await launch(ctx, training("save(10); print('saved')"))
    record = read_job(ctx.ledger, job)
    assert record.spec.platform == "sky-jobs/aws" and sky_server.managed_jobs[-1].name == f"gw-{job}-i1-a1"
    assert await ended(ctx, job) is Job.SUCCEEDED
    await gone(ctx, job)
    done = await pull(ctx, job)
    assert done.store == KEEP and not done.unsettled, "the store has the last word"
    names = {file.path for file in done.received.files}
    assert names == {"out/checkpoint-10/model.safetensors", "out/checkpoint-10/trainer_state.json"}
    seen = await check(ctx, job)
    assert seen.log is not None and "saved" in seen.log.text, "SkyPilot keeps the log"


async def test_a_running_managed_job_can_be_canceled_but_not_pulled(ctx: Context, sky_server: SkyServer) -> None:
    job = await launch(ctx, training("print('on', flush=True); time.sleep(1800)"))
    await until(ctx, job, lambda seen: seen.job.state is Job.RUNNING)
    with pytest.raises(Unreachable):
        await pull(ctx, job)
    with pytest.raises(NotSupported):
        await pause(ctx, job)
    assert (await check(ctx, job)).job.state is Job.RUNNING
    await cancel(ctx, job)
    assert await ended(ctx, job) is Job.CANCELED
    await gone(ctx, job)


async def test_a_managed_job_preempted_too_often_is_canceled(ctx: Context, sky_server: SkyServer) -> None:
    job = await launch(ctx, training("time.sleep(1800)", interruptible=True, max_restarts=1))
    for _ in range(2):
        sky_server.managed_jobs[-1].end("RECOVERING")
        assert (await check(ctx, job)).job.state is Job.QUEUED
        sky_server.managed_jobs[-1].recover()
    assert await ended(ctx, job) is Job.CANCELED
    assert read_job(ctx.ledger, job).reason is Code.MAX_RESTARTS and sky_server.managed_jobs[-1].status == "CANCELLED"


async def test_a_fan_out_runs_on_managed_jobs_and_every_cell_is_proven(ctx: Context, sky_server: SkyServer) -> None:
    before = len(sky_server.managed_jobs)
    base = training("", command=(), script=f"{SAVE}save(10)\n", timeout_s=60)
    cells = cells_of(base, grid({"lr": ["1e-5", "3e-5"]}, 2))
    plan = FanOutPlan(base=base, cells=cells, max_machines=2, max_cost_usd=100.0)
    done = await fan_out(ctx, plan, receipt=(await fan_out(ctx, plan)).receipt)
    assert done.now is not None
    fan = done.now.fan.id
    with anyio.fail_after(500):
        while not ((now := (await advance_fan_out(ctx, fan)).now) and now.over):
            await ctx.clock.sleep(61)
            await anyio.sleep(0.1)
    assert len(now.fan.proven) == 4 and len(sky_server.managed_jobs) - before == 2
