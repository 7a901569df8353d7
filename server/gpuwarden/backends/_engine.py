"""Shared base class for backends whose engine starts jobs on machines that share a file system with a reachable host.

That host's backend runs the runner's verbs and transfers all files. The engine determines a job's state.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from gpuwarden.backends._runner import RunnerBackend
from gpuwarden.backends.local import LocalBackend
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import Answer, Artifact, Handle, Known, Place, Unknown
from gpuwarden.core.sanitize import line


class EngineBackend(RunnerBackend):
    """Calls the runner and transfers files through the backend that `files` returns.

    Subclasses supply `files` and `listed`, and start, observe and stop jobs.
    """

    def files(self, place: Place) -> LocalBackend | SshBackend:
        """Return the backend for the host that has access to a target's run folders."""
        raise NotImplementedError

    async def listed(self, handle: Handle) -> Answer[bool]:
        """Return whether the engine lists the job, or Unknown if that can't be determined now."""
        raise NotImplementedError

    def mapping(self, place: Place) -> dict[str, object]:
        """Return the path mapping for the host that has the files."""
        return self.files(place).mapping(place)

    async def handle_of(self, place: Place, token: str) -> Handle:
        """Return the handle for a token."""
        return await self.files(place).handle_of(place, token)

    async def find(self, place: Place, token: str) -> Answer[Handle | None]:
        """Return the job with a token if the engine lists it, or if the job's run folder contains a status."""
        try:
            handle = await self.handle_of(place, token)
            listed, seen = await self.listed(handle), await self._look([handle])
        except WardenError as error:
            return Unknown(error.message)
        return listed if isinstance(listed, Unknown) else found(handle, seen[handle.run_dir], listed.value)

    async def ask_lines(
        self, place: Place, verb: str, run_dir: str | None, request: Mapping[str, Any], *, silence_s: float
    ) -> list[dict[str, Any]]:
        """Run one of the runner's verbs on the host that has the files, and return its lines."""
        return await self.files(place).ask_lines(place, verb, run_dir, request, silence_s=silence_s)

    async def put_file(self, handle: Handle, name: str, content: bytes) -> None:
        """Write `content` to a file in a run folder."""
        await self.files(handle.place).put_file(handle, name, content)

    def read(self, handle: Handle, artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        """Stream a file's bytes, starting at `offset`."""
        return self.files(handle.place).read(handle, artifact, offset)

    def bundle(self, handle: Handle, artifacts: Sequence[Artifact]) -> AsyncIterator[bytes]:
        """Stream many small files as one bundle."""
        return self.files(handle.place).bundle(handle, artifacts)


def found(handle: Handle, status: Mapping[str, Any], listed: bool) -> Answer[Handle | None]:
    """Return the job's handle if the engine lists the job or `status`, the poll of the run folder, belongs to it."""
    if status.get("folder") == "unreadable":
        return Unknown(line(status.get("why")))
    ran = status.get("folder") == "present" and status.get("token") == handle.token
    return Known(handle if ran or listed else None)
