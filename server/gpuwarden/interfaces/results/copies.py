"""Replies of pull_artifacts and of verify_checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pydantic import BaseModel, Field

from gpuwarden.core.guidance import Action, Hint, NextStep, do, steps
from gpuwarden.core.models import CheckpointEvidence, FileEvidence, Report, Verdict
from gpuwarden.core.plural import counted
from gpuwarden.core.sanitize import named, quoted
from gpuwarden.interfaces.results.base import SHOWN, Result
from gpuwarden.lifecycle.artifacts.pull import PullResult


class PullReply(Result):
    """Copied files. `missing` are declared outputs that do not exist on the machine."""

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


class VerifyReply(Result):
    """A verdict: proven, refuted, or unknown, which does not pass. Files that were proven are only counted.

    Code `claimed`: the machine looked at its own files, and nothing was copied here. `problems` say why it is not
    proven, `warnings` change nothing.
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


_NEXT: Final[dict[Verdict, Hint]] = {
    Verdict.PROVEN: "",
    Verdict.REFUTED: (do(Action.PULL, "again"), "If it stays refuted, the file is broken at its source."),
    Verdict.UNKNOWN: "Do what the list of what was not checked says.",
}


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
        next=result.next_steps,
    )
    if got.problems:
        reply.ok, reply.code = False, "incomplete"
        reply.message = f"{counted(len(got.problems), 'file')} could not be copied."
        reply.next = steps(("Fix what the problems say.", *result.next_steps))
    elif not got.files:
        reply.message = "No declared output exists on the machine; only the log was copied."
    return reply


def verified(report: Report, rest: Sequence[NextStep] = ()) -> VerifyReply:
    """Return the reply to verify_checkpoint. `rest` are the steps that remain for the job whose copy was verified."""
    bad: list[FileEvidence | CheckpointEvidence] = [c for c in report.checkpoints if c.verdict != "proven"]
    bad += [f for f in report.files if f.verdict != "proven"]
    code, following = str(report.verdict), _NEXT[report.verdict]
    message = {
        Verdict.PROVEN: "Proven.",
        Verdict.REFUTED: "Refuted: do not rely on it.",
        Verdict.UNKNOWN: f"Inconclusive: {counted(len(report.not_checked), 'check')} could not be made.",
    }[report.verdict]
    if rest:
        following = "" if report.verdict == "proven" else "If it stays so after another copy, it is so at its source."
    if report.claimed:
        following = do(Action.PULL, "; only a copy that is verified here counts")
        if report.verdict == "proven":
            code, message = "claimed", "Whole, as the machine itself reports; it was not copied here."
    return VerifyReply(
        ok=report.verdict == "proven",
        code=code,
        message=message,
        next=steps((*steps(following), *rest)),
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
