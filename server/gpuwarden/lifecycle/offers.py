"""Query platforms for a machine's price and availability, and list the storage that survives stopping the machine.

A submission queries one platform (`ask_offer`), and `gpuwarden offers` queries all configured ones (`offers`). If a
platform does not respond in time, its capacity is reported as unknown, not as none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from gpuwarden.core.errors import BadRequest, NoCapacity, NotSupported, WardenError, as_warden_error
from gpuwarden.core.models import Answer, Capacity, Known, Quote, Resources, Unknown
from gpuwarden.core.money import usd_per_hour
from gpuwarden.core.profile import Profile
from gpuwarden.core.task_groups import first_error
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.timeouts import in_time


@dataclass(frozen=True)
class Offer:
    """One platform's answer. `refusal` is the error if the requested machine can't be rented there now.

    `profile` is None if the platform could not be queried; the reason is in `quote`.
    """

    platform: str
    profile: Profile | None
    quote: Answer[Quote]
    refusal: WardenError | None = None

    @property
    def capacity(self) -> Capacity:
        """Return whether the requested machine can be rented now."""
        if self.refusal is not None:
            return Capacity.NONE if isinstance(self.refusal, NoCapacity) else Capacity.NOT_SOLD
        return Capacity.AVAILABLE if isinstance(self.quote, Known) else Capacity.UNKNOWN

    @property
    def price(self) -> float | None:
        """Return the price per hour in US dollars; None if it is unknown."""
        return self.quote.value.price_usd_per_hour if isinstance(self.quote, Known) else None

    @property
    def survives_stop(self) -> tuple[str, ...] | None:
        """Return the mounts whose files always survive a stop; None without a profile or if stops are unsupported."""
        if self.profile is None or self.profile.verbs.stop is None:
            return None
        tiers = (t for t in self.profile.storage if t.present != "sometimes" and t.survives.stop is True)
        return tuple(dict.fromkeys(t.path if t.present == "always" else f"{t.path} ({t.tier})" for t in tiers))


async def ask_offer(ctx: Context, platform: str, resources: Resources) -> Offer:
    """Query one platform. Raises NotFound for an unknown name, and NotSupported if gpuwarden can't rent there."""
    profile, provider = ctx.profile(platform), ctx.provider(platform)
    try:
        answer = await in_time(platform, provider.quote(resources))
    except (BadRequest, NotSupported, NoCapacity) as refusal:
        return Offer(platform, profile, Unknown(refusal.message), refusal)
    except WardenError as error:
        return Offer(platform, profile, Unknown(error.message))
    price = answer.value.price_usd_per_hour if isinstance(answer, Known) else None
    if price is not None and price <= 0:
        answer = Unknown(f"{platform} returned the price {usd_per_hour(price)}, but a price must be positive")
    return Offer(platform, profile, answer)


async def offers(ctx: Context, resources: Resources, platforms: Sequence[str] = ()) -> list[Offer]:
    """Query the given platforms, or all configured ones, concurrently. Return the offers, cheapest first.

    Platforms that can't be queried have an unknown price, and come after the known prices; refusals come last. If only
    one platform is given and it can't be queried, its error is raised.
    """
    found: list[Offer] = []

    async def ask(platform: str) -> None:
        try:
            found.append(await ask_offer(ctx, platform, resources))
        except Exception as error:
            if set(platforms) == {platform}:
                raise
            found.append(Offer(platform, None, Unknown(as_warden_error(error).message)))

    with first_error():
        async with anyio.create_task_group() as group:
            for platform in dict.fromkeys(platforms or ctx.configured()):
                group.start_soon(ask, platform)
    order = list(Capacity)
    return sorted(found, key=lambda o: (order.index(o.capacity), o.price is None, o.price or 0.0, o.platform))
