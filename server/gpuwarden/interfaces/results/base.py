"""Shared parts of replies, and the rendering of a reply's next steps for an interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from gpuwarden.core.errors import Refused, WardenError
from gpuwarden.core.guidance import NextStep, for_job
from gpuwarden.core.models import Verb
from gpuwarden.core.sanitize import named, quoted
from gpuwarden.core.states import Lease

if TYPE_CHECKING:
    from gpuwarden.core.rules import Finding
    from gpuwarden.lifecycle.execution.situation import TeardownPlan
    from gpuwarden.lifecycle.records import LeaseRecord
    from gpuwarden.policy_record import Notice

SHOWN = 20
"""Maximum number of entries in each list of a reply; longer lists would fill up a model's context."""


Words = Callable[[Sequence[NextStep]], str]
"""A function that renders next steps: `interfaces.mcp.wording.in_calls` or `interfaces.cli.wording.in_commands`."""


Steps = Annotated[
    tuple[NextStep, ...],
    PlainSerializer(lambda value: [step.as_dict() for step in value], return_type=list[dict[str, Any]]),
]


class WithNextSteps(BaseModel):
    """Base class for models with next steps. `next` contains the steps as values; a text field contains the same steps,
    rendered for an interface.
    """

    next: Steps = ()


class Result(BaseModel):
    """Base class for replies. `hint` is `next` rendered for the interface that returns the reply."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    ok: bool = True
    code: str = "ok"
    message: str = ""
    hint: str = ""
    next: Steps = ()

    def short(self) -> dict[str, Any]:
        """Return the reply without empty values, and without `next`, which `hint` and `fix` repeat."""
        full = self.model_dump(mode="json", exclude={"next": True, "findings": {"__all__": {"next"}}})
        return {k: v for k, v in full.items() if v not in (None, "", [], {}) or k == "ok"}


class WarnedReply(Result):
    """Base class for replies with warnings, mostly about problems with the policy."""

    warnings: list[str] = Field(default_factory=list)


R = TypeVar("R", bound=Result)


def warned(reply: R, notices: Sequence[Notice], words: Words) -> R:
    """Add policy problems to a reply that has a field for warnings."""
    if isinstance(reply, WarnedReply):
        reply.warnings = [f"{notice.text} {words(notice.next_steps)}".strip() for notice in notices]
    return reply


_PARTS: Final = {"findings": "fix", "news": "hint", "standing": "hint", "waiting": "hint"}
"""The lists in a reply whose entries have next steps, mapped to the text field for the rendered steps."""


def worded(reply: R, words: Words) -> R:
    """Return a reply with its next steps, and those of its list entries, rendered for an interface.

    Only the text fields for `next` are rewritten, because other text in a reply may be a path, a name or a log.
    """
    job_id = getattr(reply, "job_id", None)
    update: dict[str, Any] = {"next": for_job(reply.next, job_id)}
    update["hint"] = reply.hint or words(update["next"])
    for name, text in _PARTS.items():
        if parts := getattr(reply, name, None):
            update[name] = [part.model_copy(update={text: words(part.next)}) for part in parts]
    return reply.model_copy(update=update)


def sentence(call: str, step: NextStep) -> str:
    """Return a step as one sentence, such as "Call x to do y." or "Or call x."."""
    start = f"or {call}" if step.alternative else call
    end = f" {step.purpose}" if step.purpose and step.purpose[0].isalnum() else step.purpose
    return f"{start[0].upper()}{start[1:]}{end}."


class FindingReply(WithNextSteps):
    """One finding from a gate. `fix` is `next` rendered for the interface."""

    rule: str
    severity: str
    message: str
    fix: str = ""


class ErrorReply(Result):
    """An error. `retry` is true if the same call may succeed later."""

    ok: bool = False
    retry: bool = False


class RefusalReply(ErrorReply):
    """A gate's refusal with its findings."""

    findings: list[FindingReply]


class MeterReply(BaseModel):
    """An instance's billing. An estimated cost is an upper bound.

    `billing` is null if the billing state is unknown; the instance then counts as billed.

    `host_key` is the fingerprint of the only host key that gpuwarden accepts from the machine.
    """

    state: str
    billing: bool | None
    instance_id: str | None = None
    price_usd_per_hour: float | None = None
    cost_usd: float | None = None
    cost_estimated: bool = False
    host_key: str | None = None


class AutoTeardownReply(BaseModel):
    """The automatic teardown and self-stop that the user chose for a job's machine.

    `ends_at` is set once the user has been notified.
    """

    automatic_teardown: Verb | None = None
    grace_minutes: float | None = None
    through: str = ""
    by: str = ""
    set_at: float | None = None
    ends_at: float | None = None
    objected_at: float | None = None
    self_stop_after_minutes: float | None = None

    @model_serializer(mode="wrap")
    def _known(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit fields without a value."""
        return {k: v for k, v in whole(self).items() if v not in (None, "")}


def auto_teardown_reply(found: TeardownPlan | None) -> AutoTeardownReply | None:
    """Return the automatic teardown and self-stop of a job's machine; None if neither was chosen."""
    if found is None:
        return None
    return AutoTeardownReply(
        automatic_teardown=found.verb,
        grace_minutes=round(found.grace_s / 60, 1) if found.verb else None,
        through=found.through,
        by=named(found.by, 80) if found.by else "",
        set_at=found.set_at,
        ends_at=found.ends_at,
        objected_at=found.objected_at,
        self_stop_after_minutes=None if found.self_stop_after_s is None else round(found.self_stop_after_s / 60, 1),
    )


def findings(found: Sequence[Finding]) -> list[FindingReply]:
    """Return a gate's findings.

    Each message is quoted as a whole, because it may contain names of files, columns and processes. The next steps are
    not quoted, because gpuwarden wrote them.
    """
    return [FindingReply(rule=f.rule, severity=f.severity, message=quoted(f.message, 600), next=f.fix) for f in found]


def error_reply(error: WardenError) -> ErrorReply:
    """Return the reply for an error. The error message is quoted, because it may contain text from a machine or a
    platform.
    """
    message = quoted(error.message, 1_200)
    if isinstance(error, Refused):
        found = findings(error.findings)
        return RefusalReply(code=error.code, message=message, next=error.next_steps, retry=error.retry, findings=found)
    return ErrorReply(code=error.code, message=message, next=error.next_steps, retry=error.retry)


def meter_of(lease: LeaseRecord) -> MeterReply:
    """Return a lease's billing; `billing` is null if the lease's state does not determine it."""
    billing = {Lease.STOPPED: False, Lease.NONE: False, Lease.METERING: True, Lease.STOPPING: True}.get(lease.state)
    seen = lease.instance
    return MeterReply(
        state=lease.state,
        billing=billing,
        instance_id=named(lease.instance_id) if lease.instance_id else None,
        price_usd_per_hour=seen.price_usd_per_hour if seen else None,
        cost_usd=lease.cost,
        cost_estimated=lease.estimated,
        host_key=lease.fingerprint,
    )
