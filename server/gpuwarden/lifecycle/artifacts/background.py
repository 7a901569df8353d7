"""Copy and verify job outputs in the background, within the policy's disk limit.

A machine is billed until all outputs are verified, so the watch copies them without waiting for an agent or the user.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import anyio.to_thread
from anyio.lowlevel import checkpoint

from gpuwarden.core.clock import doubled
from gpuwarden.core.errors import Conflict, DiskError, NotFound, NotSupported, Unreachable, WardenError
from gpuwarden.core.models import Handle, Manifest
from gpuwarden.core.next_step import Copy
from gpuwarden.core.states import LIVE_LEASES, Job
from gpuwarden.ledger.events import ArtifactsPulled, SelfStopArmed
from gpuwarden.lifecycle.artifacts.local_copies import copy_state
from gpuwarden.lifecycle.artifacts.set_aside import bytes_replaced
from gpuwarden.lifecycle.artifacts.store_contents import read_store
from gpuwarden.lifecycle.artifacts.store_pull import readable_store
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.relaunch import awaits_store, may_relaunch
from gpuwarden.lifecycle.leases.auto_teardown import automatic_teardown
from gpuwarden.lifecycle.leases.meter import confirmed_end
from gpuwarden.lifecycle.leases.self_stop import wake
from gpuwarden.lifecycle.leases.self_stopped import self_stopped
from gpuwarden.lifecycle.records import JobRecord, read_job, read_lease

FIRST_RETRY_S: Final = 60.0
MOST_RETRY_S: Final = 3600.0
SNAPSHOT_S: Final = 1800.0
"""Seconds between copies of a running job's outputs, if the job may be relaunched."""
MOST_WAKES: Final = 2
"""Maximum number of times that the watch starts a machine that stopped itself. If the copy still fails, the user has to
decide."""
QUIET_S: Final = 30.0
LARGE: Final = 1 << 20
_RESTING: Final = frozenset({Job.SUCCEEDED, Job.PAUSED})
"""Job states in which the outputs don't change: the job has ended, or it is paused."""
_PULL: Final = frozenset({Copy.NONE, Copy.STALE, Copy.FROM_STORE, Copy.PARTIAL, Copy.DAMAGED})


class BackgroundCopier:
    """Makes verified copies of jobs' outputs, one job at a time. A failed copy is retried at doubling intervals."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.trouble: dict[str, str] = {}
        self._misses: dict[str, int] = {}
        self._next: dict[str, float] = {}
        self._snapshots: dict[str, float] = {}
        """Time of each running job's next copy.

        Separate from `_next`, because this delay must not apply after the job loses its machine.
        """

    async def round(self) -> None:
        """Copy and verify the outputs that have no verified copy. Failures are reported in `trouble`, not raised."""
        jobs: Iterable[JobRecord] = ()
        if self.ctx.policy.teardown.background_gb > 0:
            await self._wake()
            jobs = [read_job(self.ctx.ledger, job_id) for job_id in self.ctx.ledger.jobs_with_leases(*LIVE_LEASES)]
        # Succeeded or paused jobs whose machines may be billed, and whose outputs have no verified copy yet.
        ended = [job for job in jobs if job.state in _RESTING and job.handle is not None and job.outputs]
        wanted = {job.id: job for job in ended if copy_state(self.ctx, job.id) in {*_PULL, Copy.UNVERIFIED}}
        # Running jobs that may be relaunched: without a verified copy, they can't resume after the machine is lost.
        running = (job for job in jobs if job.state is Job.RUNNING and job.handle is not None and job.outputs)
        wanted |= {job.id: job for job in running if may_relaunch(self.ctx, job.id)}
        # Jobs that lost their machine and are relaunched from the newest outputs in their artifact store.
        wanted |= {job.id: job for job in self._lost()}
        asleep = {job.id for job in self._self_stopped()}
        self.trouble = {name: why for name, why in self.trouble.items() if name in wanted or name in asleep}
        for job in wanted.values():
            await checkpoint()
            due = self._snapshots if job.state is Job.RUNNING else self._next
            if self.ctx.clock.now() < due.get(job.id, 0.0):
                continue
            try:
                copied = await self._keep(job)
            except (WardenError, OSError) as error:  # OSError if, for example, the local disk is full
                known = error if isinstance(error, WardenError) else DiskError.of(error)
                self.trouble[job.id] = f"its outputs have not been copied yet: {known.message}"
            else:
                self.trouble.pop(job.id, None)
                if job.state is Job.RUNNING:
                    self._misses.pop(job.id, None)
                    due[job.id] = self.ctx.clock.now() + (SNAPSHOT_S if copied else FIRST_RETRY_S)
                    continue
            # If the copy could not be verified, the delay before the next attempt grows.
            n = self._misses[job.id] = self._misses.get(job.id, 0) + 1
            due[job.id] = self.ctx.clock.now() + doubled(FIRST_RETRY_S, n, MOST_RETRY_S)

    def _lost(self) -> list[JobRecord]:
        """Return the jobs that can't be relaunched until the files in their artifact store have been copied."""
        if self.ctx.policy.teardown.background_gb <= 0:
            return []
        names = self.ctx.ledger.subjects("job", Job.PREEMPTED)
        jobs = (read_job(self.ctx.ledger, name.removeprefix("job/")) for name in names)
        return [job for job in jobs if job.handle is not None and job.lease is not None
                and awaits_store(self.ctx, job) and confirmed_end(self.ctx, job.lease) == "gone"]  # fmt: skip

    def _self_stopped(self) -> list[JobRecord]:
        """Return the jobs with automatic teardown whose machines stopped themselves before all outputs were proven."""
        leases = (read_lease(self.ctx.ledger, name.removeprefix("lease/")) for name in self.ctx.ledger.resting())
        jobs = (read_job(self.ctx.ledger, lease.job_id) for lease in leases)
        return [
            job
            for job in jobs
            if automatic_teardown(self.ctx, job.id) is not None
            and job.state in {Job.SUCCEEDED, Job.UNKNOWN}
            and self_stopped(self.ctx, job)
            and copy_state(self.ctx, job.id) is not Copy.PROVEN
            and len(self.ctx.ledger.events(f"lease/{job.lease}", kind=SelfStopArmed)) < MOST_WAKES
        ]

    async def _wake(self) -> None:
        """Start the self-stopped machines of jobs with automatic teardown, so that the outputs can be copied.

        If a job's artifact store has all its outputs, they are copied from there and the machine is not started.
        """
        for job in self._self_stopped():
            if self.ctx.clock.now() < self._next.get(job.id, 0.0):
                continue
            try:
                if not await self._kept_instead(job):
                    await wake(self.ctx, job.id)
                elif copy_state(self.ctx, job.id) is not Copy.PROVEN:
                    raise NotSupported(
                        "the copy from its artifact store could not be verified; the user must check the outputs"
                    )
                self.trouble.pop(job.id, None)
            except (WardenError, OSError) as error:
                known = error if isinstance(error, WardenError) else DiskError.of(error)
                self.trouble[job.id] = f"its machine stopped itself and has not been started again: {known.message}"
                n = self._misses[job.id] = self._misses.get(job.id, 0) + 1
                self._next[job.id] = self.ctx.clock.now() + doubled(FIRST_RETRY_S, n, MOST_RETRY_S)

    async def _kept_instead(self, job: JobRecord) -> bool:
        """Copy a job's outputs from its artifact store and verify them. Return False if the machine is needed."""
        from gpuwarden.lifecycle.artifacts.pull import pull
        from gpuwarden.lifecycle.artifacts.verify import verify_job

        if not job.spec.artifact_store:
            return False
        if copy_state(self.ctx, job.id) in _PULL:
            contents = await readable_store(self.ctx, job)
            if contents is None:
                return False
            await self._check_room(job.id, contents.bytes)
            await pull(self.ctx, job.id)
        if copy_state(self.ctx, job.id) is Copy.UNVERIFIED:
            await verify_job(self.ctx, job.id)
        return copy_state(self.ctx, job.id) is not Copy.PARTIAL  # missing files can exist only on the machine

    async def _listed(self, job: JobRecord, handle: Handle) -> Manifest:
        """Return the files on a job's machine, or in its artifact store if the machine does not respond."""
        try:
            if job.state is Job.PREEMPTED:
                raise Unreachable(f"job {job.id}'s machine is gone", "Its files can no longer be read.")
            return await self.ctx.backend(handle.backend).list_files(handle, job.outputs)
        except Unreachable:
            contents = await read_store(self.ctx, job) if job.spec.artifact_store else None
            if contents is None and job.state is not Job.PREEMPTED:
                raise
            return contents.manifest if contents else Manifest(taken_at=0.0, files=())

    async def _check_room(self, job_id: str, size: int) -> None:
        """Raise NotSupported if a copy would exceed the policy's disk limit."""
        here = await anyio.to_thread.run_sync(_bytes_below, self.ctx.home / "artifacts", job_id)
        limit = self.ctx.policy.teardown.background_gb * 1e9
        if here + size > limit:
            sizes = f"a copy of {size / 1e9:.1f} GB does not fit within the {limit / 1e9:g} GB"
            raise NotSupported(f"{sizes} that background_gb allows")

    async def _keep(self, job: JobRecord) -> bool:
        """Copy a job's outputs if all of them fit within the disk limit, and verify them.

        Return False if a running job has saved no file yet, or may be saving one now. Raises NotSupported if the copy
        does not fit, and Conflict if some files could not be copied.
        """
        # imported here, because these imports take a second and most rounds copy nothing
        from gpuwarden.lifecycle.artifacts.pull import pull
        from gpuwarden.lifecycle.artifacts.verify import being_verified, verify_job

        if job.state not in _RESTING or copy_state(self.ctx, job.id) in _PULL:
            assert job.handle is not None
            listed = await self._listed(job, job.handle)
            # a recently written large file may be an incomplete checkpoint
            large = [file.mtime_ns / 1e9 for file in listed.files if file.size >= LARGE and file.mtime_ns is not None]
            fresh = any(listed.taken_at - at < QUIET_S for at in large)
            if job.state is Job.RUNNING and (fresh or not listed.files):
                return False
            await self._check_room(job.id, listed.bytes + bytes_replaced(self.ctx, job, listed))
            try:
                await pull(self.ctx, job.id)
            except (NotFound, Conflict):
                if job.state is not Job.PREEMPTED or awaits_store(self.ctx, job):
                    raise  # otherwise, the store has no files newer than the local copy
        # If an agent or the user is already verifying the copy, don't verify it here as well. This result would replace
        # theirs, and may be less conclusive on a busy computer.
        if copy_state(self.ctx, job.id) is Copy.UNVERIFIED and not being_verified(self.ctx, job.id):
            await verify_job(self.ctx, job.id)
        if copy_state(self.ctx, job.id) is Copy.PARTIAL:
            pulled = self.ctx.ledger.last(job.subject, ArtifactsPulled)
            raise Conflict(f"some files could not be copied: {'; '.join(pulled.data.problems[:3]) if pulled else ''}")
        return True


def _bytes_below(folder: Path, without: str) -> int:
    """Return the total size in bytes of the copies in a folder, except those of one job."""
    total = 0
    for root, names, files in os.walk(folder):
        if Path(root) == folder:
            names[:] = [name for name in names if name != without]
        for name in files:
            try:
                total += os.lstat(os.path.join(root, name)).st_size  # noqa: PTH118 - many files
            except OSError:
                continue
    return total
