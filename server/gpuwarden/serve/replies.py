"""What a use case answers, in the one form that tools and `--json` share.

Every reply carries `ok` and `code`, because transcript formats lose error flags. Text that somebody else wrote is
fenced and bounded here, on its way out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from gpuwarden.core.errors import Refused, WardenError
from gpuwarden.core.fence import fence, line, redact
from gpuwarden.core.models import CheckpointEvidence, FileEvidence, Report
from gpuwarden.core.repos import RepoAnswer, SearchAnswer
from gpuwarden.core.rules import Finding
from gpuwarden.core.states import TERMINAL_JOBS, Lease, Teardown
from gpuwarden.knowledge import Diagnosis
from gpuwarden.lifecycle.check import Checked, advice
from gpuwarden.lifecycle.instances import Inventory, Row
from gpuwarden.lifecycle.notify import Alert
from gpuwarden.lifecycle.pull import PullResult
from gpuwarden.lifecycle.records import JobRecord, LeaseRecord
from gpuwarden.lifecycle.submit import Submission
from gpuwarden.lifecycle.teardown import TeardownView
from gpuwarden.lifecycle.verify_there import CLAIM
from gpuwarden.lifecycle.watch import Round

SHOWN = 20
_HOW = "See not_checked for how to get there."
LOG_LIMIT = 16_000
"""As much of a log as one reply may carry, in characters."""


class Reply(BaseModel):
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


class FindingReply(BaseModel):
    """One finding of a gate."""

    rule: str
    severity: str
    message: str
    fix: str = ""


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


class SubmitReply(Reply):
    """`job_id` is set once the job is accepted; before that, `receipt` is what to submit again with."""

    job_id: str | None = None
    state: str | None = None
    adopted: bool = False
    receipt: str | None = None
    receipt_expires_at: float | None = None
    price_usd_per_hour: float | None = None
    price_source: str | None = None
    worst_cost_usd: float | None = None
    findings: list[FindingReply] = Field(default_factory=list)


class DiagnosisReply(BaseModel):
    """A known failure that the log's `lines` speak for: likely or possible, never certain."""

    id: str
    title: str
    certainty: str
    why: str
    fix: str
    lines: str = ""


class CheckReply(Reply):
    """A job and its meter now. `log_cursor` is where the next read of the log goes on."""

    job_id: str
    state: str
    why: str = ""
    attempt: int = 0
    step: int | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    exit_code: int | None = None
    alerts: list[str] = Field(default_factory=list)
    meter: MeterReply | None = None
    diagnoses: list[DiagnosisReply] = Field(default_factory=list)
    log: str = ""
    log_cursor: int | None = None
    log_bytes: int | None = None


class PullReply(Reply):
    """What was copied. `missing` are declared outputs that do not exist on the machine."""

    job_id: str
    dest: str
    files: int
    bytes: int
    bytes_sent: int
    manifest: str
    missing: list[str] = Field(default_factory=list)
    problems: list[str] = Field(default_factory=list)
    log: str | None = None


class FileReply(BaseModel):
    """The evidence on one file."""

    path: str
    format: str
    verdict: str
    problems: list[str] = Field(default_factory=list)


class VerifyReply(Reply):
    """A verdict: proven, refuted, or unknown, which is no pass. Files that were proven are only counted.

    Code `claimed`: the machine looked at its own files, and no copy is here. `problems` say why it is not proven,
    `warnings` change nothing.
    """

    verdict: str
    level: str
    path: str
    files: int
    bytes: int
    step: int | None = None
    newest: str = ""
    problems: list[str] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)
    proved: list[str] = Field(default_factory=list)
    not_checked: list[str] = Field(default_factory=list)
    evidence: list[FileReply] = Field(default_factory=list)


class TeardownReply(Reply):
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


class ClockReply(BaseModel):
    """What the platform will do by itself, and when, in seconds since the epoch."""

    at: float
    trigger: str
    effect: str


class InstanceReply(BaseModel):
    """One machine. `billing` null means that nobody knows, which counts as yes."""

    platform: str
    instance_id: str | None
    ours: bool
    state: str
    billing: bool | None
    price_usd_per_hour: float | None = None
    cost_usd: float | None = None
    since: float | None = None
    job_id: str | None = None
    job_state: str | None = None
    note: str = ""
    stopped_usd_per_hour: float | None = None
    stopped_at: float | None = None
    clocks: list[ClockReply] = Field(default_factory=list)

    @model_serializer(mode="wrap")
    def _small(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what few machines have."""
        rare = {"stopped_usd_per_hour", "stopped_at", "clocks"}
        return {k: v for k, v in whole(self).items() if v or k not in rare}


class InstancesReply(Reply):
    """Every machine of every platform in use. `unknown` names what could not be seen; it may be billing."""

    instances: list[InstanceReply] = Field(default_factory=list)
    jobs: list[dict[str, str]] = Field(default_factory=list)
    unknown: dict[str, str] = Field(default_factory=dict)


class AlertReply(BaseModel):
    """One alert. `state` is raised, or cleared when it is over; `about` is a job, lease or the whole day."""

    at: float
    about: str
    kind: str
    state: str
    text: str


class WatchReply(Reply):
    """One round of the watch: what is new, what stands, and what could not be looked at or sent."""

    news: list[AlertReply] = Field(default_factory=list)
    standing: list[AlertReply] = Field(default_factory=list)
    unknown: dict[str, str] = Field(default_factory=dict)


def error_reply(error: WardenError) -> dict[str, Any]:
    """The one form of an error. A machine or a platform may have worded part of it: one line, no cursor moved."""
    body = error.as_dict()
    body |= {"message": line(error.message, 1_200), "hint": line(error.hint, 800)}
    if isinstance(error, Refused):
        body["findings"] = [f.model_dump() for f in findings(error.findings)]
    return body


def findings(found: Sequence[Finding]) -> list[FindingReply]:
    """The findings of a gate as they leave: what a machine named stays on one line and moves no cursor."""
    return [
        FindingReply(rule=f.rule, severity=f.severity, message=line(f.message, 600), fix=line(f.fix, 400))
        for f in found
    ]


def submitted(result: Submission) -> SubmitReply:
    """A reply to submit_job."""
    reply = SubmitReply(
        findings=findings(result.findings),
        receipt=None if result.job else result.receipt,
        receipt_expires_at=None if result.job else result.expires_at,
        price_usd_per_hour=result.quote.price_usd_per_hour if result.quote else None,
        price_source=result.quote.source if result.quote else None,
        worst_cost_usd=result.worst_cost_usd,
        adopted=result.adopted,
    )
    if result.job is not None:
        reply.job_id, reply.state = result.job.id, result.job.state
        reply.code = "adopted" if result.adopted else "accepted"
        same = "The same job was submitted before and is this one. " if result.adopted else ""
        reply.message = f"{same}Job {result.job.id} is {result.job.state}. {line(result.job.why)}".strip()
        reply.hint = "Call check_job; it does not wait."
        if result.job.state == "failed" and result.job.handle is None:  # nothing was to be had, and nothing ran
            reply.ok, reply.code = False, "failed"
            reply.hint = "Nothing runs. Change what the message names, and submit anew for a new receipt."
    elif result.ask:
        reply.code = "approval_required"
        reply.message = f"Checked; nothing was launched. A person has to approve the spending: {result.ask}."
        reply.hint = f"Ask the user to run `gpuwarden approve {result.receipt}`, then submit again with this receipt."
    else:
        reply.code = "checked"
        reply.message = "Checked; nothing was launched."
        reply.hint = "To launch, submit the same arguments again with this receipt."
    return reply


def checked(result: Checked, values: tuple[str, ...] = ()) -> CheckReply:
    """A reply to check_job. `values` are secrets that the log may hold."""
    job, seen = result.job, result.observation
    log = result.log.text if result.log else ""
    return CheckReply(
        job_id=job.id,
        state=job.state,
        # A job that runs may be running badly, without a supervisor say: that is what was seen just now.
        why=line(seen.why if seen and seen.state is job.state and job.state not in TERMINAL_JOBS else job.why),
        attempt=job.attempt,
        message=line(result.note),
        hint=advice(job, result.lease),
        step=seen.step if seen else None,
        metrics={line(name, 64): number for name, number in list(seen.metrics.items())[:SHOWN]} if seen else {},
        exit_code=seen.exit_code if seen else None,
        alerts=[line(a) for a in seen.alerts[-SHOWN:]] if seen else [],
        meter=_meter(result.lease) if result.lease else None,
        diagnoses=[_diagnosis(d, values) for d in result.diagnoses],
        log=fence(log, f"the log of {job.id}", limit=LOG_LIMIT, values=values) if log else "",
        log_cursor=result.log.next if result.log else None,
        log_bytes=result.log.size if result.log else None,
    )


def _diagnosis(found: Diagnosis, values: tuple[str, ...]) -> DiagnosisReply:
    # Each line says where it is from, so that a log can't pass its own words off as what was observed.
    said = "\n".join(f"{'log' if m.number else 'observed'}: {line(redact(m.text, values), 240)}" for m in found.lines)
    return DiagnosisReply(
        id=found.id,
        title=found.title,
        certainty=found.certainty,
        why=found.why,
        fix=line(found.fix, 400),
        lines=fence(said, f"the evidence for {found.id}", values=values),
    )


def canceled(job: JobRecord, lease: LeaseRecord | None) -> CheckReply:
    """A reply to cancel_job."""
    meter = _meter(lease) if lease else None
    return CheckReply(job_id=job.id, state=job.state, why=line(job.why), hint=advice(job, lease), meter=meter)


def _meter(lease: LeaseRecord) -> MeterReply:
    billing = {Lease.STOPPED: False, Lease.NONE: False, Lease.METERING: True, Lease.STOPPING: True}.get(lease.state)
    seen = lease.instance
    return MeterReply(
        state=lease.state,
        billing=billing,
        instance_id=lease.instance_id,
        price_usd_per_hour=seen.price_usd_per_hour if seen else None,
        cost_usd=lease.cost,
        host_key=lease.fingerprint,
    )


def pulled(result: PullResult) -> PullReply:
    """A reply to pull_artifacts."""
    got = result.received
    reply = PullReply(
        job_id=result.job.id,
        dest=str(result.dest),
        files=len(got.files),
        bytes=sum(f.size for f in got.files),
        bytes_sent=got.bytes_sent,
        manifest=result.manifest.digest,
        missing=[line(m) for m in result.missing[:SHOWN]],
        problems=[line(f"{p.path}: {p.why}") for p in got.problems[:SHOWN]],
        log=str(result.log) if result.log else None,
        hint="Call verify_checkpoint with this job_id.",
    )
    if got.problems:
        reply.ok, reply.code = False, "incomplete"
        reply.message = f"{len(got.problems)} file(s) could not be copied."
        reply.hint = "Mend what `problems` says, then pull again: what arrived is kept."
    elif not got.files:
        reply.message = "No declared output exists on the machine; only the log was copied."
    return reply


def verified(report: Report) -> VerifyReply:
    """A reply to verify_checkpoint."""
    bad: list[FileEvidence | CheckpointEvidence] = [c for c in report.checkpoints if c.verdict != "proven"]
    bad += [f for f in report.files if f.verdict != "proven"]
    words = {"proven": "Proven.", "refuted": "Refuted: do not rely on it.", "unknown": "It could not be told."}
    hints = {"proven": "", "refuted": "Pull again; if it stays, the file is broken at its source."}
    code, message, hint = str(report.verdict), words[report.verdict], hints.get(report.verdict, _HOW)
    if CLAIM in report.not_checked:  # looked at by the machine itself
        hint = "Call pull_artifacts; only a copy that is verified here counts."
        if report.verdict == "proven":
            code, message = "claimed", "Whole by the machine's own word; there is no copy of it here."
    return VerifyReply(
        ok=report.verdict == "proven",
        code=code,
        message=message,
        hint=hint,
        verdict=report.verdict,
        level=report.level,
        path=report.path,
        files=len(report.files),
        bytes=report.bytes,
        step=report.step,
        newest=line(report.newest),
        problems=[line(p) for p in [*report.problems, *report.doubts][:SHOWN]],
        warnings=[line(p) for p in report.warnings[:SHOWN]],
        proved=[line(p) for p in report.proved[:SHOWN]],
        not_checked=[line(n) for n in report.not_checked[:SHOWN]],
        evidence=[
            FileReply(
                path=line(f.path),
                format=f.format if isinstance(f, FileEvidence) else f.layout,
                verdict=f.verdict,
                problems=[line(p) for p in [*f.problems, *f.doubts][:5]],
            )
            for f in bad[:SHOWN]
        ],
    )


_TEARDOWN_CODES: dict[str, str] = {
    Teardown.BLOCKED: "blocked",
    Teardown.AWAITING_HUMAN: "approval_required",
    Teardown.EXECUTING: "executing",
    Teardown.VERIFIED_STOPPED: "verified_stopped",
    Teardown.NEEDS_HUMAN: "needs_human",
    Teardown.WITHDRAWN: "withdrawn",
}


def torn_down(view: TeardownView, *, declined: bool = False) -> TeardownReply:
    """A reply to teardown_request. `declined`: a person was asked in the client and did not say yes."""
    record = view.record
    message, hint = _teardown_words(view)
    if declined:
        message, hint = "The person in the client did not approve; nothing was touched.", "Ask them what they want."
    return TeardownReply(
        ok=record.state is not Teardown.BLOCKED and not declined,
        code="declined" if declined else _TEARDOWN_CODES.get(record.state, str(record.state)),
        message=message,
        hint=hint,
        ticket=record.id,
        state=record.state,
        verb=record.verb,
        job_id=record.job_id,
        findings=findings(view.findings),
        deletes=[line(f.path) for f in view.dying[:SHOWN]],
        copy_at=view.copy_at,
        expires_at=record.expires_at if record.state is Teardown.AWAITING_HUMAN else None,
        meter=_meter(view.lease),
    )


def _teardown_words(view: TeardownView) -> tuple[str, str]:
    record, lease = view.record, view.lease
    name = f"{record.verb} of {lease.platform} instance {lease.instance_id}"
    if record.state is Teardown.BLOCKED:
        return f"The {name} is blocked; nothing was touched.", "Do what each finding says, then ask again."
    if record.state is Teardown.AWAITING_HUMAN:
        ask = f"Ask the user to run `gpuwarden approve {record.id}`, then call this again."
        return f"The {name} waits for a person; nothing was touched.", ask
    if record.state is Teardown.VERIFIED_STOPPED:
        return f"The {name} is done: the meter was seen to have stopped.", ""
    if record.state is Teardown.NEEDS_HUMAN:
        return (
            f"The {name} was asked for, but the meter is not seen to have stopped.",
            "Look at the platform's console.",
        )
    if record.state is Teardown.EXECUTING:
        return f"The {name} is under way; the meter counts as running until it is seen gone.", "Call this again."
    return f"The {name} is {record.state}.", "Call this again."


def listed(inventory: Inventory) -> InstancesReply:
    """A reply to list_instances."""
    rows = [_instance(row) for row in inventory.rows]
    billing = sum(row.billing is not False for row in inventory.rows)
    unknown = {line(k, 80): line(v) for k, v in inventory.unknown.items()}
    return InstancesReply(
        code="unknown" if unknown else "ok",
        message=f"{billing} machine(s) billing or possibly billing."
        + (" Not everything could be seen." if unknown else ""),
        instances=rows[:100],
        jobs=[{"job_id": j.id, "state": j.state, "platform": j.spec.platform} for j in inventory.jobs[:100]],
        unknown=unknown,
    )


def watched(done: Round) -> WatchReply:
    """A reply to one round of the watch; not ok while an alert stands."""
    unknown = {line(k, 80): line(v) for k, v in done.trouble.items()}
    calls = any(alert.raised for alert in done.news) or bool(done.standing)
    return WatchReply(
        ok=not calls and not unknown,
        code="alert" if calls else "unknown" if unknown else "ok",
        message=f"{len(done.standing)} alert(s) stand.",
        hint="Do what each alert says; gpuwarden ended no machine." if calls or unknown else "",
        news=[_alert(a) for a in done.news],
        standing=[_alert(a) for a in done.standing],
        unknown=unknown,
    )


def _alert(alert: Alert) -> AlertReply:
    state = "raised" if alert.raised else "cleared"
    return AlertReply(at=alert.at, about=alert.subject, kind=alert.kind, state=state, text=line(alert.text, 600))


def _instance(row: Row) -> InstanceReply:
    return InstanceReply(
        platform=row.platform,
        instance_id=row.instance_id,
        ours=row.ours,
        state=row.state,
        billing=row.billing,
        price_usd_per_hour=row.price_usd_per_hour,
        cost_usd=row.cost_usd,
        since=row.since,
        job_id=row.job.id if row.job else None,
        job_state=row.job.state if row.job else None,
        note=row.note,
        stopped_usd_per_hour=row.stopped_usd_per_hour,
        stopped_at=row.stopped_at,
        clocks=[ClockReply(at=c.at, trigger=c.trigger, effect=c.effect) for c in row.clocks],
    )


class ReposReply(Reply):
    """Repos of the Hub, one entry for each id that was asked for, without what is empty."""

    repos: list[dict[str, Any]] = Field(default_factory=list)
    requests: int = 0


class DatasetsReply(Reply):
    """Datasets that a search found."""

    datasets: list[dict[str, Any]] = Field(default_factory=list)
    more: bool = False


def repos_seen(answer: RepoAnswer) -> ReposReply:
    """The reply of hub_repo_details. `ok` says that the question was answered, not that every repo is there."""
    return ReposReply(message=answer.note, repos=[_kept(r) for r in answer.repos], requests=answer.requests)


def datasets_found(answer: SearchAnswer) -> DatasetsReply:
    """The reply of dataset_search."""
    return DatasetsReply(message=answer.note, datasets=[_kept(d) for d in answer.datasets], more=answer.more)


def _kept(model: BaseModel) -> dict[str, Any]:
    """A model without its defaults and without what is empty."""
    full = model.model_dump(mode="json", exclude_defaults=True)
    return {k: v for k, v in full.items() if v not in (None, "", [], {})}
