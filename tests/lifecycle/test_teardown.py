"""Machines: boots, interruptions, lost replies and caps; and teardown, which needs proof and the user's approval."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from gpuwarden.core.errors import BadRequest, Conflict, Refused, Unreachable
from gpuwarden.core.models import Disclosure, Handle, Manifest, Resources
from gpuwarden.core.next_step import Copy
from gpuwarden.core.policy import Approval
from gpuwarden.core.states import LIVE_LEASES, Job, Lease, Teardown
from gpuwarden.ledger.events import ArtifactsPulled
from gpuwarden.lifecycle.artifacts.local_copies import copy_state, last_pull, save_pull
from gpuwarden.lifecycle.artifacts.pull import declare, pull
from gpuwarden.lifecycle.monitoring.check import cancel, check
from gpuwarden.lifecycle.monitoring.inventory import list_instances
from gpuwarden.lifecycle.records import lease_ids, read_job, read_lease
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.lifecycle.teardown.gate import TeardownView, approve, proceed
from gpuwarden.rehearsal.model import Fault
from lifecycle_kit import launch, prove, records
from pretend_machines import Processes
from teardown_kit import House
from wording import Wording

pytestmark = pytest.mark.anyio
FORMS = Approval(channels=("terminal", "elicitation"))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    processes = Processes()
    names = ("of", "terminate", "kill", "held")
    patches = [patch(f"gpuwarden.rehearsal.processes.{name}", getattr(processes, name)) for name in names]
    for each in patches:
        each.start()
    yield House(tmp_path / "home", processes)
    for each in patches:
        each.stop()


def rules(view: TeardownView) -> set[str]:
    return {f.rule for f in view.findings}


# ------------------------------------------------------------------------------------------------------ the gate


async def test_a_teardown_needs_a_proven_copy_and_an_approval(house: House, wording: Wording) -> None:
    job = await house.ended()
    view = await house.asks(job)
    assert view.record.state is Teardown.BLOCKED and "TD-COPY-001" in rules(view)
    with pytest.raises(Refused) as refused:
        await house.yes(view)
    wording(refused, view.record.id)
    await pull(house.ctx, job)
    assert rules(await house.asks(job)) == {"TD-LOAD-001"}
    await prove(house.ctx, job)
    view = await house.asks(job)
    assert view.record.state is Teardown.AWAITING_HUMAN and not view.findings
    house.clock.advance(100)
    assert (await house.asks(job)).record.state is Teardown.AWAITING_HUMAN
    assert records(house.cloud)[0].state == "running"
    view = await house.until_off(await house.yes(view))
    assert view.record.state is Teardown.VERIFIED_STOPPED and view.lease.state is Lease.STOPPED
    assert not house.cloud.truth(records(house.cloud)[0].id).meter
    house.holds()


async def undeclared(house: House) -> tuple[str, TeardownView]:
    """Run a job with a proven output and a second checkpoint in an undeclared place, and request its teardown."""
    job = await house.started()
    house.backend.write(house.handle(job), "model", b"weights")
    house.backend.write(house.handle(job), "final.safetensors", b"better weights", "elsewhere")
    house.backend.end(house.handle(job))
    await house.after(1, job)
    await pull(house.ctx, job)
    await prove(house.ctx, job)
    return job, await house.asks(job)


@pytest.mark.attack("ending", "has a plain yes delete a checkpoint that was not declared")
async def test_a_plain_yes_does_not_delete_an_undeclared_checkpoint(house: House) -> None:
    job, view = await undeclared(house)
    assert view.record.state is Teardown.BLOCKED and rules(view) == {"TD-ELSE-002"}
    assert view.record.digest is not None
    house.ctx.policy = house.ctx.policy.model_copy(update={"approval": FORMS})
    for channel in FORMS.channels:
        with pytest.raises(Refused):
            await approve(house.ctx, view.record.id, view.record.digest, channel=channel, by="test")  # type: ignore[arg-type]
    with pytest.raises(BadRequest):
        await house.yes(view, loss="yes")
    assert records(house.cloud)[0].state == "running"
    view = await house.until_off(await house.yes(await house.asks(job), loss="train"))
    assert view.record.state is Teardown.VERIFIED_STOPPED
    assert house.ctx.ledger.events(kind="approval.granted")[0].body["without_proof"]
    house.holds()


async def test_an_undeclared_checkpoint_is_declared_pulled_and_proven(house: House, wording: Wording) -> None:
    job, _ = await undeclared(house)
    with pytest.raises(BadRequest) as refused:
        await pull(house.ctx, job, also=["../elsewhere"])
    wording(refused, "../elsewhere")
    result = await pull(house.ctx, job, also=["elsewhere", "out"])
    assert {f.path for f in result.received.files} == {"out/model", "elsewhere/final.safetensors"}
    assert rules(await house.asks(job)) == {"TD-LOAD-001"}, "it is declared now, and not proven"
    assert read_job(house.ctx.ledger, job).outputs == ("out", "elsewhere")
    await pull(house.ctx, job)
    await prove(house.ctx, job)
    view = await house.asks(job)
    assert view.record.state is Teardown.AWAITING_HUMAN and not view.findings
    assert {f.path for f in view.dying} == {"out/model", "elsewhere/final.safetensors"}
    house.holds()


async def off(house: House, job: str) -> TeardownView:
    """Stop the machine, as the user does in the platform's console, and request a teardown."""
    house.cloud.stop(records(house.cloud)[0].id)
    house.clock.advance(60)
    house.cloud.tick()
    return await house.asks(job)


@pytest.mark.attack("ending", "has a plain yes delete an output that was declared late and never copied")
@pytest.mark.parametrize("stored", [False, True], ids=["machine", "store"])
async def test_an_output_declared_late_is_not_forgotten_when_the_machine_is_off(house: House, stored: bool) -> None:
    job, _ = await undeclared(house)
    if stored:  # as after a copy from an artifact store with a final list
        last = last_pull(house.ctx, job)
        assert last is not None
        save_pull(house.ctx, last.model_copy(update={"store": "s3://b/p", "disclosure": Disclosure()}), size=1)
        await prove(house.ctx, job)
    assert copy_state(house.ctx, job) is Copy.PROVEN
    house.backend.silent = True
    with pytest.raises(Unreachable):
        await pull(house.ctx, job, also=["elsewhere"])
    house.backend.silent = False
    assert copy_state(house.ctx, job) is Copy.STALE, "the watch pulls again"
    view = await off(house, job)
    assert view.record.state is Teardown.BLOCKED and "TD-SEE-001" in rules(view)
    with pytest.raises(Refused):
        await house.yes(view)
    assert records(house.cloud)[0].state == "stopped", "not terminated"


async def test_a_known_undeclared_checkpoint_still_blocks_when_the_machine_is_off(house: House) -> None:
    job, before = await undeclared(house)
    for _ in range(2):  # a second request keeps the finding as well
        view = await off(house, job)
        assert view.record.state is Teardown.BLOCKED and rules(view) == {"TD-ELSE-001", "TD-ELSE-002"}
        assert before.findings[0].message in {found.message for found in view.findings}


async def test_a_copy_made_while_an_output_was_declared_is_not_recorded(house: House) -> None:
    job, _ = await undeclared(house)
    listed, made = house.backend.manifest, len(house.ctx.ledger.events(kind=ArtifactsPulled))

    async def slow(*args: Any) -> Manifest:
        declare(house.ctx, read_job(house.ctx.ledger, job), ["elsewhere"])
        return await listed(*args)

    house.backend.manifest = slow  # type: ignore[method-assign]
    with pytest.raises(Conflict, match="declared while"):
        await pull(house.ctx, job)
    assert len(house.ctx.ledger.events(kind=ArtifactsPulled)) == made
    assert len((await pull(house.ctx, job)).received.files) == 2


@pytest.mark.attack("person", "uses one approval twice")
async def test_an_approval_works_once(house: House, wording: Wording) -> None:
    view = await house.asks(await house.proven())
    done = await house.yes(view)
    with pytest.raises(Conflict) as refused:
        await house.yes(view)
    wording(refused, view.record.id)
    await house.until_off(done)
    with pytest.raises(Conflict) as refused:
        await house.yes(view)
    wording(refused, view.record.id)
    assert len(house.ctx.ledger.events(kind="approval.used")) == 1


@pytest.mark.attack("person", "uses an approval after its time")
async def test_an_approval_after_the_ticket_expired_is_refused(house: House, wording: Wording) -> None:
    job = await house.proven()
    view = await house.asks(job)
    house.clock.advance(house.ctx.policy.approval.ttl_s + 1)
    with pytest.raises(Conflict) as refused:
        await house.yes(view)
    wording(refused, view.record.id)
    assert records(house.cloud)[0].state == "running"
    assert (await house.yes(await house.asks(job))).record.state is Teardown.EXECUTING


@pytest.mark.attack("ending", "writes a file after the ticket was shown")
async def test_a_file_written_after_the_ticket_was_shown_voids_the_approval(house: House, wording: Wording) -> None:
    job = await house.proven()
    view = await house.asks(job)
    house.backend.write(house.handle(job), "late", b"written by something that still runs")
    with pytest.raises(Conflict) as refused:
        await house.yes(view)
    wording(refused, view.record.id)
    again = await house.asks(job)
    assert again.record.state is Teardown.BLOCKED and {"TD-COPY-001", "TD-COPY-002"} <= rules(again)
    assert records(house.cloud)[0].state == "running"


@pytest.mark.attack("ending", "changes the local copy after the ticket was shown")
async def test_a_changed_local_copy_voids_the_approval(house: House, wording: Wording) -> None:
    job = await house.proven()
    view = await house.asks(job)
    copy = house.ctx.home / "artifacts" / job / "out" / "model"
    copy.write_bytes(b"weightz")
    with pytest.raises(Conflict) as refused:
        await house.yes(view)
    wording(refused, view.record.id)
    assert rules(await house.asks(job)) == {"TD-LOAD-001"}


async def test_a_delayed_approval_is_checked_against_the_facts_again(house: House) -> None:
    """The process dies between the approval and the call, and a file is written before the next process starts."""
    job = await house.proven()
    view = await house.asks(job)
    with (
        patch("gpuwarden.lifecycle.teardown.gate._execute", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        await house.yes(view)
    house.backend.write(house.handle(job), "late", b"x")
    assert (await house.asks(job)).record.state is Teardown.BLOCKED
    assert records(house.cloud)[0].state == "running"


async def test_a_failed_job_that_saved_nothing_can_be_torn_down(house: House, wording: Wording) -> None:
    job = await house.ended("failed", saved=False)
    pulled = await pull(house.ctx, job)
    assert pulled.missing == ("out",) and not pulled.received.files
    view = await house.asks(job)
    assert view.record.state is Teardown.AWAITING_HUMAN and "TD-OUT-001" in rules(view)
    assert view.record.digest
    for approval in (house.ctx.policy.approval, FORMS):
        house.ctx.policy = house.ctx.policy.model_copy(update={"approval": approval})
        with pytest.raises(Refused) as refused:
            await approve(house.ctx, view.record.id, view.record.digest, channel="elicitation", by="test")
        wording(refused)
    assert (await house.until_off(await house.yes(view))).record.state is Teardown.VERIFIED_STOPPED


async def test_giving_up_files_without_a_copy_requires_the_jobs_name(house: House, wording: Wording) -> None:
    job = await house.ended()
    view = await house.asks(job)
    with pytest.raises(BadRequest) as refused:
        await house.yes(view, loss="something else")
    wording(refused)
    view = await house.until_off(await house.yes(view, loss="train"))
    assert view.record.state is Teardown.VERIFIED_STOPPED


async def test_a_stop_on_a_platform_without_one_is_refused(house: House, wording: Wording) -> None:
    """Found by the property test: the open ticket blocked every terminate."""
    house.opens(platform="rehearsal/lambda")
    job = await house.proven()
    view = await house.asks(job, "stop")
    assert "TD-VERB-001" in rules(view)
    with pytest.raises(Refused) as refused:
        await house.yes(view, loss="train")
    wording(refused)
    view = await house.until_off(await house.yes(await house.asks(job)))
    assert view.record.state is Teardown.VERIFIED_STOPPED


async def test_a_stop_loses_files_in_memory(house: House) -> None:
    job = await house.proven()
    whole, listed = house.backend._listed, "/dev/shm/out/model"

    def listing(handle: Handle, paths: Iterable[str], *, digests: bool) -> Manifest:
        rows = whole(handle, paths, digests=digests)
        added = rows.files[0].model_copy(update={"path": listed})
        return rows.model_copy(update={"files": (*rows.files, added)})

    with patch.object(house.backend, "_listed", listing):
        view = await house.asks(job, "stop")
    assert [(file.path, file.tier) for file in view.dying] == [(listed, "memory")]
    assert [file.path for file in view.kept] == ["out/model"] and any(f.blocks for f in view.findings)


async def test_a_stop_without_effect_can_be_followed_by_a_terminate(house: House) -> None:
    job = await house.proven()
    house.cloud.inject(records(house.cloud)[0].id, Fault(kind="bills_when_stopped"))
    view = await house.yes(await house.asks(job, "stop"))
    house.clock.advance(601)
    assert (await proceed(house.ctx, view.record.id)).record.state is Teardown.NEEDS_HUMAN
    assert read_lease(house.ctx.ledger, view.lease.id).state in LIVE_LEASES  # "stopped" but billed is not stopped
    again = await house.asks(job)
    assert again.record.id != view.record.id
    # The machine is off and can't be read, but the pull came after the job's end, so nothing was written since.
    assert again.record.state is Teardown.AWAITING_HUMAN
    done = await house.until_off(await house.yes(again))
    assert done.record.state is Teardown.VERIFIED_STOPPED
    house.holds()


@pytest.mark.parametrize("kind", ["lost_request", "lost_reply", "bad_reply"])
async def test_a_lost_terminate_is_repeated_until_the_machine_is_gone(house: House, kind: str) -> None:
    house.opens(Fault.model_validate({"kind": kind, "call": "terminate", "count": 2}))
    view = await house.until_off(await house.yes(await house.asks(await house.proven())))
    assert view.record.state is Teardown.VERIFIED_STOPPED
    assert not house.cloud.truth(records(house.cloud)[0].id).meter
    house.holds()


@pytest.mark.attack("ending", "shows a machine again after it was seen gone")
async def test_a_machine_that_comes_back_is_listed_and_can_be_ended_again(house: House) -> None:
    job = await house.proven()
    house.cloud.inject(records(house.cloud)[0].id, Fault(kind="comes_back", seconds=500))
    await house.until_off(await house.yes(await house.asks(job)))
    house.clock.advance(500)
    shown = (await list_instances(house.ctx)).rows
    assert [(r.ours, r.billing) for r in shown] == [(True, True)]
    view = await house.asks(job)
    view = await house.until_off(await house.yes(view, loss="train"))
    assert view.record.state is Teardown.VERIFIED_STOPPED and not (await list_instances(house.ctx)).rows


# ------------------------------------------------------------------------------------------------------- machines


async def test_a_machine_that_fails_to_boot_is_released_and_its_cost_reported(house: House, wording: Wording) -> None:
    house.opens(Fault(kind="failed_boot"))
    job = await launch(house.ctx, house.spec())
    seen = await house.after(11, job)
    assert seen.job.state is Job.FAILED
    wording(seen.job.why, "$")
    for _ in range(3):
        seen = await house.after(31, job)
    assert seen.lease and seen.lease.state is Lease.STOPPED
    house.holds()


async def test_a_release_survives_a_lost_request_and_a_death(house: House) -> None:
    """Regression: a lost request was never repeated, and the next process could not move from stopping to stopping."""
    house.opens(Fault(kind="failed_boot"), Fault(kind="lost_request", call="terminate", count=2))
    job = await launch(house.ctx, house.spec())
    with (
        patch("gpuwarden.lifecycle.execution.provisioning.request_end", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        await house.after(11, job)
    assert (await house.after(1, job)).job.state is Job.FAILED
    for _ in range(5):
        seen = await house.after(31, job)
    assert seen.lease and seen.lease.state is Lease.STOPPED
    assert not house.cloud.truth(records(house.cloud)[0].id).meter


async def test_empty_polls_do_not_end_a_lease_before_the_cloud_has_settled(house: House) -> None:
    """The cloud lags for less than it promises, so it has caught up by the poll that counts."""
    house.opens(Fault(kind="stale", call="get", seconds=20, count=3))
    job = await launch(house.ctx, house.spec())
    await house.after(1, job)
    seen = await house.after(5, job)
    assert seen.job.state is Job.PROVISIONING and seen.lease and seen.lease.state is Lease.METERING
    seen = await house.after(31, job)
    assert seen.job.state is Job.RUNNING and seen.lease and seen.lease.state is Lease.METERING
    house.holds()


async def test_a_preempted_job_resumes_and_is_given_up_after_max_restarts(house: House, wording: Wording) -> None:
    job = await house.started(interruptible=True, max_restarts=1)
    machine = records(house.cloud)[0].id
    house.cloud.preempt(machine)
    assert (await house.after(1, job)).job.state is Job.PREEMPTED
    assert (await house.after(21, job)).job.state is Job.RUNNING
    house.cloud.preempt(machine)
    house.clock.advance(1)
    seen = await check(house.ctx, job)
    assert seen.job.state is Job.FAILED
    wording(seen.job.why)
    assert house.backend.launched == [(job, 1), (job, 2)]


async def test_a_preempted_job_that_is_canceled_is_not_launched_again(house: House) -> None:
    job = await house.started(interruptible=True)
    house.cloud.preempt(records(house.cloud)[0].id)
    await house.after(1, job)
    assert (await cancel(house.ctx, job)).job.state is Job.CANCELED
    await house.after(60, job)
    assert house.backend.launched == [(job, 1)]


async def test_a_job_that_reaches_its_cost_cap_is_stopped_and_the_machine_stays(house: House, wording: Wording) -> None:
    job = await house.started(max_cost_usd=0.1)
    seen = await house.after(101, job)  # 0.001 USD/s
    assert seen.job.state is Job.CANCELED
    wording(seen.job.why, "$0.10")
    assert house.cloud.truth(records(house.cloud)[0].id).meter


@pytest.mark.attack("ending", "shows a second machine with the token of the first")
async def test_a_second_machine_with_the_token_is_listed_and_can_be_ended(house: House) -> None:
    """The platform rents twice for one request, and no answer ever named the second machine."""
    job = await house.proven()
    token = records(house.cloud)[0].token
    house.cloud.create(Resources(), token)
    house.clock.advance(11)
    rows = (await list_instances(house.ctx)).rows
    assert [(r.ours, r.billing is not False) for r in rows] == [(True, True)] * 2
    await house.until_off(await house.yes(await house.asks(job)))
    second = await house.asks(job)
    assert second.lease.instance_id == records(house.cloud)[1].id
    assert second.record.state is Teardown.AWAITING_HUMAN and rules(second) == {"TD-ELSE-001"}
    await house.until_off(await house.yes(second))
    assert not any(t.meter for t in house.cloud.truths().values())
    assert not lease_ids(house.ctx.ledger, *LIVE_LEASES)
    house.holds()


async def test_a_machine_hidden_from_find_for_too_long_stays_listed(house: House) -> None:
    """A reply is lost and the cloud hides the first machine for too long, so two are rented; both stay visible."""
    house.opens(
        Fault(kind="lost_reply", call="create"),
        Fault(kind="stale", call="find", seconds=300, count=9),
    )
    spec = house.spec()
    job = await launch(house.ctx, spec)
    for _ in range(3):
        await house.after(31, job)
    assert len(records(house.cloud)) == 2
    rows = (await list_instances(house.ctx)).rows
    assert {r.instance_id for r in rows if r.ours and r.billing is not False} == {r.id for r in records(house.cloud)}
    assert (await submit(house.ctx, spec)).adopted
    house.holds()
