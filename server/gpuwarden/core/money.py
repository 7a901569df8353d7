"""Format money for users and models: US dollars, `$12.50`, `$0.0031`, `$2.49/h`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

SMALLEST: Final = 0.0001
"""The smallest amount that is shown exactly. A smaller amount, as at the start of billing, is shown as `<$0.0001`."""


def usd(amount: float | None, estimated: bool = False) -> str:
    """Format an amount, rounded to the cent, or to 4 decimal places below a dollar; None becomes `unknown`."""
    if estimated and amount is not None:
        return f"about {usd(amount)}"
    if amount is None:
        return "unknown"
    sign, size = ("-" if amount < 0 else ""), abs(amount)
    if 0 < size < SMALLEST:
        return f"{sign}<${SMALLEST}"
    fine = f"{size:.4f}"
    return f"{sign}${size:,.2f}" if size >= 1 or fine[0] == "1" else f"{sign}${fine[:4]}{fine[4:].rstrip('0')}"


def usd_per_hour(price: float | None) -> str:
    """Format a price per hour; None becomes `unknown`."""
    return "unknown" if price is None else f"{usd(price)}/h"


def at_most(worst: float | None, ordered: str | None = None) -> str:
    """Format a job's worst-case cost and the end of its machine's billing. A timeout limits only the job's cost.

    `ordered` is the verb of automatic teardown (stop or terminate), which needs no approval once all outputs are
    proven.
    """
    end = f"all outputs are proven and automatic teardown {ordered}s it" if ordered else "you approve its teardown"
    return f"at most {usd(worst)} for the job; the machine is billed until {end}"


def bills_on(names: Sequence[str], price: float | None) -> str:
    """Return a sentence about storage that is billed after a machine is gone; empty if `names` is empty."""
    if not names:
        return ""
    amount = "at a price that the platform does not report" if price is None else usd_per_hour(price)
    return f"{' and '.join(names)} is billed after the machine is gone, {amount}, until you delete it"


def money(amount: float, currency: str) -> str:
    """Format an amount in a platform's currency: `$25.00`, `180.00 CNY`."""
    return usd(amount) if currency == "USD" else f"{amount:,.2f} {currency}"
