"""Replies to pull_artifacts and verify_checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel, Field

from gpuwarden.core.evidence import Cause
from gpuwarden.core.guidance import Action, NextStep, do, steps
from gpuwarden.core.models import CheckpointEvidence, FileEvidence, Report, Verdict
from gpuwarden.core.plural import counted
from gpuwarden.core.sanitize import named, quoted
from gpuwarden.interfaces.results.base import SHOWN, Result

if TYPE_CHECKING:
    from gpuwarden.lifecycle.artifacts.pull import PullResult


class PullReply(Result):
    """The result of a pull. `missing` lists declared outputs that do not exist on the machine. `store` is the artifact
    store that the files were copied from; empty if they came from the machine.
    """

    job_id: str
    dest: str
    files: int
    bytes: int
    bytes_sent: int
    manifest: str
    missing: list[str] = Field(default_factory=list)
    problems: list[str] = Field(default_factory=list)
    log: str | None = None
    store: str = ""


class FileReply(BaseModel):
    """The evidence about one file or checkpoint."""

    path: str
    format: str
    verdict: str
    problems: list[str] = Field(default_factory=list)


class VerifyReply(Result):
    """A verdict: proven, refuted or unknown. Only `proven` is a success. Proven files are counted but not listed.

    The code `claimed` means that the machine checked its own files and nothing has been copied here. `problems` are the
    reasons why the verdict is not proven; `warnings` do not affect the verdict.
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


_NEXT: Final[dict[Cause, str]] = {
    Cause.RUNS_CODE: "Do not load it: unpickling it runs code. Use weights in the safetensors format or from a source "
    "that you trust, or convert this file on a scratch machine without credentials.",
    Cause.DAMAGE: "If it is still damaged after copying it again, the source is damaged: use another checkpoint.",
    Cause.CONTRADICTION: "Its parts contradict each other, and copying it again does not help: save it again from "
    "the run, or use another checkpoint.",
    Cause.NOT_FINITE: "Copying it again does not help: go back to a checkpoint whose values are finite, then find "
    "out why the run diverged.",
    Cause.NO_RESUME: "Resume from a complete checkpoint, or restart the optimizer from these weights.",
    Cause.NEEDS_CODE: "It can't be verified without running its code: check the imported names, then load it on a "
    "scratch machine without credentials and save the tensors as safetensors.",
    Cause.UNREAD: "Load it with the program that wrote it, or compare its digest with one recorded at save time.",
    Cause.LIMIT: "Verify a part of it or use a lower level; at a terminal, the user can allow more time and bytes.",
    Cause.UNSEALED: "Compare it with the manifest that was made on the machine, or write a manifest at save time.",
    Cause.CHANGING: "Retry when no process is writing to it.",
    Cause.NOT_LOADED: "Install the library that loads this format, or load it with the program that wrote it.",
}
"""Advice to the user for each cause. No tool or command can perform these steps."""


def _following(report: Report) -> list[NextStep]:
    """Return the next steps for the causes, most severe first. If any cause refutes the copy, ignore the others."""
    refuting = [cause for cause in report.causes if cause.refutes]
    found: list[NextStep] = []
    for cause in (refuting or report.causes)[:3]:
        if cause is Cause.DAMAGE:
            again = do(Action.PULL, "again", job_id=report.job) if report.job else "Copy it again from its source."
            found += steps(again)
        found += steps(_NEXT[cause])
    return found


def pulled(result: PullResult) -> PullReply:
    """Return the reply to pull_artifacts."""
    got = result.received
    reply = PullReply(
        job_id=result.job.id,
        dest=str(result.dest),
        files=len(got.files),
        bytes=sum(f.size for f in got.files),
        bytes_sent=got.bytes_sent,
        manifest=result.manifest.digest,
        missing=[named(m) for m in result.missing[:SHOWN]],
        problems=[quoted(f"{p.path}: {p.why}") for p in got.problems[:SHOWN]],
        log=str(result.log) if result.log else None,
        store=result.store,
        next=result.next_steps,
    )
    if result.store:
        reply.message = f"Copied from {result.store}, because the machine can't be read."
        if result.unsettled:
            reply.message += quoted(f" It may lack files: {result.unsettled}.")
    if result.log_lost:
        reply.message += f" The log lacks its first {result.log_lost:,} bytes, which the machine no longer has."
    if got.problems:
        reply.ok, reply.code = False, "incomplete"
        reply.message = f"{counted(len(got.problems), 'file')} could not be copied. {reply.message}".rstrip()
        reply.next = steps(("Fix the listed problems.", *result.next_steps))
    elif not got.files and not result.store:
        reply.message = f"No declared output exists on the machine; only the log was copied.{reply.message}"
    return reply


def verified(report: Report, rest: Sequence[NextStep] = ()) -> VerifyReply:
    """Return the reply to verify_checkpoint. `rest` are the remaining steps of the job whose copy was verified."""
    bad: list[FileEvidence | CheckpointEvidence] = [c for c in report.checkpoints if c.verdict != "proven"]
    bad += [f for f in report.files if f.verdict != "proven"]
    code, following = str(report.verdict), _following(report)
    message = {
        Verdict.PROVEN: "Proven.",
        Verdict.REFUTED: "Refuted: do not rely on it.",
        Verdict.UNKNOWN: f"Inconclusive: {counted(len(report.not_checked), 'check')} could not be completed.",
    }[report.verdict]
    if rest:  # the remaining steps already include another pull if one is needed
        following = [step for step in following if step.action is not Action.PULL]
    if report.claimed:
        following = [do(Action.PULL, "; only a copy that is verified here counts")]
        if report.verdict == "proven":
            code, message = "claimed", "The machine reports the checkpoint as complete; it has not been copied here."
    return VerifyReply(
        ok=report.verdict == "proven",
        code=code,
        message=message,
        next=steps((*following, *rest)),
        verdict=report.verdict,
        level=report.level,
        path=report.path,
        files=len(report.files),
        bytes=report.bytes,
        step=report.step,
        newest=named(report.newest),
        problems=[quoted(p) for p in [*report.problems, *report.doubts][:SHOWN]],
        warnings=[quoted(p) for p in report.warnings[:SHOWN]],
        proved=[quoted(p) for p in report.proved[:SHOWN]],
        not_checked=[quoted(n) for n in report.not_checked[:SHOWN]],
        evidence=[
            FileReply(
                path=named(f.path),
                format=f.format if isinstance(f, FileEvidence) else f.layout,
                verdict=f.verdict,
                problems=[quoted(p) for p in [*f.problems, *f.doubts][:5]],
            )
            for f in bad[:SHOWN]
        ],
    )
