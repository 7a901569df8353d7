"""Reports from a job's machine reach the store: pulled over SSH, for this job only, and down to the last line."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from cutting import NoWait
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.errors import Unreachable
from gpuwarden.core.models import Handle, SpoolPiece
from gpuwarden.core.states import TERMINAL_JOBS, Job
from gpuwarden.job_tokens import job_of, job_token
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.reporting import report_secrets
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.lifecycle.monitoring.reports import ReportPuller, pull_reports
from gpuwarden.lifecycle.monitoring.watch import Round, Watcher
from gpuwarden.lifecycle.records import read_job
from lifecycle_kit import launch, open_house, training

pytestmark = pytest.mark.anyio

POST = """
import json, os, urllib.request
for step in range(30):
    body = json.dumps({"job_id": os.environ["JOB_ID"], "metrics": [{"step": step, "train_loss": 1 / (step + 1)}]})
    headers = {"Authorization": "Bearer " + os.environ["JOB_TOKEN"], "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(os.environ["METRICS_API_URL"], body.encode(), headers)) as reply:
        assert reply.status == 200
with open(os.environ["GPUWARDEN_METRICS"], "a") as file:
    file.write('{"step": 30, "accuracy": 0.5}\\n')
print("CUDA out of memory")
"""


class Spooled:
    """A backend with a spool that the test provides."""

    def __init__(self, *lines: Any, piece: int = 1 << 20) -> None:
        self.text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
        self.piece, self.asked, self.fails = piece, 0, 0

    async def spooled(self, handle: Handle, cursors: Mapping[str, int]) -> dict[str, SpoolPiece]:
        self.asked += 1
        if self.fails:
            self.fails -= 1
            raise Unreachable("the line is broken")
        start = cursors["job"]
        end = self.text.rfind("\n", start, start + self.piece) + 1
        return {
            "job": SpoolPiece(text=self.text[start:end], next=end or start),
            "runner": SpoolPiece(text="", next=0),
            "elsewhere": SpoolPiece(text=self.text, next=9),
        }


async def a_job(tmp_path: Path, backend: Any, **changes: object) -> tuple[Context, str]:
    """Run a job to its end, and replace its backend with `backend`; return the context and the job's id."""
    ctx = open_house(tmp_path / "home", NoWait())
    quick = (sys.executable, "-c", "pass")
    job = await launch(ctx, training(tmp_path / "said", 0.0, platform="local", command=quick, max_cost_usd=None))
    while (await check(ctx, job)).job.state not in TERMINAL_JOBS:
        await anyio.sleep(0.15)
    ctx._backends["local"] = backend
    return ctx, job


def point(job: str, step: object, loss: object = 1.0) -> dict[str, Any]:
    return {"kind": "metrics", "body": {"job_id": job, "metrics": [{"step": step, "loss": loss}]}}


@pytest.mark.slow
async def test_metrics_of_an_isolated_machine_are_read_over_ssh(
    ssh_house: tuple[Context, SshBackend],
    tmp_path: Path,
) -> None:
    ctx, _ = ssh_house
    job = await launch(
        ctx,
        training(tmp_path / "said", platform="box", command=(sys.executable, "-c", POST), max_cost_usd=None),
    )
    watcher = Watcher(ctx)
    while (await check(ctx, job)).job.state not in TERMINAL_JOBS:
        await watcher.reports.round()
        await anyio.sleep(0.1)
    assert read_job(ctx.ledger, job).state is Job.SUCCEEDED
    await watcher.reports.round()
    assert [p.step for p in ctx.metrics.points(job, "train_loss").points] == list(range(30))
    assert [p.value for p in ctx.metrics.points(job, "accuracy").points] == [0.5]
    assert [a.type for a in ctx.metrics.alerts(job)] == ["job_started", "gpu_oom", "job_completed"]
    assert job_token(ctx.home, job, "metrics").encode() not in (tmp_path / "home" / "ledger.db").read_bytes()


@pytest.mark.slow
@pytest.mark.attack("metrics", "writes lines for another job, and rubbish, into its spool")
async def test_a_spool_counts_only_for_its_own_job(tmp_path: Path) -> None:
    backend = Spooled(
        point("jsomebodyelse", 1), "no json\n", [1], {"kind": "metrics"}, {"kind": "metrics", "body": {"metrics": 7}},
        {"kind": "alerts", "body": {"type": "job_paused"}}, "[" * 5000 + "\n", point("x", "one"), point("x", 2),
        {"kind": "alerts", "body": {"type": "job_failed", "error_message": "key hf_" + "a" * 34}},
    )  # fmt: skip
    ctx, job = await a_job(tmp_path, backend)
    assert await pull_reports(ctx, read_job(ctx.ledger, job))
    assert [p.step for p in ctx.metrics.points(job, "loss").points] == [1, 2]
    assert ctx.metrics.series("jsomebodyelse") == ()
    assert [a.fields["error_message"] for a in ctx.metrics.alerts(job)] == ["key [secret removed]"]


@pytest.mark.slow
async def test_an_unreadable_point_loses_no_other_point(tmp_path: Path) -> None:
    many: list[dict[str, Any]] = [{"step": n, "loss": 1.0} for n in range(1_500)]
    many[700]["step"] = "x"
    ctx, job = await a_job(tmp_path, Spooled({"kind": "metrics", "body": {"metrics": many}}))
    await pull_reports(ctx, read_job(ctx.ledger, job))
    assert len(ctx.metrics.points(job, "loss").points) == 1_499


@pytest.mark.slow
async def test_a_long_spool_is_read_in_pieces_and_continues_after_a_failure(tmp_path: Path) -> None:
    backend = Spooled(*(point("j", step) for step in range(500)), piece=1_000)
    ctx, job = await a_job(tmp_path, backend)
    puller = ReportPuller(ctx)
    await puller.round()
    assert 0 < len(ctx.metrics.points(job, "loss").points) < 500
    backend.fails = 1
    await puller.round()
    assert puller.trouble.keys() == {job}
    for _ in range(5):
        await puller.round()
    assert (len(ctx.metrics.points(job, "loss").points), puller.trouble) == (500, {})
    asked = backend.asked
    await puller.round()  # the job has ended, and its whole spool was read
    assert backend.asked == asked


@pytest.mark.slow
async def test_a_hanging_machine_does_not_delay_the_watch(tmp_path: Path) -> None:
    backend = Spooled()
    ctx, _ = await a_job(tmp_path, backend)
    hangs, rounds = anyio.Event(), 0

    async def hang(handle: Handle, cursors: Mapping[str, int]) -> dict[str, SpoolPiece]:
        hangs.set()
        await anyio.sleep_forever()
        raise AssertionError

    backend.spooled = hang  # type: ignore[method-assign]
    async with anyio.create_task_group() as tasks:

        def report(found: Round) -> None:
            nonlocal rounds
            rounds += 1
            if rounds >= 3 and hangs.is_set():
                tasks.cancel_scope.cancel()

        tasks.start_soon(Watcher(ctx).run, report)
    assert rounds >= 3


@pytest.mark.slow
async def test_a_noted_server_is_passed_to_the_runner_and_keys_go_nowhere_else(tmp_path: Path) -> None:
    ctx, job_id = await a_job(tmp_path, Spooled())
    job = read_job(ctx.ledger, job_id)
    assert set(report_secrets(ctx, job, runner=True)) == {"GPUWARDEN_REPORT_TOKEN", "GPUWARDEN_REPORT_KEY"}
    assert report_secrets(ctx, job, runner=False) == {}
    ctx.notes_file = tmp_path / "notes.toml"
    ctx.notes_file.write_text('server = "https://gw.example.org/"\n')
    ctx.notes_file.chmod(0o600)
    ctx.__dict__.pop("notes")
    told = report_secrets(ctx, job, runner=True)
    assert told["GPUWARDEN_REPORT_URL"] == "https://gw.example.org"
    given = report_secrets(ctx, job, runner=False)
    assert given["METRICS_API_URL"] == "https://gw.example.org/api/training/local/metrics"
    assert job_of(ctx.home, given["JOB_TOKEN"]) == (job_id, "metrics")
    assert job_of(ctx.home, given["INTERNAL_API_KEY"]) == (job_id, "alerts")
    own = job.spec.model_copy(update={"env": {"METRICS_API_URL": "https://theirs.example.org"}})
    assert report_secrets(ctx, replace(job, spec=own), runner=False) == {}
