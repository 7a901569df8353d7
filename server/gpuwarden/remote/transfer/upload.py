"""Push files to a machine. Interrupted transfers resume. A file gets its final name only after it is verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyio import to_thread

from gpuwarden.core.clock import Clock, SystemClock
from gpuwarden.core.errors import BadRequest, Unreachable
from gpuwarden.remote.host.any_python import ANY_PYTHON, NO_PYTHON, no_python, python_command
from gpuwarden.remote.ssh.machine import Ssh
from gpuwarden.remote.ssh.outcomes import CommandFailed
from gpuwarden.remote.transfer.upload_stream import SMALL_BYTES, Counts, Row, UploadStream, agent_source, row

TRIES = 6
SPARE_BYTES = 16 << 20
SPARE_INODES = 64


@dataclass(frozen=True)
class Pushed:
    """The result of a push. `bytes_sent` counts the bytes that were transferred; `bytes_resumed` and `bytes_skipped`
    count those that were already on the machine, in part files and in complete files.
    """

    files: int
    bytes_sent: int
    bytes_resumed: int
    bytes_skipped: int
    retries: int


async def push(
    machine: Ssh,
    files: Mapping[str, Path],
    folder: str,
    *,
    python: str = ANY_PYTHON,
    stall_s: float = 30.0,
    tries: int = TRIES,
    clock: Clock | None = None,
) -> Pushed:
    """Copy files to a machine and verify their digests there. `files` maps names in `folder` to local files.

    The files are sent as one stream to a `python` (3.8 or newer) on the machine.

    Raises `BadRequest` if a name or file can't be sent or the machine has too little space, `NotSupported` if the
    machine has no suitable Python, and `Unreachable` after `tries` consecutive failures without progress. Bytes that
    arrived are kept, and the next call continues after them.
    """
    entries = await to_thread.run_sync(lambda: [row(name, path) for name, path in files.items()])
    job = _Push(machine, folder.rstrip("/"), stall_s, tries, clock or SystemClock(), sum(e.size for e in entries))
    await job.stream(entries, python)
    counts = job.counts
    return Pushed(len(entries), counts.sent, counts.resumed, counts.skipped, counts.retries)


@dataclass
class _Push:
    machine: Ssh
    folder: str
    stall_s: float
    tries: int
    clock: Clock
    total: int
    counts: Counts = field(default_factory=Counts)

    async def stream(self, entries: Sequence[Row], python: str) -> None:
        """Send the missing files, and reconnect after a lost connection."""
        # Send small files first, ordered by folder, then the others, ordered by size.
        rest, failures = sorted(entries, key=lambda e: (max(e.size, SMALL_BYTES), e.name)), 0
        first = True
        while rest or first:
            stream: UploadStream | None = None
            waiting, now = rest, first

            def work(session: Any) -> None:
                nonlocal stream
                stream = UploadStream(session, self.folder, self.counts, self.stall_s)
                stream.run(waiting, lambda hello: self._check_room(hello, files=len(waiting)) if now else None)  # noqa: B023

            first = False
            try:
                await self.machine.converse(python_command(python, agent_source(), self.folder), work)
                failures = 0
            except Unreachable as lost:
                failures = 0 if stream is not None and stream.progressed else failures
                name = next((e.name for e in rest if e.name not in self.counts.landed), self.folder)
                failures = await self.lost(lost, name, failures)
            except CommandFailed as failed:
                if failed.exit_code == NO_PYTHON:
                    raise no_python() from failed
                raise
            rest = [e for e in rest if e.name not in self.counts.landed]

    async def lost(self, lost: Unreachable, name: str, failures: int) -> int:
        """Wait before the next try. Return the new number of failures. Raises `Unreachable` after `tries` failures."""
        self.counts.retries += 1
        if failures + 1 >= self.tries:
            raise Unreachable(f"{name} could not be sent: {lost.message}", "Push again to continue.") from lost
        await self.clock.sleep(min(2.0**failures / 2, 15.0))
        return failures + 1

    def _check_room(self, hello: Mapping[str, Any], *, files: int) -> None:
        free, inodes = (n if type(n := hello.get(key)) is int else None for key in ("free", "inodes"))
        if free is not None and free < self.total + SPARE_BYTES:
            raise BadRequest(
                f"{self.folder} on the machine has {free // 1024:,} KiB free, but the transfer needs "
                f"{self.total // 1024:,} KiB",
                "Free space there, or choose another run root. Nothing was sent.",
            )
        if inodes and inodes < files + SPARE_INODES:
            raise BadRequest(
                f"{self.folder} on the machine has {inodes:,} free inodes, but the transfer needs {files:,}",
                "Run `df -i` there and remove caches with many small files, or choose another run root.",
            )
