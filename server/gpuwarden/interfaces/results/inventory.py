"""Reply to list_instances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer

from gpuwarden.core.guidance import steps
from gpuwarden.core.models import Unknown
from gpuwarden.core.plural import counted
from gpuwarden.core.sanitize import named, quoted
from gpuwarden.interfaces.results.base import WarnedReply
from gpuwarden.interfaces.results.offers import OfferReply

if TYPE_CHECKING:
    from gpuwarden.core.deadlines import Deadline, Funds
    from gpuwarden.lifecycle.monitoring.inventory import Inventory, Row


class ClockReply(BaseModel):
    """An action that the platform will take automatically. `at` is in seconds since the epoch."""

    at: float
    trigger: str
    effect: str


class InstanceReply(BaseModel):
    """One machine. `billing` is null if the billing state is unknown; the machine then counts as billed."""

    platform: str
    instance_id: str | None
    ours: bool
    state: str
    billing: bool | None
    price_usd_per_hour: float | None = None
    cost_usd: float | None = None
    cost_estimated: bool = False
    since: float | None = None
    job_id: str | None = None
    job_state: str | None = None
    note: str = ""
    stopped_usd_per_hour: float | None = None
    stopped_at: float | None = None
    clocks: list[ClockReply] = Field(default_factory=list)

    @model_serializer(mode="wrap")
    def _small(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit the fields that few machines have, if they are empty."""
        rare = {"stopped_usd_per_hour", "stopped_at", "clocks"}
        return {k: v for k, v in whole(self).items() if v or k not in rare}


class AccountReply(BaseModel):
    """The balance and the spending rate of one platform's account. Null values are unknown.

    `clock` states when the balance will run out at this rate.
    """

    platform: str
    balance: float | None = None
    currency: str | None = None
    per_hour: float | None = None
    clock: ClockReply | None = None
    note: str = ""


class InstancesReply(WarnedReply):
    """Every machine on every platform in use.

    `unknown` maps a machine's name to the reason why its state could not be read. The machine may be billed.
    """

    instances: list[InstanceReply] = Field(default_factory=list)
    accounts: list[AccountReply] = Field(default_factory=list)
    jobs: list[dict[str, str]] = Field(default_factory=list)
    unknown: dict[str, str] = Field(default_factory=dict)
    offers: list[OfferReply] = Field(default_factory=list)
    """Offers for the GPU that the caller asked about, if any."""


def listed(inventory: Inventory) -> InstancesReply:
    """Return the reply to list_instances."""
    unknown = {named(k, 80): quoted(v) for k, v in inventory.unknown.items()}
    trouble = inventory.ledger
    lost = trouble is not None and trouble.incomplete
    billing, maybe = (sum(row.billing is state for row in inventory.rows) for state in (True, None))
    counts = [f"{counted(billing, 'machine')} {'is' if billing < 2 else 'are'} billed"] if billing or not maybe else []
    counts += [f"{counted(maybe, 'machine')} may be billed"] if maybe else []
    text = f"{', and '.join(counts).capitalize()}{' as far as is known' if lost else ''}."
    # If the ledger lost records, unknown machines may be billed, so a count of zero is not shown.
    sentences = [] if lost and not (billing or maybe) else [text]
    sentences += ["Some states could not be read."] if unknown else []
    if trouble is not None:  # comes first if the ledger is incomplete, because all other sentences are then unreliable
        sentences.insert(0 if lost else len(sentences), f"{trouble.message[:1].upper()}{trouble.message[1:]}.")
    return InstancesReply(
        ok=not lost,
        code="ledger_incomplete" if lost else "unknown" if unknown else "ok",
        message=" ".join(filter(None, sentences)),
        next=steps(trouble.hint if trouble is not None else ""),
        instances=[instance_reply(row) for row in inventory.rows[:100]],
        accounts=[account_reply(funds) for funds in inventory.accounts],
        jobs=[{"job_id": j.id, "state": j.state, "platform": j.spec.platform} for j in inventory.jobs[:100]],
        unknown=unknown,
    )


def instance_reply(row: Row) -> InstanceReply:
    """Return one machine."""
    return InstanceReply(
        platform=row.platform,
        instance_id=named(row.instance_id) if row.instance_id else None,
        ours=row.ours,
        state=row.state,
        billing=row.billing,
        price_usd_per_hour=row.price_usd_per_hour,
        cost_usd=row.cost_usd,
        cost_estimated=row.lease is not None and row.lease.estimated,
        since=row.since,
        job_id=row.job.id if row.job else None,
        job_state=row.job.state if row.job else None,
        note=quoted(row.note),
        stopped_usd_per_hour=row.stopped_usd_per_hour,
        stopped_at=row.stopped_at,
        clocks=[clock_reply(c) for c in row.clocks],
    )


def account_reply(funds: Funds) -> AccountReply:
    """Return one account's balance and spending rate."""
    clock, burn = funds.clock, funds.burn if funds.burn > 0 else None
    if isinstance(funds.balance, Unknown):
        return AccountReply(platform=funds.platform, per_hour=burn, note=quoted(funds.text))
    return AccountReply(
        platform=funds.platform,
        balance=funds.balance.value.amount,
        currency=named(funds.balance.value.currency, 8),
        per_hour=burn,
        clock=clock_reply(clock) if clock else None,
        note="" if funds.whole else "the prices of some machines on this platform are unknown",
    )


def clock_reply(clock: Deadline) -> ClockReply:
    """Return one deadline."""
    return ClockReply(at=clock.at, trigger=quoted(clock.trigger), effect=quoted(clock.effect))
