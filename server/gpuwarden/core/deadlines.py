"""Deadlines that gpuwarden can't change: platform limits on instances, and account balances that run out."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from gpuwarden.core.models import Answer, Balance, Unknown
from gpuwarden.core.money import money, usd_per_hour

FAR_S: Final = 366 * 86_400.0
"""If a balance lasts longer than this, its end date is ignored, because prices will have changed by then."""


def utc(at: float) -> str:
    """Return a time in seconds since the epoch as `2026-11-27 18:05 UTC`."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


@dataclass(frozen=True)
class Deadline:
    """A deadline for one machine: its time (in seconds since the epoch), its trigger and its effect.

    `after_job` is true if the deadline can't be before the time limit of the machine's job. This applies to deadlines
    that gpuwarden itself requests.
    """

    at: float
    trigger: str
    effect: str
    after_job: bool = False


@dataclass(frozen=True)
class Funds:
    """One account's balance, observed at `at`.

    `burn` is the known cost per hour in the balance's currency. If a price is unknown, `whole` is false, and the
    balance is used up at the computed time or earlier. `effect` is the platform's action when the balance is used up.
    """

    platform: str
    balance: Answer[Balance]
    burn: float
    whole: bool
    at: float
    effect: str

    @property
    def clock(self) -> Deadline | None:
        """Return the deadline at which the balance is used up.

        None if the balance is unknown, nothing is billed, or the deadline is too far away.
        """
        if isinstance(self.balance, Unknown):
            return None
        left = self.balance.value.amount
        if left <= 0:
            return Deadline(self.at, f"{self.text} is used up", self.effect)
        if self.burn <= 0 or left / self.burn * 3600 > FAR_S:
            return None
        end = self.at + left / self.burn * 3600
        date = utc(end)
        least, latest = ("", "") if self.whole else (" or more", " at the latest")
        return Deadline(
            end, f"{self.text}; at {usd_per_hour(self.burn)}{least}, it lasts until {date}{latest}", self.effect
        )

    @property
    def text(self) -> str:
        """Return the balance as text."""
        if isinstance(self.balance, Unknown):
            return f"the balance is unknown: {self.balance.why}"
        return f"balance {money(self.balance.value.amount, self.balance.value.currency)}"
