"""Copy and verify the outputs of jobs before anybody asks, inside the disk limit of the policy.

The meter runs until everything is proven, so the watch does not wait for an agent or a person to begin.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import anyio.to_thread
from anyio.lowlevel import checkpoint

from gpuwarden.core.errors import Conflict, DiskError, NotFound, NotSupported, Unreachable, WardenError
from gpuwarden.core.models import Handle, Manifest
from gpuwarden.core.next_step import Copy
from gpuwarden.core.states import LIVE_LEASES, Job
from gpuwarden.ledger.events import ParkingArmed
from gpuwarden.lifecycle.artifacts.kept_list import read_kept
from gpuwarden.lifecycle.artifacts.kept_pull import kept_copy
from gpuwarden.lifecycle.artifacts.local_copies import copy_state
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.relaunch import awaits_kept, may_relaunch
from gpuwarden.lifecycle.leases.auto_teardown import automatic_teardown
from gpuwarden.lifecycle.leases.meter import believed
from gpuwarden.lifecycle.leases.parked import parked
from gpuwarden.lifecycle.leases.parking import wake
from gpuwarden.lifecycle.records import JobRecord, read_job, read_lease

FIRST_RETRY_S: Final = 60.0
MOST_RETRY_S: Final = 3600.0
SNAPSHOT_S: Final = 1800.0
"""Seconds between two copies of a job that runs and may be relaunched."""
MOST_WAKES: Final = 2
"""How often the watch starts a machine that stopped itself: what could not be copied then is a person's question."""
QUIET_S: Final = 30.0
LARGE: Final = 1 << 20
_RESTING: Final = frozenset({Job.SUCCEEDED, Job.PAUSED})
"""States of a job whose outputs are final, or are what it resumes from."""
_PULL: Final = frozenset({Copy.NONE, Copy.STALE, Copy.KEPT, Copy.PARTIAL, Copy.DAMAGED})


class Keeper:
    """Makes proven copies, one job at a time. What fails is tried again, half as often each time."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.trouble: dict[str, str] = {}
        self._misses: dict[str, int] = {}
        self._next: dict[str, float] = {}
        self._snapshots: dict[str, float] = {}
        """When a job that runs is looked at again: what it waits for has no meaning once its machine was taken."""

    async def round(self) -> None:
        """Copy and verify what lacks it. Failures are reported in `trouble`, not raised."""
        jobs: Iterable[JobRecord] = ()
        if self.ctx.policy.teardown.background_gb > 0:
            await self._wake()
            jobs = [read_job(self.ctx.ledger, job_id) for job_id in self.ctx.ledger.jobs_with_leases(*LIVE_LEASES)]
        # Those that succeeded or are paused, whose machines may bill, and whose copy can still become a proven one.
        ended = [job for job in jobs if job.state in _RESTING and job.handle is not None and job.outputs]
        wanted = {job.id: job for job in ended if copy_state(self.ctx, job.id) in {*_PULL, Copy.UNVERIFIED}}
        # And those that run and may go on elsewhere: that takes a proven copy from before the machine is taken.
        running = (job for job in jobs if job.state is Job.RUNNING and job.handle is not None and job.outputs)
        wanted |= {job.id: job for job in running if may_relaunch(self.ctx, job.id)}
        # And those that lost their machine and go on elsewhere, from the newest that their artifact store has.
        wanted |= {job.id: job for job in self._lost()}
        asleep = {job.id for job in self._parked()}
        self.trouble = {name: why for name, why in self.trouble.items() if name in wanted or name in asleep}
        for job in wanted.values():
            await checkpoint()
            due = self._snapshots if job.state is Job.RUNNING else self._next
            if self.ctx.clock.now() < due.get(job.id, 0.0):
                continue
            try:
                copied = await self._keep(job)
            except (WardenError, OSError) as error:  # a full disk here as well
                known = error if isinstance(error, WardenError) else DiskError.of(error)
                self.trouble[job.id] = f"its outputs are not copied yet: {known.message}"
            else:
                self.trouble.pop(job.id, None)
                if job.state is Job.RUNNING:
                    self._misses.pop(job.id, None)
                    due[job.id] = self.ctx.clock.now() + (SNAPSHOT_S if copied else FIRST_RETRY_S)
                    continue
            # a copy that is proven leaves the list; anything else waits longer before the next try
            n = self._misses[job.id] = self._misses.get(job.id, 0) + 1
            due[job.id] = self.ctx.clock.now() + min(FIRST_RETRY_S * 2.0 ** (n - 1), MOST_RETRY_S)

    def _lost(self) -> list[JobRecord]:
        """Return the jobs whose relaunch waits for what their artifact store has."""
        if self.ctx.policy.teardown.background_gb <= 0:
            return []
        names = self.ctx.ledger.subjects("job", Job.PREEMPTED)
        jobs = (read_job(self.ctx.ledger, name.removeprefix("job/")) for name in names)
        return [job for job in jobs if job.handle is not None and job.lease is not None
                and awaits_kept(self.ctx, job) and believed(self.ctx, job.lease) == "gone"]  # fmt: skip

    def _parked(self) -> list[JobRecord]:
        """Return the jobs with automatic teardown whose machines stopped themselves before everything was proven."""
        leases = (read_lease(self.ctx.ledger, name.removeprefix("lease/")) for name in self.ctx.ledger.resting())
        jobs = (read_job(self.ctx.ledger, lease.job_id) for lease in leases)
        return [
            job
            for job in jobs
            if automatic_teardown(self.ctx, job.id) is not None
            and job.state in {Job.SUCCEEDED, Job.UNKNOWN}
            and parked(self.ctx, job)
            and copy_state(self.ctx, job.id) is not Copy.PROVEN
            and len(self.ctx.ledger.events(f"lease/{job.lease}", kind=ParkingArmed)) < MOST_WAKES
        ]

    async def _wake(self) -> None:
        """Start the machines whose end a person ordered and that stopped itself before. The copy and the end follow."""
        for job in self._parked():
            if self.ctx.clock.now() < self._next.get(job.id, 0.0):
                continue
            try:
                if not await self._kept_instead(job):
                    await wake(self.ctx, job.id)
                elif copy_state(self.ctx, job.id) is not Copy.PROVEN:
                    raise NotSupported(
                        "what its artifact store has is copied and not proven; a person has to look at it"
                    )
                self.trouble.pop(job.id, None)
            except (WardenError, OSError) as error:
                known = error if isinstance(error, WardenError) else DiskError.of(error)
                self.trouble[job.id] = f"its machine stopped itself and is not started yet: {known.message}"
                n = self._misses[job.id] = self._misses.get(job.id, 0) + 1
                self._next[job.id] = self.ctx.clock.now() + min(FIRST_RETRY_S * 2.0 ** (n - 1), MOST_RETRY_S)

    async def _kept_instead(self, job: JobRecord) -> bool:
        """Copy and verify the outputs of a job at rest from its artifact store, where that has the last word."""
        from gpuwarden.lifecycle.artifacts.pull import pull
        from gpuwarden.lifecycle.artifacts.verify import verify_job

        if not job.spec.artifact_store:
            return False
        if copy_state(self.ctx, job.id) in _PULL:
            kept = await kept_copy(self.ctx, job)
            if kept is None:
                return False
            await self._check_room(job.id, kept.bytes)
            await pull(self.ctx, job.id)
        if copy_state(self.ctx, job.id) is Copy.UNVERIFIED:
            await verify_job(self.ctx, job.id)
        return copy_state(self.ctx, job.id) is not Copy.PARTIAL  # else its machine has nothing else

    async def _listed(self, job: JobRecord, handle: Handle) -> Manifest:
        """Return the files that a job's machine has, or its artifact store where that one does not answer."""
        try:
            if job.state is Job.PREEMPTED:
                raise Unreachable(f"the machine of job {job.id} is gone", "Nothing can be read there any more.")
            return await self.ctx.backend(handle.backend).list_files(handle, job.outputs)
        except Unreachable:
            kept = await read_kept(self.ctx, job) if job.spec.artifact_store else None
            if kept is None and job.state is not Job.PREEMPTED:
                raise
            return kept.manifest if kept else Manifest(taken_at=0.0, files=())

    async def _check_room(self, job_id: str, size: int) -> None:
        """Raise NotSupported where a copy does not fit into what the policy allows."""
        here = await anyio.to_thread.run_sync(_bytes_below, self.ctx.home / "artifacts", job_id)
        limit = self.ctx.policy.teardown.background_gb * 1e9
        if here + size > limit:
            sizes = f"{size / 1e9:.1f} GB do not fit into the {limit / 1e9:g} GB"
            raise NotSupported(f"{sizes} that background_gb allows")

    async def _keep(self, job: JobRecord) -> bool:
        """Copy a job's outputs where there is room for all of them, and verify them.

        Return whether there was anything: a job that runs may have saved nothing yet, or save at this moment.
        """
        # most rounds copy nothing, and what copies and proves is a second's import
        from gpuwarden.lifecycle.artifacts.pull import pull
        from gpuwarden.lifecycle.artifacts.verify import verify_job

        if job.state not in _RESTING or copy_state(self.ctx, job.id) in _PULL:
            assert job.handle is not None
            listed = await self._listed(job, job.handle)
            # a large file that was written to lately may be half of a checkpoint, which proves nothing
            large = [file.mtime_ns / 1e9 for file in listed.files if file.size >= LARGE and file.mtime_ns is not None]
            fresh = any(listed.taken_at - at < QUIET_S for at in large)
            if job.state is Job.RUNNING and (fresh or not listed.files):
                return False
            await self._check_room(job.id, listed.bytes)
            try:
                await pull(self.ctx, job.id)
            except (NotFound, Conflict):
                if job.state is not Job.PREEMPTED or awaits_kept(self.ctx, job):
                    raise  # else that settled that the store has nothing newer than what is here
        if copy_state(self.ctx, job.id) is Copy.UNVERIFIED:
            await verify_job(self.ctx, job.id)
        return True


def _bytes_below(folder: Path, without: str) -> int:
    """Return the size of the copies below a folder, but for those of one job."""
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
