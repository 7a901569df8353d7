"""Estimate how long an account's balance will last at the hourly cost of its machines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gpuwarden.core.deadlines import Funds
from gpuwarden.core.errors import NotSupported, as_warden_error
from gpuwarden.core.models import Instance, InstanceState, Known, Unknown
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.meter import lease_now
from gpuwarden.lifecycle.records import LeaseRecord
from gpuwarden.lifecycle.timeouts import in_time

UNTOLD: Final = "the effect on the machines is not documented; add credit, or end the billed machines"


async def check_balance(ctx: Context, platform: str, listed: Iterable[Instance], mine: list[LeaseRecord]) -> None:
    """Query the account's balance if a machine may be billed, and record the result."""
    machines = {i.id: i for i in listed if i.state is not InstanceState.GONE}
    for seen in (lease_now(ctx, lease.id).instance for lease in mine):
        if seen is not None and seen.id in machines:  # some lists lack prices
            known = machines[seen.id]
            missing = (f for f in ("price_usd_per_hour", "stopped_usd_per_hour") if getattr(known, f) is None)
            machines[seen.id] = known.model_copy(update={f: getattr(seen, f) for f in missing})
    if not machines:
        ctx.funds[platform] = None
        return
    try:
        balance = await in_time(platform, ctx.provider(platform).balance())
    except NotSupported:
        return
    except Exception as error:
        balance = Unknown(as_warden_error(error).message)
    rates = [m.stopped_usd_per_hour if m.meter is False else m.price_usd_per_hour for m in machines.values()]
    burn, whole = sum(max(0.0, rate) for rate in rates if rate is not None), None not in rates
    if isinstance(balance, Known):
        if balance.value.currency != "USD":
            burn, whole = 0.0, False
        elif balance.value.per_hour is not None:  # use the platform's figure if it is higher
            burn, whole = max(burn, balance.value.per_hour), True
    clocks = ctx.profile(platform).danger_clocks
    effect = next((clock.effect for clock in clocks if clock.counts_from == "balance"), UNTOLD)
    ctx.funds[platform] = Funds(platform, balance, burn, whole, ctx.clock.now(), effect)


def known_funds(ctx: Context) -> list[Funds]:
    """Return the last known balance of every account that pays for a machine."""
    return [funds for _, funds in sorted(ctx.funds.items()) if funds is not None]


def dated(ctx: Context, platform: str) -> bool:
    """Return whether the last poll of the account reported a balance, or found no machine that could be billed."""
    if platform not in ctx.funds:
        return False
    funds = ctx.funds[platform]
    return funds is None or isinstance(funds.balance, Known)
