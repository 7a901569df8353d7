"""All ledger events: frozen models, each with a version.

`decode` reads a stored body. A body of an older version is first converted to the current version. An event of an
unknown kind is `Unrecognized` and changes no record.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

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


def _stored(body: type[Body]) -> Iterator[type[Body]]:
    """Yield the models below a class that are stored, which have a field `event`."""
    for model in body.__subclasses__():
        if "event" in model.model_fields:
            yield model
        yield from _stored(model)


BODIES: Final[dict[str, type[Body]]] = {model.kind(): model for model in _stored(Body)}
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
