"""Bind each lease to the account that rented it, so that another account's key can't make an instance appear gone.

The ledger stores salted digests (`Account`), never the key. If the key is unchanged, the account is the same and the
platform is not queried. If the key is different, the platform is queried for the key's account. If the account can't be
determined, for example because a key was replaced on a platform without account ids or an older version wrote the
ledger, the lease is bound to the key only after a query with that key has returned the instance.
"""

from __future__ import annotations

import secrets as random
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Final, TypeVar

from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import Account, Answer, Instance, InstanceState, Known, Unknown
from gpuwarden.ledger.events import LeaseAccount
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.shared_answers import shared_answers
from gpuwarden.lifecycle.records import LeaseRecord
from gpuwarden.lifecycle.timeouts import in_time
from gpuwarden.providers._account import salted
from gpuwarden.providers.base import Bidder, Provider

T = TypeVar("T")


class Match(StrEnum):
    """Whether the current key belongs to the account that rented an instance."""

    SAME = "same"
    OTHER = "other"
    UNPROVEN = "unproven"


WHY: Final = {
    Match.OTHER: "the {platform} key belongs to another account; set the key for the account that rented the machine",
    Match.UNPROVEN: "the {platform} key may belong to another account, because the account does not list the machine",
}


async def account_in_use(ctx: Context, platform: str) -> Account:
    """Return the current key's account. Raises AuthFailed if no key is set."""
    provider, salt = ctx.provider(platform), random.token_hex(8)
    key, name = provider.key_digest(salt), await _name(provider, platform)
    return Account(salt=salt, key=key, id=_id_digest(salt, platform, name) if name else None)


async def match(ctx: Context, lease: LeaseRecord) -> Match:
    """Compare the current key with a lease's account. Raises AuthFailed if no key is set."""
    provider, account = ctx.provider(lease.platform), lease.account
    if account is None:
        return Match.UNPROVEN
    if provider.key_digest(account.salt) == account.key:
        return Match.SAME
    name = await _name(provider, lease.platform) if account.id else None
    if name is None:
        return Match.UNPROVEN
    return Match.SAME if _id_digest(account.salt, lease.platform, name) == account.id else Match.OTHER


async def _name(provider: Provider, platform: str) -> str | None:
    """Return the account's id, or None if the platform has no account ids or did not respond."""
    try:
        answer = await in_time(platform, provider.account_id())
    except WardenError:
        return None
    return answer.value if isinstance(answer, Known) else None


def _id_digest(salt: str, platform: str, name: str) -> str:
    return salted(salt, "account", platform, name)


class BoundProvider:
    """The provider for one lease. If the key belongs to another account, no requests are sent; answers are Unknown."""

    def __init__(self, ctx: Context, lease: LeaseRecord) -> None:
        self.ctx, self.lease = ctx, lease
        self.provider = ctx.provider(lease.platform)

    async def get(self, ident: str) -> Answer[Instance | None]:
        """Query an instance's state."""

        def shows(seen: Instance | None) -> bool:
            return seen is not None and seen.id == ident and seen.state is not InstanceState.GONE

        walk = shared_answers(self.ctx)
        return await self._look(lambda: walk.machine(self.lease, ident) if walk else self.provider.get(ident), shows)

    async def find(self, token: str) -> Answer[tuple[Instance, ...]]:
        """Return all instances that have this token."""
        walk = shared_answers(self.ctx)
        return await self._look(lambda: walk.carrying(self.lease, token) if walk else self.provider.find(token), bool)

    async def start(self, ident: str) -> Answer[None]:
        """Start the instance again."""
        return await self._act(self.provider.start, ident)

    async def raise_bid(self, ident: str, most: float) -> Answer[None]:
        """Raise the bid for an outbid instance, if the platform supports bids."""
        bidder = self.provider
        if not isinstance(bidder, Bidder):
            return Known(None)
        return await self._act(lambda outbid: bidder.raise_bid(outbid, most), ident)

    async def stop(self, ident: str) -> Answer[None]:
        """Ask the platform to stop the instance."""
        return await self._act(self.provider.stop, ident)

    async def terminate(self, ident: str) -> Answer[None]:
        """Ask the platform to terminate the instance."""
        return await self._act(self.provider.terminate, ident)

    async def _look(self, ask: Callable[[], Awaitable[Answer[T]]], shows: Callable[[T], bool]) -> Answer[T]:
        """Send a query. If the key's account is not proven, accept the answer only if it contains the instance."""
        found = await match(self.ctx, self.lease)
        if found is Match.OTHER:
            return self._unknown(found)
        answer = await in_time(self.lease.platform, ask())
        if found is Match.SAME or isinstance(answer, Unknown):
            return answer
        if not shows(answer.value):
            return self._unknown(found)
        account = await account_in_use(self.ctx, self.lease.platform)
        self.ctx.ledger.add(self.lease.subject, LeaseAccount(account=account))
        return answer

    async def _act(self, verb: Callable[[str], Awaitable[Answer[None]]], ident: str) -> Answer[None]:
        """Send a request if the key is proven to belong to the lease's account or to have access to the instance."""
        if walk := shared_answers(self.ctx):
            walk.forget(self.lease.platform, ident)
        found = await match(self.ctx, self.lease)
        if found is Match.UNPROVEN:
            seen = await self.get(ident)
            if isinstance(seen, Unknown):
                return seen
        return self._unknown(found) if found is Match.OTHER else await verb(ident)

    def _unknown(self, found: Match) -> Unknown:
        return Unknown(WHY[found].format(platform=self.lease.platform))
