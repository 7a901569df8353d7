"""Determine which verification steps a job's outputs have passed: declared, copied, equal, loaded, stored.

All facts come from the ledger and the local disk. A step that can't be checked locally is reported as unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from gpuwarden.core.models import Verdict
from gpuwarden.core.next_step import Copy
from gpuwarden.ledger.event import Event
from gpuwarden.ledger.events import ArtifactsPulled, ArtifactsVerified, Body
from gpuwarden.lifecycle.artifacts.local_copies import CopyStatus, copy_for, copy_state, verified_now
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.records import JobRecord


class ProofStage(StrEnum):
    """A verification step."""

    DECLARED = "declared"
    COPIED = "copied"
    EQUAL = "equal"
    LOADED = "loaded"
    STORED = "stored"


class StageState(StrEnum):
    """The state of a step. NOT_YET: the step is pending. UNASKED: the job does not require the step."""

    YES = "yes"
    NO = "no"
    NOT_YET = "not_yet"
    UNKNOWN = "unknown"
    UNASKED = "unasked"


@dataclass(frozen=True)
class ProofStep:
    """One step with its evidence: the time of the record, the number of files and bytes, and the problems."""

    stage: ProofStage
    state: StageState
    at: float | None = None
    files: int | None = None
    bytes: int | None = None
    names: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    copy: Copy | None = None


B = TypeVar("B", bound=Body)
_LOADED = {Verdict.PROVEN: StageState.YES, Verdict.REFUTED: StageState.NO, Verdict.UNKNOWN: StageState.UNKNOWN}
_COPIED = {
    Copy.NONE: StageState.NOT_YET,
    Copy.STALE: StageState.NOT_YET,
    Copy.PARTIAL: StageState.NO,
    Copy.EMPTY: StageState.NO,
}


def proof_steps(ctx: Context, job: JobRecord) -> tuple[ProofStep, ...]:
    """Return the states of the five steps for a job's outputs, in order."""
    return tuple(_steps(ctx, job))


def _steps(ctx: Context, job: JobRecord) -> Iterator[ProofStep]:
    yield ProofStep(
        ProofStage.DECLARED, StageState.YES if job.outputs else StageState.NO, at=job.accepted_at, names=job.outputs
    )
    pulled, state = copy_for(ctx, job.id), copy_state(ctx, job.id)
    counts = pulled.digest if pulled else ""
    made = next((e for e in _latest(ctx, job, ArtifactsPulled) if e.data.digest == counts), None)
    yield ProofStep(
        ProofStage.COPIED,
        _COPIED.get(state, StageState.YES),
        at=made.at if made else None,
        files=made.data.files if made else None,
        bytes=made.data.bytes if made else None,
        problems=made.data.problems if made else (),
        copy=state,
    )
    now = verified_now(ctx, job.id, pulled) if pulled else CopyStatus()
    # If the files have changed since their verification, its result no longer applies.
    current = now.verdict is not None
    proof = next((e for e in _latest(ctx, job, ArtifactsVerified) if current and e.data.pull == counts), None)
    at, files = (proof.at, proof.data.files) if proof else (None, None)
    equal = StageState.YES if now.equal else StageState.NO if current and state is Copy.DAMAGED else StageState.NOT_YET
    yield ProofStep(ProofStage.EQUAL, equal, at=at, files=files)
    loaded = _LOADED[now.verdict] if now.verdict is not None else StageState.NOT_YET
    yield ProofStep(ProofStage.LOADED, loaded, at=at, files=files, problems=now.problems)
    # Only the teardown gate compares the store with the machine's files.
    names = (job.spec.artifact_store,) if job.spec.artifact_store else ()
    yield ProofStep(ProofStage.STORED, StageState.UNKNOWN if names else StageState.UNASKED, names=names)


def _latest(ctx: Context, job: JobRecord, kind: type[B]) -> list[Event[B]]:
    return ctx.ledger.events(job.subject, kind=kind)[::-1]
