"""Jobs with alternative platforms: each is checked and quoted, and one approval covers the whole list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gpuwarden.core.errors import BadRequest, Conflict, Refused
from gpuwarden.core.fan_out import FanOutPlan, cells_of
from gpuwarden.core.models import Choice, JobSpec, Resources
from gpuwarden.core.policy import Caps, Policy
from gpuwarden.core.states import Job
from gpuwarden.interfaces.cli.approval import grant_spending, spending_facts
from gpuwarden.interfaces.results import submitted
from gpuwarden.ledger.events import CreateIntent, JobAccepted, JobMovedOn, ReceiptIssued
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution import provisioning
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.lifecycle.monitoring.inventory import sweep
from gpuwarden.lifecycle.records import JobRecord, read_job
from gpuwarden.lifecycle.submission.submit import NeedsApproval, submit
from gpuwarden.rehearsal.cloud import Cloud
from gpuwarden.rehearsal.model import Fault, Faults
from lifecycle_kit import FAST, clock_of_today, open_house, rent_cloud
from wording import Wording

pytestmark = pytest.mark.anyio
FIRST, SECOND, THIRD = "rehearsal/vastai", "rehearsal/runpod", "rehearsal/lambda"
PRICES = {FIRST: 1.0, SECOND: 3.0, THIRD: 2.0}


@pytest.fixture
def ctx(tmp_path: Path) -> Iterator[Context]:
    ctx = open_house(tmp_path / "house", clock_of_today())
    yield ctx
    ctx.ledger.close()


@pytest.fixture
def clouds(ctx: Context) -> dict[str, Cloud]:
    return {p: rent_cloud(ctx, platform=p, settings=priced(usd)) for p, usd in PRICES.items()}


def priced(usd: float) -> Any:
    return FAST.model_copy(update={"catalog": {}, "default_usd_per_hour": usd})


def spec(*alternatives: str, **changes: Any) -> JobSpec:
    values = {"platform": FIRST, "command": ("true",), "outputs": ("out",), "timeout_s": 3600, "max_cost_usd": 50.0}
    return JobSpec.model_validate({**values, "alternatives": alternatives, **changes})


def issued(ctx: Context, receipt: str | None) -> ReceiptIssued:
    found = ctx.ledger.last(f"receipt/{receipt}", ReceiptIssued)
    assert found is not None
    return found.data


async def test_the_gate_quotes_every_choice_and_the_receipt_keeps_all_quotes(
    ctx: Context, clouds: dict[str, Cloud]
) -> None:
    done = await submit(ctx, spec(SECOND, THIRD))
    assert [(c.platform, c.price, c.worst_cost) for c in done.choices] == [
        (FIRST, 1.0, 1.0), (SECOND, 3.0, 3.0), (THIRD, 2.0, 2.0),
    ]  # fmt: skip
    assert (done.price, done.worst_cost_usd) == (3.0, 3.0), "the highest of all"
    kept = issued(ctx, done.receipt)
    assert (kept.choices, kept.price, kept.worst_cost) == (done.choices, 3.0, 3.0)
    reply = submitted(done).model_dump()
    assert [(c["platform"], c["price_usd_per_hour"]) for c in reply["choices"]] == list(PRICES.items())


async def test_the_approval_covers_the_most_expensive_choice(ctx: Context, clouds: dict[str, Cloud]) -> None:
    """The caps allow the first platform but not the second: the approval must cover the most expensive one."""
    ctx.policy = Policy(rehearsal_caps=Caps(per_job_usd=2.5, per_day_usd=99, per_instance_usd=99))
    alone = await submit(ctx, spec())
    assert alone.ask == ""
    done = await submit(ctx, spec(SECOND))
    assert "$3.00" in done.ask and "per_job_usd" in done.ask
    with pytest.raises(NeedsApproval):
        await submit(ctx, spec(SECOND), receipt=done.receipt)
    shown = "\n".join(spending_facts(issued(ctx, done.receipt), None))
    assert FIRST in shown and SECOND in shown and "$1.00" in shown and "$3.00" in shown
    event = ctx.ledger.last(f"receipt/{done.receipt}", ReceiptIssued)
    assert event is not None
    grant_spending(ctx, event, "terminal", "test")
    launched = await submit(ctx, spec(SECOND), receipt=done.receipt)
    assert launched.job is not None and launched.job.spec.platform == FIRST


async def test_no_capacity_moves_the_job_on_at_the_next_choices_price(ctx: Context, clouds: dict[str, Cloud]) -> None:
    done = await submit(ctx, spec(SECOND, THIRD))
    for platform in (FIRST, SECOND):
        clouds[platform].configure(priced(PRICES[platform]).model_copy(update={"capacity": 0}))
    launched = await submit(ctx, spec(SECOND, THIRD), receipt=done.receipt)
    assert launched.job is not None
    job = launched.job
    assert (job.spec.platform, job.price, job.worst_cost) == (THIRD, 2.0, 2.0)
    tried = [(e.subject, e.data.platform) for e in ctx.ledger.events(kind=CreateIntent)]
    assert tried == [(f"lease/{job.id}-i{n}", p) for n, p in enumerate((FIRST, SECOND, THIRD), 1)]
    moves = [(e.data.lease, e.data.platform) for e in ctx.ledger.events(kind=JobMovedOn)]
    assert moves == [(f"{job.id}-i1", SECOND), (f"{job.id}-i2", THIRD)]
    assert all(e.data.why for e in ctx.ledger.events(kind=JobMovedOn))


async def test_a_list_without_capacity_anywhere_fails_and_rents_nothing(ctx: Context, clouds: dict[str, Cloud]) -> None:
    done = await submit(ctx, spec(SECOND))
    for platform, cloud in clouds.items():
        cloud.configure(priced(PRICES[platform]).model_copy(update={"capacity": 0}))
    launched = await submit(ctx, spec(SECOND), receipt=done.receipt)
    assert launched.job is not None and launched.job.state is Job.FAILED
    assert not any(cloud.store.state().records for cloud in clouds.values())


async def test_an_uncertain_refusal_is_settled_before_the_next_order(ctx: Context, clouds: dict[str, Cloud]) -> None:
    """The order was sent and refused: a machine may exist until two polls, `settle_s` apart, find none."""
    done = await submit(ctx, spec(SECOND))
    clouds[FIRST].configure(faults=Faults(faults=(Fault(kind="no_capacity", call="create", count=9),)))
    launched = await submit(ctx, spec(SECOND), receipt=done.receipt)
    assert launched.job is not None
    assert (launched.job.spec.platform, launched.job.state) == (FIRST, Job.PROVISIONING)
    assert not ctx.ledger.events(kind=JobMovedOn)
    await ctx.clock.sleep(clouds[FIRST].settings.settle_s + 1)
    seen = await check(ctx, launched.job.id)
    assert (seen.job.spec.platform, seen.job.generation) == (SECOND, 2)


@pytest.mark.slow
async def test_a_machine_found_before_the_next_order_is_adopted(
    ctx: Context, clouds: dict[str, Cloud], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first platform refused but did rent; its list lags, and gpuwarden exits before it orders from the second."""
    done, rent = await submit(ctx, spec(SECOND)), provisioning.rent

    async def ends(ctx: Context, job: JobRecord) -> bool:
        if job.choice:
            raise KeyboardInterrupt
        return await rent(ctx, job)

    clouds[FIRST].configure(priced(1.0).model_copy(update={"capacity": 0}))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(provisioning, "rent", ends)
        await submit(ctx, spec(SECOND), receipt=done.receipt)
    (moved,) = ctx.ledger.events(kind=JobMovedOn)
    job_id = moved.subject.removeprefix("job/")
    assert read_job(ctx.ledger, job_id).spec.platform == SECOND
    clouds[FIRST].configure(priced(1.0))
    await ctx.provider(FIRST).create(Resources(), moved.data.lease)
    await sweep(ctx)
    job = read_job(ctx.ledger, job_id)
    assert (job.spec.platform, job.price, job.worst_cost) == (FIRST, 1.0, 1.0), "the machine is of the first choice"
    for _ in range(3):
        await ctx.clock.sleep(clouds[FIRST].settings.boot_s + 1)
        seen = await check(ctx, job_id)
    assert (seen.job.spec.platform, seen.job.lease, seen.job.attempt) == (FIRST, moved.data.lease, 1)
    assert [e.data.platform for e in ctx.ledger.events(kind=CreateIntent)] == [FIRST], "and no second one is rented"


async def test_a_price_rise_after_the_check_voids_the_receipt(ctx: Context, clouds: dict[str, Cloud]) -> None:
    """A platform's price rises between receipt and order: the receipt is stale, and nothing is ordered."""
    done = await submit(ctx, spec(SECOND))
    clouds[SECOND].configure(priced(9.0))
    with pytest.raises(Conflict, match=r"\$3.00.*\$9.00"):
        await submit(ctx, spec(SECOND), receipt=done.receipt)
    assert not ctx.ledger.events(kind=JobAccepted)


async def test_a_platform_that_fails_the_gate_is_left_out(ctx: Context, clouds: dict[str, Cloud]) -> None:
    """Lambda offers no interruptible machines; the policy has no other reason to refuse the job."""
    wanted = spec(THIRD, interruptible=True)
    done = await submit(ctx, wanted)
    assert [c.platform for c in done.choices] == [FIRST]
    left_out = {f.rule: f.blocks for f in done.findings if THIRD in f.message}
    assert left_out == {"PF-OUT-002": False, "PF-SPOT-001": False}
    first_gone = spec(FIRST, platform=THIRD, interruptible=True)
    done = await submit(ctx, first_gone)
    assert [c.platform for c in done.choices] == [FIRST]
    launched = await submit(ctx, first_gone, receipt=done.receipt)
    assert launched.job is not None and launched.job.spec.platform == FIRST


async def test_a_list_with_no_usable_platform_is_refused_once(ctx: Context, clouds: dict[str, Cloud]) -> None:
    with pytest.raises(Refused) as refused:
        await submit(ctx, spec(SECOND, outputs=("/nowhere/that/lasts",), platform=FIRST, timeout_s=None))
    assert any(f.blocks for f in refused.value.findings)
    assert len(ctx.ledger.events(kind="job.refused")) == 1


async def test_a_secret_in_one_choice_refuses_the_list(ctx: Context, clouds: dict[str, Cloud]) -> None:
    with pytest.raises(Refused) as refused:
        await submit(ctx, spec(f"{SECOND}:hf_{'a1B2' * 9}"))
    assert "PF-SEC-001" in {f.rule for f in refused.value.findings}


async def test_the_same_call_twice_is_one_job(ctx: Context, clouds: dict[str, Cloud]) -> None:
    clouds[FIRST].configure(priced(PRICES[FIRST]).model_copy(update={"boot_s": 3600.0}))
    done = await submit(ctx, spec(SECOND))
    one = await submit(ctx, spec(SECOND), receipt=done.receipt)
    again = await submit(ctx, spec(SECOND), receipt=done.receipt)
    assert one.job is not None and again.job is not None and again.adopted and one.job.id == again.job.id
    twin = await submit(ctx, spec(SECOND))
    assert twin.adopted and twin.job is not None and twin.job.id == one.job.id
    with pytest.raises(Conflict):
        await submit(ctx, spec(THIRD), receipt=done.receipt)


async def test_only_rented_platforms_can_be_alternatives(
    ctx: Context, clouds: dict[str, Cloud], wording: Wording
) -> None:
    with pytest.raises(BadRequest) as refused:
        await submit(ctx, spec(platform="runpod", alternatives=("local",)))
    wording(refused, "local")


@pytest.mark.parametrize(
    "alternatives",
    [
        (FIRST,), (SECOND, SECOND), ("runpod",), (f"{SECOND}:",), ("Run Pod",), ("",), (":H100",),
        tuple(f"rehearsal/p{n}" for n in range(8)),
    ],
)  # fmt: skip
def test_an_invalid_list_of_alternatives_is_refused(alternatives: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError):
        spec(*alternatives)


def test_an_alternative_may_name_another_gpu() -> None:
    listed = spec(f"{FIRST}:A100", SECOND, gpu="H100").choices
    assert [(s.platform, s.gpu) for s in listed] == [(FIRST, "H100"), (FIRST, "A100"), (SECOND, "H100")]


def test_a_job_without_alternatives_omits_the_field_from_its_digest() -> None:
    assert "alternatives" not in spec().model_dump()
    assert Choice(platform=FIRST).gpu is None


def test_a_fan_out_has_one_platform(wording: Wording) -> None:
    base = JobSpec(platform=FIRST, script="print(1)", alternatives=(SECOND,))
    with pytest.raises(ValidationError) as refused:
        FanOutPlan(base=base, cells=cells_of(base, [{"lr": "1"}]))
    wording(refused.value.errors()[0]["ctx"]["error"])


async def test_a_job_record_shows_its_current_platform(ctx: Context, clouds: dict[str, Cloud]) -> None:
    """Until a machine is rented, the worst cost is that of the most expensive platform on the list."""
    done = await submit(ctx, spec(SECOND, THIRD))
    clouds[FIRST].configure(faults=Faults(faults=(Fault(kind="lost_request", call="create", count=9),)))
    launched = await submit(ctx, spec(SECOND, THIRD), receipt=done.receipt)
    assert launched.job is not None
    job = read_job(ctx.ledger, launched.job.id)
    assert (job.state, job.spec.platform, job.price, job.worst_cost) == (Job.PROVISIONING, FIRST, 1.0, 3.0)
