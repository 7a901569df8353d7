"""Automatic teardown despite local failures and false answers: nothing is lost, and nothing unproven ends."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from gpuwarden.core.models import InstanceState
from gpuwarden.core.policy import TeardownPolicy
from gpuwarden.core.states import Lease, Teardown
from gpuwarden.ledger.events import ApprovalUsed, AutoTeardownAnnounced, VerbSent
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.records import read_lease
from gpuwarden.rehearsal.model import Fault
from lifecycle_kit import open_house, prove, records, weights
from orders_kit import Ordered
from pretend_machines import Processes
from small_disk import fill

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def saved(house: Ordered, content: bytes) -> str:
    """Return a job that succeeded with one file, which has no copy yet."""
    job = await house.started()
    house.backend.write(house.handle(job), "model.safetensors", content)
    house.backend.end(house.handle(job))
    await house.after(1, job)
    return job


# ------------------------------------------------------------------------------------------------ a full local disk


async def test_a_full_local_disk_delays_the_copy_and_the_teardown(
    tmp_path: Path,
    processes: Processes,
    disk: Callable[[str], Path],
) -> None:
    """The copies and the ledger share a disk. A failed write prevents the teardown, but no round crashes."""
    home, cloud = disk("size=64m") / "home", tmp_path / "cloud"
    home.mkdir(mode=0o700)
    cloud.mkdir(mode=0o700)
    (home / "providers").symlink_to(cloud)
    house = Ordered(home, processes)
    job, content = await saved(house, weights()), weights()
    full = fill(home.parent)
    for _ in range(30):
        house.clock.advance(60)
        found = await house.watcher.once()
        assert house.bills()
    assert found.trouble, "the watch says what it can't do"
    full.unlink()
    raised_kinds = []
    for _ in range(40):
        house.clock.advance(60)
        await house.watcher.copier.round()
        raised_kinds += await house.watched(1)
    assert "ending_soon" in raised_kinds and not house.bills()
    assert (home / "artifacts" / job / "out" / "model.safetensors").read_bytes() == content
    house.holds()


async def test_a_disk_that_fills_in_the_grace_keeps_the_machine(
    tmp_path: Path,
    processes: Processes,
    disk: Callable[[str], Path],
) -> None:
    """A teardown that can't be recorded is not requested."""
    home, cloud = disk("size=64m") / "home", tmp_path / "cloud"
    home.mkdir(mode=0o700)
    cloud.mkdir(mode=0o700)
    (home / "providers").symlink_to(cloud)
    house = Ordered(home, processes)
    await house.proven()
    await house.watched(5)
    full = fill(home.parent)
    for _ in range(20):
        house.clock.advance(60)
        found = await house.watcher.round()
    assert house.bills() and found.trouble
    full.unlink()
    await house.watched(40)
    assert not house.bills()
    house.holds()


# ----------------------------------------------------------------------------------------------------- a false stop


async def test_a_claimed_stop_with_a_running_meter_raises_an_alert(
    tmp_path: Path,
    processes: Processes,
) -> None:
    house = Ordered(tmp_path / "home", processes, "stop")
    job = await house.proven()
    house.cloud.inject(records(house.cloud)[0].id, Fault(kind="bills_when_stopped"))
    raised_kinds = await house.watched(60)
    lease = read_lease(house.ctx.ledger, f"{job}-i1")
    assert records(house.cloud)[0].state is InstanceState.STOPPED and house.bills()
    assert lease.state is not Lease.STOPPED and "unseen_end" in raised_kinds, "its bill grows, so it is not believed"
    view = await house.yes(await house.asks(job, "terminate"))
    assert (await house.until_off(view)).record.state is Teardown.VERIFIED_STOPPED and not house.bills()


# ------------------------------------------------------------------------------------------------------ two watches


async def test_two_watch_processes_end_a_machine_once(ending_house: Ordered) -> None:
    """Each has its own ledger connection, and both run their rounds at the same time, as after a lost lock."""
    job = await ending_house.proven()
    other = open_house(ending_house.ctx.home, ending_house.clock, policy=ending_house.ctx.policy)
    other._providers, other._backends = ending_house.ctx._providers, ending_house.ctx._backends
    second = Watcher(other)
    for _ in range(20):
        ending_house.clock.advance(60)
        async with anyio.create_task_group() as together:
            together.start_soon(ending_house.watcher.round)
            together.start_soon(second.round)
    assert not ending_house.bills()
    ledger = ending_house.ctx.ledger
    assert len(ledger.events(kind=ApprovalUsed)) == 1
    assert len([e for e in ledger.events(f"lease/{job}-i1", kind=VerbSent) if e.data.taken]) == 1
    alerts = [e.body["mark"] for e in ledger.events(kind="alert.raised") if e.body["kind"] == "ending_soon"]
    assert len(alerts) == len(set(alerts)) and alerts
    ending_house.holds()
    other.ledger.close()


# ------------------------------------------------------------------------------------------- a policy edited midway


@pytest.mark.slow
@pytest.mark.parametrize(("later", "ends"), [("off", False), ("stop", False), ("terminate", True)])
async def test_a_policy_edited_during_the_grace_withdraws_or_delays_the_order(
    ending_house: Ordered, later: str, *, ends: bool
) -> None:
    job = await ending_house.proven()
    await ending_house.watched(5)
    said = ending_house.ctx.ledger.last(f"job/{job}", AutoTeardownAnnounced)
    assert said is not None and said.data.verb == "terminate"
    ending_house.ctx.policy = ending_house.ctx.policy.model_copy(
        update={"teardown": TeardownPolicy.model_validate({"automatic": later, "grace_minutes": 60})}
    )
    ending_house.watcher = Watcher(ending_house.ctx)  # a new process reads the edited file
    await ending_house.watched(3)
    await ending_house.watched(20)
    assert ending_house.bills(), "the longer grace holds"
    await ending_house.watched(60, step_s=300)
    state = InstanceState.GONE if ends else InstanceState.RUNNING
    assert [r.state for r in records(ending_house.cloud)] == [state]
    ending_house.holds()


# -------------------------------------------------------------------------------------------------- renamed outputs


async def test_an_output_renamed_after_a_copy_is_copied_under_its_new_name(ending_house: Ordered) -> None:
    job = await ending_house.started()
    ending_house.backend.write(ending_house.handle(job), "step-900.safetensors", weights())
    await pull(ending_house.ctx, job)
    out = Path(ending_house.handle(job).run_dir) / "work" / "out"
    (out / "step-900.safetensors").rename(out / "final.safetensors")
    ending_house.backend.end(ending_house.handle(job))
    await ending_house.after(1, job)
    await ending_house.watched(5)
    assert ending_house.bills(), "what was copied before is not what is there"
    await ending_house.watcher.copier.round()
    await ending_house.watched(20)
    assert not ending_house.bills()
    assert (ending_house.ctx.home / "artifacts" / job / "out" / "final.safetensors").read_bytes() == weights()
    ending_house.holds()


async def test_an_output_moved_outside_the_declared_paths_keeps_the_machine(ending_house: Ordered) -> None:
    """The proven copy has the old path; the machine has the only file at the new path, which is undeclared."""
    job = await ending_house.started()
    ending_house.backend.write(ending_house.handle(job), "model.safetensors", weights())
    await pull(ending_house.ctx, job)
    work = Path(ending_house.handle(job).run_dir) / "work"
    (work / "elsewhere").mkdir()
    shutil.move(work / "out" / "model.safetensors", work / "elsewhere" / "model.safetensors")
    ending_house.backend.end(ending_house.handle(job))
    await ending_house.after(1, job)
    await prove(ending_house.ctx, job)
    for _ in range(20):
        await ending_house.watcher.copier.round()
        await ending_house.watched(1)
    assert ending_house.bills()
