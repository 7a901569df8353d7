"""All ledger events: a discriminated union of frozen models, each with a version.

`decode` reads a stored body. A body of an older version is first converted to the current version. An event of an
unknown kind is `Unrecognized` and changes no record.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Final, get_args

from pydantic import Field

from gpuwarden.ledger.events.approval_code import (
    ApprovalCodeMade,
    ApprovalCodeUsed,
    ApprovalCodeWrong,
)
from gpuwarden.ledger.events.base import (
    Body,
    Unrecognized,
)
from gpuwarden.ledger.events.fan_out import (
    ArrayIntent,
    CellProven,
    FanOutAccepted,
    FanOutAsked,
    FanOutEnded,
    FanOutLimited,
    FanOutResumed,
    QueueCollected,
    QueueIntent,
)
from gpuwarden.ledger.events.job import (
    ArtifactsExaminedThere,
    ArtifactsPulled,
    ArtifactsVerified,
    CancelRequested,
    FolderGone,
    JobAccepted,
    JobCanceled,
    JobEnded,
    JobFailed,
    JobMovedOn,
    JobObserved,
    JobPaused,
    JobPreempted,
    JobProvisioning,
    JobQueued,
    JobRefused,
    JobRested,
    JobRunning,
    JobSubmitted,
    JobSubmitting,
    JobSucceeded,
    JobUnknown,
    MachineSeen,
    OutputsDeclared,
    PauseRequested,
    PriceAccepted,
    PriceAsk,
    ProcessGone,
    ReceiptIssued,
    RelaunchAllowed,
    RelaunchIntent,
    ResumeRequested,
    SubmitIntent,
)
from gpuwarden.ledger.events.lease import (
    AbandonIntent,
    CreateAbsent,
    CreateDoubted,
    CreateIntent,
    CreateRefused,
    CreateUnknown,
    HostChecked,
    HostTrusted,
    HostWaiting,
    LeaseAccount,
    LeaseAdopted,
    LeaseBody,
    LeaseCameBack,
    LeaseCreated,
    LeaseEnded,
    LeaseExtra,
    LeaseGone,
    LeaseLook,
    LeaseMetering,
    LeaseNone,
    LeaseObserved,
    LeaseOpened,
    LeaseStopped,
    LeaseStopping,
    LeaseUnverified,
    ResumeIntent,
    SelfStopArmed,
    StartRefused,
    VerbIntent,
    VerbSent,
)
from gpuwarden.ledger.events.passkey import (
    PasskeyAllowed,
    PasskeyRegistered,
    PasskeyRemoved,
    PasskeyUsed,
)
from gpuwarden.ledger.events.rehearsal import (
    RehearsalAllowed,
    RehearsalAsked,
    ScriptRehearsed,
)
from gpuwarden.ledger.events.teardown import (
    ApprovalDeclined,
    ApprovalGranted,
    ApprovalUnanswered,
    ApprovalUsed,
    EndingAnnounced,
    EndingObjected,
    EndingOrdered,
    Judged,
    PinWrong,
    PolicyAccepted,
    PolicyAllowed,
    SelfStopOrdered,
    TeardownAwaitingHuman,
    TeardownBlocked,
    TeardownNeedsHuman,
    TeardownRequested,
    TeardownVerifiedStopped,
    TeardownWithdrawn,
    TokenMade,
    TokenRevoked,
)
from gpuwarden.ledger.events.watch import (
    AlertBody,
    AlertCleared,
    AlertRaised,
    AlertSent,
    AlertUnsent,
)

AnyEvent = Annotated[
    ReceiptIssued
    | JobAccepted
    | JobRefused
    | JobMovedOn
    | JobProvisioning
    | JobSubmitting
    | SubmitIntent
    | JobSubmitted
    | JobQueued
    | JobRunning
    | JobUnknown
    | JobPreempted
    | JobPaused
    | JobSucceeded
    | JobFailed
    | JobCanceled
    | CancelRequested
    | PauseRequested
    | ResumeRequested
    | MachineSeen
    | FolderGone
    | ProcessGone
    | PriceAsk
    | PriceAccepted
    | OutputsDeclared
    | RelaunchAllowed
    | RelaunchIntent
    | ArtifactsPulled
    | ArtifactsVerified
    | ArtifactsExaminedThere
    | CreateIntent
    | LeaseExtra
    | LeaseAccount
    | CreateDoubted
    | CreateRefused
    | CreateUnknown
    | CreateAbsent
    | LeaseNone
    | LeaseCreated
    | LeaseAdopted
    | LeaseUnverified
    | LeaseMetering
    | LeaseCameBack
    | LeaseObserved
    | LeaseLook
    | LeaseStopped
    | LeaseGone
    | LeaseStopping
    | AbandonIntent
    | VerbIntent
    | VerbSent
    | StartRefused
    | ResumeIntent
    | SelfStopArmed
    | HostWaiting
    | HostTrusted
    | HostChecked
    | TeardownRequested
    | TeardownBlocked
    | TeardownAwaitingHuman
    | ApprovalGranted
    | ApprovalDeclined
    | ApprovalUnanswered
    | ApprovalUsed
    | TeardownVerifiedStopped
    | TeardownWithdrawn
    | TeardownNeedsHuman
    | EndingOrdered
    | SelfStopOrdered
    | EndingAnnounced
    | EndingObjected
    | PinWrong
    | PolicyAccepted
    | PolicyAllowed
    | RehearsalAsked
    | RehearsalAllowed
    | ScriptRehearsed
    | PasskeyAllowed
    | PasskeyRegistered
    | PasskeyRemoved
    | PasskeyUsed
    | ApprovalCodeMade
    | ApprovalCodeWrong
    | ApprovalCodeUsed
    | TokenMade
    | TokenRevoked
    | AlertRaised
    | AlertCleared
    | AlertSent
    | AlertUnsent
    | FanOutAccepted
    | FanOutAsked
    | QueueIntent
    | QueueCollected
    | ArrayIntent
    | CellProven
    | FanOutEnded
    | FanOutResumed
    | FanOutLimited,
    Field(discriminator="event"),
]
BODIES: Final[dict[str, type[Body]]] = {body.kind(): body for body in get_args(get_args(AnyEvent)[0])}
"""Maps each stored kind to its model."""


@cache
def kinds_of(body: type[Body]) -> frozenset[str]:
    """Return the stored kinds of a model and of its subclasses."""
    return frozenset(kind for kind, model in BODIES.items() if issubclass(model, body))


def decode(kind: str, version: int, body: dict[str, Any]) -> Body:
    """Read a stored body. Raises ValueError if it is invalid or has a newer version."""
    model = BODIES.get(kind)
    if model is None:
        return Unrecognized()
    if version > model.VERSION:
        raise ValueError(f"{kind} has version {version}, but this gpuwarden supports versions up to {model.VERSION}")
    return model.model_validate(model.upcast(version, body) if version < model.VERSION else body)


__all__ = [
    "BODIES",
    "AbandonIntent",
    "AlertBody",
    "AlertCleared",
    "AlertRaised",
    "AlertSent",
    "AlertUnsent",
    "AnyEvent",
    "ApprovalCodeMade",
    "ApprovalCodeUsed",
    "ApprovalCodeWrong",
    "ApprovalDeclined",
    "ApprovalGranted",
    "ApprovalUnanswered",
    "ApprovalUsed",
    "ArrayIntent",
    "ArtifactsExaminedThere",
    "ArtifactsPulled",
    "ArtifactsVerified",
    "Body",
    "CancelRequested",
    "CellProven",
    "CreateAbsent",
    "CreateDoubted",
    "CreateIntent",
    "CreateRefused",
    "CreateUnknown",
    "EndingAnnounced",
    "EndingObjected",
    "EndingOrdered",
    "FanOutAccepted",
    "FanOutAsked",
    "FanOutEnded",
    "FanOutLimited",
    "FanOutResumed",
    "FolderGone",
    "HostChecked",
    "HostTrusted",
    "HostWaiting",
    "JobAccepted",
    "JobCanceled",
    "JobEnded",
    "JobFailed",
    "JobMovedOn",
    "JobObserved",
    "JobPaused",
    "JobPreempted",
    "JobProvisioning",
    "JobQueued",
    "JobRefused",
    "JobRested",
    "JobRunning",
    "JobSubmitted",
    "JobSubmitting",
    "JobSucceeded",
    "JobUnknown",
    "Judged",
    "LeaseAccount",
    "LeaseAdopted",
    "LeaseBody",
    "LeaseCameBack",
    "LeaseCreated",
    "LeaseEnded",
    "LeaseExtra",
    "LeaseGone",
    "LeaseLook",
    "LeaseMetering",
    "LeaseNone",
    "LeaseObserved",
    "LeaseOpened",
    "LeaseStopped",
    "LeaseStopping",
    "LeaseUnverified",
    "MachineSeen",
    "OutputsDeclared",
    "PasskeyAllowed",
    "PasskeyRegistered",
    "PasskeyRemoved",
    "PasskeyUsed",
    "PauseRequested",
    "PinWrong",
    "PolicyAccepted",
    "PolicyAllowed",
    "PriceAccepted",
    "PriceAsk",
    "ProcessGone",
    "QueueCollected",
    "QueueIntent",
    "ReceiptIssued",
    "RehearsalAllowed",
    "RehearsalAsked",
    "RelaunchAllowed",
    "RelaunchIntent",
    "ResumeIntent",
    "ResumeRequested",
    "ScriptRehearsed",
    "SelfStopArmed",
    "SelfStopOrdered",
    "StartRefused",
    "SubmitIntent",
    "TeardownAwaitingHuman",
    "TeardownBlocked",
    "TeardownNeedsHuman",
    "TeardownRequested",
    "TeardownVerifiedStopped",
    "TeardownWithdrawn",
    "TokenMade",
    "TokenRevoked",
    "Unrecognized",
    "VerbIntent",
    "VerbSent",
    "decode",
    "kinds_of",
]
