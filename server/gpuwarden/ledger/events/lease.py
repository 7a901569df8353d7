"""Events of leases, which follow one rented machine each, and of the hosts that are met."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from gpuwarden.core.models import Account, Instance, Verb
from gpuwarden.core.rules import Finding
from gpuwarden.core.states import Lease
from gpuwarden.ledger.events.base import Body


class LeaseBody(Body):
    """Base of events that may carry the provider's answer about the machine."""

    instance: Instance | None = None


class LeaseOpened(LeaseBody):
    """Base of the events that open a lease: from here on a meter may be running."""

    MOVES_TO: ClassVar = Lease.UNVERIFIED
    job: str
    platform: str
    account: Account | None = None


class CreateIntent(LeaseOpened):
    """A machine is about to be rented; the token allows that once."""

    event: Literal["create.intent"] = "create.intent"
    generation: int = 0


class LeaseExtra(LeaseOpened):
    """A second machine carries the token of a lease."""

    event: Literal["lease.extra"] = "lease.extra"


class LeaseAccount(Body):
    """The account that rents the machine, known since a look with its key showed the machine."""

    event: Literal["lease.account"] = "lease.account"
    account: Account


class CreateDoubted(Body):
    """The platform refused to rent, with an error of `code`; a machine may exist until two looks find none."""

    event: Literal["create.doubted"] = "create.doubted"
    code: str


class CreateRefused(Body):
    """The platform refused to rent, before anything was ordered. Older ledgers believed any refusal after one look."""

    event: Literal["create.refused"] = "create.refused"
    MOVES_TO: ClassVar = Lease.NONE


class CreateUnknown(Body):
    """Nobody knows whether a machine was rented."""

    event: Literal["create.unknown"] = "create.unknown"


class CreateAbsent(Body):
    """One look found no machine with the lease's token. A look at `settles_at`, in seconds since the epoch, or later
    settles whether there is one.
    """

    event: Literal["create.absent"] = "create.absent"
    settles_at: float | None = None


class LeaseNone(Body):
    """Two looks found no machine: nothing was rented."""

    event: Literal["lease.none"] = "lease.none"
    MOVES_TO: ClassVar = Lease.NONE


class LeaseCreated(LeaseBody):
    """The platform answered with the rented machine."""

    event: Literal["lease.created"] = "lease.created"
    MOVES_TO: ClassVar = Lease.METERING


class LeaseAdopted(LeaseBody):
    """A machine with the lease's token was found."""

    event: Literal["lease.adopted"] = "lease.adopted"
    MOVES_TO: ClassVar = Lease.METERING


class LeaseUnverified(LeaseBody):
    """The provider's answer was not understood, or the machine is back in sight: it counts as metering."""

    event: Literal["lease.unverified"] = "lease.unverified"
    MOVES_TO: ClassVar = Lease.UNVERIFIED


class LeaseMetering(LeaseBody):
    """The machine was seen again."""

    event: Literal["lease.metering"] = "lease.metering"
    MOVES_TO: ClassVar = Lease.METERING


class LeaseCameBack(LeaseBody):
    """A machine that had been seen stopped or gone was seen running."""

    event: Literal["lease.came_back"] = "lease.came_back"
    MOVES_TO: ClassVar = Lease.METERING


class LeaseObserved(LeaseBody):
    """The machine's state or address changed."""

    event: Literal["lease.observed"] = "lease.observed"


class LeaseLook(LeaseBody):
    """One look: the second that agrees is believed. `cost` is the bill then, in USD."""

    event: Literal["lease.look"] = "lease.look"
    saw: Literal["alive", "gone", "stopped"]
    cost: float | None = None


class LeaseEnded(LeaseBody):
    """Base of what is believed after two looks."""

    saw: Literal["gone", "stopped"]
    cost_usd: float | None = None


class LeaseStopped(LeaseEnded):
    """The meter was seen to have stopped."""

    event: Literal["lease.stopped"] = "lease.stopped"
    MOVES_TO: ClassVar = Lease.STOPPED


class LeaseGone(LeaseEnded):
    """A machine that lay stopped is gone with its disk."""

    event: Literal["lease.gone"] = "lease.gone"


class LeaseStopping(Body):
    """An approved request is carried out."""

    event: Literal["lease.stopping"] = "lease.stopping"
    MOVES_TO: ClassVar = Lease.STOPPING
    ticket: str
    verb: Verb


class AbandonIntent(Body):
    """A machine that never ran anything is given back."""

    event: Literal["abandon.intent"] = "abandon.intent"
    MOVES_TO: ClassVar = Lease.STOPPING


class VerbIntent(Body):
    """A stop or a terminate is about to be sent. From here on it counts as sent, whatever becomes of the call."""

    event: Literal["verb.intent"] = "verb.intent"
    verb: Verb


class VerbSent(Body):
    """A stop or a terminate was sent; `taken` says whether the platform took it, `why` what came instead.

    `not_before` is when it may be sent again, in seconds since the epoch, where the platform asked to wait.
    Version 1 had `answer`: the word `taken`, or what came instead.
    """

    event: Literal["verb.sent"] = "verb.sent"
    VERSION: ClassVar = 2
    verb: Verb
    taken: bool
    not_before: float | None = None

    @classmethod
    def upcast(cls, version: int, body: dict[str, Any]) -> dict[str, Any]:
        """Split the answer of version 1."""
        answer = body["answer"]
        return {**body, "taken": answer == "taken", "why": "" if answer == "taken" else answer}


class ResumeIntent(Body):
    """A machine that is stopped is about to be started: for what it keeps, or for its paused job."""

    event: Literal["resume.intent"] = "resume.intent"


class ParkingArmed(Body):
    """A machine that was started again may stop itself again."""

    event: Literal["parking.armed"] = "parking.armed"


class StartRefused(Body):
    """The platform did not start a machine that was interrupted, or had stopped itself."""

    event: Literal["start.refused"] = "start.refused"


class HostWaiting(Body):
    """A machine runs and lets nobody in yet."""

    event: Literal["host.waiting"] = "host.waiting"


class HostTrusted(Body):
    """The host key of first contact; no other is accepted afterwards."""

    event: Literal["host.trusted"] = "host.trusted"
    host_key: str
    fingerprint: str
    host: str | None = None
    port: int | None = None


class HostChecked(Body):
    """What was found on a machine before a job ran there."""

    event: Literal["host.checked"] = "host.checked"
    findings: tuple[Finding, ...] = ()
