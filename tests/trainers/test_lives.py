"""Trainers' whole lives in the rehearsal: rented, trained as real processes, interrupted, resumed, and proven."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.core.models import JobSpec, Level, Verdict
from gpuwarden.core.policy import Approval, Local
from gpuwarden.core.states import Job, Teardown
from gpuwarden.ledger.store import Ledger
from gpuwarden.lifecycle.artifacts.pull import PullResult, pull
from gpuwarden.lifecycle.artifacts.verify import verify_job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.check import CheckedJob, check
from gpuwarden.lifecycle.teardown.gate import approve, proceed, request
from gpuwarden.rehearsal.cloud import Cloud
from lifecycle_kit import PLATFORM, WEALTHY, clock_of_today, launch, moves_on, over, promises, records, rent_cloud
from real_parts import need
from trainer_kit import FAULTS, METHODS, NEEDS, SCRIPTS, curve
from waiting import soon

pytestmark = [
    pytest.mark.prove,
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform == "win32", reason="the rehearsal's machines are POSIX"),
]
LIBRARIES = ("torch", "transformers", "trl", "peft", "datasets", "accelerate")
HELD_AT = 6
# Each life imports the libraries twice, so only some are played. GPUWARDEN_LIVES=all plays every trainer's.
ALWAYS = ("sft", "dpo", "grpo", "object_detection")
PLAYED = METHODS if os.environ.get("GPUWARDEN_LIVES") == "all" else ALWAYS


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    folders = [path for path in os.environ.get("GPUWARDEN_LLAMA_CPP", "").split(":") if path]
    approval = Approval(channels=("rehearsal",))
    policy = WEALTHY.model_copy(
        update={"approval": approval, "local": Local(unsandboxed=True, paths=tuple(folders), caches=False)}
    )
    home = tmp_path / "home"
    clock = clock_of_today()
    made = Context(Ledger(home / "ledger.db", clock, "cli"), policy, clock, home, env={})
    made.cwd = tmp_path / "project"
    made.cwd.mkdir()
    return made


def project(ctx: Context, *files: Path) -> tuple[str, ...]:
    """Copy files to the folder that a job's inputs come from; return their names."""
    assert ctx.cwd
    for file in files:
        (shutil.copytree if file.is_dir() else shutil.copyfile)(file, ctx.cwd / file.name)
    return tuple(file.name for file in files)


def job(script: str, flags: tuple[str, ...], inputs: tuple[str, ...], **changes: Any) -> JobSpec:
    return JobSpec(
        name=script,
        platform=PLATFORM,
        command=(sys.executable, f"{script}.py", "--smoke", "--out", "out", *flags),
        inputs=inputs,
        outputs=("out",),
        env={"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"},
        timeout_s=3600,
        max_cost_usd=100.0,
        interruptible=True,
        **changes,
    )


TRAINING_S = 200.0
"""Time limit for a trainer, which imports torch and trains for tens of seconds."""


async def until(ctx: Context, cloud: Cloud, job_id: str, done: Any) -> CheckedJob:
    """Check a job until `done` accepts it; fail the test if the job has ended otherwise."""

    def good(seen: CheckedJob) -> bool:
        moves_on(cloud, 1)
        assert done(seen) or not over(seen), (seen.job.why, seen.log.text if seen.log else "")
        return bool(done(seen))

    return await soon(lambda: check(ctx, job_id, limit=4000), TRAINING_S, every=0.5, good=good)


async def ended(ctx: Context, cloud: Cloud, job_id: str, level: Level = Level.RESUME) -> PullResult:
    """Pull and verify a job's outputs, then terminate its machine as a user would approve it."""
    early = await request(ctx, job_id, "terminate")
    assert early.record.state is Teardown.BLOCKED
    pulled = await pull(ctx, job_id)
    assert not pulled.missing
    report = await verify_job(ctx, job_id, level)
    assert report.verdict is Verdict.PROVEN, report.reasons
    view = await request(ctx, job_id, "terminate")
    assert view.record.state is Teardown.AWAITING_HUMAN and view.record.digest, view.findings
    view = await approve(ctx, view.record.id, view.record.digest, channel="rehearsal", by="the test")
    while view.record.state is Teardown.EXECUTING:
        await ctx.clock.sleep(1)
        view = await proceed(ctx, view.record.id)
    assert view.record.state is Teardown.VERIFIED_STOPPED
    assert promises(ctx.ledger, cloud) == []
    assert [truth.meter for truth in cloud.truths().values()] == [False]
    return pulled


@pytest.mark.parametrize("method", PLAYED)
async def test_a_trainer_runs_through_a_preemption_to_teardown(ctx: Context, method: str) -> None:
    """The machine is taken away midway, so the second checkpoint is saved on the second attempt."""
    for name in (*LIBRARIES, *NEEDS.get(method, ())):
        need(name, importlib.util.find_spec(name) is not None)
    cloud = rent_cloud(ctx)
    inputs = project(ctx, SCRIPTS / f"{method}.py", SCRIPTS / "gputrain", FAULTS)
    flags = ("--callback", f"{FAULTS.name}:Held")
    spec = job(method, flags, inputs)
    spec = spec.model_copy(update={"env": {**spec.env, "FAULT_STEP": str(HELD_AT)}})
    job_id = await launch(ctx, spec)
    seen = await until(ctx, cloud, job_id, lambda s: s.observation and s.observation.step == HELD_AT)
    assert seen.job.state is Job.RUNNING and seen.job.attempt == 1
    [machine] = records(cloud)
    assert cloud.truth(machine.id).processes
    cloud.preempt(machine.id)
    seen = await until(ctx, cloud, job_id, lambda s: s.job.state is Job.SUCCEEDED)
    assert seen.job.attempt == 2
    pulled = await ended(ctx, cloud, job_id)
    out = pulled.dest / "out"
    assert sorted(p.name for p in out.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-8"]
    result = json.loads((out / "result.json").read_text())
    assert (result["status"], result["step"], result["resumed_from"]) == ("completed", 8, "checkpoint-4")
    assert [step for step, name, _ in curve(out) if name == "loss"] == list(range(1, 9))


async def test_a_conversion_runs_from_launch_to_teardown(ctx: Context) -> None:
    """GPUWARDEN_LLAMA_CPP contains the paths of llama.cpp's source and build, as SOURCE:BUILD; `make gguf` sets it."""
    source, _, build = os.environ.get("GPUWARDEN_LLAMA_CPP", "").partition(":")
    if not build:
        pytest.skip("GPUWARDEN_LLAMA_CPP does not name a source and a build of llama.cpp")
    cloud = rent_cloud(ctx)
    flags = ("--llama-cpp", source, "--llama-cpp-build", build, "--types", "F16,Q4_K_M,Q8_0")
    job_id = await launch(
        ctx, job("merge_and_gguf", flags, project(ctx, SCRIPTS / "merge_and_gguf.py", SCRIPTS / "gputrain"))
    )
    await until(ctx, cloud, job_id, lambda s: s.job.state is Job.SUCCEEDED)
    pulled = await ended(ctx, cloud, job_id, Level.LOAD)
    files = {f["type"]: f["tensors"] for f in json.loads((pulled.dest / "out" / "result.json").read_text())["files"]}
    assert files["Q4_K_M"]["Q4_K"] and files["Q8_0"]["Q8_0"]
    assert len(list((pulled.dest / "out" / "gguf").glob("*.gguf"))) == 3
