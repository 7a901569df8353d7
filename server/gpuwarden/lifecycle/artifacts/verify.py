"""Prove a checkpoint: a job's pulled copy, its files on the machine, a path here, or a repo on the Hub.

Only the verdict on a pulled copy is recorded for the teardown gate.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import anyio

from gpuwarden.checkpoints.budget import Budget
from gpuwarden.checkpoints.findings import Findings
from gpuwarden.checkpoints.verify import verify as verify_path
from gpuwarden.core.errors import BadRequest, Conflict
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Level, Manifest, Report
from gpuwarden.core.states import Job
from gpuwarden.hub.files import SCHEME
from gpuwarden.lifecycle.artifacts.local_copies import (
    Pulled,
    last_pull,
    save_verified,
    seal,
)
from gpuwarden.lifecycle.artifacts.verify_hub import look_hub, verify_hub
from gpuwarden.lifecycle.artifacts.verify_remote import LOOK_S, verify_there
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.records import read_job

Where = Literal["auto", "here", "instance"]
Count = Callable[[int], None]


async def verify(
    ctx: Context,
    what: str,
    level: Level | None = None,
    *,
    against: str | None = None,
    where: Where = "auto",
    budget: Budget | None = None,
    progress: Count | None = None,
) -> Report:
    """Verify WHAT: a job id, `hf://owner/name`, or a path. `against` is a path or an address on the Hub; where the
    instance looks, a path there.

    Without a level it is `load`; `structure` on the Hub, where more means to download; `content` on the instance.
    `auto` looks on the instance when nothing of the job was pulled yet. `budget` bounds a look at a path or there.
    """
    if not what.strip() or (against is not None and not against.strip()):
        raise BadRequest("an empty path names nothing", "Name a file or folder; the working folder is a dot.")
    if ctx.ledger.state(f"job/{what}") not in {None, Job.REFUSED}:
        return await _verify_job(ctx, what, level, against, where, budget, progress)
    if where == "instance":
        raise BadRequest(f"{what[:120]!r} is not a job, so it has no instance", "Give a job id.")
    other = await _other(ctx, against)
    if what.startswith(SCHEME):
        depth = level or Level.STRUCTURE
        return await verify_hub(ctx, what, depth, against=other, budget=budget, progress=progress)
    return await verify_file(Path(what), level or Level.LOAD, against=other, budget=budget, progress=progress)


async def _verify_job(
    ctx: Context,
    job_id: str,
    level: Level | None,
    against: str | None,
    where: Where,
    budget: Budget | None,
    progress: Count | None,
) -> Report:
    job = read_job(ctx.ledger, job_id)
    if where == "instance" or (where == "auto" and job.handle is not None and last_pull(ctx, job_id) is None):
        seconds = min(LOOK_S, budget.left_s) if budget else LOOK_S
        return await verify_there(ctx, job, level or Level.CONTENT, against, seconds)
    other = await _other(ctx, against)
    return await verify_job(ctx, job_id, level or Level.LOAD, against=other, progress=progress)


async def _other(ctx: Context, against: str | None) -> Path | Findings | None:
    if against is None:
        return None
    return await look_hub(ctx, against) if against.startswith(SCHEME) else Path(against)


async def verify_job(
    ctx: Context,
    job_id: str,
    level: Level = Level.LOAD,
    *,
    against: Path | Findings | None = None,
    progress: Count | None = None,
) -> Report:
    """Verify what was last pulled of a job against the manifest made on the machine, and record the verdict.

    Raises NotFound for a job that is not ours, Conflict when nothing was pulled.
    """
    job = read_job(ctx.ledger, job_id)
    pulled = last_pull(ctx, job_id)
    if pulled is None:
        pull = do(Action.PULL, job_id=job_id)
        raise Conflict(f"nothing of job {job_id} was pulled yet, so no copy can be verified", pull)
    before = seal(pulled)
    dest = Path(pulled.dest)
    roster = _as_it_lies_here(pulled)
    report = await anyio.to_thread.run_sync(
        lambda: verify_path(dest, level, manifest=roster, against=against, progress=progress)
    )
    save_verified(ctx, job, pulled, before, report)
    return _with_seals(report, roster)


def _with_seals(report: Report, roster: Manifest) -> Report:
    """Return the report, with what is known of the digests that were taken on the machine right after a save."""
    ours = sum(f.sealed_at is not None for f in roster.files)
    claimed = sum(f.seal is not None for f in roster.files) - ours
    proved, warnings = list(report.proved), list(report.warnings)
    if ours:
        proved.append(f"{ours:,} of {len(roster.files):,} files were sealed on the machine right after they were saved")
    if claimed:
        warnings.append(
            f"{claimed:,} files have a seal on the machine that our sealer can't be shown to have made (the job can "
            "write such lines too): each counts as not sealed"
        )
    return report.model_copy(update={"proved": tuple(proved), "warnings": tuple(warnings)})


def _as_it_lies_here(pulled: Pulled) -> Manifest:
    """Return the machine's manifest under the names that the files have here: an absolute path is below `machine/`.

    A file that never existed is not a defect of the copy; the teardown gate reports it (TD-OUT-001).
    """
    dest = Path(pulled.dest)
    files = tuple(
        f.model_copy(update={"path": Path(pulled.places[f.path]).relative_to(dest).as_posix()})
        for f in pulled.manifest.files
        if f.path in pulled.places
    )
    absent = tuple(f for f in pulled.manifest.files if f.path not in pulled.places)
    return pulled.manifest.model_copy(update={"files": files + absent, "missing": ()})


async def verify_file(
    path: Path,
    level: Level,
    *,
    against: Path | Findings | None = None,
    budget: Budget | None = None,
    progress: Count | None = None,
) -> Report:
    """Verify any checkpoint file or folder of this machine. Nothing is recorded."""
    return await anyio.to_thread.run_sync(
        lambda: verify_path(path, level, against=against, budget=budget, progress=progress)
    )
