"""What the providers of rented machines share: names that carry a token, GPUs by name, the account's check."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import ClassVar, TypeAlias, TypeVar

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import AuthFailed, BadRequest, NotFound, NotSupported, WardenError
from gpuwarden.core.guidance import Action, Hint, do, steps
from gpuwarden.core.models import Answer, Balance, Instance, Known, Place, Resources, Unknown
from gpuwarden.core.profile import Profile, Tier
from gpuwarden.core.rules import Finding, Severity
from gpuwarden.providers._account import public_key
from gpuwarden.providers._http import Api, ApiClient

T = TypeVar("T")
Findings: TypeAlias = list[Finding]  # inside a provider, `list` is one of its methods
PREFIX = "gpuwarden-"
DURABLE_NAME = "gpuwarden"
"""The name of the volume that durable storage is taken from, where a platform names them."""
MAX_PAGES = 400


class Rented:
    """Base of the providers over HTTP. A subclass says `api`, `name` and how long a name may be."""

    name: ClassVar[str]
    api: ClassVar[Api]
    max_name: ClassVar[int] = 128

    def __init__(self, profile: Profile, clock: Clock, env: Mapping[str, str] | None = None) -> None:
        self.profile = profile
        self.settle_s = profile.limits.settle_s
        self.clock = clock
        self.env = os.environ if env is None else env
        self.door = ApiClient(self.api, clock, self.env)

    async def list(self) -> Answer[tuple[Instance, ...]]:
        """Every instance of the account, all pages."""
        raise NotImplementedError

    async def balance(self) -> Answer[Balance]:
        """Most platforms tell it; a subclass whose platform does not leaves this as it is, and says so."""
        raise NotSupported(f"{self.api.platform} tells no balance through its interface", "Look at its console.")

    async def find(self, token: str) -> Answer[tuple[Instance, ...]]:
        """Every instance whose name carries `token`. The platform's own filters are not relied on."""
        answer = await self.list()
        if isinstance(answer, Unknown):
            return answer
        return Known(tuple(i for i in answer.value if token and i.token == token))

    async def surely_gone(self, id: str, refusal: NotFound) -> Answer[Instance | None]:  # noqa: A002
        """What a 404 for one instance comes to: None only when the list can be read and does not have it.

        An address that was retired answers 404 for every instance there is.
        """
        try:
            answer = await self.list()
        except NotFound:
            return Unknown(f"it answers as if nothing were there, not even the list: {refusal.message}")
        if isinstance(answer, Unknown):
            return Unknown(f"{refusal.message}, but the list could not be read: {answer.why}")
        return Known(next((i for i in answer.value if i.id == id), None))

    async def check(self) -> Findings:
        """Whether the key is there and works, and what else stands in the way of renting."""
        try:
            answer = await self.list()
            if isinstance(answer, Unknown):
                return [self.finding(Severity.UNKNOWN, f"the account could not be looked at: {answer.why}")]
            return await self.check_account()
        except WardenError as error:
            severity = Severity.ERROR if isinstance(error, AuthFailed) else Severity.UNKNOWN
            return [self.finding(severity, error.message, error.next_steps)]

    async def check_account(self) -> Findings:
        """What a subclass looks at besides the key."""
        return []

    def finding(self, severity: Severity, message: str, fix: Hint = "") -> Finding:
        """A finding about the account."""
        return Finding(rule="PF-ACCT-001", severity=severity, message=message, fix=steps(fix))

    # ------------------------------------------------------------------------------------------------------- names

    def label(self, token: str) -> str:
        """The name of the instance that carries `token`, whole. Raises BadRequest for one that does not fit."""
        label = PREFIX + token
        if not token or len(label) > self.max_name or not re.fullmatch(r"[A-Za-z0-9._-]+", token):
            raise BadRequest(f"the token {token!r} can't stand in a name of {self.api.platform}")
        return label

    @staticmethod
    def token_in(label: str | None) -> str:
        """The token that a name carries, "" where it carries none."""
        return label.removeprefix(PREFIX) if label and label.startswith(PREFIX) else ""

    # ---------------------------------------------------------------------------------------------------- resources

    def refuse_unsold(self, resources: Resources) -> str:
        """The GPU that was asked for. Raises for what this platform can't sell."""
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
        """The profile's storage that has to be asked for."""
        return next((t for t in self.profile.storage if t.present == "on_request"), None)

    def ssh_key(self) -> str | None:
        """The public key that new machines should let in."""
        return public_key(self.env)

    # ----------------------------------------------------------------------------------------------------- instances

    def place(self, ident: str, host: str, port: int | None, user: str | None = None) -> Place:
        """Where jobs go on an instance. Port None is ssh's usual one, or what the user's ssh config says."""
        return Place(
            platform=self.profile.id,
            instance_id=ident,
            run_root=self.profile.run_root,
            host=host,
            port=port,
            user=user or self.profile.user,
        )


def no_such(platform: str, ident: str) -> NotFound:
    """The error for an instance that is not there."""
    return NotFound(f"{platform} has no instance {ident!r}", "List the instances to see what there is.")


def positive_price(price: float | None) -> float | None:
    """A price; one of zero is no price that anybody sells at, so it is unknown."""
    return price if price is not None and price > 0 else None


def epoch(moment: datetime | None) -> float | None:
    """Seconds since the epoch; a time without a zone is UTC."""
    if moment is None:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def gpu_matches(asked: str, names: Iterable[str]) -> bool:
    """Whether a GPU is one that was asked for: by a whole name, or by words of it in their order.

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
