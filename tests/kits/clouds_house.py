"""A context over an emulated platform: its API over HTTP, and emulated machines behind OpenSSH.

The fixture is `cloud_house`. `every_platform` runs a test on all six platforms; `each_platform` runs it on two, and on
the other four only in tests marked `prove`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from clouds.base import KEY, Web
from clouds.boxes import Machines, possible
from clouds.platform import Platform, platforms
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.models import JobSpec, Verdict
from gpuwarden.core.policy import Caps, Policy
from gpuwarden.core.states import TERMINAL_JOBS, Job, Teardown
from gpuwarden.interfaces.cli.approval import grant_spending
from gpuwarden.lifecycle.artifacts.pull import PullResult, pull
from gpuwarden.lifecycle.artifacts.verify import verify_job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.check import CheckedJob, check
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.lifecycle.teardown.gate import approve, proceed, request
from gpuwarden.rehearsal.model import Fault as CloudFault
from lifecycle_kit import clock_of_today, open_house, story
from real_parts import need
from waiting import soon

RICH = Policy(caps=Caps(per_job_usd=1_000, per_day_usd=100_000, per_instance_usd=1_000))

# Saves a checkpoint at every step and resumes from it. If the argument is `wait`, the first attempt hangs after three
# steps, like a long job. The environment that the script receives is an output too.
TRAIN = """
# /// script
# dependencies = []
# ///
import json, os, struct, sys, time
attempt = int(os.environ["GPUWARDEN_ATTEMPT"])
out = os.environ.get("OUT", "out")
os.makedirs(out, exist_ok=True)
os.makedirs("state", exist_ok=True)
with open("state/seen.%d.json" % attempt, "w") as file:
    json.dump({"env": dict(os.environ), "argv": sys.argv, "folder": os.getcwd()}, file)

def save(step):
    head = json.dumps({"w": {"dtype": "F32", "shape": [256], "data_offsets": [0, 1024]}}).encode()
    head += b" " * (-len(head) % 8)
    with open(out + "/model.tmp", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + struct.pack("<256f", *(step + n for n in range(256))))
    os.rename(out + "/model.tmp", out + "/model.safetensors")
    with open("state/step.tmp", "w") as file:
        file.write(str(step))
    os.rename("state/step.tmp", "state/step")

start = int(open("state/step").read()) if os.path.exists("state/step") else 0
print("begins at step", start, flush=True)
for step in range(start + 1, 6):
    save(step)
    with open(os.environ["GPUWARDEN_METRICS"], "a") as file:
        file.write(json.dumps({"step": step, "loss": 1.0 / step}) + "\\n")
    while step == 3 and attempt == 1 and sys.argv[1] == "wait":
        time.sleep(0.05)
"""


PLATFORMS = platforms()
RUNPOD, VASTAI = (next(p for p in PLATFORMS if p.name == name) for name in ("runpod", "vastai"))
every_platform = pytest.mark.parametrize("cloud_house", PLATFORMS, ids=lambda p: p.name, indirect=True)
# A platform that terminates at once and one that requires a stop first; the others are marked `prove`.
ORDINARY = ("runpod", "autodl")
each_platform = pytest.mark.parametrize(
    "cloud_house",
    [pytest.param(p, id=p.name, marks=() if p.name in ORDINARY else pytest.mark.prove) for p in PLATFORMS],
    indirect=True,
)


MACHINE_S = 60.0
"""Time limit for booting a namespace machine and its OpenSSH server."""


class House:
    """A context with one platform's account, and its machines."""

    def __init__(self, home: Path, platform: Platform, server: Web, env: pytest.MonkeyPatch) -> None:
        self.platform, self.home, self.clock = platform, home, clock_of_today()
        self.account = platform.account(home / "cloud", self.clock)
        self.machines = Machines(self.account, home / "machines")
        for name, value in {
            platform.provider.api.key_variable: KEY,
            platform.provider.api.url_variable: server.add(self.account),
            "GPUWARDEN_SSH_PUBLIC_KEY": str(self.machines.folder / "clientkey.pub"),
            **dict(platform.env),
        }.items():
            env.setenv(name, value)
        platform.take_key(self.account, self.machines)
        self.ctx = self.opens()

    def opens(self) -> Context:
        """Open a context as a new gpuwarden process does: it knows only the ledger."""
        ctx = open_house(self.home / "house", self.clock, policy=RICH)
        ctx._backends["ssh"] = SshBackend(self.clock, config=self.machines.config)
        return ctx

    async def reopens(self) -> None:
        await self.closes()
        self.ctx = self.opens()

    async def closes(self) -> None:
        backend = self.ctx.backend("ssh")
        assert isinstance(backend, SshBackend)
        await backend.aclose()
        self.ctx.ledger.close()

    def spec(self, how: str = "go", **changes: Any) -> JobSpec:
        values = {
            "name": "train", "platform": self.platform.name, "script": TRAIN, "args": (how,), "outputs": ("out",),
            "gpu": self.platform.gpu, "timeout_s": 3600, "max_cost_usd": 50.0,
        }  # fmt: skip
        return JobSpec.model_validate(values | changes)

    async def launch(self, spec: JobSpec) -> str:
        first = await submit(self.ctx, spec)
        assert first.job is None and first.receipt
        if first.ask:  # an unknown price always needs the user's approval
            issued = self.ctx.ledger.last(f"receipt/{first.receipt}", "receipt.issued")
            assert issued is not None and "unknown" in first.ask
            grant_spending(self.ctx, issued, "terminal", "test")
        self.clock.time += 15  # otherwise the create hits a rate limit, and that reply is lost instead
        done = await submit(self.ctx, spec, receipt=first.receipt)
        assert done.job is not None
        return done.job.id

    async def until(self, job: str, done: Callable[[CheckedJob], bool], *, jump_s: float = 0.0) -> CheckedJob:
        """Poll, as an agent does. The clock jumps only while no process of the job is running."""

        def good(seen: CheckedJob) -> bool:
            if done(seen):
                return True
            at_work = seen.observation is not None and seen.observation.state in {Job.QUEUED, Job.RUNNING}
            self.clock.advance(0.0 if at_work else jump_s)
            return False

        return await soon(lambda: check(self.ctx, job), MACHINE_S, every=0.05, good=good)

    async def running(self, job: str) -> CheckedJob:
        return await self.until(job, lambda c: c.job.handle is not None, jump_s=5)

    async def reached(self, job: str, step: int) -> CheckedJob:
        return await self.until(job, lambda c: bool(c.observation and c.observation.step == step))

    async def ended(self, job: str) -> CheckedJob:
        return await self.until(job, lambda c: c.job.state in TERMINAL_JOBS, jump_s=1)

    def machine(self) -> str:
        """Return the most recently rented machine."""
        return list(self.account.own)[-1]

    def breaks(self, *faults: CloudFault) -> None:
        """Inject faults into machines rented from now on."""
        cloud = self.account.cloud
        config = cloud.store.config()
        assert config is not None
        cloud.configure(faults=config.faults.model_copy(update={"faults": (*config.faults.faults, *faults)}))

    def take(self) -> None:
        """Preempt the machine mid-run, as its platform would."""
        cloud, ident = self.account.cloud, self.machine()
        if self.platform.spot:
            cloud.preempt(ident)
        elif self.platform.taken == "stopped":
            cloud.stop(ident)
        else:
            cloud.inject(ident, CloudFault(kind="vanish"))
        self.clock.time += 6
        self.machines.follow(ident)

    def billing(self) -> list[str]:
        return [ident for ident, truth in self.account.cloud.truths().items() if truth.meter]

    def story(self) -> str:
        return story(self.ctx.ledger.events(limit=10_000))


@pytest.fixture
def cloud_house(
    request: pytest.FixtureRequest, tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch,
    need_program: Callable[[str], str],
) -> Iterator[House]:  # fmt: skip
    need_program("sshd")
    need("a kernel that lets us make machines of namespaces", possible())
    made = House(tmp_path, getattr(request, "param", RUNPOD), web, monkeypatch)
    yield made
    anyio.run(made.closes)
    made.machines.close()


async def bring_home(house: House, job: str) -> PullResult:
    """Pull and verify a job's outputs."""
    pulled = await pull(house.ctx, job)
    assert not pulled.missing and not pulled.received.problems and pulled.log
    report = await verify_job(house.ctx, job)
    assert report.verdict is Verdict.PROVEN, report
    return pulled


async def take_down(house: House, job: str, loss: str | None = None) -> None:
    """Request the teardown, approve it, and poll until the machine is gone."""
    view = await request(house.ctx, job, "terminate")
    assert view.record.state is (Teardown.BLOCKED if loss else Teardown.AWAITING_HUMAN), view.findings
    assert view.record.digest
    view = await approve(house.ctx, view.record.id, view.record.digest, channel="terminal", by="test", loss=loss)
    for _ in range(12):
        if view.record.state is Teardown.VERIFIED_STOPPED:
            break
        house.clock.time += 61
        view = await proceed(house.ctx, view.record.id)
    assert view.record.state is Teardown.VERIFIED_STOPPED, house.story()
