"""Events of teardowns and of the approvals that people give."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from gpuwarden.core.models import Verb
from gpuwarden.core.rules import Finding
from gpuwarden.core.states import Teardown
from gpuwarden.ledger.events.base import Body


class TeardownRequested(Body):
    """A stop or a terminate was asked for, or a request was sent back. The first one names what it is about."""

    event: Literal["teardown.requested"] = "teardown.requested"
    MOVES_TO: ClassVar = Teardown.REQUESTED
    job: str | None = None
    lease: str | None = None
    verb: Verb | None = None


class Judged(Body):
    """Base of events that carry the digest of the facts that a person is asked about."""

    digest: str | None = None
    findings: tuple[Finding, ...] = ()
    expires_at: float | None = None
    without_proof: bool = False


class TeardownBlocked(Judged):
    """A rule blocks the request."""

    event: Literal["teardown.blocked"] = "teardown.blocked"
    MOVES_TO: ClassVar = Teardown.BLOCKED


class TeardownAwaitingHuman(Judged):
    """A person may approve, or gave up what has no proof."""

    event: Literal["teardown.awaiting_human"] = "teardown.awaiting_human"
    MOVES_TO: ClassVar = Teardown.AWAITING_HUMAN
    channel: str = ""
    by: str = ""


class ApprovalGranted(Judged):
    """A person approved a teardown, or a receipt's spending."""

    event: Literal["approval.granted"] = "approval.granted"
    VERSION: ClassVar = 2
    MOVES_TO: ClassVar = Teardown.APPROVED
    channel: str = ""
    by: str = ""
    policy: str = ""
    """The digest of the policy file that was in force."""
    auto_teardown: Verb | None = None
    """Automatic teardown that the person gave with a spending approval, for this one job."""
    relaunch_budget_usd: float | None = None
    """What the person allowed to spend on further machines after interruptions of this one job."""

    @classmethod
    def upcast(cls, version: int, body: dict[str, Any]) -> dict[str, Any]:
        """Rename what version 1 called a standing order."""
        named = {**body, "auto_teardown": body.get("end_when_proven")}
        named.pop("end_when_proven", None)
        return {**named, "channel": "automatic_teardown"} if body.get("channel") == "standing_order" else named

    def holds_at(self, now: float) -> bool:
        """Return whether the approval has not expired at a time, in seconds since the epoch."""
        return self.expires_at is not None and now <= self.expires_at


class ApprovalUnanswered(Body):
    """A client's form about the facts of `digest` got no answer; the client is not asked about them again.

    `how` is the action that came, `accept` for a form without a yes or no, or `no form` where the client shows none.
    """

    event: Literal["approval.unanswered"] = "approval.unanswered"
    digest: str | None = None
    how: Literal["decline", "cancel", "accept", "no form"] = "decline"


class ApprovalDeclined(Body):
    """A person was shown the facts of `digest` and said no; they are not asked about the same facts again."""

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
    """The meter was seen to have stopped."""

    event: Literal["teardown.verified_stopped"] = "teardown.verified_stopped"
    MOVES_TO: ClassVar = Teardown.VERIFIED_STOPPED
    cost_usd: float | None = None


class TeardownWithdrawn(Body):
    """The request was taken back, or has become pointless."""

    event: Literal["teardown.withdrawn"] = "teardown.withdrawn"
    MOVES_TO: ClassVar = Teardown.WITHDRAWN


class TeardownNeedsHuman(Body):
    """The verb was sent and the meter is not seen to have stopped."""

    event: Literal["teardown.needs_human"] = "teardown.needs_human"
    MOVES_TO: ClassVar = Teardown.NEEDS_HUMAN


class EndingOrdered(Body):
    """A person decided in advance how a job's machine ends once everything is proven.

    `through` is where they did: the policy file with the digest `policy`, or the approval of the receipt `receipt`.
    Recorded when the job is accepted. An order through the policy holds only while the policy gives it too. `storage`
    names what bills on after a terminate: it was shown at the submit and is accepted with the job.
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
    """A person allowed in the policy file with the digest `policy` that a job's machine stops itself.

    It may after `after_s` in which nobody came, counted from the job's end. Recorded when the job is accepted.
    """

    event: Literal["parking.ordered"] = "parking.ordered"
    after_s: float
    policy: str = ""


class EndingAnnounced(Body):
    """Automatic teardown will be carried out at `ends_at` on the facts of `digest`, unless somebody objects."""

    event: Literal["ending.announced"] = "ending.announced"
    ticket: str
    digest: str
    verb: Verb
    ends_at: float


class EndingObjected(Body):
    """Somebody wants the machine kept: automatic teardown of this job is void, and a person is asked as usual."""

    event: Literal["ending.objected"] = "ending.objected"
    channel: str = ""
    by: str = ""


class PinWrong(Body):
    """Somebody typed a wrong PIN."""

    event: Literal["pin.wrong"] = "pin.wrong"
    by: str = ""


class PolicyAccepted(Body):
    """A person put a policy file in force."""

    event: Literal["policy.accepted"] = "policy.accepted"
    path: str
    digest: str
    was_path: str = ""
    was_digest: str = ""
    channel: str = ""
    by: str = ""


class TokenMade(Body):
    """A person made a token of the HTTP server. `expires_at` in seconds since the epoch."""

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
    """A person allowed something that the policy forbade."""

    event: Literal["policy.allowed"] = "policy.allowed"
    what: str
    channel: str = ""
    by: str = ""
