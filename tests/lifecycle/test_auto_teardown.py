"""Automatic teardown: a machine ends unasked only if the user allowed it in advance and everything is proven."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from gpuwarden.config import load_config
from gpuwarden.core.errors import BadRequest, Conflict, NotFound, Refused
from gpuwarden.core.guidance import manual_text
from gpuwarden.core.models import Verb
from gpuwarden.core.next_step import Copy
from gpuwarden.core.policy import Caps, TeardownPolicy, policy_fields
from gpuwarden.core.states import Lease, Teardown
from gpuwarden.interfaces import results
from gpuwarden.interfaces.cli import approval
from gpuwarden.interfaces.cli.approval import grant_spending
from gpuwarden.interfaces.cli.drawing import auto_teardown_lines, local, zone
from gpuwarden.interfaces.cli.screen import pending
from gpuwarden.interfaces.results.base import AutoTeardownReply
from gpuwarden.interfaces.results.overview import status_of
from gpuwarden.ledger.events import (
    ApprovalGranted,
    AutoTeardownAnnounced,
    AutoTeardownOrdered,
    LeaseCameBack,
    ReceiptIssued,
)
from gpuwarden.lifecycle.artifacts.local_copies import copy_state
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.leases.auto_teardown import order_for
from gpuwarden.lifecycle.leases.meter import lease_now
from gpuwarden.lifecycle.monitoring.alert_conditions import waiting_for_approval
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.lifecycle.monitoring.overview import cached_overview
from gpuwarden.lifecycle.monitoring.waiting import what_waits
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.records import read_job, read_lease
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.lifecycle.teardown import orders
from gpuwarden.lifecycle.teardown.orders import HoldOutcome, hold_machine
from gpuwarden.policy_record import ActivePolicy, Notice
from gpuwarden.rehearsal.model import Fault, Faults
from lifecycle_kit import WEALTHY, prove, records
from orders_kit import MINUTE, Ordered
from pretend_machines import PretendBackend, Processes
from terminal import Typed
from wording import Wording

pytestmark = pytest.mark.anyio


async def test_a_proven_machine_ends_after_a_notice_and_its_grace(ending_house: Ordered) -> None:
    job = await ending_house.proven()
    ordered = ending_house.ctx.ledger.last(f"job/{job}", AutoTeardownOrdered)
    assert ordered is not None and (ordered.data.through, ordered.data.policy) == (
        "policy",
        ending_house.ctx.active_policy.digest,
    )
    raised_kinds = await ending_house.watched(9)
    assert raised_kinds.count("ending_soon") == 1 and ending_house.bills(), "the grace has not passed"
    raised_kinds += await ending_house.watched(6)
    assert not {"approval", "finished_billing"} & set(raised_kinds), "nobody is asked about what is ordered"
    assert not ending_house.bills()
    granted = [e for e in ending_house.ctx.ledger.events(kind=ApprovalGranted) if e.subject.startswith("teardown/")]
    assert [e.data.channel for e in granted] == ["automatic_teardown"]
    ending_house.holds()


async def test_the_order_is_shown_from_the_first_price_to_the_end(ending_house: Ordered, wording: Wording) -> None:
    ending_house.ctx.policy = ending_house.ctx.policy.model_copy(
        update={"teardown": TeardownPolicy(automatic="terminate", grace_minutes=7, self_stop_minutes=20)}
    )
    checked = results.submitted(await submit(ending_house.ctx, ending_house.spec()))
    assert checked.automatic_teardown == "terminate"
    wording(checked.message)
    job = await ending_house.proven()
    accepted = ending_house.ctx.ledger.last(f"job/{job}", AutoTeardownOrdered)
    assert accepted is not None

    async def shown() -> tuple[AutoTeardownReply | None, AutoTeardownReply | None]:
        line = next(line for line in status_of(cached_overview(ending_house.ctx, {})).ended if line.job_id == job)
        reply = results.checked(await check(ending_house.ctx, job, limit=0))
        assert reply.log == "" and reply.log_cursor is None, "no byte of it was asked for"
        return reply.ending, line.ending

    ending, listed = await shown()
    assert ending is not None and ending == listed
    assert (ending.automatic_teardown, ending.through, ending.grace_minutes) == ("terminate", "policy", 7)
    assert (ending.set_at, ending.ends_at, ending.self_stop_after_minutes) == (accepted.at, None, 20)
    set_at = f"{local(accepted.at, '%m-%d %H:%M')} {zone()}"
    wording(" ".join(auto_teardown_lines(ending)), set_at, "20m")
    await ending_house.watched(2)
    ending, _ = await shown()
    announced = ending_house.ctx.ledger.last(f"job/{job}", AutoTeardownAnnounced)
    assert ending is not None and announced is not None and ending.ends_at == announced.data.ends_at
    ends_at = f"{local(ending.ends_at)} {zone()}"
    assert ends_at in " ".join(auto_teardown_lines(ending))
    (waiting,) = what_waits(ending_house.ctx)
    assert (waiting.kind, waiting.expires_at) == ("ordered", ending.ends_at)
    (text,) = pending([waiting])
    wording(text, job)
    assert hold_machine(ending_house.ctx, job, "command line", "test") is HoldOutcome.HELD
    ending, _ = await shown()
    assert (
        ending is not None and ending.objected_at == ending_house.clock.now() and ending.self_stop_after_minutes is None
    )
    wording(" ".join(auto_teardown_lines(ending)), f"{local(ending.objected_at)} {zone()}")


async def test_a_job_without_an_order_shows_none(tmp_path: Path, processes: Processes, wording: Wording) -> None:
    house = Ordered(tmp_path / "home", processes, "off")
    checked = results.submitted(await submit(house.ctx, house.spec()))
    assert not checked.automatic_teardown
    wording(checked.message)
    reply = results.checked(await check(house.ctx, await house.started()))
    assert reply.ending is None and "ending" not in reply.short()


async def test_a_list_without_platform_calls_includes_the_cost_overnight(tmp_path: Path, processes: Processes) -> None:
    house = Ordered(tmp_path / "home", processes, "off")
    job = await house.proven()
    await house.asks(job)
    whole = lease_now(house.ctx, f"{job}-i1").cost or 0.0
    house.clock.advance(9 * 3600)
    house.ctx.seen.clear()  # as in a new process
    (waiting,) = what_waits(house.ctx)
    assert waiting.cost_usd is not None and waiting.price_usd_per_hour is not None
    assert waiting.cost_usd == pytest.approx(whole + 9 * waiting.price_usd_per_hour, rel=0.1) and whole < 2


async def test_a_timed_round_copies_a_job_that_has_just_ended(ending_house: Ordered) -> None:
    job = await ending_house.started()
    ending_house.backend.write(ending_house.handle(job), "model", b"weights")
    ending_house.backend.end(ending_house.handle(job))
    ending_house.clock.advance(MINUTE)
    await ending_house.watcher.once()
    assert copy_state(ending_house.ctx, job) is not Copy.NONE, (
        "at the next turn of the timer it would have billed for nothing"
    )


@pytest.mark.slow
async def test_a_machine_without_an_order_is_not_ended(tmp_path: Path, processes: Processes) -> None:
    house = Ordered(tmp_path / "home", processes, "off")
    job = await house.proven()
    await house.watched(60)
    assert house.bills() and house.ctx.ledger.last(f"job/{job}", AutoTeardownOrdered) is None


async def test_a_stop_order_stops_the_machine(tmp_path: Path, processes: Processes) -> None:
    house = Ordered(tmp_path / "home", processes, "stop")
    await house.proven()
    await house.watched(15)
    assert [str(r.state) for r in records(house.cloud)] == ["stopped"] and not house.bills()
    house.holds()


async def test_ending_a_stopped_machine_raises_no_came_back_alert(tmp_path: Path, processes: Processes) -> None:
    house = Ordered(tmp_path / "home", processes, "off")
    job = await house.proven()
    await house.until_off(await house.yes(await house.asks(job, "stop")))
    house.cloud.configure(faults=Faults(faults=(Fault(kind="stale", call="get", count=99, seconds=120),)))
    view = await house.yes(await house.asks(job, "terminate"))
    raised_kinds = await house.watched(4)
    assert "came_back" not in raised_kinds and not house.ctx.ledger.events(kind=LeaseCameBack)
    assert (await house.until_off(view)).record.state is Teardown.VERIFIED_STOPPED
    assert [str(truth.state) for truth in house.cloud.truths().values()] == ["gone"]


@pytest.mark.slow
async def test_an_objection_in_the_grace_keeps_the_machine(ending_house: Ordered) -> None:
    job = await ending_house.proven()
    await ending_house.watched(5)
    assert hold_machine(ending_house.ctx, job, "command line", "test") is HoldOutcome.HELD
    raised_kinds = await ending_house.watched(60)
    assert ending_house.bills() and "approval" in raised_kinds, "now a person is asked"
    assert hold_machine(ending_house.ctx, job, "command line", "test") is HoldOutcome.HELD, "it still stays"
    view = await ending_house.yes(await ending_house.asks(job))
    assert (await ending_house.until_off(view)).record.state is Teardown.VERIFIED_STOPPED
    assert hold_machine(ending_house.ctx, job, "command line", "test") is HoldOutcome.TOO_LATE


@pytest.mark.parametrize("effect", HoldOutcome)
def test_the_reply_to_an_objection_reports_its_effect(effect: HoldOutcome, wording: Wording) -> None:
    reply = approval.held("j1", effect)
    assert (reply.code, reply.ok) == (effect, effect is not HoldOutcome.TOO_LATE)
    wording(f"{reply.message} {manual_text(reply.next)}")


def now_orders(house: Ordered, verb: str) -> None:
    """Change the policy while the watch is running."""
    ending = house.ctx.policy.teardown.model_copy(update={"automatic": verb})
    house.ctx.policy = house.ctx.policy.model_copy(update={"teardown": ending})


@pytest.mark.slow
@pytest.mark.parametrize(("order", "now", "ends"), [
    ("terminate", "off", False), ("terminate", "stop", False), ("stop", "off", False), ("stop", "terminate", True),
])  # fmt: skip
@pytest.mark.parametrize("noticed", [False, True])
async def test_an_order_holds_while_the_policy_gives_it(
    tmp_path: Path, processes: Processes, order: str, now: str, *, ends: bool, noticed: bool
) -> None:
    house = Ordered(tmp_path / "home", processes, order)
    job = await house.proven()
    await house.watched(5 if noticed else 0)
    now_orders(house, now)
    raised_kinds = await house.watched(60)
    assert house.bills() is not ends
    assert bool({"approval", "finished_billing"} & set(raised_kinds)) is not ends, "else a person is asked"
    effect = hold_machine(house.ctx, job, "command line", "test")
    assert effect is (HoldOutcome.TOO_LATE if ends else HoldOutcome.HELD), "the order may come back with the policy"
    now_orders(house, order)
    await house.watched(60)
    assert house.bills() is not ends
    house.holds()


@pytest.mark.slow
async def test_an_order_withdrawn_while_the_watch_is_down_ends_nothing(ending_house: Ordered) -> None:
    """The watch dies between the recorded approval and the call; the policy changes before it restarts."""
    await ending_house.proven()
    kill = patch("gpuwarden.lifecycle.teardown.gate._execute", side_effect=KeyboardInterrupt)
    with kill, pytest.raises(KeyboardInterrupt):
        await ending_house.watched(15)
    (granted,) = [e for e in ending_house.ctx.ledger.events(kind=ApprovalGranted) if e.subject.startswith("teardown/")]
    assert granted.data.channel == "automatic_teardown"
    now_orders(ending_house, "off")
    await ending_house.watched(30)
    assert ending_house.bills()
    now_orders(ending_house, "terminate")
    await ending_house.watched(30)
    assert not ending_house.bills()
    ending_house.holds()


async def test_a_broken_policy_orders_nothing_and_hides_no_machine(ending_house: Ordered) -> None:
    await ending_house.proven()
    ordering = ending_house.ctx.source

    def broken() -> ActivePolicy:
        raise BadRequest("the policy file is not valid TOML", "Fix that line.")

    ending_house.ctx.source = broken
    for _ in range(30):
        ending_house.clock.advance(MINUTE)
        done = await ending_house.watcher.round()
        assert "not valid TOML" in done.trouble["watch"]
    assert ending_house.bills()
    ending_house.ctx.source = ordering
    await ending_house.watched(30)
    assert not ending_house.bills()


async def test_an_order_does_not_apply_to_jobs_accepted_earlier(tmp_path: Path, processes: Processes) -> None:
    house = Ordered(tmp_path / "home", processes, "off")
    await house.proven()
    house.ctx.policy = house.ctx.policy.model_copy(update={"teardown": TeardownPolicy(automatic="terminate")})
    await house.watched(30)
    assert house.bills()


# ----------------------------------------------------------------------------------------- decisions left to the user


@pytest.mark.slow
async def test_an_unproven_machine_is_not_ended(ending_house: Ordered) -> None:
    await ending_house.ended()
    await ending_house.watched(60)
    assert ending_house.bills()


@pytest.mark.slow
@pytest.mark.parametrize("state", ["failed", "canceled"])
async def test_only_a_successful_jobs_machine_is_ended(ending_house: Ordered, state: str) -> None:
    await ending_house.proven(state=state)
    await ending_house.watched(60)
    assert ending_house.bills()


@pytest.mark.slow
async def test_an_undeclared_file_keeps_the_machine(ending_house: Ordered) -> None:
    job = await ending_house.proven()
    ending_house.backend.write(ending_house.handle(job), "notes.txt", b"mine", "other")
    await ending_house.watched(60)
    assert ending_house.bills()


@pytest.mark.slow
async def test_an_output_moved_to_an_undeclared_folder_keeps_the_machine(ending_house: Ordered) -> None:
    job = await ending_house.ended(saved=False)
    ending_house.backend.write(ending_house.handle(job), "model.safetensors", b"weights", "out-final")
    await ending_house.watcher.copier.round()
    await ending_house.watched(60)
    assert ending_house.bills()


@pytest.mark.slow
async def test_a_write_during_the_grace_keeps_the_machine(ending_house: Ordered) -> None:
    job = await ending_house.proven()
    await ending_house.watched(8)
    ending_house.backend.write(ending_house.handle(job), "model", b"other weights")
    await ending_house.watched(30)
    assert ending_house.bills(), "the copy is not what is on the machine any more"


@pytest.mark.slow
async def test_a_local_copy_that_changed_is_no_longer_proof(ending_house: Ordered) -> None:
    job = await ending_house.proven()
    await ending_house.watched(5)
    copy = next((ending_house.ctx.home / "artifacts" / job).rglob("model"))
    copy.write_bytes(b"garbage")
    await ending_house.watched(30)
    assert ending_house.bills()


@pytest.mark.slow
async def test_a_users_teardown_request_is_not_taken_over(ending_house: Ordered) -> None:
    job = await ending_house.proven()
    view = await ending_house.asks(job, "stop")
    assert view.record.state is Teardown.AWAITING_HUMAN
    await ending_house.watched(30)
    assert ending_house.bills() and (await ending_house.asks(job, "stop")).record.id == view.record.id


@pytest.mark.slow
async def test_a_silent_machine_is_not_ended_until_it_answers_again(ending_house: Ordered) -> None:
    job = await ending_house.proven()
    await ending_house.watched(5)
    ending_house.backend.silent = True
    await ending_house.watched(30)
    assert ending_house.bills()
    ending_house.backend.silent = False
    raised_kinds = await ending_house.watched(1)
    assert ending_house.bills() or "ending_soon" not in raised_kinds
    await ending_house.watched(15)
    assert not ending_house.bills() and read_lease(
        ending_house.ctx.ledger, str(read_job(ending_house.ctx.ledger, job).lease)
    ).state is (Lease.STOPPED)


@pytest.mark.slow
async def test_the_grace_restarts_after_the_laptop_slept(ending_house: Ordered) -> None:
    await ending_house.proven()
    await ending_house.watched(2)
    ending_house.clock.advance(9 * 3600)
    raised_kinds = [a.kind for a in (await ending_house.watcher.round()).news if a.raised]
    assert ending_house.bills() and "ending_soon" in raised_kinds, "nobody could object while it slept"
    raised_kinds = await ending_house.watched(8)
    assert ending_house.bills()
    await ending_house.watched(6)
    assert not ending_house.bills()


async def test_a_clock_set_back_does_not_end_a_machine_early(ending_house: Ordered) -> None:
    await ending_house.proven()
    await ending_house.watched(5)
    ending_house.clock.advance(-3600)
    await ending_house.watched(9)
    assert ending_house.bills()


@pytest.mark.slow
async def test_two_watches_end_a_machine_once(ending_house: Ordered) -> None:
    await ending_house.proven()
    other = Watcher(ending_house.ctx)
    for _ in range(15):
        await ending_house.watched(1)
        await other.round()
    assert not ending_house.bills()
    ending_house.holds()


@pytest.mark.slow
async def test_an_end_that_has_no_effect_raises_an_alert(ending_house: Ordered) -> None:
    await ending_house.proven()
    ending_house.cloud.inject(records(ending_house.cloud)[0].id, Fault(kind="bills_when_stopped"))
    ending_house.cloud.configure(faults=Faults(faults=(Fault(kind="lost_request", call="terminate", count=1_000),)))
    raised_kinds = await ending_house.watched(40)
    assert ending_house.bills() and "unseen_end" in raised_kinds, "it was asked for, and it bills on"


# ------------------------------------------------------------------------------------------------ who may allow it


async def test_an_order_for_one_job_is_given_with_its_spending_approval(tmp_path: Path, processes: Processes) -> None:
    house = Ordered(tmp_path / "home", processes, "off")
    checked = await submit(house.ctx, house.spec())
    assert checked.receipt is not None
    issued = house.ctx.ledger.last(f"receipt/{checked.receipt}", ReceiptIssued)
    assert issued is not None
    grant_spending(house.ctx, issued, "terminal", "user test", "terminate")
    done = await submit(house.ctx, house.spec(), receipt=checked.receipt)
    assert done.job is not None
    ordered = house.ctx.ledger.last(f"job/{done.job.id}", AutoTeardownOrdered)
    assert ordered is not None
    assert (ordered.data.verb, ordered.data.through, ordered.data.by) == ("terminate", "approval", "user test")
    assert ordered.data.receipt == checked.receipt


async def test_the_terminal_explains_an_order_before_it_is_given(
    tmp_path: Path, processes: Processes, wording: Wording
) -> None:
    house = Ordered(tmp_path / "home", processes, "off", grace_minutes=7)
    checked = await submit(house.ctx, house.spec())
    assert checked.receipt and not checked.ask
    person = Typed("yes")
    assert (
        await approval.ask(house.ctx, checked.receipt, person, decided=approval.ApprovalDecisions("terminate"))
    ).code == "approved"
    before, told = person.shown.splitlines()[-3:-1]
    wording(f"{before}\n{told}", "terminate", "7", "gpuwarden hold")
    done = await submit(house.ctx, house.spec(), receipt=checked.receipt)
    assert done.job is not None
    ordered = house.ctx.ledger.last(f"job/{done.job.id}", AutoTeardownOrdered)
    assert ordered is not None and (ordered.data.through, ordered.data.grace_s) == ("approval", 420.0)
    with pytest.raises(Conflict) as refused:
        await approval.ask(house.ctx, checked.receipt, Typed("yes"), decided=approval.ApprovalDecisions("stop"))
    wording(refused)


async def test_answering_no_at_the_terminal_orders_nothing(
    tmp_path: Path, processes: Processes, wording: Wording
) -> None:
    house = Ordered(tmp_path / "home", processes, "off")
    checked = await submit(house.ctx, house.spec())
    with pytest.raises(Refused):
        await approval.ask(
            house.ctx, str(checked.receipt), Typed("no"), decided=approval.ApprovalDecisions("terminate")
        )
    assert order_for(house.ctx, str(checked.receipt)) is None
    view = await house.asks(await house.proven())
    with pytest.raises(BadRequest) as refused:
        await approval.ask(house.ctx, view.record.id, Typed("yes"), decided=approval.ApprovalDecisions("terminate"))
    wording(refused)


@pytest.mark.attack("agent", "gives automatic teardown through a channel that is not a terminal")
async def test_an_order_through_any_other_channel_is_ignored(tmp_path: Path, processes: Processes) -> None:
    house = Ordered(tmp_path / "home", processes, "off")
    checked = await submit(house.ctx, house.spec())
    issued = house.ctx.ledger.last(f"receipt/{checked.receipt}", ReceiptIssued)
    assert issued is not None
    for channel in ("elicitation", "rehearsal", "automatic_teardown", ""):
        grant_spending(house.ctx, issued, channel, "agent", "terminate")
        assert order_for(house.ctx, str(checked.receipt)) is None


@pytest.mark.attack("agent", "sets automatic teardown by a variable")
def test_an_environment_variable_never_sets_an_order(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text("", "utf-8")
    home = {"GPUWARDEN_HOME": str(tmp_path / "home"), "GPUWARDEN_POLICY": str(file)}
    names = [f.path for f in policy_fields() if f.path.startswith("teardown.")]
    assert len(names) == len(TeardownPolicy.model_fields)
    for path in names:
        name = f"GPUWARDEN_{path.upper().replace('.', '_')}"
        for value in ("terminate", "stop", "1", "9999"):
            config = load_config(home | {name: value})
            assert config.policy.teardown == TeardownPolicy(), f"{name}={value} was taken"
            assert [n.kind for n in config.notices] == ["file_only"]


@pytest.mark.attack("agent", "names another policy file that orders the end")
async def test_an_unrecorded_policy_orders_nothing(ending_house: Ordered) -> None:
    notice = Notice("other_policy", "/tmp/theirs.toml", "/home/me/policy.toml")
    doubted = replace(ending_house.ctx.active_policy, notices=(notice,))
    ending_house.ctx.source = lambda: doubted
    assert order_for(ending_house.ctx, "r1") is None


@pytest.mark.attack("agent", "submits a job or calls a tool with an argument that orders the end")
async def test_tool_arguments_and_job_fields_offer_no_order(ending_house: Ordered) -> None:
    from gpuwarden.interfaces.mcp.server import make_server

    tools = await make_server(ending_house.ctx).list_tools()
    words = {name for tool in tools for name in tool.input_schema.get("properties", {})}
    assert not {w for w in words if "proven" in w or "order" in w or "grace" in w or "approve" in w}
    assert not {name for name in type(ending_house.spec()).model_fields if "proven" in name or "order" in name}


async def test_an_announcement_without_its_alert_ends_nothing(ending_house: Ordered) -> None:
    await ending_house.proven()
    await ending_house.watched(1)
    with patch.object(ending_house.ctx.ledger, "alert", return_value=None):
        for _ in range(30):
            ending_house.clock.advance(60)
            await orders.AutoTeardowns(ending_house.ctx).round()
    assert ending_house.bills(), "nobody was warned, so nobody could object"


async def test_an_objection_for_an_unknown_job_is_an_error(ending_house: Ordered) -> None:
    with pytest.raises(NotFound):
        hold_machine(ending_house.ctx, "j-nothing", "command line", "test")


async def test_an_order_approves_no_other_facts(ending_house: Ordered, wording: Wording) -> None:
    from gpuwarden.lifecycle.teardown.gate import approve_by_order

    job = await ending_house.proven()
    view = await ending_house.asks(job)
    order = AutoTeardownOrdered(verb="terminate", grace_s=0, through="policy")
    with pytest.raises(Conflict) as refused:
        await approve_by_order(ending_house.ctx, view.record.id, "sha256:other", order)
    wording(refused, view.record.id)
    assert ending_house.bills()


# ---------------------------------------------------------------------------------------------------- automatic copies


async def test_a_successful_job_is_copied_before_any_request(ending_house: Ordered) -> None:
    job = await ending_house.ended()
    await ending_house.watcher.copier.round()
    assert (ending_house.ctx.home / "artifacts" / job / "out" / "model").read_bytes() == b"weights"
    assert ending_house.watcher.copier.trouble == {}


async def test_a_copy_that_is_being_verified_is_not_verified_twice(ending_house: Ordered) -> None:
    job = await ending_house.ended()
    ctx, copier = ending_house.ctx, ending_house.watcher.copier
    await pull(ctx, job)
    held = ctx.ledger.lock(f"verify-{job}")  # as `verify_job` holds it in another process
    assert held is not None
    await copier.round()
    assert copy_state(ctx, job) is Copy.UNVERIFIED and copier.trouble == {}
    held.release()
    ending_house.clock.advance(60)
    await copier.round()
    assert copy_state(ctx, job) is not Copy.UNVERIFIED


async def test_outputs_above_the_disk_limit_are_not_copied_but_reported(tmp_path: Path, processes: Processes) -> None:
    house = Ordered(tmp_path / "home", processes, background_gb=0.000_000_001)
    job = await house.ended()
    await house.watcher.copier.round()
    assert "background_gb" in house.watcher.copier.trouble[job]
    assert not (house.ctx.home / "artifacts" / job).exists()
    house.ctx.policy = WEALTHY.model_copy(update={"teardown": TeardownPolicy(background_gb=0)})
    await house.watcher.copier.round()
    assert not (house.ctx.home / "artifacts" / job).exists(), "0 copies nothing"


async def test_a_failing_copy_is_retried_with_backoff(ending_house: Ordered) -> None:
    job = await ending_house.ended()
    ending_house.backend.silent = True
    asked = 0
    listed = PretendBackend.list_files

    async def counted(self: PretendBackend, *args: object) -> object:
        nonlocal asked
        asked += 1
        return await listed(self, *args)  # type: ignore[arg-type]

    with patch.object(PretendBackend, "list_files", counted):
        for _ in range(60):
            ending_house.clock.advance(60)
            await ending_house.watcher.copier.round()
    assert 4 <= asked <= 8 and job in ending_house.watcher.copier.trouble


# -------------------------------------------------------------------------------------------- waiting for the user


@pytest.mark.parametrize("verb", ["terminate", "stop"])
@pytest.mark.prove
async def test_a_pending_approval_raises_an_alert_at_once_and_repeatedly(
    tmp_path: Path, processes: Processes, verb: Verb, wording: Wording
) -> None:
    house = Ordered(tmp_path / "home", processes, "off")
    job = await house.proven()
    view = await house.asks(job, verb)
    assert view.record.state is Teardown.AWAITING_HUMAN
    done = await house.watcher.round()
    (alert,) = [a for a in done.news if a.kind == "approval"]
    wording(alert.text, verb, "$")
    assert [s.parameters["ticket"] for s in alert.next_steps] == [view.record.id]
    raised_kinds = await house.watched(60 * 24, step_s=300)
    assert 4 <= raised_kinds.count("approval") <= 6, "10, 30, 90, 270 and 810 minutes"


async def test_spending_that_waits_for_approval_raises_an_alert(
    tmp_path: Path, processes: Processes, wording: Wording
) -> None:
    house = Ordered(tmp_path / "home", processes, "off")
    house.ctx.policy = house.ctx.policy.model_copy(update={"rehearsal_caps": Caps()})
    checked = await submit(house.ctx, house.spec())
    assert checked.ask
    (found,) = waiting_for_approval(house.ctx)
    assert found.next_steps[0].parameters["ticket"] == checked.receipt
    wording(found.text)


async def test_a_copy_in_a_second_folder_does_not_void_the_first_copy(ending_house: Ordered, tmp_path: Path) -> None:
    job = await ending_house.proven()
    before = await ending_house.asks(job)
    await pull(ending_house.ctx, job, tmp_path / "elsewhere")
    after = await ending_house.asks(job)
    assert (after.record.id, after.record.digest) == (before.record.id, before.record.digest)
    assert after.record.state is Teardown.AWAITING_HUMAN


async def test_a_changed_first_copy_no_longer_counts(ending_house: Ordered, tmp_path: Path) -> None:
    job = await ending_house.proven()
    await pull(ending_house.ctx, job, tmp_path / "elsewhere")
    next((ending_house.ctx.home / "artifacts" / job).rglob("model")).write_bytes(b"garbage")
    assert (await ending_house.asks(job)).record.state is Teardown.BLOCKED
    await prove(ending_house.ctx, job)
    assert (await ending_house.asks(job)).record.state is Teardown.AWAITING_HUMAN
