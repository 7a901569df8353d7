"""Pausing and resuming: the process saves and ends, nothing relaunches it unasked, and its cost is capped."""

from __future__ import annotations

import contextlib
from pathlib import Path

import anyio
import pytest

from gpuwarden.core.errors import Conflict, NotSupported, Refused
from gpuwarden.core.guidance import Action
from gpuwarden.core.next_step import Copy
from gpuwarden.core.policy import Caps
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job, Lease, Teardown
from gpuwarden.interfaces import results
from gpuwarden.interfaces.cli.wording import in_commands
from gpuwarden.interfaces.mcp.wording import in_calls
from gpuwarden.ledger.events import JobSubmitting, PauseRequested, ResumeIntent, ResumeRequested
from gpuwarden.lifecycle.artifacts.local_copies import copy_state
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.context import CAPS_PATIENCE_S
from gpuwarden.lifecycle.leases.budgets import DAY_S, spent_today
from gpuwarden.lifecycle.monitoring.check import cancel, check, pause, resume
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.records import read_job, read_lease
from gpuwarden.rehearsal.model import Fault
from lifecycle_kit import launch, lock_held, prove, records, training, under_caps_lock
from mortal_kit import Died, Fuse, Mortal, MortalLedger
from pausing_kit import RUNPOD, Paused
from pretend_machines import Processes
from real_parts import amount
from teardown_kit import House
from wording import Wording

pytestmark = pytest.mark.anyio


@pytest.fixture
def house(tmp_path: Path, processes: Processes) -> Paused:
    return Paused(tmp_path / "home", processes)


# ----------------------------------------------------------------------------------------------- pause and resume


async def test_a_paused_job_stays_paused_until_it_is_resumed(house: Paused) -> None:
    job = await house.paused()
    assert house.backend.graces == [120.0]  # the time to save, not a cancel's grace period
    for _ in range(5):
        assert (await house.after(600, job)).job.state is Job.PAUSED
    assert house.backend.launched == [(job, 1)]
    house.holds()


async def test_a_resumed_job_keeps_its_folder_and_uses_no_restart(house: Paused) -> None:
    job = await house.paused(max_restarts=0)
    for n in (2, 3, 4):
        assert (await resume(house.ctx, job)).job.state is Job.RUNNING
        assert house.backend.launched[-1] == (job, n)
        assert (Path(house.handle(job).run_dir) / "work/out/model").read_bytes() == b"weights at step 100"
        assert (await pause(house.ctx, job)).job.state is Job.PAUSED
    assert read_job(house.ctx.ledger, job).resumed == 3
    await resume(house.ctx, job)
    house.backend.end(house.handle(job))
    assert (await house.after(1, job)).job.state is Job.SUCCEEDED
    house.holds()


async def test_a_repeated_pause_or_resume_has_no_second_effect(house: Paused, wording: Wording) -> None:
    job = await house.paused()
    await pause(house.ctx, job)
    assert len(house.ctx.ledger.events(f"job/{job}", kind=PauseRequested)) == 1
    await resume(house.ctx, job)
    with pytest.raises(Conflict) as refused:
        await resume(house.ctx, job)
    wording(refused, job)
    assert len(house.backend.launched) == 2


async def test_a_saving_job_is_paused_once_it_has_saved(house: Paused) -> None:
    house.opens(platform=RUNPOD)
    job = await house.started()
    house.backend.saving = True
    assert (await pause(house.ctx, job)).job.state is Job.RUNNING
    house.backend.write(house.handle(job), "model", b"saved late")
    house.backend.end(house.handle(job), "canceled")  # the runner reports gpuwarden's own stop as canceled
    assert (await house.after(20, job)).job.state is Job.PAUSED


async def test_a_resume_during_a_save_waits_until_the_job_has_saved(house: Paused) -> None:
    house.opens(platform=RUNPOD)
    job = await house.started()
    house.backend.saving = True
    await pause(house.ctx, job)
    assert (await resume(house.ctx, job)).job.state is Job.RUNNING
    assert house.backend.launched == [(job, 1)]
    house.backend.end(house.handle(job), "canceled")
    assert (await house.after(20, job)).job.state is Job.RUNNING  # not treated as a cancel
    assert house.backend.launched == [(job, 1), (job, 2)]


@pytest.mark.slow
async def test_a_pause_withdraws_a_waiting_resume(house: Paused) -> None:
    job = await house.paused()
    await house.stopped(job)
    house.opens(Fault(kind="lost_request", call="start", count=9), platform=RUNPOD)
    assert (await resume(house.ctx, job)).job.state is Job.PAUSED
    assert (await pause(house.ctx, job)).job.state is Job.PAUSED
    house.opens(platform=RUNPOD)
    assert (await house.after(600, job)).job.state is Job.PAUSED
    assert house.backend.launched == [(job, 1)]


async def test_a_jobs_own_end_takes_precedence_over_a_pause(house: Paused, wording: Wording) -> None:
    house.opens(platform=RUNPOD)
    for state in ("succeeded", "failed"):
        job = await house.started(name=state)
        house.backend.end(house.handle(job), state)
        assert (await pause(house.ctx, job)).job.state == state
        with pytest.raises(Conflict) as refused:
            await pause(house.ctx, job)
        wording(refused, job)


async def test_a_canceled_job_is_not_resumed(house: Paused) -> None:
    job = await house.paused()
    canceled = await cancel(house.ctx, job)
    assert (canceled.job.state, canceled.job.reason) == (Job.CANCELED, Code.CANCELED)
    with pytest.raises(Conflict):
        await resume(house.ctx, job)
    assert len(house.backend.launched) == 1


async def test_a_job_without_a_process_is_not_paused(house: Paused) -> None:
    job = await launch(house.ctx, house.spec())
    assert house.state(job) is Job.PROVISIONING
    with pytest.raises(Conflict) as refused:
        await pause(house.ctx, job)
    assert refused.value.next_steps[0].action is Action.CANCEL


async def test_pausing_is_refused_if_files_end_with_the_process(house: Paused, wording: Wording) -> None:
    job = await house.started()
    profile = house.ctx.profile(house.platform).model_copy(update={"kind": "serverless"})
    house.ctx.profile = lambda _platform: profile  # type: ignore[method-assign]
    with pytest.raises(NotSupported) as refused:
        await pause(house.ctx, job)
    wording(refused)
    assert house.backend.graces == []


# ------------------------------------------------------------------------------------- a process that dies anywhere


async def survive(house: Paused, use: object, job: str, dies: int) -> bool:
    """Run a use case in a process that dies after this many commits and calls; return whether it died."""
    fuse, plain, backend, provider = Fuse(), house.ctx.ledger, house.backend, house.ctx.provider(house.platform)
    ledger = MortalLedger(house.ctx.home / "ledger.db", house.clock, "test")
    ledger.fuse = fuse
    house.ctx.ledger = ledger
    house.ctx._backends["local"] = Mortal(backend, fuse)  # type: ignore[assignment]
    house.ctx._providers[house.platform] = Mortal(provider, fuse)  # type: ignore[assignment]
    fuse.left = dies
    try:
        await use(house.ctx, job)  # type: ignore[operator]
    except Died:
        return True
    except Conflict:  # the first call had requested it
        return False
    finally:
        ledger.close()
        house.ctx.ledger, house.ctx._backends["local"] = plain, backend
        house.ctx._providers[house.platform] = provider
    return False


@pytest.mark.slow
@pytest.mark.endurance
async def test_pause_and_resume_survive_a_death_at_any_point(house: Paused) -> None:
    house.opens(platform=RUNPOD)
    died = 0
    for dies in range(0, 60, amount(4, 1)):
        job = await house.started(name=f"job{dies}", max_restarts=0)
        for use, state, launches in ((pause, Job.PAUSED, 1), (resume, Job.RUNNING, 2)):
            killed = await survive(house, use, job, dies)
            died += killed
            if killed and house.state(job) is not state:  # unknown whether it was requested, so request it again
                with contextlib.suppress(Conflict):
                    await use(house.ctx, job)
            assert (await house.after(31, job)).job.state is state, (dies, use)
            assert [a for name, a in house.backend.launched if name == job] == [1, 2][:launches], (dies, use)
        await cancel(house.ctx, job)
    assert died > amount(5, 20)
    house.holds()


# ------------------------------------------------------------------------------------------------- interruptions


async def test_an_interruption_before_the_pause_still_uses_up_a_restart(house: Paused) -> None:
    house.opens()
    job = await house.started(interruptible=True, max_restarts=0)
    house.backend.silent = True
    await pause(house.ctx, job)
    house.cloud.inject(records(house.cloud)[0].id, Fault(kind="preempt"))
    house.backend.silent = False
    seen = await house.after(40, job)
    seen = seen if seen.job.state is Job.PAUSED else await house.after(40, job)
    assert (seen.job.state, seen.job.reason) == (Job.PAUSED, Code.PAUSED_INTERRUPTED)
    await resume(house.ctx, job)
    for _ in range(6):
        seen = await house.after(60, job)
    assert (seen.job.state, seen.job.reason) == (Job.FAILED, Code.MAX_RESTARTS)
    assert len(house.backend.launched) == 1


async def test_losing_the_machine_fails_a_paused_job(house: Paused) -> None:
    job = await house.paused()
    house.cloud.inject(records(house.cloud)[0].id, Fault(kind="vanish"))
    for _ in range(3):
        seen = await house.after(60, job)
    assert (seen.job.state, seen.job.reason) == (Job.FAILED, Code.GONE)


# ------------------------------------------------------------------------------------------------ machine and money


async def test_pause_reports_that_the_machine_stays_billed(house: Paused, wording: Wording) -> None:
    job = await house.paused()
    reply = results.signaled(await pause(house.ctx, job))
    assert reply.state == "paused"
    assert reply.meter is not None and reply.meter.billing is True
    wording(in_calls(reply.next), job, "pull_artifacts", "cancel_job", "action=resume")
    wording(in_commands(reply.next), f"gpuwarden resume {job}", job)


async def test_a_forgotten_pause_raises_an_alert(house: Paused) -> None:
    job = await house.paused()
    watcher, kinds = Watcher(house.ctx), set()
    for _ in range(4):
        house.clock.advance(1200)
        kinds |= {alert.kind for alert in (await watcher.round()).news if alert.raised}
    assert "finished_billing" in kinds
    assert house.state(job) is Job.PAUSED


async def test_a_stop_needs_approval_and_a_resume_starts_the_machine_again(house: Paused) -> None:
    job = await house.paused()
    view = await house.asks(job, "stop")
    assert view.record.state is Teardown.AWAITING_HUMAN, view.findings  # this platform's disk survives a stop
    assert house.cloud.truths()[records(house.cloud)[0].id].meter
    await house.stopped(job)
    lease = read_job(house.ctx.ledger, job).lease
    assert lease is not None and read_lease(house.ctx.ledger, lease).state is Lease.STOPPED
    assert house.state(job) is Job.PAUSED
    assert [s.action for s in (await check(house.ctx, job)).next_steps if s.action is not Action.MANUAL] == [
        Action.RESUME, Action.TEARDOWN,
    ]  # fmt: skip
    await resume(house.ctx, job)
    for _ in range(3):
        seen = await house.after(31, job)
    assert seen.job.state is Job.RUNNING
    assert house.backend.launched == [(job, 1), (job, 2)]
    assert read_lease(house.ctx.ledger, lease).state is Lease.METERING
    assert len(house.ctx.ledger.events(f"lease/{lease}", kind=ResumeIntent)) == 1
    house.holds()


async def test_a_stop_that_cannot_be_undone_is_not_suggested(house: Paused) -> None:
    job = await house.paused()
    profile = house.ctx.profile(RUNPOD)
    verbs = profile.verbs.model_copy(update={"reversible": ()})
    house.ctx.profile = lambda _platform: profile.model_copy(update={"verbs": verbs})  # type: ignore[method-assign]
    steps = (await check(house.ctx, job)).next_steps
    assert {s.parameters.get("verb") for s in steps if s.action is Action.TEARDOWN} == {"terminate"}


async def test_a_stop_that_loses_files_is_neither_suggested_nor_allowed(house: Paused) -> None:
    job = await house.paused("rehearsal/lambda")
    steps = (await check(house.ctx, job)).next_steps
    assert {s.parameters.get("verb") for s in steps if s.action is Action.TEARDOWN} == {"terminate"}
    assert (await house.asks(job, "stop")).record.state is Teardown.BLOCKED
    assert (await house.asks(job, "terminate")).record.state is Teardown.BLOCKED  # nothing is copied yet
    await pull(house.ctx, job)
    await prove(house.ctx, job)
    assert copy_state(house.ctx, job) is Copy.PROVEN
    await house.until_off(await house.yes(await house.asks(job, "terminate")))
    seen = await house.after(60, job)
    assert (seen.job.state, seen.job.reason) == (Job.CANCELED, Code.ENDED_PAUSED)
    assert any(s.action is Action.SUBMIT for s in seen.next_steps)  # how to resume the work from the proven copy


async def test_a_copy_made_before_a_resume_is_stale_after_it(house: Paused) -> None:
    job = await house.paused()
    await pull(house.ctx, job)
    await prove(house.ctx, job)
    assert copy_state(house.ctx, job) is Copy.PROVEN
    await resume(house.ctx, job)
    house.backend.write(house.handle(job), "model", b"weights at step 200")
    assert (await house.asks(job, "terminate")).record.state is Teardown.BLOCKED
    house.backend.end(house.handle(job))
    await house.after(1, job)
    assert copy_state(house.ctx, job) is Copy.STALE


async def test_resuming_a_job_voids_the_approval_of_its_stop(house: Paused, wording: Wording) -> None:
    job = await house.paused()
    view = await house.asks(job, "stop")
    await resume(house.ctx, job)
    with pytest.raises(Conflict) as refused:
        await house.yes(view)
    wording(refused, view.record.id)
    assert house.state(job) is Job.RUNNING
    house.holds()


async def test_a_resume_is_refused_while_the_machine_is_being_stopped(house: Paused, wording: Wording) -> None:
    job = await house.paused()
    house.opens(Fault(kind="lost_request", call="stop", count=2), platform=RUNPOD)
    view = await house.yes(await house.asks(job, "stop"))
    assert view.record.state is Teardown.EXECUTING
    with pytest.raises(Conflict) as refused:
        await resume(house.ctx, job)
    wording(refused, job)
    await house.until_off(view)
    assert len(house.backend.launched) == 1


# At 36 USD an hour, an hour's limit costs the 36 USD that were approved.


async def test_the_cost_of_a_resumed_attempt_is_recorded_under_the_caps_lock(
    house: Paused, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.opens()
    job = await house.started(interruptible=True)
    await pause(house.ctx, job)
    await house.after(DAY_S - 500, job)
    held = under_caps_lock(house.ctx, monkeypatch, ResumeRequested, JobSubmitting)
    await resume(house.ctx, job)
    assert held == [(ResumeRequested, True), (JobSubmitting, True)]
    await house.after(600, job)
    house.cloud.inject(records(house.cloud)[0].id, Fault(kind="preempt"))
    for _ in range(4):
        await house.after(40, job)
    assert held[2:] == [(JobSubmitting, True)]
    first, second = (e.data for e in house.ctx.ledger.events(f"job/{job}", kind=JobSubmitting)[1:])
    assert first.worst_cost and second.worst_cost, "an interruption gives the full time limit again"
    assert first.worst_cost < spent_today(house.ctx, pretend=True) < second.worst_cost


async def test_a_resume_waits_only_briefly_for_the_caps(house: Paused, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await house.paused()
    for _ in range(2):
        with lock_held(house.ctx, monkeypatch) as waited, pytest.raises(Conflict):
            await resume(house.ctx, job)
        assert 0 < waited.time < 2 * CAPS_PATIENCE_S and house.backend.launched == [(job, 1)]
        house.ctx.ledger.add(f"job/{job}", ResumeRequested())  # the second time, the launch waits


async def test_a_resume_gets_the_time_that_is_left(house: Paused) -> None:
    house.opens(platform=RUNPOD)
    job = await house.started()
    await house.after(1200, job)
    await pause(house.ctx, job)
    await resume(house.ctx, job)
    assert house.backend.timeouts[0] == 3600
    assert 2_350 < (house.backend.timeouts[1] or 0) < 2_410


async def test_the_cost_of_a_pause_shortens_the_run_at_the_caps(house: Paused) -> None:
    house.opens(platform=RUNPOD)
    job = await house.started()
    await house.after(1200, job)
    await pause(house.ctx, job)
    await house.after(1200, job)  # the machine is billed meanwhile
    poor = Caps(per_job_usd=0, per_day_usd=0, per_instance_usd=0)
    house.ctx.policy = house.ctx.policy.model_copy(update={"rehearsal_caps": poor})
    await resume(house.ctx, job)
    assert 1_100 < (house.backend.timeouts[1] or 0) < 1_210


async def test_a_resume_on_a_forbidden_platform_is_refused(house: Paused) -> None:
    job = await house.paused()
    before, house.ctx.policy = house.ctx.policy, house.ctx.policy.model_copy(update={"platforms": ("local",)})
    with pytest.raises(Refused):
        await resume(house.ctx, job)
    house.ctx.policy = before
    await resume(house.ctx, job)
    assert read_job(house.ctx.ledger, job).attempt == 2


async def test_a_resume_above_the_approved_cost_and_the_caps_is_refused(house: Paused, wording: Wording) -> None:
    job = await house.paused()
    await house.stopped(job)
    await house.after(1, job)
    poor = Caps(per_job_usd=0, per_day_usd=0, per_instance_usd=0)
    house.ctx.policy = house.ctx.policy.model_copy(update={"rehearsal_caps": poor})
    lease = read_job(house.ctx.ledger, job).lease
    assert lease is not None
    at, seen = house.ctx.seen[lease]
    house.ctx.seen[lease] = at, seen.model_copy(update={"cost_usd": 34.0})
    with pytest.raises(Refused) as refused:
        await resume(house.ctx, job)
    wording(refused, job)
    assert house.ctx.ledger.last(f"job/{job}", ResumeRequested) is None
    assert house.ctx.ledger.last(f"lease/{lease}", ResumeIntent) is None


async def lines(file: Path, count: int) -> list[str]:
    """Wait until a process has written this many lines."""
    while not file.exists() or len(found := file.read_text().splitlines()) < count:
        await anyio.sleep(0.02)
    return found


@pytest.mark.slow
async def test_a_job_on_the_users_own_machine_pauses_for_free(tmp_path: Path) -> None:
    """A real process gets a signal, saves, ends, and continues in the same folder."""
    house = House(tmp_path / "home", Processes())
    del house.ctx._backends["local"]
    said = tmp_path / "said"
    job = await launch(house.ctx, training(said, 600, platform="local", max_cost_usd=None))
    assert (await check(house.ctx, job)).job.state is Job.RUNNING
    await lines(said, 1)
    paused = await pause(house.ctx, job)
    assert paused.job.state is Job.PAUSED and paused.lease is None
    assert [s.action for s in paused.next_steps if s.action is not Action.MANUAL] == [Action.RESUME]
    assert (await resume(house.ctx, job)).job.state is Job.RUNNING
    assert [line.split()[1] for line in await lines(said, 2)] == ["1", "2"]
    assert (await cancel(house.ctx, job)).job.state is Job.CANCELED
