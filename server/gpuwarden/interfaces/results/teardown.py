"""Reply to the teardown_request tool and to `gpuwarden teardown`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from gpuwarden.core.guidance import Hint, steps
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

if TYPE_CHECKING:
    from gpuwarden.lifecycle.teardown.gate import TeardownView

_CODES: dict[str, str] = {
    Teardown.BLOCKED: "blocked",
    Teardown.AWAITING_HUMAN: "approval_required",
    Teardown.EXECUTING: "executing",
    Teardown.VERIFIED_STOPPED: "verified_stopped",
    Teardown.NEEDS_HUMAN: "needs_human",
    Teardown.WITHDRAWN: "withdrawn",
}


class TeardownReply(WarnedReply):
    """The state of a request to stop or terminate a machine. The user approves the request with its `ticket`."""

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
    """Return the reply to teardown_request.

    `declined` is true if the user was asked in the client and did not approve.
    """
    record = view.record
    message, following = _state(view)
    if declined:
        message, following = (
            "The user did not approve in the client; nothing was changed.",
            "Ask the user how to proceed.",
        )
    return TeardownReply(
        ok=record.state is not Teardown.BLOCKED and not declined,
        code="declined" if declined else _CODES.get(record.state, str(record.state)),
        message=message,
        next=steps(following),
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


def _state(view: TeardownView) -> tuple[str, Hint]:
    """Return a request's state as a sentence, and its next steps."""
    record, lease = view.record, view.lease
    verb = {"terminate": "termination"}.get(record.verb, record.verb)
    name = f"The {verb} of {lease.platform} instance {named(lease.instance_id or 'None')}"
    unseen = f" The instance can't be read now: {quoted(view.unseen)}." if view.unseen else ""
    endings = {
        Teardown.BLOCKED: "is blocked; nothing was changed.",
        Teardown.AWAITING_HUMAN: "needs the user's approval; nothing was changed.",
        Teardown.VERIFIED_STOPPED: "is complete: billing is confirmed stopped.",
        Teardown.NEEDS_HUMAN: f"was requested, but billing is not confirmed stopped.{unseen}",
        Teardown.EXECUTING: f"is in progress; billing counts as running until it is confirmed stopped.{unseen}",
    }
    return f"{name} {endings.get(record.state, f'is {record.state}.')}", view.next_steps
