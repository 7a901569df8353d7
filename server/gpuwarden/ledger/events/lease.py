"""Events for leases and their hosts. Each rented machine has one lease."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from gpuwarden.core.models import Account, Instance, Verb
from gpuwarden.core.rules import Finding
from gpuwarden.core.states import Lease
from gpuwarden.ledger.events.base import Body


class LeaseBody(Body):
    """Base class for events that may contain the provider's response about the machine."""

    instance: Instance | None = None


class LeaseOpened(LeaseBody):
    """Base class for events that open a lease. From then on, a machine may be billed."""

    MOVES_TO: ClassVar = Lease.UNVERIFIED
    job: str
    platform: str
    account: Account | None = None


class CreateIntent(LeaseOpened):
    """A machine is about to be rented. The token ensures that this happens only once."""

    event: Literal["create.intent"] = "create.intent"
    generation: int = 0


class LeaseExtra(LeaseOpened):
    """A second machine with a lease's token was found."""

    event: Literal["lease.extra"] = "lease.extra"


class LeaseAccount(Body):
    """The account that rents the machine was identified: a query with the account's key returned the machine."""

    event: Literal["lease.account"] = "lease.account"
    account: Account


class CreateDoubted(Body):
    """The platform refused the request with the error `code`. A machine may exist until two polls have found none."""

    event: Literal["create.doubted"] = "create.doubted"
    code: str


class CreateRefused(Body):
    """The platform refused the request before a machine was ordered. In older ledgers, this event also records other
    refusals, after one poll.
    """

    event: Literal["create.refused"] = "create.refused"
    MOVES_TO: ClassVar = Lease.NONE


class CreateUnknown(Body):
    """It is unknown whether a machine was rented."""

    event: Literal["create.unknown"] = "create.unknown"


class CreateAbsent(Body):
    """One poll found no machine with the lease's token.

    The result of a poll at or after `settles_at` (seconds since the epoch) is final.
    """

    event: Literal["create.absent"] = "create.absent"
    settles_at: float | None = None


class LeaseNone(Body):
    """Two polls found no machine, so none was rented."""

    event: Literal["lease.none"] = "lease.none"
    MOVES_TO: ClassVar = Lease.NONE


class LeaseCreated(LeaseBody):
    """The platform returned the rented machine."""

    event: Literal["lease.created"] = "lease.created"
    MOVES_TO: ClassVar = Lease.METERING


class LeaseAdopted(LeaseBody):
    """A machine with the lease's token was found."""

    event: Literal["lease.adopted"] = "lease.adopted"
    MOVES_TO: ClassVar = Lease.METERING


class LeaseUnverified(LeaseBody):
    """The provider's response is unclear, or the provider lists the machine again. The machine counts as billed."""

    event: Literal["lease.unverified"] = "lease.unverified"
    MOVES_TO: ClassVar = Lease.UNVERIFIED


class LeaseMetering(LeaseBody):
    """A poll returned the machine again."""

    event: Literal["lease.metering"] = "lease.metering"
    MOVES_TO: ClassVar = Lease.METERING


class LeaseCameBack(LeaseBody):
    """A machine that was recorded as stopped or gone is running."""

    event: Literal["lease.came_back"] = "lease.came_back"
    MOVES_TO: ClassVar = Lease.METERING


class LeaseObserved(LeaseBody):
    """The machine's state or address changed."""

    event: Literal["lease.observed"] = "lease.observed"


class LeaseLook(LeaseBody):
    """The result of one poll. Two polls with equal results confirm a state. `cost` is the bill at that time in USD."""

    event: Literal["lease.look"] = "lease.look"
    saw: Literal["alive", "gone", "stopped"]
    cost: float | None = None


class LeaseEnded(LeaseBody):
    """Base class for events that record a state confirmed by two polls."""

    saw: Literal["gone", "stopped"]
    cost_usd: float | None = None


class LeaseStopped(LeaseEnded):
    """Billing is confirmed stopped."""

    event: Literal["lease.stopped"] = "lease.stopped"
    MOVES_TO: ClassVar = Lease.STOPPED


class LeaseGone(LeaseEnded):
    """A stopped machine and its disk no longer exist."""

    event: Literal["lease.gone"] = "lease.gone"


class LeaseStopping(Body):
    """An approved teardown is about to be executed."""

    event: Literal["lease.stopping"] = "lease.stopping"
    MOVES_TO: ClassVar = Lease.STOPPING
    ticket: str
    verb: Verb


class AbandonIntent(Body):
    """A machine that never ran a job is about to be torn down."""

    event: Literal["abandon.intent"] = "abandon.intent"
    MOVES_TO: ClassVar = Lease.STOPPING


class VerbIntent(Body):
    """A stop or terminate call is about to be sent. From then on, it counts as sent, regardless of its result."""

    event: Literal["verb.intent"] = "verb.intent"
    verb: Verb


class VerbSent(Body):
    """A stop or terminate call was sent. `taken` is true if the platform accepted it; otherwise, `why` is the response.

    If the platform asked gpuwarden to wait, `not_before` is the time from which the call may be sent again, in seconds
    since the epoch. Version 1 had the field `answer` instead: `taken`, or the platform's response.
    """

    event: Literal["verb.sent"] = "verb.sent"
    VERSION: ClassVar = 2
    verb: Verb
    taken: bool
    not_before: float | None = None

    @classmethod
    def upcast(cls, version: int, body: dict[str, Any]) -> dict[str, Any]:
        """Split version 1's field `answer`."""
        answer = body["answer"]
        return {**body, "taken": answer == "taken", "why": "" if answer == "taken" else answer}


class ResumeIntent(Body):
    """A stopped machine is about to be started, either to copy its outputs or to resume its paused job."""

    event: Literal["resume.intent"] = "resume.intent"


class SelfStopArmed(Body):
    """Self-stop was re-enabled on a restarted machine."""

    event: Literal["parking.armed"] = "parking.armed"


class StartRefused(Body):
    """The platform did not start a machine that was interrupted or had stopped itself."""

    event: Literal["start.refused"] = "start.refused"


class HostWaiting(Body):
    """A machine is running but does not accept connections yet."""

    event: Literal["host.waiting"] = "host.waiting"


class HostTrusted(Body):
    """The host key was recorded at the first connection. No other key is accepted afterward."""

    event: Literal["host.trusted"] = "host.trusted"
    host_key: str
    fingerprint: str
    host: str | None = None
    port: int | None = None


class HostChecked(Body):
    """A machine was checked before a job was launched on it."""

    event: Literal["host.checked"] = "host.checked"
    findings: tuple[Finding, ...] = ()
