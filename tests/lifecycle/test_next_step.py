"""The state decides the next step: following the hints leads, without circles, to a state without billing."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest

from artifact_store_kit import KEEP, Kit
from gpuwarden.core.errors import AuthFailed, Conflict, NotSupported, Unreachable, WardenError
from gpuwarden.core.guidance import Action, NextStep
from gpuwarden.core.models import Verb
from gpuwarden.core.next_step import UNDER_WAY, Copy, Machine, Situation, plan
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import AT_REST, LIVE_LEASES, TERMINAL_JOBS, Job, Teardown
from gpuwarden.interfaces import results
from gpuwarden.interfaces.cli.approval import grant_spending
from gpuwarden.ledger.events import ReceiptIssued
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.artifacts.verify import verify_job
from gpuwarden.lifecycle.execution.recovery_advice import OWN_FAULTS
from gpuwarden.lifecycle.execution.situation import following_of, situation
from gpuwarden.lifecycle.monitoring.check import cancel, check
from gpuwarden.lifecycle.monitoring.inventory import list_instances
from gpuwarden.lifecycle.records import lease_ids, read_job
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.lifecycle.teardown.gate import approve, proceed, request
from gpuwarden.rehearsal.model import Fault
from lifecycle_kit import launch, records, weights
from pretend_machines import PretendBackend, Processes, remembered
from teardown_kit import House

pytestmark = pytest.mark.anyio

# ---------------------------------------------------------------------------------------------- every possible state


def every_situation() -> Iterator[Situation]:
    """Yield the product of the three state machines' states, the copies and the user's orders."""
    tickets = [(None, None), *((state, ends) for state in Teardown for ends in (None, 1_000.0))]
    for job, machine, copy, (ticket, ends), launched, outputs, ordered, store in itertools.product(
        sorted(set(Job) - {Job.DRAFT, Job.REFUSED}),
        Machine,
        Copy,
        tickets,
        (True, False),
        (True, False),
        (None, "stop"),
        ("", "s3://bucket/team"),
    ):
        refused = job is Job.PROVISIONING and machine is Machine.UNSEEN and ordered is not None
        yield Situation(
            job_id="j1", job=job, now=400.0, machine=machine, copy=copy, ticket="t1" if ticket else "",
            ticket_state=ticket, launched=launched, outputs=outputs, ordered=ordered,  # type: ignore[arg-type]
            ends_at=ends if ordered else None, settles_at=430.0 if refused else None,
            self_stopped=machine is Machine.OFF and outputs and launched, artifact_store=store, watched=bool(store),
            stoppable=outputs,
        )  # fmt: skip


def first(found: tuple[NextStep, ...]) -> NextStep | None:
    return next((step for step in found if step.action is not Action.MANUAL), None)


@pytest.mark.slow
def test_every_state_has_a_fitting_next_step() -> None:
    seen = 0
    for now in every_situation():
        seen += 1
        found, wrong = plan(now), []
        step, actions = first(found), [s.action for s in found]
        if not found or len(set(actions) - {Action.MANUAL}) != len([a for a in actions if a is not Action.MANUAL]):
            wrong.append("no step, or one twice")
        if step is None and now.machine in {Machine.BILLING, Machine.UNSEEN}:
            wrong.append("a machine bills and nothing is to be done")
        stored = now.artifact_store and now.copy in {Copy.NONE, Copy.STALE, Copy.FROM_STORE, Copy.UNVERIFIED}
        if now.job in TERMINAL_JOBS and now.machine is Machine.GONE and step is not None and not stored:
            wrong.append("nothing is left to do")
        text = " ".join(str(s.parameters.get("text", "")) for s in found)
        if (
            Action.PULL in actions
            and now.artifact_store
            and now.machine in {Machine.OFF, Machine.GONE}
            and now.artifact_store not in text
        ):
            wrong.append("it does not say where the copy is")
        under_way = now.ticket_state in UNDER_WAY
        asleep = now.self_stopped and now.job not in TERMINAL_JOBS  # it is not known how the job ended
        waits = step is not None and step.action is Action.CHECK and now.ordered and now.job in TERMINAL_JOBS
        if waits and now.machine is Machine.BILLING and not now.watched:
            wrong.append("it waits for a watch that does not run")
        if now.job is Job.PAUSED and now.machine is Machine.BILLING and Action.RESUME not in actions and not under_way:
            wrong.append("it does not say how the job goes on")
        if now.settled and not asleep and {Action.PULL, Action.VERIFY} & set(actions):
            wrong.append("no copy can get better")
        if step is not None and step.action is Action.VERIFY and now.copy is not Copy.UNVERIFIED:
            wrong.append("there is nothing to verify")
        if now.job not in AT_REST and not now.self_stopped and {Action.PULL, Action.TEARDOWN} & set(actions):
            wrong.append("the job has not ended")
        assert not wrong, (wrong, now, found)
    assert seen > 10_000


# ------------------------------------------------------------------------------------- walks with the real use cases


class Walk(House):
    """An agent and a user who follow the hints exactly, and do nothing else."""

    def __init__(self, home: Path, processes: Processes) -> None:
        super().__init__(home, processes)
        self.path: list[str] = []
        self.in_the_console = False
        self.turns: Counter[tuple[object, ...]] = Counter()

    async def saved(self, state: str = "succeeded", **changes: object) -> str:
        job = await self.started(**changes)
        self.backend.write(self.handle(job), "model.safetensors", weights())
        self.backend.end(self.handle(job), state)
        await self.after(1, job)
        return job

    def ends_itself(self, verb: Callable[[str], object]) -> None:
        """Make the platform end the machine, as at its own end date."""
        self.in_the_console = True
        verb(records(self.cloud)[0].id)

    async def to_the_end(self, job: str, most: int = 25) -> None:
        """Follow the hint of every reply until none requires an action; fail on a circle."""
        rest = (await check(self.ctx, job)).next_steps
        for _ in range(most):
            step = first(rest)
            if step is None or step.action is Action.SUBMIT:
                reason = read_job(self.ctx.ledger, job).reason
                assert step is None or reason not in OWN_FAULTS, f"the same failure is paid for twice: {self.path}"
                break
            rest = await self.obey(job, rest, step)
        else:
            raise AssertionError(f"it goes on and on: {self.path}")
        assert not any(t.meter for t in self.cloud.truths().values()), f"it bills at the end: {self.path}"
        assert not lease_ids(self.ctx.ledger, *LIVE_LEASES), f"a lease is left: {self.path}"
        assert read_job(self.ctx.ledger, job).state in TERMINAL_JOBS, self.path

    async def obey(self, job: str, rest: tuple[NextStep, ...], step: NextStep) -> tuple[NextStep, ...]:
        now = situation(self.ctx, read_job(self.ctx.ledger, job))
        key = (step.action, now.job, now.machine, now.copy, now.ticket_state)
        self.turns[key] += 1
        self.path.append(" ".join(map(str, key)))
        waits = step.action is Action.CHECK or now.ticket_state is Teardown.EXECUTING  # for time to pass
        if self.turns[key] > (8 if waits else 2):
            raise AssertionError(f"the hint turns in a circle: {self.path}")
        if now.machine is Machine.OFF and not now.self_stopped and step.action is not Action.TEARDOWN:
            for record in records(self.cloud):  # the text before the step asks the user to do so
                if str(record.state) == "stopped":
                    self.cloud.start(record.id)
            self.clock.advance(31)
        if self.turns[key] == 3 and now.job is Job.RUNNING:
            self.backend.end(self.handle(job))
        try:
            return await self.do(job, step)
        except WardenError as error:
            self.path.append(f"{error.code}: {error.message}")
            found = (*error.next_steps, *getattr(error, "findings", ()))
            real = tuple(s for s in found if isinstance(s, NextStep))
            return real if first(real) else (await check(self.ctx, job)).next_steps

    async def do(self, job: str, step: NextStep) -> tuple[NextStep, ...]:
        given = step.parameters
        assert given.get("job_id", job) == job
        if step.action is Action.CHECK:
            self.clock.advance(31)
            return (await check(self.ctx, job)).next_steps
        if step.action is Action.CANCEL:
            return (await cancel(self.ctx, job)).next_steps
        if step.action is Action.PULL:
            return results.pulled(await pull(self.ctx, job)).next
        if step.action is Action.VERIFY:
            return results.verified(await verify_job(self.ctx, job), following_of(self.ctx, job)).next
        if step.action is Action.TEARDOWN:
            self.clock.advance(31)
            verb = given.get("verb", "terminate")
            assert verb in get_args(Verb)
            return results.torn_down(await request(self.ctx, job, verb)).next  # type: ignore[arg-type]
        if step.action is Action.LIST_INSTANCES:
            await list_instances(self.ctx)
            return (await check(self.ctx, job)).next_steps
        assert step.action is Action.APPROVE, step
        return await self.says_yes(job, str(given["ticket"]), gives_up=given.get("without_proof") is True)

    async def says_yes(self, job: str, ticket: str, *, gives_up: bool) -> tuple[NextStep, ...]:
        if ticket.startswith("r"):
            issued = self.ctx.ledger.last(f"receipt/{ticket}", ReceiptIssued)
            assert issued is not None
            grant_spending(self.ctx, issued, "terminal", "test")
            return (await check(self.ctx, job)).next_steps
        view = await proceed(self.ctx, ticket)
        assert view.record.digest
        loss = view.job.spec.name if gives_up else None
        view = await approve(self.ctx, ticket, view.record.digest, channel="terminal", by="test", loss=loss)
        return results.torn_down(view).next


@pytest.fixture
def walk(tmp_path: Path) -> Iterator[Walk]:
    processes = Processes()
    names = ("of", "terminate", "kill", "held")
    patches = [patch(f"gpuwarden.rehearsal.processes.{name}", getattr(processes, name)) for name in names]
    patches.append(patch("gpuwarden.checkpoints.load.run_child", remembered))
    for each in patches:
        each.start()
    yield Walk(tmp_path / "home", processes)
    for each in patches:
        each.stop()


async def succeeded(walk: Walk) -> str:
    return await walk.saved()


async def stops(walk: Walk) -> str:
    return await walk.saved(teardown="stop")


async def failed(walk: Walk) -> str:
    return await walk.saved("failed")


async def saved_nothing(walk: Walk) -> str:
    return await walk.ended(saved=False)


async def failed_and_saved_nothing(walk: Walk) -> str:
    return await walk.ended("failed", saved=False)


async def saved_what_is_broken(walk: Walk) -> str:
    job = await walk.started()
    walk.backend.write(walk.handle(job), "model.safetensors", weights()[:100])
    walk.backend.end(walk.handle(job))
    await walk.after(1, job)
    return job


async def canceled(walk: Walk) -> str:
    job = await walk.started()
    walk.backend.write(walk.handle(job), "model.safetensors", weights())
    await cancel(walk.ctx, job)
    return job


async def canceled_while_it_boots(walk: Walk) -> str:
    checked = await submit(walk.ctx, walk.spec())
    done = await submit(walk.ctx, walk.spec(), receipt=checked.receipt)
    assert done.job is not None
    await cancel(walk.ctx, done.job.id)
    return done.job.id


async def refused_at_launch(walk: Walk, error: WardenError | None = None) -> str:
    checked = await submit(walk.ctx, walk.spec())
    done = await submit(walk.ctx, walk.spec(), receipt=checked.receipt)
    assert done.job is not None
    with patch.object(PretendBackend, "submit", side_effect=error or NotSupported("no such interpreter there")):
        assert (await walk.after(11, done.job.id)).job.state is Job.FAILED
    return done.job.id


async def refused_after_it_may_have_started(walk: Walk) -> str:
    checked = await submit(walk.ctx, walk.spec())
    done = await submit(walk.ctx, walk.spec(), receipt=checked.receipt)
    assert done.job is not None
    started = PretendBackend.submit

    async def lost(self: PretendBackend, *args: object, **kwargs: object) -> object:
        await started(self, *args, **kwargs)  # type: ignore[arg-type]
        raise Unreachable("the answer was lost")

    with patch.object(PretendBackend, "submit", lost):
        await walk.after(11, done.job.id)
    refused = AuthFailed("the key is refused now")
    with (
        patch.object(PretendBackend, "submit", side_effect=refused),
        patch.object(PretendBackend, "find", side_effect=refused),
    ):
        assert (await walk.after(11, done.job.id)).job.state is Job.FAILED
    return done.job.id


async def stopped_by_its_platform(walk: Walk) -> str:
    job = await walk.started()
    walk.backend.write(walk.handle(job), "model.safetensors", weights())
    walk.ends_itself(walk.cloud.stop)
    await walk.after(11, job)
    assert (await walk.after(31, job)).job.state is Job.PREEMPTED, "it does not read as running"
    return job


async def stopped_by_its_platform_and_canceled(walk: Walk) -> str:
    job = await walk.started()
    walk.backend.write(walk.handle(job), "model.safetensors", weights())
    walk.ends_itself(walk.cloud.stop)
    walk.clock.advance(11)
    await cancel(walk.ctx, job)
    await walk.after(31, job)
    assert read_job(walk.ctx.ledger, job).state is Job.CANCELED, "no process runs on a machine that is off"
    return job


async def stopped_by_its_platform_after_a_success(walk: Walk) -> str:
    job = await walk.saved()
    walk.ends_itself(walk.cloud.stop)
    await walk.after(11, job)
    await walk.after(31, job)
    return job


async def taken_for_good(walk: Walk) -> str:
    job = await walk.started()
    walk.ends_itself(walk.cloud.terminate)
    await walk.after(11, job)
    return job


async def never_boots(walk: Walk) -> str:
    walk.opens(Fault(kind="failed_boot"))
    checked = await submit(walk.ctx, walk.spec())
    done = await submit(walk.ctx, walk.spec(), receipt=checked.receipt)
    assert done.job is not None
    return done.job.id


LISTED_LATE = Fault(kind="stale", call="find", count=9, seconds=20)


async def refused_by_its_platform(walk: Walk) -> str:
    walk.opens(Fault(kind="no_capacity", call="create"))
    return await launch(walk.ctx, walk.spec())


async def refused_by_its_platform_and_canceled(walk: Walk) -> str:
    walk.opens(Fault(kind="no_capacity", call="create"))
    return await canceled_while_it_boots(walk)


async def refused_by_a_platform_that_can_not_be_listed(walk: Walk) -> str:
    walk.opens(Fault(kind="no_capacity", call="create"), Fault(kind="lost_reply", call="find", count=2))
    return await launch(walk.ctx, walk.spec())


async def refused_and_rented_all_the_same(walk: Walk) -> str:
    walk.opens(Fault(kind="false_refusal", call="create"), LISTED_LATE)
    job = await launch(walk.ctx, walk.spec())
    assert read_job(walk.ctx.ledger, job).reason is Code.REFUSAL_UNSETTLED
    assert (await walk.after(31, job)).job.state is Job.RUNNING
    walk.backend.write(walk.handle(job), "model.safetensors", weights())
    walk.backend.end(walk.handle(job))
    await walk.after(1, job)
    return job


async def refused_and_rented_all_the_same_and_canceled(walk: Walk) -> str:
    walk.opens(Fault(kind="false_refusal", call="create"), LISTED_LATE)
    return await canceled_while_it_boots(walk)


async def given_up_unseen(walk: Walk, kind: Any) -> str:
    """Approve the end of a machine that a refused request may have rented, before it is first listed."""
    walk.opens(Fault(kind=kind, call="create"), LISTED_LATE)
    job = await canceled_while_it_boots(walk)
    view = await walk.asks(job)
    assert view.record.state is Teardown.BLOCKED and view.record.digest
    await walk.yes(view, loss=view.job.spec.name)
    return job


async def given_up_unseen_and_rented_all_the_same(walk: Walk) -> str:
    return await given_up_unseen(walk, "false_refusal")


async def given_up_unseen_and_never_rented(walk: Walk) -> str:
    return await given_up_unseen(walk, "no_capacity")


async def copied_too_early(walk: Walk) -> str:
    job = await walk.started()
    walk.backend.write(walk.handle(job), "model.safetensors", weights()[:50])
    await pull(walk.ctx, job)
    walk.backend.write(walk.handle(job), "model.safetensors", weights())
    walk.backend.end(walk.handle(job))
    await walk.after(1, job)
    return job


async def copied_to_two_folders(walk: Walk) -> str:
    job = await walk.saved()
    await pull(walk.ctx, job)
    await verify_job(walk.ctx, job)
    await pull(walk.ctx, job, walk.ctx.home.parent / "elsewhere")
    return job


async def damaged_here(walk: Walk) -> str:
    job = await walk.saved()
    await pull(walk.ctx, job)
    next((walk.ctx.home / "artifacts" / job).rglob("model.safetensors")).write_bytes(weights()[:-4] + b"\0\0\0\1")
    await verify_job(walk.ctx, job)
    return job


async def wrote_elsewhere(walk: Walk) -> str:
    job = await walk.saved()
    walk.backend.write(walk.handle(job), "model.safetensors", weights(), "elsewhere")
    return job


async def waits_for_a_late_person(walk: Walk) -> str:
    job = await walk.saved()
    await pull(walk.ctx, job)
    await verify_job(walk.ctx, job)
    await walk.asks(job)
    walk.clock.advance(9 * 3600)
    return job


async def whose_end_is_lost_twice(walk: Walk) -> str:
    walk.opens(Fault(kind="lost_request", call="terminate", count=2))
    return await walk.saved()


STORIES: tuple[Callable[[Walk], Awaitable[str]], ...] = (
    succeeded, stops, failed, saved_nothing, failed_and_saved_nothing, saved_what_is_broken, canceled,
    canceled_while_it_boots, refused_at_launch, refused_after_it_may_have_started, stopped_by_its_platform,
    stopped_by_its_platform_and_canceled, stopped_by_its_platform_after_a_success, taken_for_good, never_boots,
    copied_too_early, copied_to_two_folders, damaged_here, wrote_elsewhere, waits_for_a_late_person,
    whose_end_is_lost_twice, refused_by_its_platform, refused_by_its_platform_and_canceled,
    refused_by_a_platform_that_can_not_be_listed, refused_and_rented_all_the_same,
    refused_and_rented_all_the_same_and_canceled, given_up_unseen_and_rented_all_the_same,
    given_up_unseen_and_never_rented,
)  # fmt: skip


@pytest.mark.prove
@pytest.mark.parametrize("begin", STORIES, ids=lambda story: story.__name__)
async def test_following_the_hints_reaches_an_end(walk: Walk, begin: Callable[[Walk], Awaitable[str]]) -> None:
    job = await begin(walk)
    await walk.to_the_end(job)
    if not walk.in_the_console:
        walk.holds()


# ----------------------------------------------------------------------- nights: self-stopped machines, artifact stores


class NightWalk(Walk, Kit):
    """A walk whose jobs may have an artifact store, and whose machines may stop themselves."""

    def __init__(self, home: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
        Kit.__init__(self, home, processes, monkeypatch, order)
        self.path, self.in_the_console, self.turns = [], False, Counter()
        self.watching = False

    async def do(self, job: str, step: NextStep) -> tuple[NextStep, ...]:
        """Do what a walk does; run rounds of the watch once one was started."""
        self.watching = self.watching or step.action is Action.WATCH
        if self.watching and step.action in {Action.CHECK, Action.WATCH}:
            await self.round(240)
            return (await check(self.ctx, job)).next_steps
        return await super().do(job, step)

    async def self_stopped(self, state: str = "succeeded", *, stores: bool = False, **changes: object) -> str:
        """Start a job that saves and ends overnight on a machine that stops itself before anything is checked."""
        job = await self.started(**({"artifact_store": KEEP} if stores else {}), **changes)
        self.backend.write(self.handle(job), "model.safetensors", weights())
        self.backend.end(self.handle(job), state)
        self.self_stops()
        self.clock.advance(9 * 3600)
        return job

    def stores(self, job: str, **said: Any) -> None:
        self.keeps(job, {"out/model.safetensors": weights()}, **said)


async def self_stopped(walk: NightWalk) -> str:
    return await walk.self_stopped()


async def self_stopped_and_failed(walk: NightWalk) -> str:
    return await walk.self_stopped("failed")


async def self_stopped_and_given_up(walk: NightWalk) -> str:
    job = await walk.self_stopped()
    await walk.after(31, job)
    await cancel(walk.ctx, job)
    return job


async def self_stopped_and_stopping(walk: NightWalk) -> str:
    return await walk.self_stopped(teardown="stop")


async def self_stopped_and_kept(walk: NightWalk) -> str:
    job = await walk.self_stopped(stores=True)
    walk.stores(job)
    return job


async def self_stopped_and_kept_and_failed(walk: NightWalk) -> str:
    job = await walk.self_stopped("failed", stores=True)
    status = {"state": "failed", "attempt": 1, "exit_code": 1, "reason": "exited", "why": ""}
    walk.stores(job, ended={"status": status})
    return job


async def self_stopped_and_kept_without_the_last_word(walk: NightWalk) -> str:
    job = await walk.self_stopped(stores=True)
    walk.stores(job, ended={"look": ""})
    return job


async def self_stopped_and_kept_in_a_store_that_lost_a_file(walk: NightWalk) -> str:
    job = await walk.self_stopped(stores=True)
    walk.stores(job)
    del walk.shelf.objects[walk.key(job, "out/model.safetensors")]
    return job


async def self_stopped_and_kept_in_a_store_that_is_denied(walk: NightWalk) -> str:
    job = await walk.self_stopped(stores=True)
    walk.stores(job)
    walk.shelf.silent = True
    return job


async def kept_and_taken_for_good(walk: NightWalk) -> str:
    job = await walk.self_stopped(stores=True)
    walk.stores(job)
    walk.ends_itself(walk.cloud.terminate)
    return job


async def kept_and_taken_in_the_middle(walk: NightWalk) -> str:
    job = await walk.started(artifact_store=KEEP)
    walk.backend.write(walk.handle(job), "model.safetensors", weights())
    walk.stores(job, end=False)
    walk.ends_itself(walk.cloud.terminate)
    for _ in range(3):
        await walk.after(31, job)
    return job


async def kept_and_still_on(walk: NightWalk) -> str:
    job = await walk.saved(artifact_store=KEEP)
    walk.stores(job)
    return job


NIGHTS: tuple[Callable[[NightWalk], Awaitable[str]], ...] = (
    self_stopped, self_stopped_and_failed, self_stopped_and_given_up, self_stopped_and_stopping,
    self_stopped_and_kept, self_stopped_and_kept_and_failed, self_stopped_and_kept_without_the_last_word,
    self_stopped_and_kept_in_a_store_that_lost_a_file, self_stopped_and_kept_in_a_store_that_is_denied,
    kept_and_taken_for_good, kept_and_taken_in_the_middle, kept_and_still_on,
)  # fmt: skip


@pytest.mark.prove
@pytest.mark.parametrize("order", ["off", "terminate"])
@pytest.mark.parametrize("begin", NIGHTS, ids=lambda story: story.__name__)
async def test_following_the_hints_after_a_night_reaches_an_end(
    tmp_path: Path,
    processes: Processes,
    monkeypatch: pytest.MonkeyPatch,
    begin: Callable[[NightWalk], Awaitable[str]],
    order: str,
) -> None:
    monkeypatch.setattr("gpuwarden.checkpoints.load.run_child", remembered)
    walk = NightWalk(tmp_path / "home", processes, monkeypatch, order)
    await walk.to_the_end(await begin(walk))
    if not walk.in_the_console:
        walk.holds()
    if begin is self_stopped_and_kept:
        assert walk.starts() == 0, "what its store proved needs no machine"


@pytest.mark.slow
async def test_hints_after_a_success_lead_from_pull_to_approval(walk: Walk) -> None:
    await walk.to_the_end(await walk.saved())
    steps = [line.split()[0] for line in walk.path]
    assert steps[:4] == ["pull", "verify", "teardown", "approve"] and set(steps[4:]) <= {"teardown", "check"}


@pytest.mark.slow
async def test_a_completed_step_is_not_suggested_again(walk: Walk) -> None:
    job = await walk.saved()
    for use, wanted in ((pull, Action.VERIFY), (verify_job, Action.TEARDOWN)):
        await use(walk.ctx, job)  # type: ignore[operator]
        step = first((await check(walk.ctx, job)).next_steps)
        assert step is not None and step.action is wanted
    await walk.asks(job)
    step = first((await check(walk.ctx, job)).next_steps)
    assert step is not None and step.action is Action.APPROVE


async def test_a_machine_whose_launch_was_refused_can_be_ended(walk: Walk) -> None:
    job = await refused_at_launch(walk)
    with pytest.raises(Conflict, match=job) as never:
        await pull(walk.ctx, job)
    step = first(never.value.next_steps)
    assert step is not None and step.action is Action.TEARDOWN, "looking again would change nothing"
    assert (await walk.asks(job)).record.state is Teardown.AWAITING_HUMAN


async def test_cancel_and_check_show_the_same_cost(walk: Walk) -> None:
    job = await walk.started()
    walk.clock.advance(1800)
    canceled = results.signaled(await cancel(walk.ctx, job)).meter
    checked = results.checked(await check(walk.ctx, job)).meter
    assert canceled is not None and checked is not None and canceled.cost_usd == checked.cost_usd
    assert canceled.cost_usd is not None and canceled.cost_usd > 1.0
