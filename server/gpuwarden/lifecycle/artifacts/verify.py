"""Verify a checkpoint: a job's pulled copy, its files on the machine, a local path, or a repo on the Hub.

Only the verdict on a pulled copy is recorded for the teardown gate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio

from gpuwarden.checkpoints.budget import Budget
from gpuwarden.checkpoints.file_model import Limits
from gpuwarden.checkpoints.findings import Findings
from gpuwarden.checkpoints.verify import verify as verify_path
from gpuwarden.core.errors import BadRequest, Conflict
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Level, Manifest, Report, Where
from gpuwarden.core.safe_names import STAGING
from gpuwarden.core.states import Job
from gpuwarden.hub.files import SCHEME
from gpuwarden.lifecycle.artifacts.local_copies import Pulled, last_pull, save_verified, seal
from gpuwarden.lifecycle.artifacts.set_aside import drop_older
from gpuwarden.lifecycle.artifacts.verify_hub import hub_structure, verify_hub
from gpuwarden.lifecycle.artifacts.verify_remote import LOOK_S, verify_on_machine
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.records import read_job
from gpuwarden.remote.transfer.destination import OWNER

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
    limits: Limits | None = None,
) -> Report:
    """Verify `what`: a job id, `hf://owner/name`, or a path.

    `against` is a path or a Hub address to compare with, or a path on the instance if `what` is verified there. The
    default level is `load`; on the Hub it is `structure`, because deeper levels download the files; on the instance it
    is `content`. `auto` verifies on the instance if none of the job's outputs has been pulled yet. `budget` limits the
    verification of a path, or of files on the instance; `limits` limits the resources for each local file.
    """
    if not what.strip() or (against is not None and not against.strip()):
        raise BadRequest("the path is empty", "Specify a file or folder; `.` is the working folder.")
    if ctx.ledger.state(f"job/{what}") not in {None, Job.REFUSED}:
        job = read_job(ctx.ledger, what)
        if where == "instance" or (where == "auto" and job.handle is not None and last_pull(ctx, what) is None):
            seconds = min(LOOK_S, budget.left_s) if budget else LOOK_S
            return await verify_on_machine(ctx, job, level or Level.CONTENT, against, seconds)
        return await verify_job(
            ctx, what, level or Level.LOAD, against=await _other(ctx, against), progress=progress, limits=limits
        )
    if where == "instance":
        raise BadRequest(f"{what[:120]!r} is not a job, so it has no instance", "Specify a job id.")
    other = await _other(ctx, against)
    if what.startswith(SCHEME):
        depth = level or Level.STRUCTURE
        return await verify_hub(ctx, what, depth, against=other, budget=budget, progress=progress)
    pulled, inside = _pull_of(ctx, Path(what))
    if pulled and inside == ".":
        return await verify_job(ctx, pulled.job, level or Level.LOAD, against=other, progress=progress, limits=limits)
    return await verify_file(
        Path(what),
        level or Level.LOAD,
        against=other,
        budget=budget,
        progress=progress,
        limits=limits,
        manifest=pulled.local_manifest() if pulled else None,
        under=inside,
    )


def _pull_of(ctx: Context, path: Path) -> tuple[Pulled | None, str]:
    """Return the pull whose folder contains a path, and the path relative to that folder; otherwise, None and ""."""
    try:
        real = path.resolve()
        for folder in (real, *real.parents):
            mark = folder / STAGING / OWNER
            if mark.is_file() and not mark.is_symlink():
                pulled = last_pull(ctx, mark.read_text("utf-8", "replace")[:200])
                mine = pulled is not None and Path(pulled.dest).resolve() == folder
                return (pulled, real.relative_to(folder).as_posix()) if mine else (None, "")
    except (OSError, ValueError):  # verify_path reports the problem
        pass
    return None, ""


async def _other(ctx: Context, against: str | None) -> Path | Findings | None:
    if against is None:
        return None
    return await hub_structure(ctx, against) if against.startswith(SCHEME) else Path(against)


async def verify_job(
    ctx: Context,
    job_id: str,
    level: Level = Level.LOAD,
    *,
    against: Path | Findings | None = None,
    progress: Count | None = None,
    limits: Limits | None = None,
) -> Report:
    """Verify a job's latest pull against the manifest made on the machine, and record the verdict.

    Raises NotFound for an unknown job, and Conflict if the job has not been pulled.
    """
    job = read_job(ctx.ledger, job_id)
    pulled = last_pull(ctx, job_id)
    if pulled is None:
        pull = do(Action.PULL, job_id=job_id)
        raise Conflict(f"job {job_id} has not been pulled yet, so it has no copy to verify", pull)
    before = seal(pulled)
    dest = Path(pulled.dest)
    listed = pulled.local_manifest()
    held = ctx.ledger.lock(_lock(job_id))
    try:
        report = await anyio.to_thread.run_sync(
            lambda: verify_path(dest, level, manifest=listed, against=against, progress=progress, limits=limits)
        )
        save_verified(ctx, job, pulled, before, report)
        drop_older(ctx, job_id, pulled)
    finally:
        if held is not None:
            held.release()
    sealed = sum(f.sealed_at is not None for f in listed.files)
    claimed = sum(f.seal is not None for f in listed.files) - sealed
    proved, warnings = report.proved, report.warnings
    if sealed:
        proved += (f"{sealed:,} of {len(listed.files):,} files were sealed on the machine right after they were saved",)
    if claimed:
        not_ours = (
            f"{claimed:,} files have a seal that is not confirmed as gpuwarden's (a job can write seal lines as well); "
            "these files count as not sealed"
        )
        warnings += (not_ours,)
    return report.model_copy(update={"job": job_id, "proved": proved, "warnings": warnings})


def being_verified(ctx: Context, job_id: str) -> bool:
    """Return whether any process is running `verify_job` for this job."""
    held = ctx.ledger.lock(_lock(job_id))
    if held is None:
        return True
    held.release()
    return False


def _lock(job_id: str) -> str:
    return f"verify-{job_id}"


async def verify_file(
    path: Path,
    level: Level,
    *,
    against: Path | Findings | None = None,
    budget: Budget | None = None,
    progress: Count | None = None,
    limits: Limits | None = None,
    manifest: Manifest | None = None,
    under: str = "",
) -> Report:
    """Verify a local checkpoint file or folder. Nothing is recorded.

    `manifest` is the manifest that a pull recorded for its files; `under` is the path relative to the pulled folder.
    """
    work = partial(
        verify_path,
        path,
        level,
        manifest=manifest,
        under=under,
        against=against,
        budget=budget,
        progress=progress,
        limits=limits,
    )
    return await anyio.to_thread.run_sync(work)
