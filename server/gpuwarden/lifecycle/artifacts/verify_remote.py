"""Examine a job's outputs on the machine that wrote them, so that large outputs need not be downloaded.

The result is only the machine's own report about its files. The teardown gate does not use it, because the files would
still be lost with the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpuwarden.backends.base import ExaminingBackend
from gpuwarden.checkpoints.compare import Comparison
from gpuwarden.checkpoints.findings import Entry, Findings, Judgement
from gpuwarden.checkpoints.verify import report
from gpuwarden.core.errors import BadReply, BadRequest, Conflict, NotSupported
from gpuwarden.core.evidence import known
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Level, Report, clean_path
from gpuwarden.core.sanitize import line
from gpuwarden.hub.files import SCHEME
from gpuwarden.ledger.events import ArtifactsExaminedThere
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.records import JobRecord

LOOK_S = 3600.0
_MOST = 2_000
CLAIM = "a copy, because nothing was pulled; only the machine itself examined its files"


class _Foreign(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class _Findings(_Foreign):
    path: str = Field(max_length=4096)
    proved: list[str] = Field(default=[], max_length=10)
    warnings: list[str] = Field(default=[], max_length=10)
    doubts: list[str] = Field(default=[], max_length=10)
    problems: list[str] = Field(default=[], max_length=10)
    causes: list[str] = Field(default=[], max_length=10)


class _File(_Findings):
    format: str = Field(max_length=100)
    size: int = Field(ge=0, lt=1 << 63)
    unproved: list[str] = Field(default=[], max_length=10)
    sealed: bool = False
    unread: bool = False

    def entry(self, path: str) -> Entry:
        """Return the file as an `Entry`, with all text from the machine truncated."""
        return Entry(
            path,
            line(self.format, 100),
            self.size,
            proved=_lines(self.proved),
            unproved=_lines(self.unproved),
            warnings=_lines(self.warnings),
            problems=_lines(self.problems),
            doubts=_lines(self.doubts),
            causes=known(self.causes),
            sealed=self.sealed,
            unread=self.unread,
        )


class _Folder(_Findings):
    layout: str = Field(max_length=100)
    step: int | None = Field(default=None, gt=-1 << 63, lt=1 << 63)
    checkpoint: bool = False
    resume: list[str] = Field(default=[], max_length=10)

    def judgement(self, path: str) -> Judgement:
        """Return the folder as a `Judgement`, with all text from the machine truncated."""
        return Judgement(
            line(self.layout, 100),
            path,
            self.step,
            _lines(self.proved),
            _lines(self.warnings),
            _lines(self.problems),
            _lines(self.doubts),
            causes=known(self.causes),
            checkpoint=self.checkpoint,
            resume=_lines(self.resume),
        )


class _Compared(_Foreign):
    proved: list[str] = Field(default=[], max_length=10)
    warnings: list[str] = Field(default=[], max_length=10)
    problems: list[str] = Field(default=[], max_length=10)
    doubts: list[str] = Field(default=[], max_length=10)


class _Found(_Foreign):
    error: str = ""
    files: list[_File] = Field(default=[], max_length=_MOST)
    folders: list[_Folder] = Field(default=[], max_length=_MOST)
    doubts: list[str] = Field(default=[], max_length=20)
    more: int = Field(default=0, ge=0)
    more_bad: int = Field(default=0, ge=0)
    compared: _Compared | None = None


async def verify_on_machine(
    ctx: Context, job: JobRecord, level: Level, against: str | None = None, seconds: float = LOOK_S
) -> Report:
    """Examine a job's files on its machine, and record the report as the machine's claim.

    `against` is a path on the machine in the same form as an output: absolute, or relative to the working folder.
    Raises BadRequest for an invalid path, Conflict for a job without files, and NotSupported if the backend can't
    examine files.
    """
    if against is not None and against.startswith(SCHEME):
        raise BadRequest(
            f"the instance can compare only with its own files, not with {against[:120]!r}",
            "Specify a path on the instance, or pull the outputs and compare locally.",
        )
    try:
        against = None if against is None else clean_path(against)
    except ValueError as why:
        raise BadRequest(
            f"against: {why}", "Use a path on the instance, in the same form as declared outputs."
        ) from why
    if job.handle is None:
        raise Conflict(
            f"job {job.id} {job.state.phrase} and was never launched, so it has no files",
            do(Action.CHECK, job_id=job.id),
        )
    backend = ctx.backend(job.handle.backend)
    if not isinstance(backend, ExaminingBackend):
        raise NotSupported(f"{job.handle.backend} can't examine files on the machine", "Pull them, then verify.")
    answer = await backend.examine(job.handle, job.outputs, level=level, seconds=seconds, against=against)
    found, compared = _findings(answer)
    others = {} if against is None else {line(against, 60): compared}
    made = report(found, level, f"{job.id} on {job.spec.platform}", compared=others)
    made = made.model_copy(update={"job": job.id, "claimed": True, "not_checked": (CLAIM, *made.not_checked)})
    event = ArtifactsExaminedThere(
        verdict=made.verdict, level=level, files=len(made.files), problems=tuple(made.reasons[:20])
    )
    ctx.ledger.add(job.subject, event)
    return made


def _findings(answer: Mapping[str, Mapping[str, Any]]) -> tuple[Findings, Comparison]:
    """Validate the machine's findings, and combine those of all outputs.

    The second return value combines the comparisons of all outputs that contain a model.
    """
    found, merged, compared = Findings(Path(), {}, None, []), Comparison(), False
    for output, raw in answer.items():
        try:
            reply = _Found.model_validate(dict(raw))
        except ValidationError as error:
            raise BadReply(
                f"the machine's findings are invalid at {error.errors()[0]['loc']}", "Pull, then verify the copy."
            ) from error
        if reply.error:
            found.doubts.append(f"{output}: {line(reply.error, 200)}")
        found.doubts += [f"{output}: {line(d, 300)}" for d in reply.doubts]
        if reply.more_bad:
            found.doubts.append(f"{output}: {reply.more_bad:,} more files that are not proven")
        alone = len(reply.files) == 1 and not reply.folders and reply.files[0].path == output.rsplit("/", 1)[-1]
        for file in reply.files:
            path = output if alone else f"{output}/{line(file.path, 500)}"
            found.entries[path] = file.entry(path)
        for folder in reply.folders:
            path = f"{output}/{line(folder.path, 500)}" if folder.path else output
            found.judgements.append(folder.judgement(path))
        compared |= reply.compared is not None
        for name, texts in reply.compared or ():
            getattr(merged, name).extend(_lines(texts))
    if not compared:
        merged.doubts.append("the job's outputs have no tensors to compare")
    return found, merged


def _lines(texts: list[str]) -> list[str]:
    return [line(t, 300) for t in texts]
