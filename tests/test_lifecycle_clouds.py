"""A job's whole life on every rented platform: its own interface over HTTP, and real machines behind OpenSSH."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from clouds.autodl import AutoDLAccount
from clouds.base import KEY, Emulator, Fault, Web
from clouds.boxes import Machines, possible
from clouds.lambda_cloud import LambdaAccount
from clouds.paperspace import PaperspaceTeam
from clouds.prime_intellect import PrimeAccount
from clouds.runpod import RunPodCloud
from clouds.vastai import VastCloud
from clouds_kit import web  # noqa: F401
from conftest import need
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.errors import Refused
from gpuwarden.core.models import JobSpec, Verdict
from gpuwarden.core.policy import Caps, Policy
from gpuwarden.core.rules import Finding
from gpuwarden.core.states import LIVE_LEASES, Job, Lease, Teardown
from gpuwarden.lifecycle.check import Checked, check
from gpuwarden.lifecycle.instances import list_instances
from gpuwarden.lifecycle.pull import pull
from gpuwarden.lifecycle.records import job_ids, lease_ids, read_job, read_lease
from gpuwarden.lifecycle.submit import submit
from gpuwarden.lifecycle.teardown import approve, proceed, request
from gpuwarden.lifecycle.verify import verify_job
from gpuwarden.lifecycle.warden import Warden
from gpuwarden.providers._http import Api
from gpuwarden.providers.autodl import AutoDL
from gpuwarden.providers.lambda_cloud import LambdaCloud
from gpuwarden.providers.paperspace import Paperspace
from gpuwarden.providers.prime_intellect import PrimeIntellect
from gpuwarden.providers.runpod import RunPod
from gpuwarden.providers.vastai import Vast
from gpuwarden.remote.connect import HostKeyChanged, fingerprint
from gpuwarden.serve.approval import grant_spending
from gpuwarden.serve.replies import checked as check_reply
from lifecycle_kit import open_house, story

pytestmark = pytest.mark.anyio
RICH = Policy(caps=Caps(per_job_usd=1_000, per_day_usd=100_000, per_instance_usd=1_000))

# Saves a checkpoint at every step and goes on from it. Told to wait, the first attempt stops after three steps, as a
# machine does whose work takes long. What it sees of the world is an output too.
TRAIN = """
# /// script
# dependencies = []
# ///
import json, os, struct, sys, time
attempt = int(os.environ["GPUWARDEN_ATTEMPT"])
os.makedirs("out", exist_ok=True)
os.makedirs("state", exist_ok=True)
with open("state/seen.%d.json" % attempt, "w") as file:
    json.dump({"env": dict(os.environ), "argv": sys.argv, "folder": os.getcwd()}, file)

def save(step):
    head = json.dumps({"w": {"dtype": "F32", "shape": [256], "data_offsets": [0, 1024]}}).encode()
    head += b" " * (-len(head) % 8)
    with open("out/model.tmp", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + struct.pack("<256f", *(step + n for n in range(256))))
    os.rename("out/model.tmp", "out/model.safetensors")
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


@dataclass(frozen=True)
class Platform:
    """One platform: its account, its interface, what is asked for, and which requests create and end."""

    name: str
    account: type[Emulator]
    api: Api
    gpu: str
    creates: str
    ends: str
    spot: bool = False
    env: tuple[tuple[str, str], ...] = ()


PLATFORMS = (
    Platform("runpod", RunPodCloud, RunPod.api, "H100", r"^POST /pods$", r"^DELETE /pods/"),
    Platform(
        "vastai", VastCloud, Vast.api, "H100", r"^PUT /api/v0/asks/", r"^DELETE /api/v0/instances/", spot=True
    ),
    Platform("lambda", LambdaAccount, LambdaCloud.api, "H100", r"instance-operations/launch", r"operations/terminate"),
    Platform(
        "autodl", AutoDLAccount, AutoDL.api, "H800", r"pro/create$", r"pro/release$",
        env=(("AUTODL_CNY_PER_USD", "7.0"),),
    ),
    Platform(
        "paperspace", PaperspaceTeam, Paperspace.api, "H100", r"^POST /machines$", r"^DELETE /machines/",
        env=(("PAPERSPACE_TEMPLATE", "tpl1"), ("PAPERSPACE_REGION", "ny2")),
    ),
    Platform("prime-intellect", PrimeAccount, PrimeIntellect.api, "H100", r"^POST /pods/$", r"^DELETE /pods/"),
)  # fmt: skip
RUNPOD, VASTAI = PLATFORMS[:2]


class JumpingClock:
    """The machine's clock, ahead of it by what was slept: boots and second looks take no time, processes do."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def now(self) -> float:
        return time.time() + self.ahead

    async def sleep(self, seconds: float) -> None:
        self.ahead += seconds
        await anyio.lowlevel.checkpoint()


class House:
    """A warden with one platform's account, and its machines."""

    def __init__(self, home: Path, platform: Platform, server: Web, env: pytest.MonkeyPatch) -> None:
        self.platform, self.home, self.clock = platform, home, JumpingClock()
        self.account = platform.account(home / "cloud", self.clock)
        self.machines = Machines(self.account, home / "machines")
        for name, value in {
            platform.api.key_variable: KEY,
            platform.api.url_variable: server.add(self.account),
            "GPUWARDEN_SSH_PUBLIC_KEY": str(self.machines.folder / "clientkey.pub"),
            **dict(platform.env),
        }.items():
            env.setenv(name, value)
        match self.account:  # those that take no key with an order
            case LambdaAccount():
                self.account.ssh_keys[0]["public_key"] = self.machines.key
            case PrimeAccount():
                self.account.keys[1]["publicKey"] = self.machines.key
            case PaperspaceTeam():
                self.machines.image_keys = [self.machines.key]
        self.w = self.opens()

    def opens(self) -> Warden:
        """A process of gpuwarden, knowing only what is in the ledger."""
        w = open_house(self.home / "house", self.clock, policy=RICH)
        w._backends["ssh"] = SshBackend(self.clock, config=self.machines.config)
        return w

    async def reopens(self) -> None:
        await self.closes()
        self.w = self.opens()

    async def closes(self) -> None:
        backend = self.w.backend("ssh")
        assert isinstance(backend, SshBackend)
        await backend.aclose()
        self.w.ledger.close()

    def spec(self, how: str = "go", **changes: Any) -> JobSpec:
        values = {
            "name": "train", "platform": self.platform.name, "script": TRAIN, "args": (how,), "outputs": ("out",),
            "gpu": self.platform.gpu, "timeout_s": 3600, "max_cost_usd": 50.0,
        }  # fmt: skip
        return JobSpec.model_validate(values | changes)

    async def launch(self, spec: JobSpec) -> str:
        first = await submit(self.w, spec)
        assert first.job is None and first.receipt
        if first.ask:  # a price that the platform does not tell is always a person's decision
            issued = self.w.ledger.last(f"receipt/{first.receipt}", "receipt.issued")
            assert issued is not None and "unknown" in first.ask
            grant_spending(self.w, issued, "terminal", "test")
        self.clock.ahead += 15  # or a rate limit answers the create, whose reply is lost in its stead
        done = await submit(self.w, spec, receipt=first.receipt)
        assert done.job is not None
        return done.job.id

    async def until(self, job: str, done: Callable[[Checked], bool], *, jump_s: float = 0.0) -> Checked:
        """Check again and again, as an agent does."""
        for _ in range(150):
            seen = await check(self.w, job)
            if done(seen):
                return seen
            self.clock.ahead += jump_s
            await anyio.sleep(0.05)
        raise AssertionError(f"{seen}\n{self.story()}")

    async def running(self, job: str) -> Checked:
        return await self.until(job, lambda c: c.job.handle is not None, jump_s=5)

    async def ended(self, job: str) -> Checked:
        return await self.until(job, lambda c: c.job.state in {Job.SUCCEEDED, Job.FAILED, Job.CANCELED})

    def machine(self) -> str:
        """The only machine that was ever rented."""
        (ident,) = self.account.own
        return ident

    def billing(self) -> list[str]:
        return [ident for ident, truth in self.account.cloud.truths().items() if truth.meter]

    def story(self) -> str:
        return story(self.w.ledger.events(limit=10_000))


@pytest.fixture
def house(
    request: pytest.FixtureRequest, tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch,  # noqa: F811
    need_program: Callable[[str], str],
) -> Iterator[House]:  # fmt: skip
    need_program("sshd")
    need("a kernel that lets us make machines of namespaces", possible())
    made = House(tmp_path, getattr(request, "param", RUNPOD), web, monkeypatch)
    yield made
    anyio.run(made.closes)
    made.machines.close()


every_platform = pytest.mark.parametrize("house", PLATFORMS, ids=lambda p: p.name, indirect=True)


async def take_down(house: House, job: str) -> None:
    """Ask, approve as a person does, and look until the machine is seen gone."""
    view = await request(house.w, job, "terminate")
    assert view.record.state is Teardown.AWAITING_HUMAN, view.findings
    assert view.record.digest
    view = await approve(house.w, view.record.id, view.record.digest, channel="terminal", by="test")
    for _ in range(12):
        if view.record.state is Teardown.VERIFIED_STOPPED:
            break
        house.clock.ahead += 61
        view = await proceed(house.w, view.record.id)
    assert view.record.state is Teardown.VERIFIED_STOPPED, house.story()


@every_platform
async def test_the_whole_life_of_a_job(house: House) -> None:
    spot = house.platform.spot
    house.account.faults = [Fault("lost_reply", house.platform.creates), Fault("lost_reply", house.platform.ends)]
    job = await house.launch(house.spec("wait" if spot else "go", interruptible=spot))
    assert read_job(house.w.ledger, job).state is Job.PROVISIONING
    await house.reopens()

    seen = await house.running(job)
    assert len(house.account.own) == 1, "the create whose reply was lost was adopted, not repeated"
    assert seen.lease is not None and house.w.ledger.last(seen.lease.subject, "lease.adopted")
    trusted = house.w.ledger.last(seen.lease.subject, "host.trusted")
    key = (house.machines.folder / house.machine() / "hostkey.pub").read_text()
    assert trusted and "first use" in trusted.body["why"] and trusted.body["fingerprint"] == fingerprint(key)
    meter = check_reply(seen).meter
    assert meter and meter.host_key == fingerprint(key)

    if spot:
        await house.until(job, lambda c: bool(c.observation and c.observation.step == 3))
        house.account.cloud.preempt(house.machine())
        house.machines.follow(house.machine())
        seen = await house.until(job, lambda c: c.job.attempt == 2 and c.job.state is not Job.PREEMPTED, jump_s=5)
        assert house.account.own[house.machine()]["label"].endswith(f"{job}-i1")

    seen = await house.ended(job)
    assert seen.job.state is Job.SUCCEEDED, (seen, house.story())
    assert seen.log and f"begins at step {3 if spot else 0}" in seen.log.text
    assert seen.lease and seen.lease.state in LIVE_LEASES and house.billing() == [house.machine()]
    assert len(house.w.ledger.events(f"lease/{seen.lease.id}", kind="host.checked")) == 1

    blocked = await request(house.w, job, "terminate")
    assert blocked.record.state is Teardown.BLOCKED and "TD-COPY-001" in {f.rule for f in blocked.findings}
    with pytest.raises(Refused):
        await approve(house.w, blocked.record.id, str(blocked.record.digest), channel="terminal", by="test")

    await house.reopens()
    pulled = await pull(house.w, job)
    assert not pulled.missing and not pulled.received.problems and pulled.log
    report = await verify_job(house.w, job)
    assert report.verdict is Verdict.PROVEN, report
    assert house.billing() == [house.machine()]

    nobody_else_has_the_key(house, pulled.dest)

    await take_down(house, job)
    assert house.billing() == []
    assert [f.count for f in house.account.faults] == [0, 0], "both replies were lost"
    lease = read_lease(house.w.ledger, f"{job}-i1")
    assert lease.state is Lease.STOPPED and lease_ids(house.w.ledger, *LIVE_LEASES) == []
    assert not [row for row in (await list_instances(house.w)).rows if row.billing is not False]


def nobody_else_has_the_key(house: House, copies: Path) -> None:
    """The account's key is in no order, in no file of the machine, in no copy, and not in the ledger."""
    assert all(KEY not in json.dumps(a.body, default=str) for a in house.account.asked)
    place = read_job(house.w.ledger, *job_ids(house.w.ledger)).place
    assert place is not None
    there = house.machines.disk(house.machine()) / place.run_root.lstrip("/")
    kept = [f for folder in (there, copies, house.home / "house") for f in folder.rglob("*") if f.is_file()]
    assert any(f.name == "seen.1.json" for f in kept)
    assert [f for f in kept if KEY.encode() in f.read_bytes()] == []


# ------------------------------------------------------------------------------------------------- first contact


async def test_a_machine_that_is_not_fit_fails_the_job_and_stays_for_a_person(house: House) -> None:
    house.machines.broken = 3
    job = await house.launch(house.spec())
    seen = await house.until(job, lambda c: c.job.state is Job.FAILED, jump_s=5)
    assert "uncorrected memory errors" in seen.job.why and "rent another" in seen.job.why
    assert "still rented" in seen.job.why
    assert not list(house.machines.disk(house.machine()).rglob("*.py")), "nothing was sent there"
    house.clock.ahead += 3600
    await list_instances(house.w)
    assert house.billing() == [house.machine()], "its end is a person's decision"
    await take_down(house, job)
    assert house.billing() == []


async def test_a_machine_that_lets_nobody_in_is_given_back_at_the_boot_limit_with_its_cost(house: House) -> None:
    house.machines.silent = True
    job = await house.launch(house.spec())
    seen = await house.until(job, lambda c: c.lease is not None and c.lease.instance_id is not None, jump_s=20)
    house.clock.ahead += 20
    seen = await check(house.w, job)
    assert seen.job.state is Job.PROVISIONING and house.billing() == [house.machine()]
    house.clock.ahead += house.w.profile("runpod").limits.boot_timeout_s
    await check(house.w, job)
    seen = await house.until(job, lambda c: c.job.state is Job.FAILED, jump_s=60)
    assert "could not be reached" in seen.job.why and "USD" in seen.job.why
    await house.until(job, lambda c: bool(c.lease and c.lease.state is Lease.STOPPED), jump_s=61)
    assert house.billing() == []


@pytest.mark.parametrize("house", [VASTAI], ids=["vastai"], indirect=True)
async def test_another_host_at_the_address_gets_nothing(house: House) -> None:
    """The machine is taken back in the middle of the run, and something else answers when it is up again."""
    job = await house.launch(house.spec("wait", interruptible=True))
    await house.running(job)
    await house.until(job, lambda c: bool(c.observation and c.observation.step == 3))
    house.account.cloud.preempt(house.machine())
    house.machines.follow(house.machine())
    house.machines.renew_key(house.machine())
    seen = await house.until(job, lambda c: c.job.state is Job.FAILED, jump_s=5)
    assert "host key" in seen.job.why and "changed" in seen.job.why
    await house.reopens()
    with pytest.raises(HostKeyChanged):
        await pull(house.w, job)
    assert not list(house.machines.disk(house.machine()).rglob("seen.2.json"))
    assert house.billing() == [house.machine()]


async def test_a_contact_that_was_cut_short_goes_on_from_the_key(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies between pinning the key and looking the machine over; the next one trusts nobody anew."""

    class Died(BaseException):
        pass

    async def dies(*_: object) -> list[Finding]:
        raise Died

    monkeypatch.setattr(house.w.backend("ssh"), "check", dies)
    job = await house.launch(house.spec())
    with pytest.raises(Died):
        await house.running(job)
    await house.reopens()
    await house.running(job)
    seen = await house.ended(job)
    assert seen.job.state is Job.SUCCEEDED, house.story()
    kinds = [e.kind for e in house.w.ledger.events(f"lease/{job}-i1")]
    assert kinds.count("host.trusted") == kinds.count("host.checked") == 1


async def test_the_cost_cap_is_met_where_the_platform_tells_no_cost(house: House) -> None:
    """RunPod tells prices while a Pod runs, and its cost afterwards."""
    job = await house.launch(house.spec("wait", max_cost_usd=10.0))
    await house.running(job)
    await house.until(job, lambda c: bool(c.observation and c.observation.step == 3))
    house.clock.ahead += 3600
    assert (await check(house.w, job)).job.state is Job.RUNNING
    house.clock.ahead += 3 * 3600
    seen = await house.until(job, lambda c: c.job.state is not Job.RUNNING)
    assert seen.job.state is Job.CANCELED and "max_cost_usd" in seen.job.why
    assert house.billing() == [house.machine()]
