"""Look at a job's outputs on the machine that wrote them, so that a hundred gigabytes need not travel to be checked.

What comes back is that machine's word. It tells whether the files there are whole; it is no copy outside of what the
machine's end would destroy, and the teardown gate does not read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpuwarden.backends.base import Examiner
from gpuwarden.checkpoints.compare import Compared
from gpuwarden.checkpoints.findings import Entry, Findings, Judgement
from gpuwarden.checkpoints.verify import report
from gpuwarden.core.errors import BadReply, BadRequest, Conflict, NotSupported
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Level, Report, clean_path
from gpuwarden.core.sanitize import line
from gpuwarden.hub.files import SCHEME
from gpuwarden.ledger.events import ArtifactsExaminedThere
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.records import JobRecord

LOOK_S = 3600.0
_MOST = 2_000
CLAIM = "a copy: the machine looked at its own files, which is a claim, and nothing was pulled"


class _Foreign(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class _Said(_Foreign):
    path: str = Field(max_length=4096)
    proved: list[str] = Field(default=[], max_length=10)
    warnings: list[str] = Field(default=[], max_length=10)
    doubts: list[str] = Field(default=[], max_length=10)
    problems: list[str] = Field(default=[], max_length=10)


class _File(_Said):
    format: str = Field(max_length=100)
    size: int = Field(ge=0, lt=1 << 63)
    unproved: list[str] = Field(default=[], max_length=10)
    sealed: bool = False
    unread: bool = False


class _Folder(_Said):
    layout: str = Field(max_length=100)
    step: int | None = Field(default=None, gt=-1 << 63, lt=1 << 63)
    checkpoint: bool = False
    resume: list[str] = Field(default=[], max_length=10)


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


async def verify_there(
    ctx: Context, job: JobRecord, level: Level, against: str | None = None, seconds: float = LOOK_S
) -> Report:
    """Examine a job's files on its machine. The report is recorded as a claim. `against` is a path there, as outputs
    are: relative to the working folder, or absolute.

    Raises BadRequest for an invalid path, Conflict for a job without files, NotSupported where a backend can't.
    """
    if against is not None:
        against = _path_there(against)
    if job.handle is None:
        raise Conflict(
            f"job {job.id} {job.state.told} and was never launched, so it has no files", do(Action.CHECK, job_id=job.id)
        )
    backend = ctx.backend(job.handle.backend)
    if not isinstance(backend, Examiner):
        raise NotSupported(f"{job.handle.backend} can't examine files on the machine", "Pull them, then verify.")
    outputs = job.outputs
    answer = await backend.examine(job.handle, outputs, level=level, seconds=seconds, against=against)
    found, compared = _findings(answer)
    made = report(found, level, f"{job.id} on {job.spec.platform}", compared=_other(against, compared))
    made = made.model_copy(update={"claimed": True, "not_checked": (CLAIM, *made.not_checked)})
    event = ArtifactsExaminedThere(
        verdict=made.verdict, level=level, files=len(made.files), problems=tuple(made.reasons[:20])
    )
    ctx.ledger.add(job.subject, event)
    return made


def _path_there(against: str) -> str:
    """Return a path on the machine, or what is wrong with it."""
    if against.startswith(SCHEME):
        raise BadRequest(
            f"the instance compares with its own files, not with {against[:120]!r}",
            "Name a path there, or pull the outputs and compare here.",
        )
    try:
        return clean_path(against)
    except ValueError as why:
        raise BadRequest(f"against: {why}", "Name a path on the instance, as outputs are named.") from why


def _other(against: str | None, compared: list[Compared]) -> dict[str, Compared]:
    """Merge the comparisons of the outputs that contain a model."""
    if against is None:
        return {}
    made = Compared()
    for one in compared:
        for name, lines in vars(one).items():
            getattr(made, name).extend(lines)
    if not compared:
        made.doubts.append("there are no tensors to compare in it")
    return {line(against, 60): made}


def _findings(answer: Mapping[str, Mapping[str, Any]]) -> tuple[Findings, list[Compared]]:
    """Return the machine's findings as ours: strictly read, and under the names of the outputs."""
    found, compared = Findings(Path(), {}, None, []), []
    for output, raw in answer.items():
        try:
            said = _Found.model_validate(dict(raw))
        except ValidationError as error:
            raise BadReply(
                f"the machine's findings make no sense at {error.errors()[0]['loc']}", "Pull, then verify here."
            ) from error
        _take(output, said, found)
        if said.compared is not None:
            compared.append(Compared(**{name: _lines(texts) for name, texts in said.compared}))
    return found, compared


def _take(output: str, said: _Found, found: Findings) -> None:
    if said.error:
        found.doubts.append(f"{output}: {line(said.error, 200)}")
    found.doubts += [f"{output}: {line(d, 300)}" for d in said.doubts]
    if said.more_bad:
        found.doubts.append(f"{output}: {said.more_bad:,} more files that are not proven")
    alone = len(said.files) == 1 and not said.folders and said.files[0].path == output.rsplit("/", 1)[-1]
    for file in said.files:
        path = output if alone else f"{output}/{line(file.path, 500)}"
        found.entries[path] = Entry(
            path,
            line(file.format, 100),
            file.size,
            proved=_lines(file.proved),
            unproved=_lines(file.unproved),
            warnings=_lines(file.warnings),
            problems=_lines(file.problems),
            doubts=_lines(file.doubts),
            sealed=file.sealed,
            unread=file.unread,
        )
    for folder in said.folders:
        path = f"{output}/{line(folder.path, 500)}" if folder.path else output
        found.judgements.append(
            Judgement(
                line(folder.layout, 100),
                path,
                folder.step,
                _lines(folder.proved),
                _lines(folder.warnings),
                _lines(folder.problems),
                _lines(folder.doubts),
                checkpoint=folder.checkpoint,
                resume=_lines(folder.resume),
            )
        )


def _lines(texts: list[str]) -> list[str]:
    return [line(t, 300) for t in texts]
