"""Base class for providers of rented machines: instance names with tokens, GPU names, and the account check."""

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
Findings: TypeAlias = list[Finding]  # inside a provider class, `list` is a method
Instances: TypeAlias = list[Instance]
PREFIX = "gpuwarden-"
DURABLE_NAME = "gpuwarden"
"""The name of the durable storage volume, on platforms with named volumes."""
MAX_PAGES = 400


class HttpProvider:
    """Base class for providers with an HTTP API. A subclass sets `api`, `name` and `max_name`.

    A subclass implements `look_up` for one instance, `bill` for the final bill of an instance that is gone, and
    `ask_account` for the account.
    """

    name: ClassVar[str]
    api: ClassVar[Api]
    max_name: ClassVar[int] = 128
    machine_options: frozenset[str] = frozenset()
    """The job options that this platform accepts: `image`, `region`, both or neither."""

    def __init__(self, profile: Profile, clock: Clock, env: Mapping[str, str] | None = None) -> None:
        self.profile = profile
        self.settle_s = profile.limits.settle_s
        self.clock = clock
        self.env = os.environ if env is None else env
        self.client = ApiClient(self.api, clock, self.env)
        self._accounts: dict[str, str] = {}
        """Account ids by key digest. A key never moves to another account."""

    # ------------------------------------------------------------------------------------------------- the account

    def key_digest(self, salt: str) -> str:
        """Return a salted digest of the account's key and the API address."""
        return self.client.digest(salt)

    async def account_id(self) -> Answer[str]:
        """Return the id of the account that the key belongs to. The platform is queried once per key.

        If the API address is not the platform's own, the address is part of the account's name, because a server at
        that address could report any account.
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
        """Return the account's id as reported by the platform. Raises NotSupported unless a subclass overrides it."""
        raise NotSupported(f"{self.api.platform} does not report the account through its API")

    # ------------------------------------------------------------------------------------------------ one instance

    def is_id(self, ident: str) -> bool:
        """Return whether `ident` could be an instance id on this platform."""
        return is_safe_id(ident)

    async def look_up(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return one instance. None or NotFound means that the platform has no such instance."""
        raise NotImplementedError

    async def bill(self, id: str, token: str) -> Instance | None:  # noqa: A002
        """Return an instance that is gone, with its final cost, or None if the platform does not report the cost."""
        return None

    async def get(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return one instance. If it is gone and the list confirms this, return None, or the instance with its final
        bill.
        """
        if not self.is_id(id):
            return Known(None)
        message = ""
        try:
            answer = await self.look_up(id)
        except NotFound as refusal:
            answer, message = Known(None), refusal.message
        if isinstance(answer, Unknown):
            return answer
        seen = answer.value
        if seen is not None and seen.id != id:
            return Unknown(f"{self.api.platform} was asked for {id} but returned another instance")
        if seen is not None and seen.state is not InstanceState.GONE:
            return answer
        there = await confirmed_absent(id, self.list, message or f"{self.api.platform} reports that {id} is gone")
        if isinstance(there, Unknown) or there.value is not None:
            return there
        return Known(await self.bill(id, seen.token if seen else "") or seen)

    async def list(self) -> Answer[tuple[Instance, ...]]:
        """Return every instance in the account, from all pages."""
        raise NotImplementedError

    def read_rows(
        self,
        rows: Iterable[object],
        shape: type[R],
        view: Callable[[R], Instance],
        names: type[N],
        named: Callable[[N], tuple[str, str | None]],
    ) -> Answer[tuple[Instance, ...]]:
        """Parse a list row by row, so that an invalid row does not hide other instances.

        A row without the expected shape becomes an UNCLEAR instance with the row's id and name. If a row lacks its id
        or name, it could be any instance, so the whole list is Unknown.
        """
        found: Instances = []
        for row in rows:
            raw, what = json.dumps(row).encode(), "the request for its list (one row)"
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
        """Raise NotSupported. A subclass whose platform reports the balance overrides this method."""
        raise NotSupported(
            f"{self.api.platform} does not report the balance through its API", "See the platform's console."
        )

    async def find(self, token: str) -> Answer[tuple[Instance, ...]]:
        """Return every instance whose name contains `token`, without relying on the platform's own filters."""
        answer = await self.list()
        if isinstance(answer, Unknown):
            return answer
        return Known(tuple(i for i in answer.value if token and i.token == token))

    async def check(self) -> Findings:
        """Return findings about the key and about anything else that prevents renting."""
        try:
            answer = await self.list()
            if isinstance(answer, Unknown):
                return [self.finding(Severity.UNKNOWN, f"the account could not be read: {answer.why}")]
            return await self.check_account()
        except WardenError as error:
            severity = Severity.ERROR if isinstance(error, AuthFailed) else Severity.UNKNOWN
            return [self.finding(severity, error.message, error.next_steps)]

    async def check_account(self) -> Findings:
        """Return findings specific to the platform, in addition to those about the key."""
        return []

    def finding(self, severity: Severity, message: str, fix: Hint = "") -> Finding:
        """Return a finding about the account."""
        return Finding(rule="PF-ACCT-001", severity=severity, message=message, fix=steps(fix))

    # ------------------------------------------------------------------------------------------------------- names

    def label(self, token: str) -> str:
        """Return the instance name that contains the full token. Raises BadRequest if the token can't be part of a
        name.
        """
        label = PREFIX + token
        if not token or len(label) > self.max_name or not re.fullmatch(r"[A-Za-z0-9._-]+", token):
            raise BadRequest(f"the token {token!r} can't be part of an instance name on {self.api.platform}")
        return label

    @staticmethod
    def token_in(label: str | None) -> str:
        """Return the token in an instance name, or "" if the name contains none."""
        return label.removeprefix(PREFIX) if label and label.startswith(PREFIX) else ""

    # ---------------------------------------------------------------------------------------------------- resources

    def refuse_unsold(self, resources: Resources) -> str:
        """Return the requested GPU. Raises BadRequest or NotSupported if the platform can't meet the request."""
        if resources.interruptible and not self.profile.spot.offered:
            raise NotSupported(
                f"{self.api.platform} does not offer interruptible machines",
                "Request a machine that is not interruptible.",
            )
        if resources.durable_storage and self.durable_tier() is None:
            raise NotSupported(f"{self.api.platform} does not offer storage that is kept after the machine is gone")
        if not resources.gpu:
            raise BadRequest("no GPU is specified", do(Action.SET_ARGUMENT, "to a name such as H100", name="gpu"))
        return resources.gpu

    def durable_tier(self) -> Tier | None:
        """Return the profile's storage tier that is provided on request."""
        return next((t for t in self.profile.storage if t.present == "on_request"), None)

    def option(self, resources: Resources, name: str, variable: str = "") -> str:
        """Return the job's option `name`, else the value of the environment variable `variable`, else ""."""
        return str(resources.options.get(name) or (self.env.get(variable) if variable else "") or "")

    def ssh_key(self) -> str | None:
        """Return the public key that new machines should accept."""
        return public_key(self.env)

    # ----------------------------------------------------------------------------------------------------- instances

    def place(self, ident: str, host: str, port: int | None, user: str | None = None) -> Place:
        """Return the `Place` for jobs on an instance.

        If the port is None, ssh uses its default port or the port in the user's ssh config.
        """
        return Place(
            platform=self.profile.id,
            instance_id=ident,
            run_root=self.profile.run_root,
            host=host,
            port=port,
            user=user or self.profile.user,
        )


async def confirmed_absent(
    id: str,  # noqa: A002
    listing: Callable[[], Awaitable[Answer[tuple[Instance, ...]]]],
    message: str,
) -> Answer[Instance | None]:
    """Return None if the list does not contain the instance, otherwise the instance as listed.

    Returns Unknown if the list or the instance's row can't be read. `message` describes the reply to the query for this
    instance. A single 404 may be wrong, and a retired API address returns 404 for every instance.
    """
    try:
        answer = known_list() or await listing()
    except NotFound:
        return Unknown(f"the platform found neither the instance nor the list of instances: {message}")
    if isinstance(answer, Unknown):
        return Unknown(f"{message}, but the list could not be read: {answer.why}")
    listed = next((i for i in answer.value if i.id == id and i.state is not InstanceState.GONE), None)
    if listed is not None and listed.state is InstanceState.UNCLEAR:
        return Unknown(f"{message}, but it is listed: {listed.why}")
    return Known(listed)


def no_such(platform: str, ident: str) -> NotFound:
    """Return the error for a missing instance."""
    return NotFound(f"{platform} has no instance {ident!r}", "List the instances to find its id.")


def positive_price(price: float | None) -> float | None:
    """Return `price` if it is positive, otherwise None, because platforms report an unknown price as zero."""
    return price if price is not None and price > 0 else None


def epoch(moment: datetime | None) -> float | None:
    """Convert a time to seconds since the epoch. A time without a zone counts as UTC."""
    if moment is None:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def gpu_matches(asked: str, names: Iterable[str]) -> bool:
    """Return whether one of these GPU names matches the request, either as a whole or by consecutive words.

    "H100" matches "NVIDIA H100 80GB HBM3"; "L4" does not match "L40S".
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
