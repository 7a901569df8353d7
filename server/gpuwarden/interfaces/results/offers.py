"""Reply to `gpuwarden offers`: a machine's price on every platform, and the mounts that survive a stop there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Capacity, Unknown
from gpuwarden.core.plural import counted
from gpuwarden.core.sanitize import quoted
from gpuwarden.interfaces.results.base import Result

if TYPE_CHECKING:
    from gpuwarden.lifecycle.offers import Offer


class OfferReply(BaseModel):
    """One offer. `capacity`: available, unknown, none (no machine is free now) or not_sold. A null price is unknown.

    `survives_stop` lists the mounts whose files survive a stop. It is null if the platform can't stop machines or was
    not queried. If a mount is followed by a name in parentheses, the job must request that storage.
    `bills_when_stopped` is true if anything is or may be billed after a stop.
    """

    platform: str
    capacity: Capacity
    price_usd_per_hour: float | None = None
    survives_stop: list[str] | None = None
    bills_when_stopped: bool | None = None
    note: str = ""


class OffersReply(Result):
    """Offers from every queried platform, cheapest first."""

    offers: list[OfferReply] = Field(default_factory=list)


def offered(found: Sequence[Offer]) -> OffersReply:
    """Return the reply to a request for offers."""
    rows = [offer_reply(offer) for offer in found]
    if not rows:
        return OffersReply(
            code="not_configured",
            message="No platform that rents machines is configured.",
            next=(do(Action.DOCTOR, "to see the missing settings"),),
        )
    can = sum(row.capacity is Capacity.AVAILABLE for row in rows)
    silent = sum(row.capacity is Capacity.UNKNOWN for row in rows)
    text = f"The machine is available now on {can} of {counted(len(rows), 'platform')}."
    return OffersReply(
        code="unknown" if silent else "ok",
        message=f"{text} {silent} did not answer." if silent else text,
        offers=rows,
    )


def offer_reply(offer: Offer) -> OfferReply:
    """Return one platform's answer."""
    kept, quote = offer.survives_stop, offer.quote
    why = quote.why if isinstance(quote, Unknown) else quote.value.note
    return OfferReply(
        platform=offer.platform,
        capacity=offer.capacity,
        price_usd_per_hour=offer.price,
        survives_stop=None if kept is None else list(kept),
        bills_when_stopped=None if kept is None or offer.profile is None else bool(offer.profile.residue("stop")),
        note=quoted(why if isinstance(quote, Unknown) or quote.value.note else quote.value.source, 200),
    )
