"""Keep the proven copy of a job that may be relaunched until a newer copy is proven.

A pull replaces the files that the job has rewritten. If the machine is lost before the newer copy is proven, the job
has to resume from the older one. Therefore a pull first moves the files that it will replace to a subfolder of the
staging folder. The moved files and the unchanged files are recorded together as a copy with the same proof.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import Artifact, Manifest, digest
from gpuwarden.core.safe_names import STAGING
from gpuwarden.core.states import AT_REST, TERMINAL_JOBS, Job
from gpuwarden.lifecycle.artifacts.local_copies import Pulled, info_of, proof_of, write_record
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.relaunch import may_relaunch, proven_copy
from gpuwarden.lifecycle.records import JobRecord, read_job
from gpuwarden.remote.transfer.destination import Destination, bare
from gpuwarden.remote.transfer.partial_file import sync_folder

FOLDER: Final = "proven"
"""Subfolder of the staging folder for the moved files."""


def needed_copy(ctx: Context, job: JobRecord) -> Pulled | None:
    """Return the proven copy that a job may be relaunched from; None if none exists or the job has ended."""
    if job.state in TERMINAL_JOBS or not may_relaunch(ctx, job.id):
        return None
    found = proven_copy(ctx, job)
    return found[0] if found else None


def bytes_replaced(ctx: Context, job: JobRecord, listed: Manifest) -> int:
    """Return the total size in bytes of the needed copy's files that a pull of the listed files may replace."""
    kept = needed_copy(ctx, job)
    now = {f.path: f.stamp[:2] for f in listed.files}  # without the status change time, which a relaunch changes
    return sum(f.size for f in kept.manifest.files if now.get(f.path, f.stamp[:2]) != f.stamp[:2]) if kept else 0


def set_aside(ctx: Context, job_id: str, dest: Path, listed: Manifest, digests: Mapping[str, str]) -> None:
    """Move the files in a job's needed copy that a pull to `dest` will replace, and record the copy with its new paths.

    The caller must hold the lock on `dest`. `digests` contains the known digests of the listed files. The proof is
    carried over only if the sealed copy is unchanged, and if the move changed only each file's path and status change
    time.
    """
    kept = needed_copy(ctx, read_job(ctx.ledger, job_id))
    proof = proof_of(ctx, job_id, kept) if kept else None
    if kept is None or proof is None:
        return
    aside, names = dest / STAGING / FOLDER, {f.path for f in listed.files}

    def stays(file: Artifact) -> bool:
        place = Path(kept.places[file.path])
        same = file.path not in names or digests.get(file.path) == bare(file.sha256 or "")
        return same or not place.is_relative_to(dest) or place.is_relative_to(aside)

    moving = [f.path for f in kept.manifest.files if f.path in kept.places and not stays(f)]
    if not moving:
        return
    before = {path: info for path, place in kept.places.items() if (info := info_of(place))}
    if digest(sorted(before.values())) != proof.seal:
        return
    if sum(f.size for f in kept.manifest.files if f.path in moving) > shutil.disk_usage(dest).free:
        raise OSError(errno.ENOSPC, "not enough space for both the proven copy and a newer one")
    places = dict(kept.places)
    try:
        for path in moving:
            place = Path(places[path])
            target = aside / kept.digest[7:23] / place.relative_to(dest)
            target.parent.mkdir(parents=True, exist_ok=True)
            place.replace(target)
            places[path] = str(target)
    finally:  # also after a failed move, because other files may have been moved
        for folder in {Path(place).parent for place in places.values() if place not in kept.places.values()}:
            sync_folder(folder)
        moved = kept.model_copy(update={"places": places})
        after = {path: info for path, place in places.items() if (info := info_of(place))}
        if all(_same(before[path], after.get(path), moved=places[path] != kept.places[path]) for path in places):
            write_record(ctx, moved)
            carried = {"pull": moved.digest, "seal": digest(sorted(after.values()))}
            ctx.ledger.add(f"job/{job_id}", proof.model_copy(update=carried))


def _same(before: list[str | int], after: list[str | int] | None, *, moved: bool) -> bool:
    """Return whether two results of `info_of` describe an unchanged file. A move changes the path and the ctime."""
    if not moved or after is None:
        return before == after
    return [*before[1:3], before[4]] == [*after[1:3], after[4]]


def drop_older(ctx: Context, job_id: str, pulled: Pulled) -> None:
    """Delete the files that were set aside for copies older than this proven copy.

    The files are kept while another process is receiving files, or while a relaunch may be reading them.
    """
    folder = Path(pulled.dest) / STAGING / FOLDER
    state = read_job(ctx.ledger, job_id).state
    if (state is not Job.RUNNING and state not in AT_REST) or not folder.is_dir():
        return
    with contextlib.suppress(WardenError, OSError), Destination(Path(pulled.dest), job_id).only_writer():
        kept = proven_copy(ctx, read_job(ctx.ledger, job_id))
        if kept is not None and kept[0].digest == pulled.digest:
            shutil.rmtree(folder)
