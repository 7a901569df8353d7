"""Poll an instance and decide whether it is billed. An ended state must be confirmed by a second answer.

An answer that can't be interpreted moves a lease to *unverified*, which counts as billed. "Gone" and "stopped" are
confirmed by a second poll with the same result, at least the provider's settle time later; for "stopped", the bill must
not have grown in the meantime. Answers obtained with another account's key are ignored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import Answer, Instance, InstanceState, Known, Unknown
from gpuwarden.core.money import usd
from gpuwarden.core.states import LIVE_LEASES, Lease
from gpuwarden.ledger.events import (
    AbandonIntent,
    LeaseBody,
    LeaseCameBack,
    LeaseGone,
    LeaseLook,
    LeaseMetering,
    LeaseObserved,
    LeaseStopped,
    LeaseUnverified,
    VerbSent,
)
from gpuwarden.ledger.fold import ended_as
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.accounts import BoundProvider
from gpuwarden.lifecycle.leases.shared_answers import shared_answers
from gpuwarden.lifecycle.records import LeaseRecord, read_job, read_lease

ENDED = frozenset({InstanceState.GONE})
UNSEEN_S = 60.0
"""A bill may still grow by the full price of this many seconds after the machine is off."""
PRICE_CHANGE, CENT = 0.01, 0.01
"""Smallest change in a price (as a fraction) or in a bill (in US dollars) that is recorded."""


async def poll_lease(ctx: Context, lease_id: str) -> Answer[Instance | None]:
    """Poll the provider for a lease's instance, and record changes.

    Return Known(None) if the instance is reported gone, even if that is not confirmed yet.
    """
    answer = await _poll_lease(ctx, lease_id)
    if (walk := shared_answers(ctx)) is not None:
        walk.settled(f"lease/{lease_id}")
    return answer


async def _poll_lease(ctx: Context, lease_id: str) -> Answer[Instance | None]:
    lease = read_lease(ctx.ledger, lease_id)
    if lease.instance_id is None:
        return Unknown("the provider has not reported the instance's id yet")
    try:
        answer = await BoundProvider(ctx, lease).get(lease.instance_id)
    except WardenError as error:
        answer = Unknown(error.message)
    if isinstance(answer, Unknown):
        ctx.unseen[lease_id] = answer.why
        if lease.state is Lease.METERING:
            ctx.ledger.add(lease.subject, LeaseUnverified(why=answer.why))
        return answer
    ctx.unseen.pop(lease_id, None)
    instance = answer.value
    if instance is not None:
        ctx.seen[lease_id] = ctx.clock.now(), instance
    if instance is None or instance.state in ENDED:
        _confirm(ctx, lease, "gone", instance)
        return Known(None)
    if instance.meter is False and _stays_off(ctx, lease, instance) and not given_back(ctx, lease):
        _confirm(ctx, lease, "stopped", instance)
        return answer
    _record_alive(ctx, lease, instance)
    return answer


def _record_alive(ctx: Context, lease: LeaseRecord, instance: Instance) -> None:
    """Record changes to an instance that may be billed: a restart, or a new state, address or price."""
    before, last = lease.instance, ctx.ledger.last(lease.subject, LeaseLook)
    if last is not None and last.data.saw != "alive":
        ctx.ledger.add(lease.subject, LeaseLook(saw="alive", instance=instance))
    if lease.state is Lease.UNVERIFIED:
        ctx.ledger.add(lease.subject, LeaseMetering(instance=instance))
    elif lease.state is Lease.STOPPED and not _being_ended(ctx, lease, instance):
        why = "the provider reports the instance as running after it was confirmed stopped or gone"
        ctx.ledger.add(lease.subject, LeaseCameBack(why=why, instance=instance))
    else:
        # A restart may change the port. Every process shows the recorded cost, so all but small changes are recorded.
        moved = before is None or before.state is not instance.state or instance.place not in (None, before.place)
        price, expected = instance.price_usd_per_hour or 0.0, lease.cost_by(ctx.clock.now()) or 0.0
        repriced = price > 0 and abs(price - (lease.price or 0.0)) > PRICE_CHANGE * price
        dearer = (instance.cost_usd or 0.0) > expected * (1 + PRICE_CHANGE) + CENT
        if moved or repriced or dearer:
            ctx.ledger.add(lease.subject, LeaseObserved(instance=instance))


def lease_now(ctx: Context, lease_id: str) -> LeaseRecord:
    """Return a lease with its current cost and the latest answer that this process received about its instance."""
    lease = read_lease(ctx.ledger, lease_id)
    heard = ctx.seen.get(lease_id)
    if heard is not None and (not lease.answers or heard[0] >= lease.answers[-1][0]):
        lease = replace(lease, answers=(*lease.answers, heard))
    if confirmed_end(ctx, lease_id) == "gone":
        cost = lease.cost_by(lease.since) if lease.answers else None
    else:
        cost = lease.cost_by(ctx.clock.now(), read_job(ctx.ledger, lease.job_id).price)
    bill = None if silent(ctx, lease) or lease.billed is None else lease.billed * (1 + PRICE_CHANGE) + CENT
    billed = bill is not None and cost is not None and cost <= bill
    return replace(lease, cost=cost, estimated=cost is not None and not billed)


def silent(ctx: Context, lease: LeaseRecord) -> bool:
    """Return whether the last poll of a lease's instance got no answer, which leaves the machine's state unknown."""
    return lease.state is Lease.UNVERIFIED or lease.id in ctx.unseen


def spent(ctx: Context, lease_id: str) -> float | None:
    """Return an upper bound on a lease's cost so far, in US dollars; None if unknown. Caps apply to this bound."""
    return lease_now(ctx, lease_id).cost


def confirmed_end(ctx: Context, lease_id: str) -> str | None:
    """Return the confirmed state of a machine: `gone`, or `stopped` (disk kept); None if the lease has not ended."""
    return ended_as(ctx.ledger.history(f"lease/{lease_id}"))


def given_back(ctx: Context, lease: LeaseRecord) -> bool:
    """Return whether an instance is being terminated because it did not become usable for a job.

    Stopping such an instance is not enough, because its disk may still be billed.
    """
    return ctx.ledger.last(lease.subject, AbandonIntent) is not None


def _stays_off(ctx: Context, lease: LeaseRecord, instance: Instance) -> bool:
    """Return whether an instance that is not billed stays off.

    An interrupted instance may run again, unless a stop was requested; a platform may report both cases as the same
    state.
    """
    if instance.state is not InstanceState.INTERRUPTED:
        return instance.state is InstanceState.STOPPED
    sent, back = ctx.ledger.last(lease.subject, VerbSent), ctx.ledger.last(lease.subject, LeaseCameBack)
    asked = sent is not None and sent.data.verb == "stop" and sent.data.taken
    return asked and (back is None or sent is None or sent.seq > back.seq)


def _ran_unseen(ctx: Context, lease: LeaseRecord, instance: Instance) -> str:
    """Return evidence from the bill that a machine has run after it was recorded as off; empty if there is none.

    The user may start and stop the machine in the console between two polls. Files written in between exist only on the
    machine's disk.
    """
    ended, price = ctx.ledger.last(lease.subject, LeaseStopped), lease.price
    if ended is None or ended.data.instance is None or price is None:
        return ""
    before, now, disk = ended.data.instance.cost_usd, instance.cost_usd, instance.stopped_usd_per_hour
    if before is None or now is None or disk is None:
        return ""
    explained = disk * 1.05 * (ctx.clock.now() - ended.at) / 3600 + price * UNSEEN_S / 3600
    grew = now - before
    return f"its bill has grown by {usd(grew)} since it stopped, more than its disk costs" * (grew > explained)


def _being_ended(ctx: Context, lease: LeaseRecord, instance: Instance) -> bool:
    """Return whether a machine that was off is being terminated at gpuwarden's request and therefore is not running."""
    sent = ctx.ledger.last(lease.subject, VerbSent)
    return instance.state is InstanceState.TERMINATING and sent is not None and sent.data.verb == "terminate"


def _confirm(ctx: Context, lease: LeaseRecord, saw: Literal["gone", "stopped"], instance: Instance | None) -> None:
    """Record that a poll reported the machine as gone or stopped; confirm the state if two polls agree.

    A machine whose bill grows by more than its disk costs counts as running, regardless of the reported state.
    """
    if lease.state is Lease.NONE or saw == confirmed_end(ctx, lease.id):
        if saw == "stopped" and instance is not None and (why := _ran_unseen(ctx, lease, instance)):
            ctx.ledger.add(lease.subject, LeaseCameBack(why=why, instance=instance))
        return
    last, now = ctx.ledger.last(lease.subject, LeaseLook), ctx.clock.now()
    settle_s = ctx.provider(lease.platform).settle_s
    billed = instance.cost_usd if instance else None
    agrees = last is not None and last.data.saw == saw
    if agrees and last and instance and saw == "stopped" and last.data.cost is not None and billed is not None:
        explained = (instance.stopped_usd_per_hour or 0) * (now - last.at) / 3600
        agrees = billed - last.data.cost <= explained * 1.05 + 1e-9
    if last is None or not agrees or now < last.at:  # if the clock was set back, the wait starts again
        _record(ctx, lease, LeaseLook(saw=saw, cost=billed), instance)
    elif now - last.at >= settle_s:
        why = f"{saw} in two polls, {now - last.at:.1f} s apart"
        cost = instance.cost_usd if instance else None  # without a bill, the ledger computes the cost
        if lease.state in LIVE_LEASES:
            _record(ctx, lease, LeaseStopped(saw=saw, why=why, cost_usd=cost), instance)
        else:
            _record(ctx, lease, LeaseGone(saw=saw, why=why, cost_usd=cost), instance)


def _record(ctx: Context, lease: LeaseRecord, event: LeaseBody, instance: Instance | None) -> None:
    """Record an event together with the instance that the provider returned, if any."""
    ctx.ledger.add(lease.subject, event if instance is None else event.model_copy(update={"instance": instance}))
