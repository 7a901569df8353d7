"""The notice of automatic teardown counts from its delivery and is repeated after the watch was away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from doors import environment, policy_file
from gpuwarden.core.errors import BadRequest
from gpuwarden.core.guidance import Action
from gpuwarden.core.states import Job, Teardown
from gpuwarden.interfaces.cli import main
from gpuwarden.interfaces.cli.approval import grant_spending
from gpuwarden.ledger.events import (
    AlertRaised,
    AlertSent,
    AlertUnsent,
    AutoTeardownAnnounced,
    ReceiptIssued,
    VerbIntent,
)
from gpuwarden.lifecycle.execution.situation import following
from gpuwarden.lifecycle.leases.auto_teardown import WATCHED_S, automatic_teardown, notices
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.lifecycle.monitoring.overview import cached_overview
from gpuwarden.lifecycle.monitoring.waiting import what_waits
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.notify import ENDING_SOON, AlertSender
from gpuwarden.lifecycle.records import read_job
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.lifecycle.teardown import gate
from gpuwarden.policy_record import Notice
from orders_kit import CALLED, MINUTE, Ordered, Phone
from pretend_machines import Processes
from wording import Wording

pytestmark = pytest.mark.anyio


@pytest.fixture
def house(tmp_path: Path, processes: Processes, phone: Phone) -> Ordered:
    """Return an installation with automatic teardown whose alerts go to the phone."""
    made = Ordered(tmp_path / "home", processes)
    made.ctx.policy = made.ctx.policy.model_copy(update={"watch": CALLED})
    return made


def restarted(house: Ordered) -> None:
    """Replace the watch with a new process."""
    house.watcher = Watcher(house.ctx)


async def test_the_grace_begins_when_the_notice_is_delivered(house: Ordered, phone: Phone, wording: Wording) -> None:
    job = await house.proven()
    phone.down = True
    await house.watched(30)
    assert house.bills() and not phone.taken
    (waiting,) = what_waits(house.ctx)
    assert (waiting.kind, waiting.expires_at) == ("ordered", None), "no end is due before the notice arrives"
    wording(house.ctx.phrase(following(house.ctx, read_job(house.ctx.ledger, job))))
    assert "finished_billing" in {e.data.condition for e in house.ctx.ledger.standing_alerts()}
    phone.down = False
    await house.watched(11)
    (arrived,) = phone.notices()
    assert house.bills() and what_waits(house.ctx)[0].expires_at == arrived + 10 * MINUTE
    await house.watched(15)
    assert not house.bills() and len(phone.notices()) == 1


async def test_the_next_watch_sends_a_recorded_but_unsent_notice(house: Ordered, phone: Phone) -> None:
    await house.proven()
    with patch.object(AlertSender, "round", side_effect=RuntimeError("killed")):
        await house.watched(1)
    assert house.ctx.ledger.events(kind=AlertRaised) and not phone.taken
    restarted(house)
    await house.watched(1)
    assert len(phone.notices()) == 1
    await house.watched(9)
    assert house.bills(), "ten minutes after the delivery, not after the announcement"
    await house.watched(4)
    assert not house.bills()


async def test_a_failing_channel_is_retried_with_backoff(house: Ordered, phone: Phone) -> None:
    await house.proven()
    asked: list[float] = []

    async def refuse(_ctx: object, _alert: object) -> str:
        asked.append(house.clock.now())
        return "no"

    with patch("gpuwarden.lifecycle.notify._desktop", refuse):
        await house.watched(60)
    unsent = house.ctx.ledger.events(kind=AlertUnsent)
    assert 6 <= len(asked) <= 14 and len(unsent) == len({e.data.alert for e in unsent}) == 2
    assert house.watcher.alert_sender.trouble == {"desktop": "no"}
    await house.watched(11)
    assert {alert.kind for alert in phone.taken} == {ENDING_SOON, "finished_billing"}
    assert house.watcher.alert_sender.trouble == {}
    sent = house.ctx.ledger.events(kind=AlertSent)
    assert len(sent) == len(phone.taken), "each is sent once"


async def test_an_alert_resolved_before_delivery_is_not_sent(house: Ordered, phone: Phone) -> None:
    job = await house.proven()
    phone.down = True
    await house.watched(30)
    await house.until_off(await house.yes(await house.asks(job)))
    phone.down = False
    await house.watched(15)
    assert phone.taken == []


@pytest.mark.parametrize("how", ["slept", "restarted"])
async def test_a_watch_away_longer_than_the_grace_repeats_the_notice(house: Ordered, phone: Phone, how: str) -> None:
    await house.proven()
    await house.watched(2)
    house.clock.advance(11 * MINUTE)
    if how == "restarted":
        restarted(house)
    await house.watched(1)
    assert house.bills() and len(phone.notices()) == 2
    await house.watched(9)
    assert house.bills()
    await house.watched(4)
    assert not house.bills() and len(phone.notices()) == 2


async def test_an_end_delayed_by_every_gap_is_overdue(house: Ordered, phone: Phone) -> None:
    """A laptop sleeps repeatedly, or a timer runs the watch less often than the grace period."""
    await house.proven()
    raised: list[str] = []
    for _ in range(4):
        raised += await house.watched(1)
        house.clock.advance(15 * MINUTE)
    assert house.bills() and raised.count("ending_soon") == 4 and raised.count("finished_billing") == 1


async def test_a_watch_killed_right_after_a_gap_remembers_the_gap(house: Ordered, phone: Phone) -> None:
    """The first round after the gap could not reach the machine, so it announced nothing."""
    await house.proven()
    await house.watched(2)
    house.clock.advance(11 * MINUTE)
    restarted(house)
    house.backend.silent = True
    await house.watched(1)
    house.backend.silent = False
    restarted(house)
    await house.watched(1)
    assert house.bills() and len(phone.notices()) == 2


async def test_a_watch_that_died_before_its_teardown_call_repeats_the_notice(house: Ordered, phone: Phone) -> None:
    job = await house.proven()
    with patch.object(gate, "_finish", side_effect=RuntimeError("killed")):
        await house.watched(13)
    (ticket,) = house.ctx.ledger.subjects("teardown", Teardown.EXECUTING, job=job)
    house.clock.advance(8 * 60 * MINUTE)
    restarted(house)
    await house.watched(1)
    assert not house.ctx.ledger.events(kind=VerbIntent) and len(phone.notices()) == 2
    assert house.ctx.ledger.state(ticket) == Teardown.AWAITING_HUMAN
    await house.watched(14)
    assert not house.bills()


async def test_a_watch_that_is_restarted_soon_keeps_the_notice(house: Ordered, phone: Phone) -> None:
    """A timer runs the watch every few minutes, each time in a new process."""
    await house.proven()
    for _ in range(4):
        restarted(house)
        await house.watched(5, step_s=300)
    assert not house.bills() and len(phone.notices()) == 1


async def test_a_watch_without_its_state_file_repeats_the_notice(house: Ordered, phone: Phone) -> None:
    await house.proven()
    await house.watched(5)
    (house.ctx.home / "watch.json").unlink()
    restarted(house)
    await house.watched(8)
    assert house.bills() and len(phone.notices()) == 2


# ------------------------------------------------------------------------------------------------------ without a watch


async def test_automatic_teardown_without_a_watch_shows_a_warning(house: Ordered, wording: Wording) -> None:
    (first,) = notices(house.ctx)
    (step,) = first.next_steps
    assert (first.kind, step.action, dict(step.parameters)) == ("unwatched", Action.WATCH, {"install": True})
    assert not first.question, "it is a warning, and no reason to ask about a spending"
    wording(first.text)
    await house.watcher.round()
    assert notices(house.ctx) == ()
    house.clock.advance(WATCHED_S + 1)
    assert [n.kind for n in notices(house.ctx)] == ["unwatched"]


async def test_a_job_order_without_a_watch_shows_a_warning(tmp_path: Path, processes: Processes) -> None:
    house = Ordered(tmp_path / "home", processes, "off")
    await house.started()
    assert notices(house.ctx) == ()
    checked = await submit(house.ctx, house.spec(name="other", command=("other",)))
    issued = house.ctx.ledger.last(f"receipt/{checked.receipt}", ReceiptIssued)
    assert issued is not None
    grant_spending(house.ctx, issued, "terminal", "user test", "terminate")
    await submit(house.ctx, house.spec(name="other", command=("other",)), receipt=checked.receipt)
    assert [n.kind for n in notices(house.ctx)] == ["unwatched"]


@pytest.mark.parametrize("look", ["check", "status"])
@pytest.mark.parametrize("announced", [True, False])
async def test_check_and_status_raise_the_alert_for_an_overdue_end(
    house: Ordered, phone: Phone, look: str, announced: bool
) -> None:
    job = await house.proven()
    if announced:
        await house.watched(2)
    house.clock.advance(5 * MINUTE)

    async def looks() -> set[str]:
        if look == "check":
            await check(house.ctx, job)
        else:
            cached_overview(house.ctx, {})
        return {e.data.condition for e in house.ctx.ledger.standing_alerts()}

    assert "finished_billing" not in await looks(), "it is not overdue"
    house.clock.advance(20 * MINUTE)
    assert "finished_billing" in await looks()
    raised = len(house.ctx.ledger.events(kind=AlertRaised))
    await looks()
    assert len(house.ctx.ledger.events(kind=AlertRaised)) == raised, "it is raised once"
    steps = following(house.ctx, read_job(house.ctx.ledger, job))
    assert Action.WATCH in {step.action for step in steps}
    await house.watched(1)
    assert "finished_billing" in {alert.kind for alert in phone.taken}, "the next watch sends it on"


async def test_a_broken_policy_does_not_hide_a_job_with_its_own_order(house: Ordered) -> None:
    job = await house.proven()
    order = automatic_teardown(house.ctx, job)
    assert order is not None
    house.ctx.ledger.add(f"job/{job}", order.model_copy(update={"through": "approval"}))
    await house.watched(2)
    house.clock.advance(30 * MINUTE)
    house.ctx.source = Mock(side_effect=BadRequest("the policy file is not valid TOML", "Fix that line."))
    assert (await check(house.ctx, job)).job.state is Job.SUCCEEDED
    (waiting,) = what_waits(house.ctx)
    assert (waiting.kind, waiting.expires_at) == ("ordered", None)


def test_status_and_doctor_begin_with_the_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment(tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    with policy_file(tmp_path / "home").open("a") as file:
        file.write('[teardown]\nautomatic = "terminate"\n')
    warning = Notice("unwatched", "", "").text
    for command in ("status", "doctor"):
        main.run([command])
        shown = capsys.readouterr().out
        assert shown.startswith("warning ") and shown[8:].startswith(warning), shown
        assert "gpuwarden watch --install" in shown.splitlines()[0]
        main.run([command, "--json"])
        assert json.loads(capsys.readouterr().out)["warnings"][0].startswith(warning)
    main.run(["watch", "--once"])
    capsys.readouterr()
    main.run(["status"])
    assert warning not in capsys.readouterr().out


async def test_reading_a_read_only_ledger_records_nothing(house: Ordered) -> None:
    await house.proven()
    house.clock.advance(60 * MINUTE)
    with patch.object(type(house.ctx.ledger), "readable_only", "no room"):
        assert cached_overview(house.ctx, {}).running is not None
    assert house.ctx.ledger.last(f"job/{await _only(house)}", AutoTeardownAnnounced) is None
    assert not house.ctx.ledger.events(kind=AlertRaised)


async def _only(house: Ordered) -> Any:
    (subject,) = house.ctx.ledger.subjects("job")
    return subject.removeprefix("job/")
