"""Prove a job's pulled copies, or any checkpoint by its path. A job's verdict is recorded for the teardown gate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio

from gpuwarden.checkpoints.verify import verify as verify_path
from gpuwarden.core.errors import Conflict
from gpuwarden.core.models import Level, Manifest, Report
from gpuwarden.lifecycle.copies import Pulled, last_pull, save_verified, seal
from gpuwarden.lifecycle.records import read_job
from gpuwarden.lifecycle.warden import Warden


async def verify_job(
    w: Warden, job_id: str, level: Level = Level.LOAD, *, progress: Callable[[int], None] | None = None
) -> Report:
    """Verify what was last pulled of a job against the manifest made on the machine, and record the verdict.

    Raises NotFound for a job that is not ours, Conflict when nothing was pulled.
    """
    job = read_job(w.ledger, job_id)
    pulled = last_pull(w, job_id)
    if pulled is None:
        raise Conflict(f"nothing of job {job_id} was pulled yet, so there is no copy to verify", "Call pull_artifacts.")
    before = seal(pulled)
    dest = Path(pulled.dest)
    roster = _as_it_lies_here(pulled)
    report = await anyio.to_thread.run_sync(lambda: verify_path(dest, level, manifest=roster, progress=progress))
    save_verified(w, job, pulled, before, report)
    return report


def _as_it_lies_here(pulled: Pulled) -> Manifest:
    """The machine's manifest under the names that the files have here: an absolute path lies below `machine/`.

    What never existed is no defect of the copy; the teardown gate tells the person about it (TD-OUT-001).
    """
    dest = Path(pulled.dest)
    files = tuple(
        f.model_copy(update={"path": Path(pulled.places[f.path]).relative_to(dest).as_posix()})
        for f in pulled.manifest.files
        if f.path in pulled.places
    )
    absent = tuple(f for f in pulled.manifest.files if f.path not in pulled.places)
    return pulled.manifest.model_copy(update={"files": files + absent, "missing": ()})


async def verify_file(path: Path, level: Level, *, progress: Callable[[int], None] | None = None) -> Report:
    """Verify any checkpoint file or folder of this machine. Nothing is recorded."""
    return await anyio.to_thread.run_sync(lambda: verify_path(path, level, progress=progress))
