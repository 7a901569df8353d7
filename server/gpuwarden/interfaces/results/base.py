"""What every reply has, and the parts that several replies share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from gpuwarden.core.errors import Refused, WardenError
from gpuwarden.core.rules import Finding
from gpuwarden.core.sanitize import line, named, quoted
from gpuwarden.core.states import Lease
from gpuwarden.lifecycle.records import LeaseRecord
from gpuwarden.policy_record import Notice

SHOWN = 20
"""Entries of a list that a reply names; more are not for a model to read."""


class Result(BaseModel):
    """What every reply has."""

    model_config = ConfigDict(extra="forbid")

    ok: bool = True
    code: str = "ok"
    message: str = ""
    hint: str = ""

    def short(self) -> dict[str, Any]:
        """The reply without what is empty."""
        full = self.model_dump(mode="json")
        return {k: v for k, v in full.items() if v not in (None, "", [], {}) or k == "ok"}


class WarnedReply(Result):
    """A reply about what costs: `warnings` are what is wrong with the policy, such as another file than the usual."""

    warnings: list[str] = Field(default_factory=list)


W = TypeVar("W", bound=Result)


def warned(reply: W, notices: Sequence[Notice]) -> W:
    """Add what there is to say about the policy to a reply that takes it."""
    if isinstance(reply, WarnedReply):
        reply.warnings = [notice.text for notice in notices]
    return reply


class FindingReply(BaseModel):
    """One finding of a gate."""

    rule: str
    severity: str
    message: str
    fix: str = ""


class ErrorReply(Result):
    """What went wrong. `retry` says whether the same call may do better later."""

    ok: bool = False
    retry: bool = False


class RefusalReply(ErrorReply):
    """A gate's no, with what it found."""

    findings: list[FindingReply]


class MeterReply(BaseModel):
    """An instance's meter. `billing` null means that nobody knows, which counts as yes.

    `host_key` is the fingerprint that the machine showed at first contact, and has to show ever after.
    """

    state: str
    billing: bool | None
    instance_id: str | None = None
    price_usd_per_hour: float | None = None
    cost_usd: float | None = None
    host_key: str | None = None


def findings(found: Sequence[Finding]) -> list[FindingReply]:
    """The findings of a gate as they leave.

    A message may name files, columns and processes, so the whole of it is a quotation; `fix` is ours.
    """
    return [
        FindingReply(rule=f.rule, severity=f.severity, message=quoted(f.message, 600), fix=line(f.fix, 400))
        for f in found
    ]


def error_reply(error: WardenError) -> ErrorReply:
    """The one form of an error. A machine or a platform may have worded part of the message, so it is a quotation."""
    message, hint = quoted(error.message, 1_200), line(error.hint, 800)
    told = ErrorReply(code=error.code, message=message, hint=hint, retry=error.retry)
    if isinstance(error, Refused):
        return RefusalReply(**told.model_dump(), findings=findings(error.findings))
    return told


def meter_of(lease: LeaseRecord) -> MeterReply:
    """The meter as it leaves; a state that says neither yes nor no is null."""
    billing = {Lease.STOPPED: False, Lease.NONE: False, Lease.METERING: True, Lease.STOPPING: True}.get(lease.state)
    seen = lease.instance
    return MeterReply(
        state=lease.state,
        billing=billing,
        instance_id=named(lease.instance_id) if lease.instance_id else None,
        price_usd_per_hour=seen.price_usd_per_hour if seen else None,
        cost_usd=lease.cost,
        host_key=lease.fingerprint,
    )
