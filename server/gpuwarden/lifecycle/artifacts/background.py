"""Copy and verify the outputs of jobs that succeeded before anybody asks, inside the disk limit of the policy.

The meter runs until everything is proven, so the watch does not wait for an agent or a person to begin.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import anyio.to_thread
from anyio.lowlevel import checkpoint

from gpuwarden.core.errors import DiskError, NotSupported, WardenError
from gpuwarden.core.next_step import Copy
from gpuwarden.core.states import LIVE_LEASES, Job
from gpuwarden.lifecycle.artifacts.local_copies import copy_state
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.records import JobRecord, read_job

FIRST_RETRY_S: Final = 60.0
MOST_RETRY_S: Final = 3600.0
_PULL: Final = frozenset({Copy.NONE, Copy.STALE, Copy.PARTIAL, Copy.DAMAGED})


class Keeper:
    """Makes proven copies, one job at a time. What fails is tried again, half as often each time."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.trouble: dict[str, str] = {}
        self._misses: dict[str, int] = {}
        self._next: dict[str, float] = {}

    async def round(self) -> None:
        """Copy and verify what lacks it. Failures are reported in `trouble`, not raised."""
        jobs: Iterable[JobRecord] = ()
        if self.ctx.policy.ending.background_gb > 0:
            jobs = (read_job(self.ctx.ledger, job_id) for job_id in self.ctx.ledger.jobs_with_leases(*LIVE_LEASES))
        # Those that succeeded, whose machines may bill, and whose copy can still become a proven one.
        ended = [job for job in jobs if job.state is Job.SUCCEEDED and job.handle is not None and job.outputs]
        wanted = {job.id: job for job in ended if copy_state(self.ctx, job.id) in {*_PULL, Copy.UNVERIFIED}}
        self.trouble = {name: why for name, why in self.trouble.items() if name in wanted}
        for job in wanted.values():
            await checkpoint()
            if self.ctx.clock.now() < self._next.get(job.id, 0.0):
                continue
            try:
                await self._keep(job)
            except (WardenError, OSError) as error:  # a full disk here as well
                told = error if isinstance(error, WardenError) else DiskError.of(error)
                self.trouble[job.id] = f"its outputs are not copied yet: {told.message}"
            else:
                self.trouble.pop(job.id, None)
            # a copy that is proven leaves the list; anything else waits longer before the next try
            n = self._misses[job.id] = self._misses.get(job.id, 0) + 1
            self._next[job.id] = self.ctx.clock.now() + min(FIRST_RETRY_S * 2.0 ** (n - 1), MOST_RETRY_S)

    async def _keep(self, job: JobRecord) -> None:
        """Copy a job's outputs where there is room for all of them, and verify them."""
        # most rounds copy nothing, and what copies and proves is a second's import
        from gpuwarden.lifecycle.artifacts.pull import pull
        from gpuwarden.lifecycle.artifacts.verify import verify_job

        if copy_state(self.ctx, job.id) in _PULL:
            assert job.handle is not None
            listed = await self.ctx.backend(job.handle.backend).list_files(job.handle, job.outputs)
            here = await anyio.to_thread.run_sync(_bytes_below, self.ctx.home / "artifacts", job.id)
            limit = self.ctx.policy.ending.background_gb * 1e9
            if here + listed.bytes > limit:
                sizes = f"{listed.bytes / 1e9:.1f} GB do not fit into the {limit / 1e9:g} GB"
                raise NotSupported(f"{sizes} that background_gb allows")
            await pull(self.ctx, job.id)
        if copy_state(self.ctx, job.id) is Copy.UNVERIFIED:
            await verify_job(self.ctx, job.id)


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
