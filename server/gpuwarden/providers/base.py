"""The provider protocol. A reply in an unexpected format is `Unknown` and never means that an instance does not exist.

A provider module defines `create(profile, state, clock)`, annotated with the class that it returns; `ACCOUNT_KEYS`, the
environment variables that contain the account's key; and `SHELL_GUARD` (`core.shell_guard`), the commands with which
the platform's own tools end machines. The guard looks for these commands in an agent's shell commands.

Refusals raise `AuthFailed`, `NoCapacity`, `RateLimited`, `BadRequest` or `NotSupported`. A refused create request may
still have rented a machine, so the caller searches by token twice before it concludes that no machine was rented. This
check is unnecessary for a refusal raised inside `core.errors.nothing_sent`, because no order was sent. The caller can
try another platform at once. A lost or unreadable reply is an `Unknown` answer: the request may have taken effect, so
the caller checks for an effect before retrying.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from gpuwarden import providers
from gpuwarden.core.clock import Clock
from gpuwarden.core.contract import TEXTS, Contract, instance_of
from gpuwarden.core.models import Answer, Balance, Instance, Known, Quote, Resources
from gpuwarden.core.profile import Profile
from gpuwarden.core.registry import Registry
from gpuwarden.core.rules import Finding
from gpuwarden.core.shell_guard import ShellGuard
from gpuwarden.providers._account import text_of_key_file

LEAST_KEY: Final = 8
"""Minimum length of a key. A shorter string is not a key, and would match unrelated text."""


class Provider(Protocol):
    """A provider rents and releases instances on one platform."""

    name: str
    profile: Profile
    settle_s: float
    """Minimum number of seconds between two polls if the second is to confirm the first."""

    def key_digest(self, salt: str) -> str:
        """Return a salted digest of the account's key. Raises AuthFailed if no key is set."""
        ...

    async def account_id(self) -> Answer[str]:
        """Return the id of the account that the key belongs to. Raises NotSupported if the platform's API does not
        report it.
        """
        ...

    async def check(self) -> list[Finding]:
        """Return the problems with the account or the key."""
        ...

    async def quote(self, resources: Resources) -> Answer[Quote]:
        """Return the current price of a machine with these resources."""
        ...

    async def create(self, resources: Resources, token: str) -> Answer[Instance]:
        """Rent one instance with `token` in its name or label. Returns before the instance has booted."""
        ...

    async def find(self, token: str) -> Answer[tuple[Instance, ...]]:
        """Return every instance with `token` in its name or label.

        Callers treat an empty tuple as final only after a second poll confirms it.
        """
        ...

    async def get(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return one instance, or None if neither a query by id nor the list finds it.

        Callers treat None as final only after a second poll confirms it.
        """
        ...

    async def list(self) -> Answer[tuple[Instance, ...]]:
        """Return every instance in the account, from all pages of the list."""
        ...

    async def balance(self) -> Answer[Balance]:
        """Return the account's balance. Raises NotSupported if the platform's API does not report a balance."""
        ...

    async def start(self, id: str) -> Answer[None]:  # noqa: A002
        """Start a stopped instance again, if the platform supports it."""
        ...

    async def stop(self, id: str) -> Answer[None]:  # noqa: A002
        """Request a stop. Known means that the platform accepted the request, not that billing stopped."""
        ...

    async def terminate(self, id: str) -> Answer[None]:  # noqa: A002
        """Request termination. Idempotent: the result is Known for an instance that is already gone."""
        ...


@runtime_checkable
class Bidder(Protocol):
    """A provider that rents interruptible instances by bidding, and that can raise the bids."""

    async def raise_bid(self, id: str, most: float) -> Answer[None]:  # noqa: A002
        """Raise the bid for an outbid instance, if a winning bid costs at most `most` dollars per hour, including the
        disk.

        No request is sent if the current bid wins, or if every winning bid costs more than `most`.
        """
        ...


@runtime_checkable
class MachineOptionsProvider(Protocol):
    """A provider that accepts preferences about its machines, such as `image` and `region`, as options of a job."""

    machine_options: frozenset[str]


_LIST: ContextVar[Known[tuple[Instance, ...]] | None] = ContextVar("list_in_hand", default=None)


@contextmanager
def list_in_hand(listed: Known[tuple[Instance, ...]] | None) -> Iterator[None]:
    """Let `get` use a recently read list to confirm that an instance is gone. If `listed` is None, `get` requests a
    list.

    Without a shared list, a thousand reclaimed machines would cause a thousand requests for the list.
    """
    token = _LIST.set(listed)
    try:
        yield
    finally:
        _LIST.reset(token)


def known_list() -> Known[tuple[Instance, ...]] | None:
    """Return the list that `get` may use; None if `get` must request one."""
    return _LIST.get()


PROVIDERS: Final = Registry(
    "provider",
    providers,
    Contract(
        home=__name__,
        values={"ACCOUNT_KEYS": TEXTS, "SHELL_GUARD": instance_of(ShellGuard)},
        functions={"create": ("profile", "state", "clock")},
        product=Provider,
    ),
)


def provider_names() -> list[str]:
    """Return the names of all providers, sorted, without importing them."""
    return PROVIDERS.names()


def account_keys() -> frozenset[str]:
    """Return the names of the environment variables for account keys, which are never sent to a machine."""
    names: list[tuple[str, ...]] = [module.ACCOUNT_KEYS for _, module in PROVIDERS.usable()]
    return frozenset(word for keys in names for key in keys for word in (key, f"{key}_FILE"))


def account_key_values(env: Mapping[str, str]) -> dict[str, str]:
    """Return this process's account keys by source: an environment variable, or a file named by such a variable."""
    found = {}
    for name in account_keys():
        found[name] = given = env.get(name, "").strip()  # this variable may contain the key itself instead of a path
        if name.endswith("_FILE") and given:
            found[f"the file of {name}"] = text_of_key_file(given)
    return {where: value for where, value in found.items() if len(value) >= LEAST_KEY}


def keyed(name: str, env: Mapping[str, str]) -> bool:
    """Return whether the user has set an account key for a provider."""
    keys: tuple[str, ...] = PROVIDERS.load(name).ACCOUNT_KEYS
    return any(env.get(word) for key in keys for word in (key, f"{key}_FILE"))


def load_provider(name: str, profile: Profile, state: Path, clock: Clock) -> Provider:
    """Return the provider called `name` for one profile. The provider may store files in the folder `state`."""
    provider: Provider = PROVIDERS.make(name, profile, state, clock)
    return provider
