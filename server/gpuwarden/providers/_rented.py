"""Shared base of the providers of rented machines: names that carry a token, GPUs by name, the account's check."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import ClassVar, TypeAlias, TypeVar

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import AuthFailed, BadRequest, NotFound, NotSupported, WardenError
from gpuwarden.core.guidance import Action, Hint, do, steps
from gpuwarden.core.models import Answer, Balance, Instance, InstanceState, Known, Place, Resources, Unknown
from gpuwarden.core.profile import Profile, Tier
from gpuwarden.core.rules import Finding, Severity
from gpuwarden.providers._account import public_key
from gpuwarden.providers._http import Api, ApiClient, ResponseModel, is_safe_id
from gpuwarden.providers.base import known_list

T = TypeVar("T")
R = TypeVar("R", bound=ResponseModel)
N = TypeVar("N", bound=ResponseModel)
Findings: TypeAlias = list[Finding]  # inside a provider, `list` is one of its methods
Instances: TypeAlias = list[Instance]
PREFIX = "gpuwarden-"
DURABLE_NAME = "gpuwarden"
"""The name of the volume that durable storage is taken from, where a platform names them."""
MAX_PAGES = 400


class Rented:
    """Base of the providers over HTTP. A subclass sets `api`, `name` and the longest name.

    It looks one instance up in `look_up`, the bill of a gone one in `bill`, and the account in `ask_account`.
    """

    name: ClassVar[str]
    api: ClassVar[Api]
    max_name: ClassVar[int] = 128
    wishes: frozenset[str] = frozenset()
    """The options of a job that this platform takes: `image`, `region`."""

    def __init__(self, profile: Profile, clock: Clock, env: Mapping[str, str] | None = None) -> None:
        self.profile = profile
        self.settle_s = profile.limits.settle_s
        self.clock = clock
        self.env = os.environ if env is None else env
        self.client = ApiClient(self.api, clock, self.env)
        self._accounts: dict[str, str] = {}
        """The account's id by a digest of its key: a key belongs to one account for as long as it exists."""

    # ------------------------------------------------------------------------------------------------- the account

    def key_digest(self, salt: str) -> str:
        """Return a salted digest of the key in use and its address."""
        return self.client.digest(salt)

    async def account_id(self) -> Answer[str]:
        """Name the account that the key in use belongs to; asked once for each key.

        At another address than the platform's own it is another account, or a server there could call itself ours.
        """
        key = self.key_digest(self.name)
        if key not in self._accounts:
            answer = await self.ask_account()
            if isinstance(answer, Unknown):
                return answer
            elsewhere = "" if self.client.url == self.api.url.rstrip("/") else f" at {self.client.url}"
            self._accounts[key] = answer.value + elsewhere
        return Known(self._accounts[key])

    async def ask_account(self) -> Answer[str]:
        """Ask the platform whose key is in use."""
        raise NotSupported(f"{self.api.platform} names no account through its API")

    # ------------------------------------------------------------------------------------------------ one instance

    def is_id(self, ident: str) -> bool:
        """Return whether an instance of this platform could have that id."""
        return is_safe_id(ident)

    async def look_up(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Ask for one instance. None or NotFound: the platform says that it does not exist."""
        raise NotImplementedError

    async def bill(self, id: str, token: str) -> Instance | None:  # noqa: A002
        """Return a gone instance with its final cost, or None where the platform does not have that."""
        return None

    async def get(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return one instance. A gone one is None, or the instance with its bill; the list has to agree that it is
        gone.
        """
        if not self.is_id(id):
            return Known(None)
        said = ""
        try:
            answer = await self.look_up(id)
        except NotFound as refusal:
            answer, said = Known(None), refusal.message
        if isinstance(answer, Unknown):
            return answer
        seen = answer.value
        if seen is not None and seen.id != id:
            return Unknown(f"{self.api.platform} was asked for {id} and answered with another")
        if seen is not None and seen.state is not InstanceState.GONE:
            return answer
        there = await agreed_gone(id, self.list, said or f"{self.api.platform} says that {id} is gone")
        if isinstance(there, Unknown) or there.value is not None:
            return there
        return Known(await self.bill(id, seen.token if seen else "") or seen)

    async def list(self) -> Answer[tuple[Instance, ...]]:
        """Return every instance of the account, all pages."""
        raise NotImplementedError

    def read_rows(
        self,
        rows: Iterable[object],
        shape: type[R],
        view: Callable[[R], Instance],
        names: type[N],
        named: Callable[[N], tuple[str, str | None]],
    ) -> Answer[tuple[Instance, ...]]:
        """Read a list row by row, so that an odd row hides no other instance.

        A row that does not have the expected shape is UNCLEAR, by the id and the name in it. One without them could be
        any instance, so then the list is Unknown.
        """
        found: Instances = []
        for row in rows:
            raw, what = json.dumps(row).encode(), "a row of its list"
            read = self.client.parse(raw, shape, what)
            if isinstance(read, Known):
                found.append(view(read.value))
                continue
            least = self.client.parse(raw, names, what)
            if isinstance(least, Unknown):
                return least
            ident, name = named(least.value)
            found.append(Instance(id=ident, token=self.token_in(name), state=InstanceState.UNCLEAR, why=read.why))
        return Known(tuple(found))

    async def balance(self) -> Answer[Balance]:
        """Raise NotSupported; a subclass whose platform reports the balance overrides this."""
        raise NotSupported(f"{self.api.platform} reports no balance through its API", "Look at its console.")

    async def find(self, token: str) -> Answer[tuple[Instance, ...]]:
        """Return every instance whose name carries `token`. The platform's own filters are not relied on."""
        answer = await self.list()
        if isinstance(answer, Unknown):
            return answer
        return Known(tuple(i for i in answer.value if token and i.token == token))

    async def check(self) -> Findings:
        """Return findings on the key and on whatever else prevents renting."""
        try:
            answer = await self.list()
            if isinstance(answer, Unknown):
                return [self.finding(Severity.UNKNOWN, f"the account could not be read: {answer.why}")]
            return await self.check_account()
        except WardenError as error:
            severity = Severity.ERROR if isinstance(error, AuthFailed) else Severity.UNKNOWN
            return [self.finding(severity, error.message, error.next_steps)]

    async def check_account(self) -> Findings:
        """Return a subclass's findings on anything besides the key."""
        return []

    def finding(self, severity: Severity, message: str, fix: Hint = "") -> Finding:
        """Return a finding about the account."""
        return Finding(rule="PF-ACCT-001", severity=severity, message=message, fix=steps(fix))

    # ------------------------------------------------------------------------------------------------------- names

    def label(self, token: str) -> str:
        """Return the name of the instance that carries `token`, whole. Raises BadRequest for one that does not fit."""
        label = PREFIX + token
        if not token or len(label) > self.max_name or not re.fullmatch(r"[A-Za-z0-9._-]+", token):
            raise BadRequest(f"the token {token!r} can't be part of a name of {self.api.platform}")
        return label

    @staticmethod
    def token_in(label: str | None) -> str:
        """Return the token that a name carries, "" where it carries none."""
        return label.removeprefix(PREFIX) if label and label.startswith(PREFIX) else ""

    # ---------------------------------------------------------------------------------------------------- resources

    def refuse_unsold(self, resources: Resources) -> str:
        """Return the GPU that was asked for. Raises for a request that this platform can't sell."""
        if resources.interruptible and not self.profile.spot.offered:
            raise NotSupported(f"{self.api.platform} sells no interruptible machines", "Ask for an uninterrupted one.")
        if resources.durable_storage and self.durable_tier() is None:
            raise NotSupported(f"{self.api.platform} has no storage that can be asked for and outlives the machine")
        if not resources.gpu:
            raise BadRequest(
                "no GPU was named, so none can be chosen", do(Action.SET_ARGUMENT, "to a name such as H100", name="gpu")
            )
        return resources.gpu

    def durable_tier(self) -> Tier | None:
        """Return the profile's storage that has to be asked for."""
        return next((t for t in self.profile.storage if t.present == "on_request"), None)

    def wished(self, resources: Resources, name: str, variable: str = "") -> str:
        """Return a wish of the job, else what the user's variable says for every job; empty without either."""
        return str(resources.options.get(name) or (self.env.get(variable) if variable else "") or "")

    def ssh_key(self) -> str | None:
        """Return the public key that new machines should let in."""
        return public_key(self.env)

    # ----------------------------------------------------------------------------------------------------- instances

    def place(self, ident: str, host: str, port: int | None, user: str | None = None) -> Place:
        """Return the place of jobs on an instance. Port None is ssh's usual one, or what the user's ssh config says."""
        return Place(
            platform=self.profile.id,
            instance_id=ident,
            run_root=self.profile.run_root,
            host=host,
            port=port,
            user=user or self.profile.user,
        )


async def agreed_gone(
    id: str,  # noqa: A002
    listing: Callable[[], Awaitable[Answer[tuple[Instance, ...]]]],
    said: str,
) -> Answer[Instance | None]:
    """Return None when the list can be read and does not have an instance either; else the instance as listed.

    `said` is the answer about the instance alone. A 404 for one instance may be a stray one, and an address
    that was retired answers 404 for every instance there is.
    """
    try:
        answer = known_list() or await listing()
    except NotFound:
        return Unknown(f"it answers as if nothing were there, not even the list: {said}")
    if isinstance(answer, Unknown):
        return Unknown(f"{said}, but the list could not be read: {answer.why}")
    listed = next((i for i in answer.value if i.id == id and i.state is not InstanceState.GONE), None)
    if listed is not None and listed.state is InstanceState.UNCLEAR:
        return Unknown(f"{said}, but it is listed: {listed.why}")
    return Known(listed)


def no_such(platform: str, ident: str) -> NotFound:
    """Return the error for an instance that is not there."""
    return NotFound(f"{platform} has no instance {ident!r}", "List the instances to see what there is.")


def positive_price(price: float | None) -> float | None:
    """Return a price; zero means unknown."""
    return price if price is not None and price > 0 else None


def epoch(moment: datetime | None) -> float | None:
    """Return seconds since the epoch; a time without a zone is UTC."""
    if moment is None:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def gpu_matches(asked: str, names: Iterable[str]) -> bool:
    """Return whether a GPU is one that was asked for: by a whole name, or by words of it in their order.

    "H100" is "NVIDIA H100 80GB HBM3"; "L4" is not "L40S".
    """
    wanted = _words(asked)
    for name in names:
        words = _words(name)
        if "".join(words) == "".join(wanted):
            return True
        spans = (words[n : n + len(wanted)] for n in range(len(words)))
        if wanted and any(span == wanted for span in spans):
            return True
    return False


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.casefold())
