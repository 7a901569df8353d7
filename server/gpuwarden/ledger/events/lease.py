"""Events of leases, one for each rented machine, and of their hosts."""

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
    """Base of the events that open a lease: a machine may be billed from then on."""

    MOVES_TO: ClassVar = Lease.UNVERIFIED
    job: str
    platform: str
    account: Account | None = None


class CreateIntent(LeaseOpened):
    """A machine is about to be rented; the token allows that once."""

    event: Literal["create.intent"] = "create.intent"
    generation: int = 0


class LeaseExtra(LeaseOpened):
    """A second machine has the token of a lease."""

    event: Literal["lease.extra"] = "lease.extra"


class LeaseAccount(Body):
    """The account that rents the machine, identified when a query with its key returned the machine."""

    event: Literal["lease.account"] = "lease.account"
    account: Account


class CreateDoubted(Body):
    """The platform refused to rent, with the error `code`; a machine may exist until two polls find none."""

    event: Literal["create.doubted"] = "create.doubted"
    code: str


class CreateRefused(Body):
    """The platform refused to rent before anything was ordered; in older ledgers, any refusal after one poll."""

    event: Literal["create.refused"] = "create.refused"
    MOVES_TO: ClassVar = Lease.NONE


class CreateUnknown(Body):
    """It is unknown whether a machine was rented."""

    event: Literal["create.unknown"] = "create.unknown"


class CreateAbsent(Body):
    """One poll found no machine with the lease's token.

    A poll at `settles_at` (seconds since the epoch) or later decides whether such a machine exists.
    """

    event: Literal["create.absent"] = "create.absent"
    settles_at: float | None = None


class LeaseNone(Body):
    """Two polls found no machine: nothing was rented."""

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
    """The provider's answer was not understood, or the machine is listed again. The machine counts as billing."""

    event: Literal["lease.unverified"] = "lease.unverified"
    MOVES_TO: ClassVar = Lease.UNVERIFIED


class LeaseMetering(LeaseBody):
    """A poll returned the machine again."""

    event: Literal["lease.metering"] = "lease.metering"
    MOVES_TO: ClassVar = Lease.METERING


class LeaseCameBack(LeaseBody):
    """A machine that was recorded as stopped or gone runs."""

    event: Literal["lease.came_back"] = "lease.came_back"
    MOVES_TO: ClassVar = Lease.METERING


class LeaseObserved(LeaseBody):
    """The machine's state or address changed."""

    event: Literal["lease.observed"] = "lease.observed"


class LeaseLook(LeaseBody):
    """The result of one poll. Two polls that agree confirm a state. `cost` is the bill at that time, in USD."""

    event: Literal["lease.look"] = "lease.look"
    saw: Literal["alive", "gone", "stopped"]
    cost: float | None = None


class LeaseEnded(LeaseBody):
    """Base of the states that two polls have confirmed."""

    saw: Literal["gone", "stopped"]
    cost_usd: float | None = None


class LeaseStopped(LeaseEnded):
    """Billing is confirmed stopped."""

    event: Literal["lease.stopped"] = "lease.stopped"
    MOVES_TO: ClassVar = Lease.STOPPED


class LeaseGone(LeaseEnded):
    """A stopped machine is gone with its disk."""

    event: Literal["lease.gone"] = "lease.gone"


class LeaseStopping(Body):
    """An approved teardown is being carried out."""

    event: Literal["lease.stopping"] = "lease.stopping"
    MOVES_TO: ClassVar = Lease.STOPPING
    ticket: str
    verb: Verb


class AbandonIntent(Body):
    """A machine that never ran a job is about to be given back."""

    event: Literal["abandon.intent"] = "abandon.intent"
    MOVES_TO: ClassVar = Lease.STOPPING


class VerbIntent(Body):
    """A stop or a terminate is about to be sent. From then on the call counts as sent, regardless of its result."""

    event: Literal["verb.intent"] = "verb.intent"
    verb: Verb


class VerbSent(Body):
    """A stop or a terminate was sent; `taken` is whether the platform accepted the verb; if not, `why` is its answer.

    If the platform asked to wait, `not_before` is when the verb may be sent again, in seconds since the epoch. Version
    1 had `answer`: the word `taken`, or the platform's other answer.
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
    """A stopped machine is about to be started: for its outputs, or for its paused job."""

    event: Literal["resume.intent"] = "resume.intent"


class ParkingArmed(Body):
    """A machine that was started again is allowed to stop itself again."""

    event: Literal["parking.armed"] = "parking.armed"


class StartRefused(Body):
    """The platform did not start a machine that was interrupted or had stopped itself."""

    event: Literal["start.refused"] = "start.refused"


class HostWaiting(Body):
    """A machine runs but does not accept connections yet."""

    event: Literal["host.waiting"] = "host.waiting"


class HostTrusted(Body):
    """The host key at first contact; no other key is accepted afterwards."""

    event: Literal["host.trusted"] = "host.trusted"
    host_key: str
    fingerprint: str
    host: str | None = None
    port: int | None = None


class HostChecked(Body):
    """The findings on a machine before a job ran there."""

    event: Literal["host.checked"] = "host.checked"
    findings: tuple[Finding, ...] = ()
