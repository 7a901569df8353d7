"""Copy a job's outputs from its artifact store if the machine can't be read.

Every file is compared with the list that the runner signed: first the size and checksum that the store reports,
then the received bytes. A listed file that is missing from the store is reported by name as a problem.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import anyio

from gpuwarden.core.errors import Conflict, NotFound, Unreachable, WardenError
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Artifact, InstanceState, Known, Manifest
from gpuwarden.core.reasons import Code, because
from gpuwarden.core.safe_names import UnsafeName, check_name
from gpuwarden.core.sanitize import line
from gpuwarden.core.store_address import StoredFile
from gpuwarden.core.weights import checkpoint_like
from gpuwarden.ledger.events import ArtifactsPulled
from gpuwarden.lifecycle.artifacts.local_copies import Pulled, last_pull, save_pull
from gpuwarden.lifecycle.artifacts.set_aside import set_aside
from gpuwarden.lifecycle.artifacts.store_contents import StoreContents, read_store, unsettled
from gpuwarden.lifecycle.artifacts.store_copy import disagreement
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.meter import confirmed_end, poll_lease
from gpuwarden.lifecycle.leases.self_stopped import self_stopped
from gpuwarden.lifecycle.records import JobRecord
from gpuwarden.lifecycle.timeouts import store_limit
from gpuwarden.remote.transfer.destination import bare
from gpuwarden.remote.transfer.receive import Problem, Progress, Received, receive

_OFF: Final = frozenset({InstanceState.STOPPED, InstanceState.INTERRUPTED})
_WHY: Final[Mapping[Code, str]] = {
    Code.STORE_INCOMPLETE: "the artifact store lists the file but does not contain it",
    Code.STORE_CHANGED: "the artifact store's file with this name differs from the listed file",
}


@dataclass(frozen=True)
class StoreSource:
    """A source for `receive` that reads a job's files from the job's artifact store."""

    contents: StoreContents

    def read(self, artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        """Stream one file from `offset`."""
        return self.contents.store.read(self.contents.keys[artifact.path], offset)


async def at_rest(ctx: Context, job: JobRecord) -> bool:
    """Return whether a job's machine is known to be off or gone, in which case only the artifact store can be read."""
    if job.lease is None:
        return False
    answer = await poll_lease(ctx, job.lease)
    if isinstance(answer, Known):
        return answer.value is None or answer.value.state in _OFF
    return confirmed_end(ctx, job.lease) is not None


async def readable_store(ctx: Context, job: JobRecord) -> StoreContents | None:
    """Return a job's artifact store if the outputs should be copied from it, else None.

    The machine must be off or gone. A machine that stopped itself can be started again, so its store is used only if
    the list is final (see `unsettled`) and no earlier copy from the store lacked files. Raises NotFound if the store is
    empty.
    """
    if not job.spec.artifact_store or not await at_rest(ctx, job):
        return None
    last = ctx.ledger.last(job.subject, ArtifactsPulled)
    if self_stopped(ctx, job) and last is not None and last.data.store and last.data.not_taken:
        return None
    try:
        contents = await read_store(ctx, job)
    except WardenError:
        if self_stopped(ctx, job):
            return None
        raise
    if self_stopped(ctx, job) and (contents is None or unsettled(ctx, job, contents) is not None):
        return None
    if contents is None:
        nothing_better(ctx, job)
        raise NotFound(f"job {job.id}: {because(Code.STORE_EMPTY).text}", do(Action.CHECK, job_id=job.id))
    return contents


def nothing_better(ctx: Context, job: JobRecord) -> None:
    """If the machine is gone, record that no better copy than the current one will become available."""
    if job.lease is None or confirmed_end(ctx, job.lease) != "gone":
        return
    last = ctx.ledger.last(job.subject, ArtifactsPulled)
    if last is not None:
        ctx.ledger.add(job.subject, last.data.model_copy(update={"unsettled": True}))
    else:
        nothing = Manifest(taken_at=ctx.clock.now(), files=())
        save_pull(ctx, Pulled(job=job.id, dest="", manifest=nothing, places={}, store=job.spec.artifact_store), size=0)


async def receive_from_store(
    ctx: Context,
    job: JobRecord,
    contents: StoreContents,
    dest: Path,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[Pulled, Received]:
    """Copy the files that a store lists to `dest`.

    Raises Conflict if the local copy is newer, or if the list is unsigned and its files differ from the local copy.
    Raises Unreachable if the connection to the store is lost; the files received so far remain.
    """
    if better := newer_local_file(ctx, job, contents):
        nothing_better(ctx, job)
        why = (
            "newer than its artifact store"
            if contents.signed
            else "different from its artifact store, whose list is not signed"
        )
        raise Conflict(
            f"the local copy of job {job.id} is {why} (for example, {line(better, 200)}); nothing was replaced",
            do(Action.VERIFY, "the local copy", job_id=job.id),
        )
    manifest = contents.manifest
    problems = await compare(contents, manifest)
    good = manifest.model_copy(update={"files": tuple(f for f in manifest.files if f.path not in problems)})
    aside = partial(set_aside, ctx, job.id, dest, good)
    received = await receive(StoreSource(contents), good, dest, owner=job.id, progress=progress, replacing=aside)
    problems |= {p.path: f"in the artifact store: {p.why}" for p in received.problems}
    order = [f.path for f in manifest.files if f.path in problems]
    received = received.model_copy(update={"problems": tuple(Problem(path=p, why=problems[p]) for p in order)})
    last = contents.listed.end if unsettled(ctx, job, contents) is None else None
    places = {f.path: f.local for f in received.files}
    pulled = Pulled(
        job=job.id,
        dest=str(dest),
        manifest=manifest,
        places=places,
        store=str(contents.address),
        disclosure=last.disclosed if last else None,
    )
    return pulled, received


async def compare(contents: StoreContents, manifest: Manifest) -> dict[str, str]:
    """Return the paths of the listed files that can't be copied, with the reasons. Nothing is downloaded."""
    refused: dict[str, str] = {}
    keys: dict[str, str] = {}
    for file in manifest.files:
        try:
            check_name(file.path)
        except UnsafeName as unsafe:
            refused[file.path] = unsafe.message
        else:
            keys[file.path] = contents.keys[file.path]
    limit = store_limit(len(keys))
    try:
        with anyio.fail_after(limit):
            found: dict[str, StoredFile] = await contents.store.files(list(keys.values()), read=False)
    except TimeoutError:
        raise Unreachable(f"{contents.address} sent no complete response within {limit:g} s", "Try again.") from None
    rows = {row.path: row for row in contents.files}
    for file in manifest.files:
        if file.path in keys:
            trouble = disagreement(file, rows[file.path], found.get(keys[file.path]))
            if trouble is not None and trouble in _WHY:
                refused[file.path] = _WHY[trouble]
    return refused


def newer_local_file(ctx: Context, job: JobRecord, contents: StoreContents) -> str:
    """Return the path of a file in the last copy that is newer than the store's version, or of a newer checkpoint that
    the store lacks.

    Return an empty string if there is none. A store with a final list is never older. The times in an unsigned list
    can't be trusted, so any local file that differs from the list counts as newer.
    """
    last = last_pull(ctx, job.id)
    if last is None or unsettled(ctx, job, contents) is None:
        return ""
    rows = {row.path: row for row in contents.listed.files}
    newest = max((row.mtime_ns for row in rows.values()), default=0)
    for file in last.manifest.files:
        row = rows.get(file.path)
        older = row is not None and row.artifact.stamp != file.stamp and row.mtime_ns < file.mtime_ns
        other = not contents.signed and row is not None and row.sha256 != bare(file.sha256 or "")
        lacks = row is None and checkpoint_like(file.path) and file.mtime_ns > newest
        if file.path in last.places and (older or lacks or other):
            return file.path
    return ""
