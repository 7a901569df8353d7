"""Reply to `gpuwarden diagnose`: the outcome of the run that wrote a log, and the matching reference entries."""

from __future__ import annotations

from pydantic import BaseModel, Field

from gpuwarden.core.guidance import steps
from gpuwarden.core.sanitize import line
from gpuwarden.interfaces.results.base import Result
from gpuwarden.interfaces.results.check import DiagnosisReply, diagnosis_reply
from gpuwarden.interfaces.results.decisions import DecisionReply, decision_reply
from gpuwarden.interfaces.results.version_skew import SkewReply, skew_reply
from gpuwarden.knowledge import diagnose, search, shipped
from gpuwarden.knowledge.decisions import for_entries
from gpuwarden.knowledge.diagnosis import Diagnosis
from gpuwarden.knowledge.failure import ExceptionRead, Failure, Outcome, Reading
from gpuwarden.knowledge.message_origin import origin
from gpuwarden.knowledge.search import Hit, nothing_failed
from gpuwarden.knowledge.version_skew import explain

COLLECT = (
    "the complete log of the rank that failed first",
    "the exit code and, if the process was killed, dmesg -T | tail or the platform's event list",
    "pip freeze, nvidia-smi, and the exact command",
)
"""Information to collect if no entry is a likely match."""


class ExceptionReply(BaseModel):
    """One exception with its innermost frame and the package that raised it. `version` is empty if the log lacks it."""

    type: str
    message: str
    line: int
    rank: str = ""
    frame: str = ""
    package: str = ""
    version: str = ""


class FailureReply(BaseModel):
    """A run's outcome, according to its log.

    `chain` lists the exceptions that led to `exception`. The run continued after the errors in `recovered`.
    """

    outcome: str
    exception: ExceptionReply | None = None
    chain: list[ExceptionReply] = Field(default_factory=list)
    missing: dict[str, str] = Field(default_factory=dict)
    """The attribute, keyword, name or module that, according to the exception, does not exist."""
    last_progress: str = ""
    exit_code: int | None = None
    signal: str = ""
    device: list[str] = Field(default_factory=list)
    """Lines from CUDA, NCCL, the driver (Xid) or the kernel's OOM killer."""
    recovered: list[ExceptionReply] = Field(default_factory=list)
    ranks: int = 0


class OriginReply(BaseModel):
    """The range of package releases in which `file` raises the message. An empty bound means that the range may extend
    beyond the known releases.
    """

    package: str
    file: str
    since: str = ""
    until: str = ""

    @property
    def releases(self) -> str:
        """Return the releases and the file as one line."""
        limits = (("since", self.since), ("until", self.until))
        return " ".join([self.package, *(f"{word} {release}" for word, release in limits if release), f"({self.file})"])


class DiagnoseReply(Result):
    """The failure in a log, and the reference entries that match it, each likely or possible."""

    failure: FailureReply
    skew: SkewReply | None = None
    """Releases that contain the missing name."""
    origin: OriginReply | None = None
    """The place in the package's source that raises the message."""
    diagnoses: list[DiagnosisReply] = Field(default_factory=list)
    decision: DecisionReply | None = None
    """Checks that determine the cause, if the best entry has a list of them."""
    collect: list[str] = Field(default_factory=list)
    query: str = ""
    """Query for a web or issue search."""


def diagnose_log(log: str, exit_code: int | None = None, limit: int = 3) -> DiagnoseReply:
    """Read a log and return the entries that match its failure.

    `exit_code` is the run's exit code, if the log does not contain it.
    """
    reading = Reading(log, exit_code)
    failure = reading.failure
    found = diagnose(shipped(), log, exit_code=exit_code, failed=None, limit=limit, reading=reading)
    rows = [diagnosis_reply(one, ()) for one in found]
    well = nothing_failed(reading) or failure.outcome in {Outcome.RUNNING, Outcome.SUCCEEDED}
    if not rows and failure.outcome is Outcome.FAILED:
        rows = [diagnosis_reply(_from_words(hit), ()) for hit in search(shipped(), log, limit) if hit.kind == "gotcha"]
    reply = DiagnoseReply(failure=failure_reply(failure), skew=skew_reply(explain(failure)), diagnoses=rows)
    if source := origin(failure):
        reply.origin = OriginReply(**source.model_dump(exclude={"template"}))
    explained = reply.skew is not None and reply.skew.certainty == "likely"
    reply.decision = decision_reply(for_entries([row.id for row in rows[:1]]))
    if well and not rows:
        reply.code, reply.message = "nothing_failed", "The log contains no failure."
        reply.next = steps(
            "If the run hangs, slows down or produces worse results, search for a description of that symptom."
        )
    elif not explained and not any(row.certainty == "likely" for row in rows):
        reply.collect = list(COLLECT)
        reply.query = line(failure.query, 300)
        if not rows and reply.skew is None:
            reply.code, reply.message = "no_entry_fits", "No reference entry matches this failure."
    return reply


def failure_reply(failure: Failure) -> FailureReply:
    """Return the reply about a failure, with all strings sanitized and shortened."""
    missing = failure.gone.model_dump(include={"kind", "owner", "name"}) if failure.gone else {}
    return FailureReply(
        outcome=failure.outcome,
        exception=_exception(failure.exception) if failure.exception else None,
        chain=[_exception(one) for one in failure.chain[-3:]],
        missing={name: line(value, 100) for name, value in missing.items() if value},
        last_progress=line(failure.progress.text, 200) if failure.progress else "",
        exit_code=failure.exit_code,
        signal=failure.signal,
        device=[line(one.text, 240) for one in failure.device],
        recovered=[_exception(one) for one in failure.recovered[-3:]],
        ranks=failure.ranks,
    )


def _exception(read: ExceptionRead) -> ExceptionReply:
    return ExceptionReply(
        type=line(read.type, 120),
        message=line(read.message, 400),
        line=read.line,
        rank=line(read.rank, 12),
        frame=line(read.frame, 240),
        package=line(read.package, 60),
        version=line(read.version, 40),
    )


def _from_words(hit: Hit) -> Diagnosis:
    """Return a diagnosis from an entry that shares words with the failure but has no matching signature."""
    why = "no signature matches; this entry's wording is the closest to the failure's"
    return Diagnosis(
        id=hit.id,
        title=hit.title,
        certainty="possible",
        why=why,
        cause=hit.summary,
        fix=hit.fix,
        lines=(),
        page=hit.page,
    )
