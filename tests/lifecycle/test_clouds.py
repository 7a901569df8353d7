"""A job's whole life on every rented platform: the platform's own HTTP API, and real machines behind OpenSSH."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clouds.base import KEY, Fault
from clouds_house import RICH, TRAIN, VASTAI, House, bring_home, every_platform, take_down
from gpuwarden.core.errors import Conflict, Refused, WardenError
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.policy import Policy
from gpuwarden.core.reasons import Code
from gpuwarden.core.rules import Finding
from gpuwarden.core.states import LIVE_LEASES, Job, Lease, Teardown
from gpuwarden.interfaces.results import checked as check_reply
from gpuwarden.ledger.events import HostChecked, JobFailed
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.lifecycle.monitoring.inventory import list_instances
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.records import lease_ids, read_job, read_lease
from gpuwarden.lifecycle.teardown.gate import approve, request
from gpuwarden.remote.host.probe_findings import RENT_ANOTHER
from gpuwarden.remote.ssh.host_keys import HostKeyChanged, fingerprint
from lifecycle_kit import open_house

pytestmark = pytest.mark.anyio

# Takes a second to save when a signal asks it to stop.
SAVES_AT_SIGNAL = """
import signal
def save_and_exit(*_):
    time.sleep(1)
    open("out/saved.txt", "w").write("saved at the signal")
    sys.exit(0)
signal.signal(signal.SIGTERM, save_and_exit)

def save(step):"""


@every_platform
async def test_a_new_installation_lists_the_accounts_machines(cloud_house: House) -> None:
    """A forgotten machine is billed, even if this ledger has never used the platform."""
    await cloud_house.launch(cloud_house.spec())
    fresh = open_house(cloud_house.home / "elsewhere", cloud_house.clock, policy=RICH)
    assert (await list_instances(fresh)).rows == ()
    fresh.env = {cloud_house.platform.provider.api.key_variable: KEY}
    cloud_house.clock.time += 60  # lists lag
    [row] = (await list_instances(fresh)).rows
    assert not row.ours and row.instance_id and row.billing is not False
    fresh.policy = Policy(platforms=("local",))
    assert (await list_instances(fresh)).rows == (), "the user allows no look at this platform"
    fresh.ledger.close()


@pytest.mark.prove
@every_platform
async def test_the_whole_life_of_a_job(cloud_house: House) -> None:
    """The create reply is lost, the machine is taken mid-run, and the teardown reply is lost."""
    platform = cloud_house.platform
    cloud_house.account.faults = [Fault("lost_reply", platform.creates), Fault("lost_reply", platform.ends)]
    job = await cloud_house.launch(cloud_house.spec("wait", interruptible=platform.spot))
    assert read_job(cloud_house.ctx.ledger, job).state is Job.PROVISIONING
    await cloud_house.reopens()

    seen = await cloud_house.running(job)
    assert len(cloud_house.account.own) == 1, "the create whose reply was lost was adopted, not repeated"
    assert seen.lease is not None and cloud_house.ctx.ledger.last(seen.lease.subject, "lease.adopted")
    trusted = cloud_house.ctx.ledger.last(seen.lease.subject, "host.trusted")
    key = (cloud_house.machines.folder / cloud_house.machine() / "hostkey.pub").read_text()
    assert trusted and trusted.body["fingerprint"] == fingerprint(key)
    meter = check_reply(seen).meter
    assert meter and meter.host_key == fingerprint(key)

    await cloud_house.reached(job, 3)
    cloud_house.take()
    job = await TAKEN[platform.taken](cloud_house, job)

    seen = await cloud_house.ended(job)
    assert seen.job.state is Job.SUCCEEDED, (seen, cloud_house.story())
    begun = 0 if platform.taken == "gone" else 3
    assert seen.log and f"begins at step {begun}" in seen.log.text
    assert seen.lease and seen.lease.state in LIVE_LEASES and cloud_house.billing() == [cloud_house.machine()]
    assert len(cloud_house.ctx.ledger.events(f"lease/{seen.lease.id}", kind="host.checked")) == 1

    blocked = await request(cloud_house.ctx, job, "terminate")
    assert blocked.record.state is Teardown.BLOCKED and "TD-COPY-001" in {f.rule for f in blocked.findings}
    with pytest.raises(Refused):
        await approve(cloud_house.ctx, blocked.record.id, str(blocked.record.digest), channel="terminal", by="test")

    await cloud_house.reopens()
    pulled = await bring_home(cloud_house, job)
    assert cloud_house.billing() == [cloud_house.machine()]
    nobody_else_has_the_key(cloud_house, job, pulled.dest)

    await take_down(cloud_house, job)
    assert cloud_house.billing() == []
    after = await check(cloud_house.ctx, job)
    assert after.log and after.log.text == seen.log.text and after.note
    assert [f.count for f in cloud_house.account.faults] == [0, 0], "both replies were lost"
    lease = read_lease(cloud_house.ctx.ledger, f"{job}-i1")
    assert lease.state is Lease.STOPPED and lease_ids(cloud_house.ctx.ledger, *LIVE_LEASES) == []
    assert not [row for row in (await list_instances(cloud_house.ctx)).rows if row.billing is not False]


async def resumed(house: House, job: str) -> str:
    """Wait until the platform has brought the machine back by itself and the job continues there."""
    seen = await house.until(job, lambda c: c.job.attempt == 2 and c.job.state is not Job.PREEMPTED, jump_s=5)
    assert seen.lease and seen.lease.id == f"{job}-i1" and len(house.account.own) == 1
    return job


async def lies_stopped(house: House, job: str) -> str:
    """Check that nothing starts the stopped machine, whose disk is billed; once the user does, the job continues."""
    seen = await house.until(job, lambda c: c.job.state is Job.PREEMPTED, jump_s=5)
    assert seen.job.reason is Code.INTERRUPTED
    for _ in range(4):
        house.clock.time += 60
        assert (await check(house.ctx, job)).job.state is Job.PREEMPTED
    assert house.billing() == [] and len(house.account.own) == 1
    (row,) = (await list_instances(house.ctx)).rows
    assert row.state == "stopped" and row.note and row.instance_id
    await house.ctx.provider(house.platform.name).start(row.instance_id)
    return await resumed(house, job)


async def is_gone(house: House, job: str) -> str:
    """Check that the job fails with a reason, its lease ends at the second poll, and a new machine gets the work."""
    seen = await house.until(job, lambda c: c.job.state is Job.FAILED, jump_s=30)
    assert seen.job.reason is Code.GONE
    assert seen.lease and seen.lease.state is Lease.STOPPED and house.billing() == []
    with pytest.raises(Conflict, match=job):
        await request(house.ctx, job, "terminate")
    with pytest.raises(WardenError):
        await pull(house.ctx, job)
    again = await house.launch(house.spec(interruptible=house.platform.spot))
    assert len(house.account.own) == 2 and again != job
    await house.running(again)
    return again


TAKEN = {"resumed": resumed, "stopped": lies_stopped, "gone": is_gone}


def nobody_else_has_the_key(house: House, job: str, copies: Path) -> None:
    """Assert that the account's key is in no request body, no file on the machine, no copy and not in the ledger."""
    assert all(KEY not in json.dumps(a.body, default=str) for a in house.account.requests)
    place = read_job(house.ctx.ledger, job).place
    assert place is not None
    there = house.machines.disk(house.machine()) / place.run_root.lstrip("/")
    kept = [f for folder in (there, copies, house.home / "house") for f in folder.rglob("*") if f.is_file()]
    assert any(f.name == "seen.1.json" for f in kept)
    assert [f for f in kept if KEY.encode() in f.read_bytes()] == []


# ------------------------------------------------------------------------------------------------- first contact


@pytest.mark.slow
async def test_an_unfit_machine_fails_the_job_and_waits_for_the_user(cloud_house: House) -> None:
    cloud_house.machines.broken = 3
    job = await cloud_house.launch(cloud_house.spec())
    seen = await cloud_house.until(job, lambda c: c.job.state is Job.FAILED, jump_s=5)
    assert seen.job.reason is Code.UNFIT_HOST and seen.next_steps[0] == do(Action.MANUAL, text=RENT_ANOTHER)
    checked = cloud_house.ctx.ledger.last(f"lease/{job}-i1", HostChecked)
    assert checked is not None and "PF-GPU-002" in {f.rule for f in checked.data.findings if f.blocks}
    assert not list(cloud_house.machines.disk(cloud_house.machine()).rglob("*.py")), "nothing was sent there"
    cloud_house.clock.time += 3600
    await list_instances(cloud_house.ctx)
    assert cloud_house.billing() == [cloud_house.machine()], "its end is a person's decision"
    await take_down(cloud_house, job)
    assert cloud_house.billing() == []


@pytest.mark.slow
async def test_a_machine_without_ssh_at_the_boot_limit_is_released(cloud_house: House) -> None:
    cloud_house.machines.silent = True
    job = await cloud_house.launch(cloud_house.spec())
    seen = await cloud_house.until(job, lambda c: c.lease is not None and c.lease.instance_id is not None, jump_s=20)
    cloud_house.clock.time += 20
    seen = await check(cloud_house.ctx, job)
    assert seen.job.state is Job.PROVISIONING and cloud_house.billing() == [cloud_house.machine()]
    cloud_house.clock.time += cloud_house.ctx.profile("runpod").limits.boot_timeout_s
    await check(cloud_house.ctx, job)
    seen = await cloud_house.until(job, lambda c: c.job.state is Job.FAILED, jump_s=60)
    failed = cloud_house.ctx.ledger.last(f"job/{job}", JobFailed)
    assert failed and failed.data.reason and failed.data.reason.code == Code.GIVEN_BACK
    assert str(failed.data.reason.parameters["cost"]).startswith("$")
    await cloud_house.until(job, lambda c: bool(c.lease and c.lease.state is Lease.STOPPED), jump_s=61)
    assert cloud_house.billing() == []


@pytest.mark.slow
@pytest.mark.parametrize("cloud_house", [VASTAI], ids=["vastai"], indirect=True)
async def test_another_host_at_the_address_gets_nothing(cloud_house: House) -> None:
    """The machine is taken mid-run, and another host answers at its address afterwards."""
    job = await cloud_house.launch(cloud_house.spec("wait", interruptible=True))
    await cloud_house.running(job)
    await cloud_house.until(job, lambda c: bool(c.observation and c.observation.step == 3))
    cloud_house.account.cloud.preempt(cloud_house.machine())
    cloud_house.machines.follow(cloud_house.machine())
    cloud_house.machines.renew_key(cloud_house.machine())
    seen = await cloud_house.until(job, lambda c: c.job.state is Job.FAILED, jump_s=5)
    assert seen.job.reason is Code.REFUSED_LAUNCH
    await cloud_house.reopens()
    with pytest.raises(HostKeyChanged) as changed:
        await pull(cloud_house.ctx, job)
    assert changed.value.message in seen.job.why
    assert not list(cloud_house.machines.disk(cloud_house.machine()).rglob("seen.2.json"))
    assert cloud_house.billing() == [cloud_house.machine()]


@pytest.mark.slow
async def test_an_interrupted_first_contact_reuses_the_pinned_host_key(
    cloud_house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies between pinning the host key and probing the machine; the next one pins no new key."""

    class Died(BaseException):
        pass

    async def dies(*_: object) -> list[Finding]:
        raise Died

    monkeypatch.setattr(cloud_house.ctx.backend("ssh"), "check", dies)
    job = await cloud_house.launch(cloud_house.spec())
    with pytest.raises(Died):
        await cloud_house.running(job)
    await cloud_house.reopens()
    await cloud_house.running(job)
    seen = await cloud_house.ended(job)
    assert seen.job.state is Job.SUCCEEDED, cloud_house.story()
    kinds = [e.kind for e in cloud_house.ctx.ledger.events(f"lease/{job}-i1")]
    assert kinds.count("host.trusted") == kinds.count("host.checked") == 1


@pytest.mark.slow
async def test_a_job_at_its_cost_cap_saves_and_ends_but_its_machine_stays(cloud_house: House) -> None:
    """RunPod reports prices while a Pod runs, and its cost afterwards. The machine stays, with the saved files."""
    script = TRAIN.replace("def save(step):", SAVES_AT_SIGNAL)
    # The time limit is longer than the cap allows, so that RunPod's own end at that limit does not come first.
    job = await cloud_house.launch(cloud_house.spec("wait", script=script, max_cost_usd=10.0, timeout_s=8 * 3600))
    await cloud_house.running(job)
    await cloud_house.reached(job, 3)
    cloud_house.clock.time += 3600
    assert (await check(cloud_house.ctx, job)).job.state is Job.RUNNING
    cloud_house.clock.time += 3 * 3600
    told = [a for _ in range(3) for a in (await Watcher(cloud_house.ctx).round()).news]
    seen = await cloud_house.until(job, lambda c: c.job.state is not Job.RUNNING)
    assert seen.job.state is Job.CANCELED and seen.job.reason is Code.COST_CAP
    (asked,) = [a for a in told if a.kind == "cost_cap"]
    assert job in asked.text and "$10.00" in asked.text
    assert cloud_house.billing() == [cloud_house.machine()] and cloud_house.ctx.ledger.events(kind="verb.sent") == []
    pulled = await bring_home(cloud_house, job)
    assert sorted(f.path for f in pulled.manifest.files) == ["out/model.safetensors", "out/saved.txt"]
