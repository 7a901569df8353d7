"""How long an account's money lasts: what is left of it, and what the machines there cost an hour."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from gpuwarden.core.errors import NotSupported, in_our_words
from gpuwarden.core.models import Answer, Balance, Instance, InstanceState, Known, Unknown
from gpuwarden.core.money import money, usd_per_hour
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.expirations import Deadline
from gpuwarden.lifecycle.monitoring.meter import lease_now
from gpuwarden.lifecycle.records import LeaseRecord
from gpuwarden.lifecycle.timeouts import in_time

FAR_S: Final = 366 * 86_400.0
"""An end that is further away is no danger and has no date: prices change before."""
UNTOLD: Final = "what becomes of the machines then is not described; add credit, or end what bills"


@dataclass(frozen=True)
class Funds:
    """One account when it was looked at, `at`.

    `burn` is what is known to bill there an hour in the balance's currency. Where some price is not known, not `whole`,
    the money ends no later than it says. `effect` is what the platform does at the end.
    """

    platform: str
    balance: Answer[Balance]
    burn: float
    whole: bool
    at: float
    effect: str

    @property
    def clock(self) -> Deadline | None:
        """The danger clock of the balance; None where its date is unknown or far away, or nothing bills."""
        if isinstance(self.balance, Unknown):
            return None
        left = self.balance.value.amount
        if left <= 0:
            return Deadline(self.at, f"{self.said} is used up", self.effect)
        if self.burn <= 0 or left / self.burn * 3600 > FAR_S:
            return None
        end = self.at + left / self.burn * 3600
        date = datetime.fromtimestamp(end, UTC).strftime("%Y-%m-%d %H:%M UTC")
        least, latest = ("", "") if self.whole else (" or more", " at the latest")
        return Deadline(
            end, f"{self.said}, at {usd_per_hour(self.burn)}{least} it lasts until {date}{latest}", self.effect
        )

    @property
    def said(self) -> str:
        """The balance in words."""
        if isinstance(self.balance, Unknown):
            return f"the balance is unknown: {self.balance.why}"
        return f"balance {money(self.balance.value.amount, self.balance.value.currency)}"


async def look_at_funds(ctx: Context, platform: str, listed: Iterable[Instance], mine: list[LeaseRecord]) -> None:
    """Ask for the balance where a machine may bill, and remember what it comes to."""
    machines = {i.id: i for i in listed if i.state is not InstanceState.GONE}
    for lease in (lease_now(ctx, m.id) for m in mine):
        if lease.instance is not None and lease.instance.id in machines:
            machines[lease.instance.id] = _fuller(machines[lease.instance.id], lease.instance)
    if not machines:
        ctx.funds[platform] = None
        return
    try:
        balance = await in_time(platform, ctx.provider(platform).balance())
    except NotSupported:
        return
    except Exception as error:
        balance = Unknown(in_our_words(error).message)
    burn, whole = _burn(machines.values(), balance)
    ctx.funds[platform] = Funds(platform, balance, burn, whole, ctx.clock.now(), _effect(ctx, platform))


def _fuller(listed: Instance, seen: Instance) -> Instance:
    """A machine of a list with the prices that only a look at it tells."""
    told = {f: getattr(seen, f) for f in ("price_usd_per_hour", "stopped_usd_per_hour") if getattr(listed, f) is None}
    return listed.model_copy(update=told)


def _burn(machines: Iterable[Instance], balance: Answer[Balance]) -> tuple[float, bool]:
    """What is spent an hour, and whether all of it is known. The platform's own word counts where it is the higher."""
    rates = [i.stopped_usd_per_hour if i.meter is False else i.price_usd_per_hour for i in machines]
    total, whole = sum(max(0.0, rate) for rate in rates if rate is not None), None not in rates
    if isinstance(balance, Unknown):
        return total, whole
    if balance.value.currency != "USD":
        return 0.0, False
    told = balance.value.per_hour
    return (total, whole) if told is None else (max(total, told), True)


def _effect(ctx: Context, platform: str) -> str:
    clocks = ctx.profile(platform).danger_clocks
    return next((c.effect for c in clocks if c.counts_from == "balance"), UNTOLD)


def known_funds(ctx: Context) -> list[Funds]:
    """What this process last saw of every account that pays for a machine."""
    return [funds for _, funds in sorted(ctx.funds.items()) if funds is not None]


def dated(ctx: Context, platform: str) -> bool:
    """Whether this process can say now how near the end of a balance is."""
    if platform not in ctx.funds:
        return False
    funds = ctx.funds[platform]
    return funds is None or isinstance(funds.balance, Known)
