"""Record the pulled copies of a job's artifacts.

Each pull writes one record with the local path of each file and the machine's manifest. A *seal* is a digest of the
files' metadata (size, times, inode). A later check can use it to detect in milliseconds whether the copy has changed
since it was verified. A change to any byte changes the seal, because ordinary programs can't set a file's status change
time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpuwarden.core.models import Artifact, Disclosure, Frozen, Level, LogChunk, Manifest, Report, Verdict, digest
from gpuwarden.core.next_step import Copy
from gpuwarden.core.safe_names import LOG_NAME
from gpuwarden.core.states import Teardown
from gpuwarden.ledger.event import Event
from gpuwarden.ledger.events import ArtifactsPulled, ArtifactsVerified, OutputsDeclared, TeardownBlocked
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.meter import confirmed_end
from gpuwarden.lifecycle.leases.self_stopped import started_since
from gpuwarden.lifecycle.records import JobRecord, at_rest, read_job
from gpuwarden.private import private_folder, write_private


class CopyStatus(Frozen):
    """Current state of the local copy. `verdict` is None if the copy has not been verified since it last changed.

    `equal` is true if every file has the digest that the manifest lists, regardless of the verdict on its content.
    `unread` lists files in unsupported formats if the verdict is unknown only because of them; their digests equal the
    machine's. `aside` lists images, tables and logs if the verdict is refuted only because of them; the files on the
    machine have the same defects.
    """

    verdict: Verdict | None = None
    equal: bool = False
    problems: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()


class Pulled(Frozen):
    """One pull. `places` maps each path in the manifest to its path in `dest`.

    `store` is the address of the artifact store from which the files were copied; empty if they came from the machine.
    `disclosure` lists the other files on the machine, according to the store's final list; None if there is no such
    list.
    """

    job: str
    dest: str
    manifest: Manifest
    places: dict[str, str]
    store: str = ""
    disclosure: Disclosure | None = None

    @property
    def digest(self) -> str:
        """Return a digest of the pulled files and their destinations."""
        other = self.disclosure.model_dump(mode="json") if self.disclosure else None
        origin = [self.store, other, self.manifest.missing, self.manifest.skipped] if self.store else []
        return digest([self.dest, self.manifest.digest, sorted(self.places.items()), *origin])

    def has(self, file: Artifact) -> bool:
        """Return whether the pull includes this file with a digest, and the file has the same size and times now."""
        known = next((a for a in self.manifest.files if a.path == file.path and file.path in self.places), None)
        return known is not None and known.sha256 is not None and known.stamp == file.stamp

    def local_manifest(self) -> Manifest:
        """Return the machine's manifest with local file names; files with absolute paths are under `machine/`.

        An output that the job never wrote is not a defect in the copy; the teardown gate reports it (TD-OUT-001).
        """
        files = tuple(
            f.model_copy(update={"path": Path(self.places[f.path]).relative_to(self.dest).as_posix()})
            for f in self.manifest.files
            if f.path in self.places
        )
        absent = tuple(f for f in self.manifest.files if f.path not in self.places)
        return self.manifest.model_copy(update={"files": files + absent, "missing": ()})


def save_pull(
    ctx: Context,
    pulled: Pulled,
    *,
    size: int,
    missing: Sequence[str] = (),
    problems: Sequence[str] = (),
    not_taken: Sequence[str] = (),
) -> None:
    """Record a pull: write the manifest to a separate file, and its digest to the ledger."""
    event = ArtifactsPulled(
        record=write_record(ctx, pulled),
        digest=pulled.digest,
        dest=pulled.dest,
        files=len(pulled.places),
        bytes=size,
        missing=tuple(missing),
        problems=tuple(problems),
        not_taken=tuple(not_taken),
        store=pulled.store,
        unsettled=bool(pulled.store) and pulled.disclosure is None,
    )
    ctx.ledger.add(f"job/{pulled.job}", event)


def write_record(ctx: Context, pulled: Pulled) -> str:
    """Write a pull's record file, and return its name."""
    name = record_name(pulled.job, pulled.digest)
    write_private(private_folder(ctx.home / "pulls") / name, pulled.model_dump_json())
    return name


def record_name(job_id: str, digest: str) -> str:
    """Return the record file name for the pull with this digest."""
    return f"{job_id}-{digest[7:23]}.json"


def last_pull(ctx: Context, job_id: str) -> Pulled | None:
    """Return a job's latest pull; None if the job was never pulled, or if the record has been changed or lost."""
    event = ctx.ledger.last(f"job/{job_id}", ArtifactsPulled)
    return read_pull(ctx, event.data.record, event.data.digest) if event else None


def read_pull(ctx: Context, record: str, digest: str) -> Pulled | None:
    """Return the pull that a record file describes; None if the file has been changed or lost."""
    try:
        pulled = Pulled.model_validate_json((ctx.home / "pulls" / record).read_bytes())
    except (OSError, ValueError):
        return None
    return pulled if pulled.digest == digest else None


def complete_after(ctx: Context, job_id: str) -> int | None:
    """Return the number of the ledger event after which a pull includes all outputs.

    The event is the job's end, or a later declaration of outputs, because earlier pulls did not request these outputs.
    None means that the job may still have a process.
    """
    end, declared = at_rest(ctx.ledger, job_id), ctx.ledger.last(f"job/{job_id}", OutputsDeclared)
    return None if end is None else max(end.seq, declared.seq if declared else 0)


def copy_for(ctx: Context, job_id: str, listed: Manifest | None = None) -> Pulled | None:
    """Return the copy to use for a job: the oldest complete, proven copy, or else the latest pull.

    A complete copy was made after the job's end and after the last declaration of outputs.

    A later pull to another folder does not replace a proven copy. `listed` contains the files that are on the machine
    now: a copy that lacks one of them, or has an older version of it, is used only if no proven copy has all of them.
    """
    since = complete_after(ctx, job_id)
    tried = set()
    for event in ctx.ledger.events(f"job/{job_id}", kind=ArtifactsPulled) if since else ():
        if since is None or event.seq < since or event.data.digest in tried:
            continue
        if event.data.problems or event.data.not_taken or _may_lack(ctx, job_id, event):
            continue
        tried.add(event.data.digest)
        pulled = read_pull(ctx, event.data.record, event.data.digest)
        if pulled is None or verified_now(ctx, job_id, pulled).verdict is not Verdict.PROVEN:
            continue
        if listed is None or all(pulled.has(file) for file in listed.files):
            return pulled
    return last_pull(ctx, job_id)


OUTDATED: Final = frozenset({"TD-COPY-001", "TD-COPY-002"})
"""Rules that report a copy older than the files on the machine."""


def copy_state(ctx: Context, job_id: str) -> Copy:
    """Return the state of a job's copy (see `copy_for`), without querying the machine."""
    pulled, last = copy_for(ctx, job_id), ctx.ledger.last(f"job/{job_id}", ArtifactsPulled)
    if pulled is None or last is None:
        return Copy.NONE
    for ticket in ctx.ledger.subjects("teardown", Teardown.BLOCKED, job=job_id):
        blocked = ctx.ledger.last(ticket, TeardownBlocked)  # the gate checked the machine after the pull
        if blocked is not None and blocked.seq > last.seq and OUTDATED & {f.rule for f in blocked.data.findings}:
            return Copy.STALE
    seen = verified_now(ctx, job_id, pulled)
    if pulled.digest != last.data.digest and seen.verdict is Verdict.PROVEN:
        return Copy.PROVEN
    since = complete_after(ctx, job_id)
    if since is not None and last.seq < since:
        return Copy.STALE
    if _may_lack(ctx, job_id, last):
        return Copy.FROM_STORE
    if last.data.not_taken or (since is not None and last.data.problems):
        return Copy.PARTIAL
    if not pulled.places:
        return Copy.EMPTY
    if seen.verdict is None or seen.verdict is Verdict.PROVEN:
        return Copy.UNVERIFIED if seen.verdict is None else Copy.PROVEN
    return Copy.BROKEN if seen.equal or seen.verdict is Verdict.UNKNOWN else Copy.DAMAGED


def _may_lack(ctx: Context, job_id: str, event: Event[ArtifactsPulled]) -> bool:
    """Return whether a job's machine may have files that were missing from the store when it was copied.

    True if the machine has been started since then or the store's list was not final, unless the machine is gone.
    """
    if not (event.data.store or event.data.unsettled):
        return False
    job = read_job(ctx.ledger, job_id)
    gone = job.lease is not None and confirmed_end(ctx, job.lease) == "gone"
    return not gone and (event.data.unsettled or started_since(ctx, job, event.seq))


async def pulled_log(ctx: Context, job_id: str, start: int, limit: int) -> LogChunk | None:
    """Return part of the pulled log; a negative `start` counts from the end. Return None if no log was pulled."""
    pulled = last_pull(ctx, job_id)
    return read_piece(Path(pulled.dest) / LOG_NAME, start, limit) if pulled else None


def read_piece(file: Path, start: int, limit: int) -> LogChunk | None:
    """Return at most `limit` bytes of a file, or None if it can't be read. A negative `start` counts from the end."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            begin = min(start, size) if start >= 0 else max(0, size + start)
            stream.seek(begin)
            piece = stream.read(limit)
    except OSError:
        return None
    return LogChunk.of(piece, begin, size)


def seal(pulled: Pulled) -> str | None:
    """Return a digest of all copied files' metadata; None if a file is missing or is not a regular file."""
    found = [info_of(path) for path in pulled.places.values()]
    known = [info for info in found if info is not None]
    return digest(sorted(known)) if len(known) == len(found) else None


def info_of(path: str) -> list[str | int] | None:
    """Return a file's path, size, times and inode; None if it is missing or is not a regular file."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    plain = stat.S_ISREG(found.st_mode)
    return [path, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino] if plain else None


def save_verified(ctx: Context, job: JobRecord, pulled: Pulled, before: str | None, report: Report) -> None:
    """Record a verification. If the files changed while being read, it is recorded without a seal and not used."""
    sealed = before if before == seal(pulled) else None
    readable = report.readable is Verdict.PROVEN
    event = ArtifactsVerified(
        verdict=report.verdict,
        level=report.level,
        pull=pulled.digest,
        seal=sealed,
        problems=tuple(report.reasons[:20]),
        equal=all(f.sealed for f in report.files),
        files=len(report.files),
        bytes=report.bytes,
        unread=tuple(report.unread[:50]) if readable else (),
        aside=tuple(report.aside[:50]) if readable else (),
    )
    ctx.ledger.add(job.subject, event)


def proof_of(ctx: Context, job_id: str, pulled: Pulled) -> ArtifactsVerified | None:
    """Return a pull's last verification."""
    proofs = ctx.ledger.events(f"job/{job_id}", kind=ArtifactsVerified)
    return next((event.data for event in reversed(proofs) if event.data.pull == pulled.digest), None)


def verified_now(ctx: Context, job_id: str, pulled: Pulled) -> CopyStatus:
    """Return a local copy's verification state, with no verdict if the copy has changed since its verification."""
    proof = proof_of(ctx, job_id, pulled)
    if proof is None or proof.seal is None:
        return CopyStatus()
    if proof.level not in {Level.LOAD, Level.RESUME} or proof.seal != seal(pulled):
        return CopyStatus()
    return CopyStatus(
        verdict=proof.verdict, equal=proof.equal, problems=proof.problems, unread=proof.unread, aside=proof.aside
    )
