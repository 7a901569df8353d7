"""A machine is taken for good: within the user's budget, another is rented, once, and resumes the proven copy."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuwarden.core.errors import BadRequest, Conflict, NoCapacity, RateLimited, Refused
from gpuwarden.core.models import Answer, Instance, Resources
from gpuwarden.core.policy import Caps, TeardownPolicy, policy_fields
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job
from gpuwarden.interfaces.cli import approval
from gpuwarden.interfaces.cli.approval import ApprovalDecisions, grant_spending
from gpuwarden.ledger.events import CreateIntent, ReceiptIssued, RelaunchAllowed, RelaunchIntent
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.context import CAPS_PATIENCE_S
from gpuwarden.lifecycle.execution import running
from gpuwarden.lifecycle.execution.advance import advance
from gpuwarden.lifecycle.leases.budgets import spent_today
from gpuwarden.lifecycle.leases.meter import spent
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.lifecycle.records import read_job
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.rehearsal.model import Fault, Faults
from lifecycle_kit import lock_held, open_house, prove, records, under_caps_lock
from pretend_machines import Processes
from relaunch_kit import BUDGET, Allowed
from terminal import Typed
from wording import Wording

pytestmark = pytest.mark.anyio


@pytest.fixture
def house(tmp_path: Path, processes: Processes) -> Allowed:
    return Allowed(tmp_path / "home", processes)


# ------------------------------------------------------------------------------------------------- who may decide


async def test_a_budget_approved_at_the_terminal_is_recorded_with_the_job(house: Allowed, wording: Wording) -> None:
    checked = await submit(house.ctx, house.spec())
    assert checked.receipt is not None
    person = Typed("yes")
    assert (
        await approval.ask(house.ctx, checked.receipt, person, decided=ApprovalDecisions(None, BUDGET))
    ).code == "approved"
    before, told = person.shown.splitlines()[-3:-1]
    wording(f"{before}\n{told}", "$10.00")
    done = await submit(house.ctx, house.spec(), receipt=checked.receipt)
    assert done.job is not None
    allowed = house.ctx.ledger.last(f"job/{done.job.id}", RelaunchAllowed)
    assert allowed is not None and allowed.data.budget_usd == BUDGET
    with pytest.raises(Conflict) as refused:
        await approval.ask(house.ctx, checked.receipt, Typed("yes"), decided=ApprovalDecisions(None, 50.0))
    wording(refused)


async def test_a_declined_or_too_small_budget_is_refused(house: Allowed, wording: Wording) -> None:
    checked = await submit(house.ctx, house.spec())
    with pytest.raises(Refused):
        await approval.ask(house.ctx, str(checked.receipt), Typed("no"), decided=ApprovalDecisions(None, BUDGET))
    with pytest.raises(BadRequest) as refused:
        await approval.ask(house.ctx, str(checked.receipt), Typed("yes"), decided=ApprovalDecisions(None, 0.01))
    wording(refused)


@pytest.mark.parametrize("channel", ["elicitation", "rehearsal", "automatic_teardown"])
async def test_a_budget_through_any_other_channel_is_ignored(house: Allowed, channel: str) -> None:
    spec = house.spec()
    receipt = str((await submit(house.ctx, spec)).receipt)
    issued = house.ctx.ledger.last(f"receipt/{receipt}", ReceiptIssued)
    assert issued is not None
    grant_spending(house.ctx, issued, channel, "somebody", relaunch_usd=BUDGET)
    done = await submit(house.ctx, spec, receipt=receipt)
    assert done.job is not None and house.ctx.ledger.last(f"job/{done.job.id}", RelaunchAllowed) is None


def test_the_policy_has_no_relaunch_setting() -> None:
    assert not [f.path for f in policy_fields() if "relaunch" in f.path]


# --------------------------------------------------------------------------------------------------- the relaunch


async def test_another_machine_resumes_from_the_proven_copy(house: Allowed) -> None:
    job = await house.copied()
    house.takes()
    kinds = await house.rounds()
    record = read_job(house.ctx.ledger, job)
    assert record.state is Job.RUNNING and house.rented() == 2 and record.generation == 2
    assert house.backend.launched == [(job, 1), (job, 2)]
    assert house.backend.given == [{}, {"out/model": b"weights at step 100"}]
    assert "relaunched" in kinds and "failed" not in kinds
    house.backend.end(house.handle(job))
    assert (await house.after(31, job)).job.state is Job.SUCCEEDED
    await pull(house.ctx, job)
    await prove(house.ctx, job)
    view = await house.until_off(await house.yes(await house.asks(job)))
    assert view.record.state == "verified_stopped"
    house.holds()


async def test_without_a_budget_the_next_step_is_a_submit_from_the_copy(tmp_path: Path, processes: Processes) -> None:
    house = Allowed(tmp_path / "home", processes, budget=None)
    job = await house.copied()
    house.takes()
    await house.rounds()
    found = await check(house.ctx, job)
    assert found.job.state is Job.FAILED and house.rented() == 1
    assert any(step.action == "submit" and "inputs" in step.parameters for step in found.next_steps)


async def test_without_a_proven_copy_nothing_is_rented(house: Allowed, wording: Wording) -> None:
    job = await house.running()
    house.takes()
    await house.rounds()
    record = read_job(house.ctx.ledger, job)
    assert (record.state, record.reason) == (Job.FAILED, Code.NOT_RELAUNCHED)
    wording(record.why)
    assert house.rented() == 1


async def test_a_changed_local_copy_is_not_resumed_from(house: Allowed) -> None:
    job = await house.copied()
    next((house.ctx.home / "artifacts" / job).rglob("model")).write_bytes(b"garbage")
    house.takes()
    await house.rounds()
    assert read_job(house.ctx.ledger, job).state is Job.FAILED and house.rented() == 1


@pytest.mark.slow
async def test_an_exhausted_budget_ends_the_relaunches(house: Allowed, wording: Wording) -> None:
    """Each run may cost about $3.60, so $10 pay for two relaunches, whatever the first machines cost."""
    job = await house.copied(max_restarts=50)
    for _ in range(5):
        house.takes()
        await house.rounds()
        if read_job(house.ctx.ledger, job).state is Job.FAILED:
            break
        house.clock.advance(3000)
        await house.rounds(1)
    record = read_job(house.ctx.ledger, job)
    assert (record.state, record.reason) == (Job.FAILED, Code.NOT_RELAUNCHED)
    wording(record.why)
    first, *later = [truth.cost_usd for truth in house.cloud.truths().values()]
    assert 1 <= len(later) <= 3 and sum(later) <= BUDGET, (first, later)
    house.holds()


async def test_a_daily_cap_limits_a_relaunch(house: Allowed) -> None:
    job = await house.copied()
    house.ctx.policy = house.ctx.policy.model_copy(update={"rehearsal_caps": Caps(per_day_usd=3.0)})
    house.takes()
    await house.rounds()
    record = read_job(house.ctx.ledger, job)
    assert record.state is Job.FAILED and "per_day_usd" in record.why and house.rented() == 1


async def test_the_cost_of_a_relaunch_is_recorded_under_the_caps_lock_first(
    house: Allowed, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await house.copied()
    lost = str(read_job(house.ctx.ledger, job).lease)
    held = under_caps_lock(house.ctx, monkeypatch, RelaunchIntent)

    async def dies(*_: object) -> bool:
        return False

    monkeypatch.setattr(running, "rent", dies)
    house.takes()
    for _ in range(8):
        await house.rounds(0 if held else 1)
    assert held == [(RelaunchIntent, True)] and house.rented() == 1
    worst, paid = read_job(house.ctx.ledger, job).worst_cost, spent(house.ctx, lost)
    assert worst and paid and spent_today(house.ctx, pretend=True) == pytest.approx(paid + worst)


async def test_a_relaunch_waits_only_briefly_for_the_caps(house: Allowed, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await house.copied()
    house.takes()
    with lock_held(house.ctx, monkeypatch) as waited:
        await house.rounds(4)
        house.clock.advance(300)
        assert job in (await house.watcher.round()).trouble
        begun, found = waited.time, await check(house.ctx, job)
    assert 0 < waited.time - begun < 2 * CAPS_PATIENCE_S and found.note
    assert (found.job.state, house.rented()) == (Job.PREEMPTED, 1)
    await house.rounds()
    assert (read_job(house.ctx.ledger, job).state, house.rented()) == (Job.RUNNING, 2)


@pytest.mark.slow
async def test_two_watches_rent_exactly_one_machine(house: Allowed) -> None:
    job = await house.copied()
    house.takes()
    others = [open_house(house.ctx.home, house.clock, policy=house.ctx.policy) for _ in range(3)]
    for other in others:
        other._backends, other._providers = house.ctx._backends, house.ctx._providers
    for _ in range(8):
        house.clock.advance(31)
        async with anyio.create_task_group() as together:
            for ctx in (house.ctx, *others):
                together.start_soon(advance, ctx, job)
    assert house.rented() == 2 and read_job(house.ctx.ledger, job).state is Job.RUNNING
    assert len(house.ctx.ledger.events(kind=CreateIntent)) == 2
    assert house.backend.launched == [(job, 1), (job, 2)]


async def test_a_lost_reply_to_the_order_rents_no_second_machine(house: Allowed) -> None:
    job = await house.copied()
    house.cloud.configure(faults=Faults(faults=(Fault(kind="lost_reply", call="create", at=1),)))
    house.takes()
    await house.rounds(12)
    assert house.rented() == 2 and read_job(house.ctx.ledger, job).state is Job.RUNNING
    house.holds()


@pytest.mark.slow
async def test_a_platform_without_a_free_machine_is_asked_again_later(house: Allowed) -> None:
    job = await house.copied()
    house.cloud.configure(faults=Faults(faults=(Fault(kind="no_capacity", call="create", at=1, count=2),)))
    house.takes()
    await house.rounds(5)
    assert read_job(house.ctx.ledger, job).state is Job.PROVISIONING and house.rented() == 1
    await house.rounds(40, 60)
    assert read_job(house.ctx.ledger, job).state is Job.RUNNING and house.rented() == 2
    assert house.cloud.store.state().calls["create"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("busy", [0, 2])
async def test_a_rate_limit_delays_a_relaunch_without_using_an_attempt(
    house: Allowed, monkeypatch: pytest.MonkeyPatch, busy: int
) -> None:
    job = await house.copied()
    provider = house.ctx.provider(read_job(house.ctx.ledger, job).spec.platform)
    create, refused = provider.create, 0

    async def limited(wanted: Resources, token: str) -> Answer[Instance]:
        nonlocal refused
        refused += 1
        if refused <= 9:
            raise RateLimited("asked too often", "Wait.")
        if refused <= 9 + busy:
            raise NoCapacity("nothing is free")
        return await create(wanted, token)

    monkeypatch.setattr(provider, "create", limited)
    house.takes()
    await house.rounds(60 + 20 * busy)
    assert (refused, read_job(house.ctx.ledger, job).state) == (10 + busy, Job.RUNNING), "31 minutes, and 5 and 10"


@pytest.mark.slow
async def test_a_platform_that_never_has_capacity_fails_the_job(house: Allowed) -> None:
    job = await house.copied()
    house.cloud.configure(faults=Faults(faults=(Fault(kind="no_capacity", call="create", at=1, count=99),)))
    house.takes()
    await house.rounds(120, 120)
    found = await check(house.ctx, job)
    assert found.job.state is Job.FAILED and house.rented() == 1
    assert any(step.action == "submit" for step in found.next_steps)


async def test_a_machine_torn_down_on_request_is_not_replaced(house: Allowed) -> None:
    job = await house.copied()
    view = await house.asks(job)
    await house.yes(view, loss="train")
    await house.rounds()
    assert house.rented() == 1 and read_job(house.ctx.ledger, job).state is not Job.RUNNING


async def test_a_job_that_fails_by_itself_is_not_relaunched(house: Allowed) -> None:
    job = await house.copied()
    house.backend.end(house.handle(job), "failed")
    await house.rounds()
    house.takes()
    await house.rounds()
    assert house.rented() == 1 and house.backend.launched == [(job, 1)]


async def test_a_canceled_job_is_not_relaunched(house: Allowed) -> None:
    from gpuwarden.lifecycle.monitoring.check import cancel

    job = await house.copied()
    house.takes()
    house.backend.silent = True
    await cancel(house.ctx, job)
    house.backend.silent = False
    await house.rounds()
    assert house.rented() == 1 and read_job(house.ctx.ledger, job).state is Job.CANCELED


async def test_the_watch_makes_the_copy_while_the_job_runs(house: Allowed) -> None:
    job = await house.running()
    await house.watcher.copier.round()
    assert house.ctx.ledger.events(f"job/{job}", kind="artifacts.pulled")
    await prove(house.ctx, job)
    house.takes()
    await house.rounds()
    assert read_job(house.ctx.ledger, job).state is Job.RUNNING and house.rented() == 2


async def test_a_checkpoint_that_is_being_written_is_copied_later(house: Allowed) -> None:
    job = await house.running()
    listing = house.backend._listed

    def busy(*args: object, **how: object) -> object:
        found = listing(*args, **how)  # type: ignore[arg-type]
        large = tuple(file.model_copy(update={"size": 1 << 30, "mtime_ns": 99 * 10**9}) for file in found.files)
        return found.model_copy(update={"taken_at": 100.0, "files": large})

    with patch.object(house.backend, "_listed", busy):
        await house.watcher.copier.round()
    assert not house.ctx.ledger.events(f"job/{job}", kind="artifacts.pulled") and not house.watcher.copier.trouble
    house.clock.advance(61)
    await house.watcher.copier.round()
    assert house.ctx.ledger.events(f"job/{job}", kind="artifacts.pulled")


async def test_without_a_budget_a_running_job_is_not_copied(tmp_path: Path, processes: Processes) -> None:
    house = Allowed(tmp_path / "home", processes, budget=None)
    job = await house.running()
    await house.watcher.copier.round()
    assert not house.ctx.ledger.events(f"job/{job}", kind="artifacts.pulled")


@pytest.mark.parametrize("leap", [-10 * 86_400.0, 10 * 86_400.0])
async def test_a_clock_jump_rents_no_extra_machine(house: Allowed, leap: float) -> None:
    job = await house.copied()
    house.takes()
    await house.rounds(2)
    house.clock.advance(leap)
    await house.rounds(12)
    assert house.rented() <= 2 and house.backend.launched.count((job, 2)) <= 1
    house.holds()


# --------------------------------------------------------------------------------------------------- random stories

STORIES = int(os.environ.get("GPUWARDEN_STORIES", "12"))
ACTS = st.lists(
    st.sampled_from(
        ["take", "round", "round", "copy", "prove", "copier", "sleep", "preempt", "lost", "none", "self_stop"]
    ),
    max_size=25,
)


@pytest.mark.prove
@settings(
    max_examples=int(os.environ.get("GPUWARDEN_STORIES", "20")),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(acts=ACTS, interruptible=st.booleans())
def test_any_story_keeps_the_budget_and_the_promises(
    tmp_path_factory: pytest.TempPathFactory, acts: list[str], interruptible: bool
) -> None:
    """No attempt is launched twice, no machine is billed unnoticed, and all relaunches cost at most the budget."""
    made = Processes()
    names = ("of", "terminate", "kill", "held")
    patches = [patch(f"gpuwarden.rehearsal.processes.{name}", getattr(made, name)) for name in names]
    for each in patches:
        each.start()
    try:
        anyio.run(_story, tmp_path_factory.mktemp("story") / "home", made, acts, interruptible)
    finally:
        for each in patches:
            each.stop()


async def _story(home: Path, processes: Processes, acts: list[str], interruptible: bool) -> None:
    house = Allowed(home, processes)
    ending = TeardownPolicy(self_stop_minutes=30)
    house.ctx.policy = house.ctx.policy.model_copy(update={"teardown": ending})
    job = await house.running(max_restarts=20, interruptible=interruptible)
    for act in acts:
        with _quietly():
            if act == "take":
                house.takes()
            elif act == "copy":
                await pull(house.ctx, job)
            elif act == "prove":
                await prove(house.ctx, job)
            elif act == "copier":
                await house.watcher.copier.round()
            elif act == "preempt":
                house.cloud.preempt(records(house.cloud)[-1].id)
            elif act == "self_stop":
                house.cloud.self_stop(records(house.cloud)[-1].id)
            elif act in {"lost", "none"}:
                kind = "lost_reply" if act == "lost" else "no_capacity"
                house.cloud.configure(faults=Faults(faults=(Fault(kind=kind, call="create", at=1),)))  # type: ignore[arg-type]
        await house.rounds(1, 600 if act == "sleep" else 31)
    await house.rounds(6)
    launched = house.backend.launched
    assert len(set(launched)) == len(launched)
    intents = house.ctx.ledger.events(kind=RelaunchIntent)
    after = [truth.cost_usd for truth in list(house.cloud.truths().values())[1:]]
    assert not after or intents, "no second machine without an intent"
    assert sum(after) <= BUDGET
    house.holds()


def _quietly() -> object:
    import contextlib

    from gpuwarden.core.errors import WardenError

    return contextlib.suppress(WardenError)
