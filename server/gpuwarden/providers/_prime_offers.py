"""Prime Intellect offers: the amounts that can be ordered, and their price."""

from __future__ import annotations

from dataclasses import dataclass

from gpuwarden.providers._http import Readable, ResponseModel
from gpuwarden.providers._rented import positive_price


class Prices(ResponseModel):
    """The price of a complete offer, in dollars per hour."""

    onDemand: float | None = None  # noqa: N815
    communityPrice: float | None = None  # noqa: N815
    currency: str | None = None


class ResourceRange(ResponseModel):
    """A resource's selectable range in an offer, and its unit price in dollars per hour."""

    minCount: int | None = None  # noqa: N815
    defaultCount: int | None = None  # noqa: N815
    maxCount: int | None = None  # noqa: N815
    pricePerUnit: float | None = None  # noqa: N815
    step: int | None = None
    defaultIncludedInPrice: bool | None = None  # noqa: N815

    def amount(self, wanted: int | None) -> int | None:
        """Return the amount to order; None selects the default. Raises ValueError if the offer has too little."""
        if self.minCount is None or self.maxCount is None:  # nothing to choose
            if wanted is not None and self.defaultCount is not None and self.defaultCount < wanted:
                raise ValueError("the offer has less")
            return self.defaultCount if self.defaultCount is not None else wanted
        least = max(self.minCount, wanted or self.defaultCount or self.minCount)
        steps = -(-(least - self.minCount) // max(1, self.step or 1))
        amount = self.minCount + steps * max(1, self.step or 1)
        if amount > self.maxCount:
            raise ValueError("the offer has less")
        return amount

    def usd_per_hour(self, amount: int | None) -> float:
        """Return the hourly surcharge for `amount` units, on top of the offer's base price."""
        included = (self.defaultCount or 0) if self.defaultIncludedInPrice else 0
        return max(0, (amount or 0) - included) * max(0.0, self.pricePerUnit or 0.0)


class Offer(ResponseModel):
    """One configuration that a provider offers through Prime Intellect."""

    cloudId: str  # noqa: N815
    gpuType: str  # noqa: N815
    gpuCount: int  # noqa: N815
    socket: str | None = None
    provider: str | None = None
    dataCenter: str | None = None  # noqa: N815
    country: str | None = None
    security: str | None = None
    stockStatus: str  # noqa: N815
    images: tuple[str, ...] | None = None
    isSpot: bool | None = None  # noqa: N815
    prepaidTime: float | None = None  # noqa: N815
    prices: Prices
    disk: ResourceRange = ResourceRange()
    vcpu: ResourceRange = ResourceRange()
    memory: ResourceRange = ResourceRange()


class Offers(ResponseModel):
    """One page of offers."""

    items: tuple[Readable[Offer], ...]
    totalCount: int  # noqa: N815


@dataclass(frozen=True)
class ChosenOffer:
    """An offer with the amounts to order and their total price; None means unknown."""

    offer: Offer
    disk_gb: int | None
    vcpus: int | None
    memory_gb: int | None
    usd_per_hour: float | None


def choose(offer: Offer, disk_gb: int | None) -> ChosenOffer | None:
    """Return the amounts to order from an offer and their price; None if the offer has too little of a resource.

    A price in a currency other than dollars is unknown.
    """
    try:
        disk = offer.disk.amount(disk_gb)
        vcpus, memory = offer.vcpu.amount(None), offer.memory.amount(None)
    except ValueError:
        return None
    more = offer.disk.usd_per_hour(disk) + offer.vcpu.usd_per_hour(vcpus) + offer.memory.usd_per_hour(memory)
    community, prices = offer.prices.communityPrice, offer.prices
    base = positive_price(community if community is not None else prices.onDemand)
    if prices.currency not in {None, "USD", "usd"}:
        base = None
    return ChosenOffer(offer, disk, vcpus, memory, None if base is None else base + more)
