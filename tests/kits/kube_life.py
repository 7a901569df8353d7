"""The complete life of a job on a cluster, through the use cases, for both the in-memory and the real cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import NotSupported, Refused
from gpuwarden.core.guidance import Action
from gpuwarden.core.models import JobSpec, Verdict
from gpuwarden.core.states import TERMINAL_JOBS, Job
from gpuwarden.data import data_dir
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.artifacts.verify import verify_job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.check import CheckedJob, cancel, check, pause, resume
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.lifecycle.teardown.gate import request
from lifecycle_kit import open_house
from waiting import soon

# Saves its step on SIGTERM and resumes from it. Ends once the file `go` exists.
TRAIN = """# /// script
# requires-python = ">=3.8"
# dependencies = []
# ///
import json, os, signal, struct, sys, time
os.makedirs("out", exist_ok=True)

def save(step):
    head = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    head += b" " * (-len(head) % 8)
    with open("out/model.tmp", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + struct.pack("<4f", step, 2, 3, 4))
    os.rename("out/model.tmp", "out/model.safetensors")

step = 0
if os.path.exists("out/model.safetensors"):
    with open("out/model.safetensors", "rb") as file:
        step = int(struct.unpack("<f", file.read()[-16:-12])[0])
print("from step", step, flush=True)

def told(*_):
    save(step + 1)
    print("saved step", step + 1, flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, told)
while not os.path.exists("go"):
    time.sleep(0.05)
save(step + 1)
print("step", step + 1, "loss 0.5", flush=True)
"""

# On SIGTERM, counts its starts in a file, and prints the count when it starts, as a job that loads a checkpoint would.
RESUMES = """
n=$(cat count 2>/dev/null || echo 0); echo "from $n $KEY"
trap 'echo $((n + 1)) > count; echo saved; exit 0' TERM
while [ ! -e go ]; do sleep 0.1; done
"""


class Disturbed(Protocol):
    """A cluster whose scheduling the test controls."""

    def preempt(self, job: str) -> None:
        """Preempt a job's pod."""

    def names(self, plural: str) -> list[str]:
        """Return the names of all objects of a kind that the jobs created, without the pod for files."""

    def claim(self, name: str = "runs", **spec: object) -> None:
        """Create a claim with our label."""


def warden(tmp_path: Path, runs: Path | None = None) -> Context:
    """Return a context whose profile has its run folders at the mount path of the test's pods."""
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    text = (data_dir("profiles") / "kubernetes.md").read_text("utf-8")
    assert text.count(": /gpuwarden\n") == 2
    (profiles / "kubernetes.md").write_text(text.replace(": /gpuwarden\n", f": {runs or tmp_path / 'runs'}\n"), "utf-8")
    ctx = open_house(tmp_path / "home", SystemClock())
    ctx.own_profiles = profiles
    return ctx


def train(**changes: object) -> JobSpec:
    """Return the spec of a job that runs `TRAIN`."""
    given = {"platform": "kubernetes/test", "script": TRAIN, "outputs": ("out",), "timeout_s": 600, "name": "tiny"}
    return JobSpec.model_validate({**given, "options": {"image": "python:3.12-slim"}, **changes})


async def until(ctx: Context, job_id: str, good: Callable[[CheckedJob], bool]) -> CheckedJob:
    """Poll the job until `good` accepts the answer."""

    async def look() -> CheckedJob | None:
        seen = await check(ctx, job_id)
        return seen if good(seen) else None

    seen = await soon(look, 60, every=0.1)
    assert seen is not None
    return seen


async def refused(ctx: Context, spec: JobSpec) -> list[str]:
    """Return the rules by which the gate refuses a job, with their messages."""
    with pytest.raises(Refused) as error:
        await submit(ctx, spec)
    return [f"{f.rule}: {f.message}" for f in error.value.findings if f.blocks]


def said(seen: CheckedJob, words: str) -> bool:
    """Return whether the log has these words."""
    return seen.log is not None and words in seen.log.text


async def whole_life(ctx: Context, cluster: Disturbed) -> None:
    """Run a job: refused, submitted, preempted, resumed, pulled, proven; then another: paused, canceled, and gone."""
    (why,) = await refused(ctx, train(outputs=("/data/out",)))
    assert why.startswith("PF-OUT-002: /data/out ")
    assert cluster.names("jobs") == []

    done = await submit(ctx, train())
    assert done.job is not None and done.receipt and done.quote is None and not done.ask, "nothing is metered"
    seen = await until(ctx, done.job.id, lambda s: said(s, "from step 0"))
    assert seen.job.state is Job.RUNNING and seen.lease is None
    (name,) = cluster.names("jobs")
    cluster.preempt(name)
    seen = await until(ctx, done.job.id, lambda s: said(s, "from step 1"))
    assert said(seen, "saved step 1") and seen.job.state not in TERMINAL_JOBS
    assert cluster.names("jobs") == [name], "it is the same job, in another pod"
    assert seen.job.handle is not None
    (Path(seen.job.handle.run_dir) / "work/go").touch()
    seen = await until(ctx, done.job.id, lambda s: s.job.state in TERMINAL_JOBS)
    assert seen.job.state is Job.SUCCEEDED and said(seen, "step 2 loss 0.5")
    assert [s.action for s in seen.next_steps][-2:] == [Action.PULL, Action.VERIFY]
    await pull(ctx, done.job.id)
    assert (await verify_job(ctx, done.job.id)).verdict is Verdict.PROVEN
    with pytest.raises(NotSupported):
        await request(ctx, done.job.id, "terminate")

    other = await submit(ctx, train(name="other"))
    assert other.job is not None
    await until(ctx, other.job.id, lambda s: said(s, "from step 0"))
    assert len(cluster.names("jobs")) == 2
    await pause(ctx, other.job.id)
    await until(ctx, other.job.id, lambda s: s.job.state is Job.PAUSED)
    assert cluster.names("jobs") == [name], "a paused job takes nothing from the cluster"
    await resume(ctx, other.job.id)
    await until(ctx, other.job.id, lambda s: s.job.state is Job.RUNNING and said(s, "from step 1"))
    await cancel(ctx, other.job.id)
    seen = await until(ctx, other.job.id, lambda s: s.job.state in TERMINAL_JOBS)
    assert seen.job.state is Job.CANCELED
    assert cluster.names("jobs") == [name] and not any("other" in pod for pod in cluster.names("pods"))
