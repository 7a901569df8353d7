"""Pull a job's artifacts: list them with digests on the machine, copy the files with resumable transfers, and compare
every copy with its digest.

If the machine can't be read, the files come from the job's artifact store. The log is copied as well, even if the job
saved no other file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from gpuwarden.backends.base import Backend, artifacts
from gpuwarden.core.errors import AuthFailed, BadRequest, Conflict, Refused, Unreachable, WardenError
from gpuwarden.core.guidance import Action, NextStep, do
from gpuwarden.core.models import MAX_OUTPUTS, Handle, Manifest, clean_path
from gpuwarden.core.safe_names import LOG_NAME, STAGING
from gpuwarden.core.states import Job
from gpuwarden.core.store_address import StoreAddress
from gpuwarden.ledger.events import OutputsDeclared
from gpuwarden.lifecycle.artifacts.local_copies import Pulled, save_pull
from gpuwarden.lifecycle.artifacts.seal_keys import with_authentic_seals
from gpuwarden.lifecycle.artifacts.set_aside import set_aside
from gpuwarden.lifecycle.artifacts.store_contents import StoreContents, read_store, unsettled
from gpuwarden.lifecycle.artifacts.store_pull import at_rest, readable_store, receive_from_store
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.advance import advance
from gpuwarden.lifecycle.execution.situation import following
from gpuwarden.lifecycle.leases.self_stop import hold, survives_stop, wake
from gpuwarden.lifecycle.leases.self_stopped import self_stopped
from gpuwarden.lifecycle.records import JobRecord, read_job
from gpuwarden.private import private_folder
from gpuwarden.remote.transfer.receive import Progress, Received, receive

_LOG: Final = re.compile(r"(?:^|/)events\.out\.tfevents\.[^/]+$|\.(?:log|jsonl|csv|out|err|wandb)$")
"""Paths of files that are not part of a checkpoint and that jobs append to while they run."""

LOG_LIMIT = 64 << 20
_CHUNK = 1 << 20


@dataclass(frozen=True)
class PullResult:
    """Result of a pull. `missing` lists the declared outputs that do not exist on the machine.

    `store` is the artifact store from which the files were copied, empty if they came from the machine; `lost` is the
    reason why the machine could not be read; `unsettled` is the reason why the store may lack some of the machine's
    files. `log_lost` counts the log bytes that the machine no longer has, or that exceed `LOG_LIMIT`.
    """

    job: JobRecord
    dest: Path
    manifest: Manifest
    received: Received
    missing: tuple[str, ...]
    log: Path | None
    next_steps: tuple[NextStep, ...] = ()
    store: str = ""
    lost: str = ""
    unsettled: str = ""
    log_lost: int = 0


async def pull(
    ctx: Context,
    job_id: str,
    dest: Path | None = None,
    *,
    also: Sequence[str] = (),
    progress: Callable[[Progress], None] | None = None,
) -> PullResult:
    """Copy a job's declared outputs to `dest` (default: gpuwarden's folder) and compare digests.

    `also` permanently declares additional outputs: the teardown gate protects them like all other outputs. If the
    machine is off, gone or unreachable, the files come from the job's artifact store, if any. A machine that stopped
    itself is started only if the store's list is not final or the store refuses access.

    Raises Conflict for a job that was never launched, or if another call declared outputs in the meantime; BadRequest
    for a destination that is on the machine, belongs to gpuwarden or contains other files; Unreachable if the machine
    does not respond (the next pull keeps the files received so far); Refused if starting the machine costs more than
    the user allowed.
    """
    job = read_job(ctx.ledger, job_id)
    if not job.spec.artifact_store or also:
        return await _pull_machine(ctx, job_id, dest, also, progress)
    if job.handle is not None and job.lease is not None and await at_rest(ctx, job):
        job = await advance(ctx, job_id)
        if (contents := await readable_store(ctx, job)) is not None:
            try:
                return await _pull_from_store(ctx, job, contents, dest, progress)
            except AuthFailed:
                if not self_stopped(ctx, job):
                    raise  # a machine that did not stop itself still has the files
    try:
        return await _pull_machine(ctx, job_id, dest, also, progress)
    except (Unreachable, Refused) as lost:
        job = read_job(ctx.ledger, job_id)
        try:
            contents = await read_store(ctx, job) if job.handle is not None else None
        except WardenError:
            contents = None
        if contents is None:
            raise
        return await _pull_from_store(ctx, job, contents, dest, progress, lost=lost.message)


async def _pull_from_store(
    ctx: Context,
    job: JobRecord,
    contents: StoreContents,
    dest: Path | None,
    progress: Callable[[Progress], None] | None,
    lost: str = "",
) -> PullResult:
    """Copy the files that an artifact store lists. `lost` is the error that prevented a copy from the machine."""
    target = dest_of(ctx, job, dest)
    if dest is None:
        private_folder(target)
    pulled, received = await receive_from_store(ctx, job, contents, target, progress)
    _record(ctx, job, pulled, received)
    why = unsettled(ctx, job, contents)
    return PullResult(
        job,
        target,
        pulled.manifest,
        received,
        pulled.manifest.missing,
        None,
        following(ctx, job),
        store=pulled.store,
        lost=lost,
        unsettled=why.text if why else "",
    )


async def _pull_machine(
    ctx: Context,
    job_id: str,
    dest: Path | None,
    also: Sequence[str],
    progress: Callable[[Progress], None] | None,
) -> PullResult:
    """Copy the outputs from the machine."""
    await wake(ctx, job_id)
    job = await advance(ctx, job_id)
    if job.handle is None:
        raise Conflict(f"job {job_id} ({job.state}) was never launched, so it has no files", following(ctx, job))
    target = dest_of(ctx, job, dest)
    job = declare(ctx, job, also)
    assert job.handle is not None
    if not all(survives_stop(ctx, job.spec, path) for path in job.declared):
        await hold(ctx, job_id)  # a self-stop would lose the newly declared outputs
    backend = ctx.backend(job.handle.backend)
    if dest is None:
        private_folder(target)
    async with artifacts(backend, job.handle, job.outputs, target) as (manifest, source):
        listed = with_authentic_seals(ctx, job_id, manifest)
        aside = partial(set_aside, ctx, job_id, target, listed)
        received = await receive(source, listed, target, owner=job_id, progress=progress, replacing=aside)
    manifest = received.sealed(listed)
    places = {f.path: f.local for f in received.files}
    # Exclude logs that a running job writes to. Otherwise, a job that writes often would never have a complete copy.
    growing = {p.path for p in received.problems if job.state is Job.RUNNING and _LOG.search(p.path)}
    settled = manifest.model_copy(update={"files": tuple(f for f in manifest.files if f.path not in growing)})
    log, lost = await _pull_log(backend, job.handle, target, places.values())
    _record(ctx, job, Pulled(job=job_id, dest=str(target), manifest=settled, places=places), received)
    rest = following(ctx, job)
    return PullResult(job, target, manifest, received, manifest.missing, log, rest, log_lost=lost)


def _record(ctx: Context, job: JobRecord, pulled: Pulled, received: Received) -> None:
    """Record a pull. Raises Conflict if another call has declared more outputs, because the copy lacks them."""
    listed = {f.path for f in pulled.manifest.files}
    with ctx.ledger.transaction():
        if read_job(ctx.ledger, job.id).outputs != job.outputs:
            again = do(Action.PULL, "again; only missing files are sent", job_id=job.id)
            raise Conflict(f"more outputs of job {job.id} were declared while the others were being copied", again)
        save_pull(
            ctx,
            pulled,
            size=sum(f.size for f in received.files),
            missing=pulled.manifest.missing,
            problems=[f"{p.path}: {p.why}" for p in received.problems[:20]],
            not_taken=[p.path for p in received.problems if p.path in listed][:20],
        )


def declare(ctx: Context, job: JobRecord, also: Sequence[str]) -> JobRecord:
    """Add outputs to a job's declared outputs, and return the updated job.

    Raises BadRequest for a path that is invalid as an output, or that the job's artifact store reserves.
    """
    try:
        new = [path for path in dict.fromkeys(map(clean_path, also)) if path not in job.outputs]
    except ValueError as why:
        raise BadRequest(f"also: {why}", "Use paths on the machine, in the same form as declared outputs.") from why
    if job.spec.artifact_store and (taken := [path for path in new if StoreAddress.reserved(path)]):
        raise BadRequest(
            f"also: the artifact store reserves {taken[0]} for its own files", "Give that output another name."
        )
    if len(job.outputs) + len(new) > MAX_OUTPUTS:
        raise BadRequest(f"a job can have at most {MAX_OUTPUTS} outputs", "List a folder instead of its files.")
    if new:
        ctx.ledger.add(job.subject, OutputsDeclared(outputs=(*job.declared, *new)))
    return read_job(ctx.ledger, job.id)


def dest_of(ctx: Context, job: JobRecord, dest: Path | None) -> Path:
    """Return the destination for the copies. Raises BadRequest if the destination is on the job's machine, inside
    gpuwarden's own folders, or unusable.
    """
    own = ctx.home / "artifacts" / job.id
    target = (dest or own).expanduser().absolute()
    real = Path(*target.parts).resolve()
    root = job.place.root if job.place else ""
    if root and real.is_relative_to(Path(root).resolve()):
        raise BadRequest(f"{target} is on the job's machine and would be lost with it", "Choose another folder.")
    # samefile is used, because a file system may ignore case
    if real != own.resolve() and any(p.exists() and p.samefile(ctx.home) for p in (real, *real.parents)):
        raise BadRequest(f"{target} is inside gpuwarden's state folder", "Choose another folder, or omit it.")
    if any(real == path or path in real.parents for path in map(Path.resolve, ctx.protected_paths[1:])):
        raise BadRequest(
            f"{target} is reserved for gpuwarden's policy, notes or profiles", "Choose another folder, or omit it."
        )
    if not str(real).isprintable():
        raise BadRequest(f"{str(target)[:200]!a} contains characters that can't be displayed", "Choose another name.")
    if target.exists() and not target.is_dir():
        raise BadRequest(f"{target} is not a folder", "Specify a folder; it is created if it does not exist.")
    return real


async def _pull_log(
    backend: Backend, handle: Handle, target: Path, artifacts: Iterable[str]
) -> tuple[Path | None, int]:
    """Save the last part of the log next to the artifacts, with a line in place of each missing part.

    Return its path and the number of missing bytes. If saving fails, the path is None, because no check needs the log.
    """
    part = target / STAGING / f"{LOG_NAME}.draft"
    taken = {Path(local).relative_to(target).parts[0].casefold() for local in artifacts}
    path = target / STAGING / LOG_NAME if LOG_NAME in taken else target / LOG_NAME  # don't overwrite an artifact
    try:
        chunk = await backend.logs(handle, 0, 1)
        lost = cursor = max(0, chunk.size - LOG_LIMIT)
        gap = cursor
        with part.open("w", encoding="utf-8", errors="replace") as file:
            while cursor < chunk.size:
                piece = await backend.logs(handle, cursor, _CHUNK)
                if piece.next <= cursor:
                    break
                skipped = max(0, piece.next - cursor - len(piece.text.encode("utf-8", "replace")))
                gap, lost = gap + skipped, lost + skipped
                if gap:
                    file.write(f"[{gap:,} bytes of the log are missing here]\n")
                file.write(piece.text)
                cursor, gap = piece.next, 0
        part.replace(path)
    except (WardenError, OSError):
        return None, 0
    return path, lost
