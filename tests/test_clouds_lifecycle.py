"""The whole life of a job on each emulated platform: HTTP to the platform, a real OpenSSH server on the machine.

Renting loses its reply and is adopted, not repeated; the job runs behind SSH, is pulled and proven; a person says yes;
the end loses its reply, and is believed only when the machine was seen gone twice.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from clouds.base import Fault, Web
from clouds.machines import Machines, Rooted
from clouds_kit import CloudContract, CloudRig, web  # noqa: F401
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.models import InstanceState, Verb
from gpuwarden.core.policy import Caps, Policy
from gpuwarden.core.states import Job, Lease, Teardown
from gpuwarden.ledger.store import Ledger
from gpuwarden.lifecycle.check import check
from gpuwarden.lifecycle.instances import list_instances
from gpuwarden.lifecycle.pull import pull
from gpuwarden.lifecycle.records import lease_ids, read_job, read_lease
from gpuwarden.lifecycle.teardown import approve, proceed, request
from gpuwarden.lifecycle.warden import Warden
from lifecycle_kit import launch, prove, training
from sshd import find_sshd
from test_providers_autodl import TestAutoDL as AutoDLTests
from test_providers_lambda_cloud import TestLambda as LambdaTests
from test_providers_paperspace import TestPaperspace as PaperspaceTests
from test_providers_prime_intellect import TestPrimeIntellect as PrimeTests
from test_providers_runpod import TestRunPod as RunPodTests
from test_providers_vastai import TestVast as VastTests

pytestmark = pytest.mark.anyio
CAPS = Caps(per_job_usd=1_000, per_day_usd=100_000, per_instance_usd=1_000)
PATIENCE_S = 60.0
SUITES: tuple[type[CloudContract], ...] = (
    RunPodTests,
    VastTests,
    LambdaTests,
    AutoDLTests,
    PaperspaceTests,
    PrimeTests,
)


class SkippingClock:
    """The machine's clock, that is moved ahead instead of slept on."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def now(self) -> float:
        return time.time() + self.ahead

    async def sleep(self, seconds: float) -> None:
        self.ahead += seconds
        await anyio.lowlevel.checkpoint()


@dataclass
class Street:
    """A warden, an account of one platform, and the machines in it."""

    w: Warden
    rig: CloudRig
    suite: CloudContract
    machines: Machines
    clock: SkippingClock
    folder: Path

    @property
    def platform(self) -> str:
        return self.rig.provider.profile.id

    async def until(self, job: str, *states: Job) -> None:
        """Look until the job is in one of the states; a machine that boots is given its time at once."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            seen = (await check(self.w, job)).job
            if seen.state in states:
                return
            if seen.state in {Job.ACCEPTED, Job.PROVISIONING}:
                self.clock.ahead += 12
            await anyio.sleep(0.05)
        raise AssertionError((read_job(self.w.ledger, job), [e.kind for e in self.w.ledger.events(limit=500)][-20:]))

    async def torn_down(self, job: str, verb: Verb) -> None:
        """Ask, say yes, lose the reply to the last verb, and look until it is believed."""
        view = await request(self.w, job, verb)
        assert view.record.state is Teardown.AWAITING_HUMAN, view.findings
        self.rig.cloud.faults = [Fault("lost_reply", self.suite.ends)]
        await approve(self.w, view.record.id, view.record.digest, channel="terminal", by="a person in a test")
        for _ in range(12):
            view = await proceed(self.w, view.record.id)
            if view.record.state is Teardown.VERIFIED_STOPPED:
                return
            self.clock.ahead += self.rig.provider.settle_s + 1
        raise AssertionError((view.record, view.findings))


@asynccontextmanager
async def street(suite: CloudContract, folder: Path, server: Web) -> AsyncIterator[Street]:
    rig = suite.make(folder / "account", server)
    clock = SkippingClock()
    for owner in (rig.provider, rig.provider.door, rig.cloud, rig.cloud.cloud):  # type: ignore[attr-defined]
        owner.clock = clock
    machines = Machines(folder / "machines", rig.cloud)
    w = Warden(Ledger(folder / "ledger.db", clock, "cli"), Policy(caps=CAPS), clock, folder / "home", env={})
    w._providers[rig.provider.profile.id] = Rooted(rig.provider, machines)  # type: ignore[assignment, arg-type]
    backend = SshBackend(SystemClock(), config=machines.client.config)
    w._backends["ssh"] = backend
    try:
        yield Street(w, rig, suite, machines, clock, folder)
    finally:
        await backend.aclose()
        machines.stop()


@pytest.fixture(params=SUITES, ids=lambda s: s.emulator.profile_id)
def suite(request: pytest.FixtureRequest) -> CloudContract:
    find_sshd()
    made: CloudContract = request.param()
    return made


async def test_a_whole_life(suite: CloudContract, tmp_path: Path, web: Web) -> None:  # noqa: F811
    async with street(suite, tmp_path, web) as s:
        said = tmp_path / "said"
        s.rig.cloud.faults = [Fault("lost_reply", suite.creates)]
        spec = training(said, platform=s.platform, gpu=suite.resources.gpu)
        job = await launch(s.w, spec)
        await s.until(job, Job.SUCCEEDED)
        assert len(s.rig.cloud.own) == 1, "a lost reply rented twice"
        assert len(said.read_text().splitlines()) == 1, "the job ran more than once"

        pulled = await pull(s.w, job)
        assert pulled.received.complete and [Path(f.local).name for f in pulled.received.files] == ["model.safetensors"]
        await prove(s.w, job)
        verbs: tuple[Verb, ...] = ("stop", "terminate")
        needs_stop = s.rig.provider.profile.verbs.terminate_needs_stop
        for verb in verbs if needs_stop else verbs[1:]:
            await s.torn_down(job, verb)

        leases = [read_lease(s.w.ledger, lease) for lease in lease_ids(s.w.ledger)]
        assert [lease.state for lease in leases if lease.instance_id] == [Lease.STOPPED]
        assert {lease.state for lease in leases if not lease.instance_id} <= {Lease.NONE}  # refused by a rate limit
        (truth,) = s.rig.cloud.cloud.truths().values()
        assert truth.state is InstanceState.GONE and truth.meter is False and truth.processes == ()
        assert not s.machines.up, "a machine that is gone still has an SSH server"
        assert [r for r in (await list_instances(s.w)).rows if r.billing is not False] == []


async def test_outbid_in_the_middle(tmp_path: Path, web: Web) -> None:  # noqa: F811
    """The machine is taken and comes back with another address; the job goes on there and is pulled."""
    find_sshd()
    async with street(VastTests(), tmp_path, web) as s:
        said = tmp_path / "said"
        spec = training(said, 4.0, platform=s.platform, gpu="H100", interruptible=True)
        job = await launch(s.w, spec)
        await s.until(job, Job.RUNNING)
        (inner,) = s.rig.cloud.own
        before = s.machines.up[inner].port
        s.rig.cloud.cloud.preempt(inner)
        await s.until(job, Job.PREEMPTED)
        assert not s.machines.up
        s.clock.ahead += 30
        await s.until(job, Job.SUCCEEDED)
        assert s.machines.up[inner].port != before
        assert len(said.read_text().splitlines()) == 2
        assert len(s.rig.cloud.own) == 1
        assert (await pull(s.w, job)).received.complete
