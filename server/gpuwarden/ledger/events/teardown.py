"""Events of teardowns and of the user's approvals."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from gpuwarden.core.models import Verb
from gpuwarden.core.rules import Finding
from gpuwarden.core.states import Teardown
from gpuwarden.ledger.events.base import Body


class TeardownRequested(Body):
    """A stop or a terminate was requested, or a request was reopened. The first event names the job and the machine."""

    event: Literal["teardown.requested"] = "teardown.requested"
    MOVES_TO: ClassVar = Teardown.REQUESTED
    job: str | None = None
    lease: str | None = None
    verb: Verb | None = None


class Judged(Body):
    """Base of events with the digest of the facts for the approval."""

    digest: str | None = None
    findings: tuple[Finding, ...] = ()
    expires_at: float | None = None
    without_proof: bool = False


class TeardownBlocked(Judged):
    """A rule blocks the request."""

    event: Literal["teardown.blocked"] = "teardown.blocked"
    MOVES_TO: ClassVar = Teardown.BLOCKED


class TeardownAwaitingHuman(Judged):
    """The request waits for the user's approval, or the user accepted losing unverified outputs."""

    event: Literal["teardown.awaiting_human"] = "teardown.awaiting_human"
    MOVES_TO: ClassVar = Teardown.AWAITING_HUMAN
    channel: str = ""
    by: str = ""


class ApprovalGranted(Judged):
    """The user approved a teardown, or a receipt's spending."""

    event: Literal["approval.granted"] = "approval.granted"
    VERSION: ClassVar = 2
    MOVES_TO: ClassVar = Teardown.APPROVED
    channel: str = ""
    by: str = ""
    policy: str = ""
    """Digest of the policy file in force."""
    auto_teardown: Verb | None = None
    """Automatic teardown that the user chose with a spending approval, for this job only."""
    relaunch_budget_usd: float | None = None
    """Budget for further machines after interruptions of this job."""

    @classmethod
    def upcast(cls, version: int, body: dict[str, Any]) -> dict[str, Any]:
        """Rename the standing order of version 1 to automatic teardown."""
        named = {**body, "auto_teardown": body.get("end_when_proven")}
        named.pop("end_when_proven", None)
        return {**named, "channel": "automatic_teardown"} if body.get("channel") == "standing_order" else named

    def holds_at(self, now: float) -> bool:
        """Return whether the approval has not expired at a time, in seconds since the epoch."""
        return self.expires_at is not None and now <= self.expires_at


class ApprovalUnanswered(Body):
    """A client's form about the facts of `digest` got no answer; that client is not asked about these facts again.

    `how` is the returned action, `accept` for a form without a decision, or `no form` if the client shows no forms.
    """

    event: Literal["approval.unanswered"] = "approval.unanswered"
    digest: str | None = None
    how: Literal["decline", "cancel", "accept", "no form"] = "decline"


class ApprovalDeclined(Body):
    """The user declined the facts of `digest` and is not asked about the same facts again."""

    event: Literal["approval.declined"] = "approval.declined"
    digest: str | None = None
    channel: str = ""
    by: str = ""


class ApprovalUsed(Judged):
    """An approval is carried out; the token allows that once."""

    event: Literal["approval.used"] = "approval.used"
    MOVES_TO: ClassVar = Teardown.EXECUTING
    channel: str = ""
    verb: Verb | None = None


class TeardownVerifiedStopped(Body):
    """Billing is confirmed stopped."""

    event: Literal["teardown.verified_stopped"] = "teardown.verified_stopped"
    MOVES_TO: ClassVar = Teardown.VERIFIED_STOPPED
    cost_usd: float | None = None


class TeardownWithdrawn(Body):
    """The request was withdrawn, or is obsolete."""

    event: Literal["teardown.withdrawn"] = "teardown.withdrawn"
    MOVES_TO: ClassVar = Teardown.WITHDRAWN


class TeardownNeedsHuman(Body):
    """The verb was sent, but billing is not confirmed stopped."""

    event: Literal["teardown.needs_human"] = "teardown.needs_human"
    MOVES_TO: ClassVar = Teardown.NEEDS_HUMAN


class EndingOrdered(Body):
    """The user ordered automatic teardown of a job's machine, to happen once all outputs are verified.

    `through` is the source of the order: the policy file with the digest `policy`, or the approval of the receipt
    `receipt`. The event is recorded when the job is accepted. An order from the policy is valid only while the policy
    contains it. `storage` names the storage that is billed after a terminate: that storage was shown at the submission
    and is accepted with the job.
    """

    event: Literal["ending.ordered"] = "ending.ordered"
    verb: Verb
    grace_s: float
    through: Literal["policy", "approval"]
    policy: str = ""
    receipt: str = ""
    by: str = ""
    storage: tuple[str, ...] = ()


class ParkingOrdered(Body):
    """The policy file with the digest `policy` allows self-stop of a job's machine.

    The machine may stop itself `after_s` seconds after the job's end, counted again from each read of its files; polls
    of the job's status do not count. The event is recorded when the job is accepted.
    """

    event: Literal["parking.ordered"] = "parking.ordered"
    after_s: float
    policy: str = ""


class EndingAnnounced(Body):
    """Automatic teardown will be carried out at `ends_at` on the facts of `digest`, unless the user objects."""

    event: Literal["ending.announced"] = "ending.announced"
    ticket: str
    digest: str
    verb: Verb
    ends_at: float


class EndingObjected(Body):
    """Automatic teardown of this job is canceled by a hold; the teardown needs an approval as usual."""

    event: Literal["ending.objected"] = "ending.objected"
    channel: str = ""
    by: str = ""


class PinWrong(Body):
    """A wrong PIN was entered."""

    event: Literal["pin.wrong"] = "pin.wrong"
    by: str = ""


class PolicyAccepted(Body):
    """The user put a policy file in force."""

    event: Literal["policy.accepted"] = "policy.accepted"
    path: str
    digest: str
    was_path: str = ""
    was_digest: str = ""
    channel: str = ""
    by: str = ""


class TokenMade(Body):
    """The user made a token of the HTTP server. `expires_at` is in seconds since the epoch."""

    event: Literal["token.made"] = "token.made"
    name: str
    scopes: tuple[str, ...]
    expires_at: float
    channel: str = ""
    by: str = ""
    person: str = ""


class TokenRevoked(Body):
    """A token of the HTTP server was revoked."""

    event: Literal["token.revoked"] = "token.revoked"
    name: str
    by: str = ""


class PolicyAllowed(Body):
    """The user allowed an action that the policy forbids."""

    event: Literal["policy.allowed"] = "policy.allowed"
    what: str
    channel: str = ""
    by: str = ""
