"""Reply to check_job and cancel_job: a job's current state, with part of its log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from gpuwarden.core.sanitize import fence, line, named, quoted, redact
from gpuwarden.core.states import TERMINAL_JOBS, Job
from gpuwarden.interfaces.results.base import (
    SHOWN,
    AutoTeardownReply,
    MeterReply,
    WarnedReply,
    auto_teardown_reply,
    meter_of,
)
from gpuwarden.interfaces.results.cells import FanOutReply
from gpuwarden.interfaces.results.decisions import CheckOutcomeReply, outcome_reply
from gpuwarden.interfaces.results.version_skew import SkewReply, skew_reply

if TYPE_CHECKING:
    from gpuwarden.core.models import Observation
    from gpuwarden.knowledge import Diagnosis
    from gpuwarden.lifecycle.monitoring.check import CheckedJob, SignaledJob
    from gpuwarden.lifecycle.records import LeaseRecord

FOREIGN = frozenset({"why", "queue", "nodes", "resources"})
"""Allocation fields that contain text from outside gpuwarden."""
LOG_LIMIT = 16_000
"""Maximum number of log characters in one reply."""


class DiagnosisReply(BaseModel):
    """A known failure indicated by the log lines in `lines`. `certainty` is likely or possible."""

    id: str
    title: str
    certainty: str
    why: str
    fix: str
    lines: str = ""


class ArtifactStoreReply(BaseModel):
    """The content of a job's artifact store, according to the store's file list.

    If the content is unknown or may lack files from the machine, `why` gives the reason.
    """

    store: str
    files: int = 0
    bytes: int = 0
    newest: list[str] = Field(default_factory=list)
    why: str = ""


class CheckReply(WarnedReply):
    """A job's current state and billing. `log_cursor` is the position at which the next log read starts."""

    job_id: str
    state: str
    why: str = ""
    reason: str = ""
    """The code for the reason in `why`."""
    attempt: int = 0
    step: int | None = None
    total_steps: int | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    progress_from: str = ""
    """Source of step and metrics: the job's own `metrics`, its `output`, saved `files`, or `posted` to the server."""
    started_at: float | None = None
    elapsed_s: float | None = None
    remaining_s: float | None = None
    """Seconds until the last step, at the pace of the last few minutes."""
    remaining_range_s: list[int] = Field(default_factory=list)
    """Lowest and highest estimate of the seconds until the last step, from this run's pace and earlier runs."""
    projected_cost_usd: float | None = None
    """Projected cost of the current machine up to the last step, in US dollars."""
    curve: list[float] = Field(default_factory=list)
    """The loss from the first step to the last, downsampled."""
    usage: dict[str, float] = Field(default_factory=dict)
    """GPU, memory and disk usage in the machine's last report, in percent and bytes."""
    allocation: dict[str, str | float] = Field(default_factory=dict)
    """Report from the engine that runs the job, such as Slurm: the engine's job id, queue, nodes and restarts."""
    exit_code: int | None = None
    alerts: list[str] = Field(default_factory=list)
    meter: MeterReply | None = None
    ending: AutoTeardownReply | None = None
    diagnoses: list[DiagnosisReply] = Field(default_factory=list)
    skew: SkewReply | None = None
    """Package releases that contain the name that the failed job could not find."""
    checks: list[CheckOutcomeReply] = Field(default_factory=list)
    """Outcomes of the read-only checks that ran on the machine because the job has problems."""
    artifact_store: ArtifactStoreReply | None = None
    """The content of the artifact store, if the machine can't be read."""
    evidence: dict[str, str] = Field(default_factory=dict)
    """Result of each step in verifying the job's outputs: yes, no, not_yet or unknown."""
    fan_out: FanOutReply | None = None
    log: str = ""
    log_cursor: int | None = None
    log_bytes: int | None = None

    def short(self) -> dict[str, Any]:
        """Omit `curve`, which is only for display, and `started_at`."""
        return {name: value for name, value in super().short().items() if name not in ("curve", "started_at")}


def checked(result: CheckedJob, values: tuple[str, ...] = ()) -> CheckReply:
    """Return the reply to check_job. `values` are secrets that the log may contain."""
    from gpuwarden.lifecycle.artifacts.proof_steps import StageState
    from gpuwarden.lifecycle.posted import posted_text

    job, seen = result.job, result.observation
    log = result.log.text if result.log else ""
    # If a running job has lost its supervisor, only the latest poll shows this, not the job's last transition.
    current = seen is not None and seen.state is job.state and job.state not in TERMINAL_JOBS
    allocation = seen.allocation.model_dump(exclude_none=True) if seen and seen.allocation else {}
    return CheckReply(
        job_id=job.id,
        state=job.state,
        why=named(seen.why if seen and current else job.why, 300),
        reason=str((seen.reason if seen and current else job.reason) or ""),
        attempt=job.attempt,
        message=quoted(result.note),
        next=result.next_steps,
        step=seen.step if seen else None,
        **_progress(seen, result.lease, running=current and seen is not None and seen.state is Job.RUNNING),
        metrics={named(name, 64): number for name, number in list(seen.metrics.items())[:SHOWN]} if seen else {},
        usage=seen.beat.model_dump(exclude_none=True) if seen and current and seen.beat else {},
        allocation={
            k: quoted(v, 200) if isinstance(v, str) and k in FOREIGN else v
            for k, v in allocation.items()
            if v not in ("", 0)
        },
        exit_code=seen.exit_code if seen else None,
        alerts=[quoted(a) for a in (*(seen.alerts[-SHOWN:] if seen else ()), *map(posted_text, result.posted))],
        meter=meter_of(result.lease) if result.lease else None,
        ending=auto_teardown_reply(result.ending),
        diagnoses=[diagnosis_reply(d, values) for d in result.diagnoses],
        skew=skew_reply(result.skew),
        checks=[outcome_reply(one) for one in result.checks],
        artifact_store=ArtifactStoreReply(
            store=store.address,
            files=store.files,
            bytes=store.bytes,
            newest=[named(name, 200) for name in store.newest],
            why=quoted(store.why),
        )
        if (store := result.artifact_store)
        else None,
        remaining_range_s=[round(result.remaining.low), round(result.remaining.high)] if result.remaining else [],
        evidence={step.stage: step.state for step in result.evidence if step.state is not StageState.UNASKED},
        log=fence(log, f"the log of {job.id}", limit=LOG_LIMIT, values=values) if log else "",
        log_cursor=result.log.next if result.log else None,
        log_bytes=result.log.size if result.log else None,
    )


def _progress(seen: Observation | None, lease: LeaseRecord | None, *, running: bool) -> dict[str, Any]:
    """Return a job's progress and projected cost.

    Times are from the job's machine, whose clock may differ from the local clock.
    """
    if seen is None:
        return {}
    end = seen.at if running else seen.ended_at
    left = max(0.0, seen.eta_at - seen.at) if running and seen.eta_at is not None else None
    price = lease.instance.price_usd_per_hour if lease and lease.instance else None
    known = lease is not None and lease.cost is not None and price is not None and left is not None
    return {
        "total_steps": seen.total_steps,
        "progress_from": seen.source,
        "started_at": seen.started_at,
        "elapsed_s": round(end - seen.started_at, 1) if end and seen.started_at else None,
        "remaining_s": None if left is None else round(left),
        "projected_cost_usd": round(lease.cost + price * left / 3600, 4) if known else None,  # type: ignore[union-attr,operator]
        "curve": [loss for _, loss in seen.curve][-64:],
    }


def signaled(result: SignaledJob) -> CheckReply:
    """Return the reply to cancel_job, or to a pause or resume."""
    job = result.job
    return CheckReply(
        job_id=job.id,
        state=job.state,
        why=named(job.why, 300),
        reason=str(job.reason or ""),
        next=result.next_steps,
        meter=meter_of(result.lease) if result.lease else None,
        ending=auto_teardown_reply(result.ending),
    )


def diagnosis_reply(found: Diagnosis, values: tuple[str, ...]) -> DiagnosisReply:
    """Return a diagnosis with its evidence fenced and the secrets in `values` redacted."""
    # Each line names its source, so that a log can't present its own text as an observation.
    evidence = "\n".join(
        f"{'log' if m.number else 'observed'}: {line(redact(m.text, values), 240)}" for m in found.lines
    )
    return DiagnosisReply(
        id=found.id,
        title=found.title,
        certainty=found.certainty,
        why=found.why,
        fix=line(found.fix, 400),
        lines=fence(evidence, f"the evidence for {found.id}", values=values) if evidence else "",
    )
