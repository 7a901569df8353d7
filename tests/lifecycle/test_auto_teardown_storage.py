"""Storage that outlives a machine: its cost is accepted with the job, and it is named before and after teardown."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from gpuwarden.core.models import Verb
from gpuwarden.core.next_step import ENDED
from gpuwarden.interfaces import results
from gpuwarden.interfaces.cli.approval import spending_facts
from gpuwarden.interfaces.results.overview import status_of
from gpuwarden.ledger.events import AlertRaised, ApprovalGranted, AutoTeardownOrdered, ReceiptIssued
from gpuwarden.lifecycle.execution.situation import following
from gpuwarden.lifecycle.monitoring.overview import cached_overview
from gpuwarden.lifecycle.records import read_job
from gpuwarden.lifecycle.submission.submit import submit
from lifecycle_kit import records
from orders_kit import Ordered
from pretend_machines import Processes
from wording import Wording

pytestmark = pytest.mark.anyio
VOLUME = "network-volume (/workspace)"


@pytest.fixture
def house(tmp_path: Path, processes: Processes) -> Ordered:
    """Return an installation that rents on RunPod, where a network volume is billed until it is deleted."""
    made = Ordered(tmp_path / "home", processes)
    made.opens(platform="rehearsal/runpod")
    return made


async def test_submit_shows_the_price_of_storage_that_stays_billed(house: Ordered, wording: Wording) -> None:
    checked = await submit(house.ctx, house.spec(durable_storage=True))
    reply = results.submitted(checked)
    assert (reply.storage, reply.storage_usd_per_hour, reply.automatic_teardown) == ([VOLUME], 0.02, "terminate")
    wording(reply.message)
    issued = house.ctx.ledger.last(f"receipt/{checked.receipt}", ReceiptIssued)
    assert issued is not None and any(VOLUME in text for text in spending_facts(issued.data, "terminate"))
    launched = await submit(house.ctx, house.spec(durable_storage=True), receipt=checked.receipt)
    assert launched.job is not None
    wording(results.submitted(launched).message, launched.job.id)
    ordered = house.ctx.ledger.last(f"job/{launched.job.id}", AutoTeardownOrdered)
    assert ordered is not None and ordered.data.storage == (VOLUME,)
    without = results.submitted(await submit(house.ctx, house.spec(name="other", command=("other",))))
    assert without.storage == []


async def test_an_adopted_job_is_shown_with_its_order(house: Ordered, wording: Wording) -> None:
    job = await house.started()
    again = await submit(house.ctx, house.spec())
    assert again.adopted and again.job is not None and again.job.id == job and again.ordered == "terminate"
    wording(results.submitted(again).message, job)


@pytest.mark.slow
async def test_the_machine_is_ended_and_its_storage_reported_as_billed(house: Ordered, wording: Wording) -> None:
    job = await house.proven(durable_storage=True)
    await house.watched(15)
    assert not house.bills() and [str(r.state) for r in records(house.cloud)] == ["gone"]
    (notice,) = (e.data.text for e in house.ctx.ledger.events(kind=AlertRaised) if e.data.condition == "ending_soon")
    wording(notice, job)
    (granted,) = (e for e in house.ctx.ledger.events(kind=ApprovalGranted) if e.subject.startswith("teardown/"))
    (finding,) = granted.data.findings
    assert finding.rule == "TD-VERB-002" and VOLUME in finding.message
    wording(house.ctx.phrase(finding.fix))
    steps = following(house.ctx, read_job(house.ctx.ledger, job))
    assert ENDED not in house.ctx.phrase(steps)
    wording(house.ctx.phrase(steps))
    status = status_of(cached_overview(house.ctx, {}))
    assert [line.storage for line in status.ended] == [[VOLUME]]


@pytest.mark.slow
async def test_storage_that_was_not_shown_at_submit_needs_approval(house: Ordered) -> None:
    """The job was submitted with an older version, or its profile gained the storage later."""
    with patch("gpuwarden.lifecycle.submission.submit.storage_after", return_value=()):
        await house.proven(durable_storage=True)
    raised_kinds = await house.watched(60)
    assert house.bills() and "approval" in raised_kinds


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["stop", "terminate"])
async def test_a_teardown_reply_never_denies_billing_while_storage_is_billed(
    tmp_path: Path, processes: Processes, verb: Verb
) -> None:
    house = Ordered(tmp_path / "home", processes, "off")
    house.opens(platform="rehearsal/runpod")
    job = await house.proven(durable_storage=True)
    asked = await house.asks(job, verb)
    assert [f.rule for f in asked.findings] == ["TD-VERB-002"]
    reply = results.torn_down(await house.until_off(await house.yes(asked)))
    text = f"{reply.message} {house.ctx.phrase(reply.next)}"
    assert "nothing of it" not in text.lower() and "bill" in text
