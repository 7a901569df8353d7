"""Events for teardowns, approvals, the policy and tokens."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from gpuwarden.core.models import Verb
from gpuwarden.core.rules import Finding
from gpuwarden.core.states import Teardown
from gpuwarden.ledger.events.base import Body


class TeardownRequested(Body):
    """A stop or termination was requested, or a request was reopened. A reopened request has no `job` or `lease`."""

    event: Literal["teardown.requested"] = "teardown.requested"
    MOVES_TO: ClassVar = Teardown.REQUESTED
    job: str | None = None
    lease: str | None = None
    verb: Verb | None = None


class Judged(Body):
    """Base class for events with the digest of the facts that the user approves."""

    digest: str | None = None
    findings: tuple[Finding, ...] = ()
    expires_at: float | None = None
    without_proof: bool = False


class TeardownBlocked(Judged):
    """A rule blocks the request."""

    event: Literal["teardown.blocked"] = "teardown.blocked"
    MOVES_TO: ClassVar = Teardown.BLOCKED


class TeardownAwaitingHuman(Judged):
    """The request is waiting for the user's approval, or the user has accepted the loss of unverified outputs."""

    event: Literal["teardown.awaiting_human"] = "teardown.awaiting_human"
    MOVES_TO: ClassVar = Teardown.AWAITING_HUMAN
    channel: str = ""
    by: str = ""


class ApprovalGranted(Judged):
    """The user approved a teardown, or the spending that a receipt requires."""

    event: Literal["approval.granted"] = "approval.granted"
    VERSION: ClassVar = 2
    MOVES_TO: ClassVar = Teardown.APPROVED
    channel: str = ""
    by: str = ""
    policy: str = ""
    """The digest of the policy file that was in effect."""
    auto_teardown: Verb | None = None
    """The verb of automatic teardown, if the user chose it for this job when approving the spending."""
    relaunch_budget_usd: float | None = None
    """The budget for additional machines if this job is interrupted."""

    @classmethod
    def upcast(cls, version: int, body: dict[str, Any]) -> dict[str, Any]:
        """Convert a version 1 body, in which automatic teardown was called a standing order."""
        named = {**body, "auto_teardown": body.get("end_when_proven")}
        named.pop("end_when_proven", None)
        return {**named, "channel": "automatic_teardown"} if body.get("channel") == "standing_order" else named

    def holds_at(self, now: float) -> bool:
        """Return whether the approval is still valid at a time, in seconds since the epoch."""
        return self.expires_at is not None and now <= self.expires_at


class ApprovalUnanswered(Body):
    """A client did not answer the approval form for the facts with this digest, and the form is not sent again.

    `how` is the action that the client returned: `accept` if the form contained no decision, or `no form` if the client
    does not support forms.
    """

    event: Literal["approval.unanswered"] = "approval.unanswered"
    digest: str | None = None
    how: Literal["decline", "cancel", "accept", "no form"] = "decline"


class ApprovalDeclined(Body):
    """The user declined a request for the facts with this digest, and is not asked about these facts again."""

    event: Literal["approval.declined"] = "approval.declined"
    digest: str | None = None
    channel: str = ""
    by: str = ""


class ApprovalUsed(Judged):
    """An approved action is about to be executed. The token ensures that this happens only once."""

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
    """The request was withdrawn or became obsolete."""

    event: Literal["teardown.withdrawn"] = "teardown.withdrawn"
    MOVES_TO: ClassVar = Teardown.WITHDRAWN


class TeardownNeedsHuman(Body):
    """The stop or terminate call was sent, but billing is not confirmed stopped."""

    event: Literal["teardown.needs_human"] = "teardown.needs_human"
    MOVES_TO: ClassVar = Teardown.NEEDS_HUMAN


class AutoTeardownOrdered(Body):
    """The user enabled automatic teardown of a job's machine. It starts when all outputs are verified.

    `through` names the place where it was enabled: the policy file with the digest `policy`, or the approval of the
    receipt `receipt`. The event is recorded when the job is accepted. If a policy enabled automatic teardown, the event
    is valid only while the policy still enables it. `storage` lists the storage that is billed after a termination.
    This storage was shown at submission, and the user accepted it together with the job.
    """

    event: Literal["ending.ordered"] = "ending.ordered"
    verb: Verb
    grace_s: float
    through: Literal["policy", "approval"]
    policy: str = ""
    receipt: str = ""
    by: str = ""
    storage: tuple[str, ...] = ()


class SelfStopOrdered(Body):
    """The policy file with the digest `policy` allows self-stop of a job's machine.

    The machine may stop itself `after_s` seconds after the job ends. The countdown restarts when the machine's files
    are read, but not when the job's status is polled. The event is recorded when the job is accepted.
    """

    event: Literal["parking.ordered"] = "parking.ordered"
    after_s: float
    policy: str = ""


class AutoTeardownAnnounced(Body):
    """Automatic teardown will start at `ends_at`, based on the facts with this digest, unless the user cancels it."""

    event: Literal["ending.announced"] = "ending.announced"
    ticket: str
    digest: str
    verb: Verb
    ends_at: float


class AutoTeardownHeld(Body):
    """A hold canceled automatic teardown for this job. Its teardown now requires the usual approval."""

    event: Literal["ending.objected"] = "ending.objected"
    channel: str = ""
    by: str = ""


class PinWrong(Body):
    """A wrong PIN was entered. `tried_at` is the time by the system clock, which a rehearsal can't shift."""

    event: Literal["pin.wrong"] = "pin.wrong"
    by: str = ""
    tried_at: float = 0.0


class PolicyAccepted(Body):
    """The user activated a policy file."""

    event: Literal["policy.accepted"] = "policy.accepted"
    path: str
    digest: str
    was_path: str = ""
    was_digest: str = ""
    channel: str = ""
    by: str = ""


class TokenMade(Body):
    """The user created a token for the HTTP server. `expires_at` is in seconds since the epoch."""

    event: Literal["token.made"] = "token.made"
    name: str
    scopes: tuple[str, ...]
    expires_at: float
    channel: str = ""
    by: str = ""
    person: str = ""


class TokenRevoked(Body):
    """A token for the HTTP server was revoked."""

    event: Literal["token.revoked"] = "token.revoked"
    name: str
    by: str = ""


class PolicyAllowed(Body):
    """The user allowed an action that the policy forbids."""

    event: Literal["policy.allowed"] = "policy.allowed"
    what: str
    channel: str = ""
    by: str = ""
