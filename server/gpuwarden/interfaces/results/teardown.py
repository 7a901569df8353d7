"""The reply of teardown_request."""

from __future__ import annotations

from pydantic import Field

from gpuwarden.core.errors import by_a_person
from gpuwarden.core.sanitize import named, quoted
from gpuwarden.core.states import Teardown
from gpuwarden.interfaces.results.base import (
    SHOWN,
    FindingReply,
    MeterReply,
    WarnedReply,
    findings,
    meter_of,
)
from gpuwarden.lifecycle.ending.teardown import TeardownView

_CODES: dict[str, str] = {
    Teardown.BLOCKED: "blocked",
    Teardown.AWAITING_HUMAN: "approval_required",
    Teardown.EXECUTING: "executing",
    Teardown.VERIFIED_STOPPED: "verified_stopped",
    Teardown.NEEDS_HUMAN: "needs_human",
    Teardown.WITHDRAWN: "withdrawn",
}


class TeardownReply(WarnedReply):
    """Where a request to stop or terminate is. `ticket` is what a person approves."""

    ticket: str
    state: str
    verb: str
    job_id: str
    findings: list[FindingReply] = Field(default_factory=list)
    deletes: list[str] = Field(default_factory=list)
    copy_at: str | None = None
    expires_at: float | None = None
    meter: MeterReply


def torn_down(view: TeardownView, *, declined: bool = False) -> TeardownReply:
    """A reply to teardown_request. `declined`: a person was asked in the client and did not say yes."""
    record = view.record
    message, hint = _words(view)
    if declined:
        message, hint = "The person in the client did not approve; nothing was touched.", "Ask them what they want."
    return TeardownReply(
        ok=record.state is not Teardown.BLOCKED and not declined,
        code="declined" if declined else _CODES.get(record.state, str(record.state)),
        message=message,
        hint=hint,
        ticket=record.id,
        state=record.state,
        verb=record.verb,
        job_id=record.job_id,
        findings=findings(view.findings),
        deletes=[named(f.path) for f in view.dying[:SHOWN]],
        copy_at=view.copy_at,
        expires_at=record.expires_at if record.state is Teardown.AWAITING_HUMAN else None,
        meter=meter_of(view.lease),
    )


def _words(view: TeardownView) -> tuple[str, str]:
    record, lease = view.record, view.lease
    verb = {"terminate": "termination"}.get(record.verb, record.verb)
    machine = named(lease.instance_id or "None")
    name = f"{verb} of {lease.platform} instance {machine}"
    if record.state is Teardown.BLOCKED:
        return f"The {name} is blocked; nothing was touched.", "Do what each finding says, then ask again."
    if record.state is Teardown.AWAITING_HUMAN:
        ask = f"{by_a_person(record.id)}; then call this again."
        return f"The {name} waits for a person; nothing was touched.", ask
    if record.state is Teardown.VERIFIED_STOPPED:
        return f"The {name} is done: the meter was seen to have stopped.", ""
    unseen = f" It can't be seen now: {quoted(view.unseen)}." if view.unseen else ""
    if record.state is Teardown.NEEDS_HUMAN:
        message = f"The {name} was asked for, but the meter is not seen to have stopped."
        return message + unseen, "Look at the platform's console."
    if record.state is Teardown.EXECUTING:
        message = f"The {name} is under way; the meter counts as running until it is seen gone."
        return message + unseen, "Call this again."
    return f"The {name} is {record.state}.", "Call this again."
