"""The provider protocol. A reply of an unexpected shape is `Unknown`, never "nothing there".

A provider's module offers `create(profile, state, clock)`, annotated with the class that it returns. It names in
`ACCOUNT_KEYS` the variables with its account's key, and declares in `SHELL_GUARD` (`core.shell_guard`) how its own
tools end machines; the guard of an agent's shell reads it there.

Refusals raise (`AuthFailed`, `NoCapacity`, `RateLimited`, `BadRequest`, `NotSupported`). A refused create may have
rented a machine all the same, so two looks by token decide. A refusal raised inside `core.errors.nothing_sent`, before
anything was ordered, is certain: where a search finds no capacity, the caller can ask elsewhere at once.
A lost or unreadable reply is an `Unknown` answer: it may have been done, so the caller checks before it retries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

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
"""Shorter strings are not keys, and would match everywhere."""


class Provider(Protocol):
    """Rents and releases instances of one platform."""

    name: str
    profile: Profile
    settle_s: float
    """Seconds after which a second look that agrees with the first counts."""

    def key_digest(self, salt: str) -> str:
        """Return a salted digest of the account's key in use. Raises AuthFailed where there is none."""
        ...

    async def account_id(self) -> Answer[str]:
        """Name the account of the key in use. Raises NotSupported where the platform's API names none."""
        ...

    async def check(self) -> list[Finding]:
        """Return the problems of the account or the key."""
        ...

    async def quote(self, resources: Resources) -> Answer[Quote]:
        """Return the price now."""
        ...

    async def create(self, resources: Resources, token: str) -> Answer[Instance]:
        """Rent one instance that carries `token` in its name or label. Returns at once."""
        ...

    async def find(self, token: str) -> Answer[tuple[Instance, ...]]:
        """Return every instance that carries `token`. An empty tuple counts only after a second look."""
        ...

    async def get(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return one instance; None when look-up and list agree that it does not exist, which counts after a second
        look.
        """
        ...

    async def list(self) -> Answer[tuple[Instance, ...]]:
        """Return every instance of the account, all pages."""
        ...

    async def balance(self) -> Answer[Balance]:
        """Return the account's balance. Raises NotSupported where the platform's API reports none."""
        ...

    async def start(self, id: str) -> Answer[None]:  # noqa: A002
        """Start a stopped instance again, where the platform can."""
        ...

    async def stop(self, id: str) -> Answer[None]:  # noqa: A002
        """Ask for a stop. Known means the provider accepted the request, not that the meter stopped."""
        ...

    async def terminate(self, id: str) -> Answer[None]:  # noqa: A002
        """Ask for the end. Idempotent: an instance that is gone already is Known."""
        ...


@runtime_checkable
class Bidder(Protocol):
    """A provider whose interruptible instances are bid for, and whose bids can be raised."""

    async def raise_bid(self, id: str, most: float) -> Answer[None]:  # noqa: A002
        """Bid again for an outbid instance, if a bid that wins costs at most `most` dollars an hour, its disk included.

        Nothing is sent where the present bid wins, or where none that wins is within `most`.
        """
        ...


@runtime_checkable
class Wishing(Protocol):
    """A provider that takes wishes about its machines, such as `image` and `region`, as options of a job."""

    wishes: frozenset[str]


_LIST: ContextVar[Known[tuple[Instance, ...]] | None] = ContextVar("list_in_hand", default=None)


@contextmanager
def list_in_hand(listed: Known[tuple[Instance, ...]] | None) -> Iterator[None]:
    """Let `get` compare an instance that it does not find with a list that was read a moment ago; None for a new one.

    A platform that took back a thousand machines would otherwise be asked for its list a thousand times.
    """
    token = _LIST.set(listed)
    try:
        yield
    finally:
        _LIST.reset(token)


def known_list() -> Known[tuple[Instance, ...]] | None:
    """Return the list that `get` may rely on now; None where it has to ask for one."""
    return _LIST.get()


def _key_variables(module: Any, name: str) -> Iterator[str]:
    if set(module.SHELL_GUARD.key_variables) != set(module.ACCOUNT_KEYS):
        yield "key_variables of SHELL_GUARD are other ones than ACCOUNT_KEYS"


PROVIDERS: Final = Registry(
    "provider",
    providers,
    Contract(
        home=__name__,
        values={"ACCOUNT_KEYS": TEXTS, "SHELL_GUARD": instance_of(ShellGuard)},
        functions={"create": ("profile", "state", "clock")},
        product=Provider,
        rest=_key_variables,
    ),
)


def provider_names() -> list[str]:
    """Return the names of all providers, sorted, without importing them."""
    return PROVIDERS.names()


def account_keys() -> frozenset[str]:
    """Return the variables with an account's key, of every provider. None goes to a machine."""
    names: list[tuple[str, ...]] = [module.ACCOUNT_KEYS for _, module in PROVIDERS.usable()]
    return frozenset(word for keys in names for key in keys for word in (key, f"{key}_FILE"))


def account_key_values(env: Mapping[str, str]) -> dict[str, str]:
    """Return this process's account keys by their source: a variable, or a file that one names."""
    found = {}
    for name in account_keys():
        found[name] = given = env.get(name, "").strip()  # somebody may have put the key where the file name belongs
        if name.endswith("_FILE") and given:
            found[f"the file of {name}"] = text_of_key_file(given)
    return {where: value for where, value in found.items() if len(value) >= LEAST_KEY}


def keyed(name: str, env: Mapping[str, str]) -> bool:
    """Whether the user has given the key of a provider's account."""
    keys: tuple[str, ...] = PROVIDERS.load(name).ACCOUNT_KEYS
    return any(env.get(word) for key in keys for word in (key, f"{key}_FILE"))


def load_provider(name: str, profile: Profile, state: Path, clock: Clock) -> Provider:
    """The provider called `name` for one profile; `state` is the folder it may keep files in."""
    provider: Provider = PROVIDERS.make(name, profile, state, clock)
    return provider
