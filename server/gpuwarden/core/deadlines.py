"""When something ends by itself: an instance at a platform's deadline, an account's money at its burn rate."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from gpuwarden.core.models import Answer, Balance, Unknown
from gpuwarden.core.money import money, usd_per_hour

FAR_S: Final = 366 * 86_400.0
"""An end that is further away is no danger and has no date: prices change before."""


@dataclass(frozen=True)
class Deadline:
    """One danger clock of one machine: when it fires (seconds since the epoch), why, and what happens then."""

    at: float
    trigger: str
    effect: str


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
        """Return the danger clock of the balance; None where its date is unknown or far away, or nothing bills."""
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
        """Return the balance in words."""
        if isinstance(self.balance, Unknown):
            return f"the balance is unknown: {self.balance.why}"
        return f"balance {money(self.balance.value.amount, self.balance.value.currency)}"
