"""Jobs without processes, for tests that run thousands of job lifecycles in seconds.

The cloud is the real rehearsal cloud with its real disks; only the processes on its machines are emulated: a job is a
status file on the machine's disk and an entry in a table, and the test ends it. When the cloud kills a machine's
processes, they are removed from the table. The crash test and the tests of the backends use real processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuwarden.checkpoints import load
from gpuwarden.core.errors import Conflict, NotFound, Unreachable
from gpuwarden.core.models import (
    Answer,
    Artifact,
    Disclosure,
    Handle,
    JobSpec,
    Known,
    LogChunk,
    Manifest,
    Observation,
    Place,
    StopResult,
    Unknown,
)
from gpuwarden.core.reasons import Code
from gpuwarden.core.rules import Finding
from gpuwarden.core.states import Job


class Processes:
    """Replace `gpuwarden.rehearsal.processes`: for each instance, the run folders whose process is alive."""

    def __init__(self) -> None:
        self.living: dict[str, set[str]] = {}

    def of(self, machine: str, named: Iterable[object] = ()) -> list[object]:
        return []

    def terminate(self, processes: Iterable[object]) -> None:
        """Kill the emulated jobs."""

    def kill(self, machine: str, named: Iterable[object] = ()) -> bool:
        self.living.pop(machine, None)
        return True

    def held(self, ids: set[str]) -> set[str]:
        return {each for each in ids if self.living.get(each)}


Loaded = tuple[list[dict[str, Any]], str]
_LOADED: dict[tuple[object, ...], Loaded] = {}
_load_child = load.run_child


def remembered(task: str, seconds: float, command: Sequence[str]) -> Loaded:
    """Replace `gpuwarden.checkpoints.load.run_child`: cache the real child's results by file content."""
    files = json.loads(task)["files"]
    bytes_of = ((f["name"], f["format"], hashlib.sha256(Path(f["path"]).read_bytes()).hexdigest()) for f in files)
    key = (*command, *bytes_of)
    if key not in _LOADED:
        _LOADED[key] = _load_child(task, seconds, command)
    return _LOADED[key]


class PretendBackend:
    """An emulated `Backend`. If `silent`, no machine answers."""

    name = "local"
    takes_inputs = True
    seals = True

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.silent = False
        self.launched: list[tuple[str, int]] = []
        self.armed: list[str] = []
        self.held: list[str] = []

    # -- test controls

    def end(self, handle: Handle, state: str = "succeeded") -> None:
        """End a running job normally."""
        if self._alive(handle):
            self._say(handle, state=state)
            self.processes.living[str(handle.place.instance_id)].discard(handle.run_dir)

    def write(self, handle: Handle, name: str, content: bytes, folder_name: str = "out") -> None:
        """Write an output file, if the machine exists. Only `out` is declared at launch."""
        folder = Path(handle.run_dir) / "work" / folder_name
        if Path(handle.run_dir).is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    # -- the backend

    async def check(self, place: Place) -> list[Finding]:
        return []

    async def submit(
        self,
        spec: JobSpec,
        place: Place,
        token: str,
        *,
        secrets: Mapping[str, str],
        attempt: int = 1,
        inputs: Mapping[str, Path] | None = None,
    ) -> Handle:
        handle = self._handle(place, token)
        self._reach(place)
        said = self._status(handle)
        if said is not None and said["attempt"] >= attempt:
            return handle
        if said is not None and self._alive(handle):
            raise Conflict("an earlier attempt still runs")
        self.launched.append((token, attempt))
        Path(handle.run_dir).mkdir(parents=True, exist_ok=True)
        self._say(handle, attempt=attempt, state="running")
        self.processes.living.setdefault(str(place.instance_id), set()).add(handle.run_dir)
        return handle

    async def find(self, place: Place, token: str) -> Answer[Handle | None]:
        handle = self._handle(place, token)
        try:
            self._reach(place)
        except Unreachable as error:
            return Unknown(error.message)
        return Known(handle if self._status(handle) else None)

    async def poll(self, handles: Sequence[Handle]) -> dict[str, Observation]:
        if self.silent:
            raise Unreachable("silence")
        return {h.token: self._observe(h) for h in handles}

    def _observe(self, handle: Handle) -> Observation:
        said = self._status(handle)
        if said is None:
            return Observation(state=Job.UNKNOWN, why="the run folder is not on the machine")
        if said["state"] == "running" and not self._alive(handle):
            return Observation(state=Job.FAILED, why="it is gone", reason=Code.VANISHED, attempt=said["attempt"])
        return Observation(state=Job(said["state"]), why=said["state"], attempt=said["attempt"])

    async def logs(self, handle: Handle, cursor: int = 0, limit: int = 65_536) -> LogChunk:
        self._reach(handle.place)
        return LogChunk(text="", next=0, size=0)

    async def list_files(self, handle: Handle, paths: Iterable[str]) -> Manifest:
        return self._listed(handle, paths, digests=False)

    async def manifest(self, handle: Handle, paths: Iterable[str]) -> Manifest:
        return self._listed(handle, paths, digests=True)

    def _listed(self, handle: Handle, paths: Iterable[str], *, digests: bool) -> Manifest:
        self._reach(handle.place)
        if not Path(handle.run_dir).is_dir():
            raise NotFound("the run folder does not exist")
        work = Path(handle.run_dir) / "work"
        rows = []
        for path in sorted(
            {each for name in paths for each in (*work.glob(f"{name}/*"), work / name) if each.is_file()}
        ):
            found = path.stat()
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest() if digests else None
            name = str(path.relative_to(work))
            rows.append(Artifact(path=name, size=found.st_size, mtime_ns=found.st_mtime_ns, sha256=sha256))
        return Manifest(taken_at=0, files=tuple(rows), missing=() if rows else ("out",))

    async def read(self, handle: Handle, artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        self._reach(handle.place)
        yield (Path(handle.run_dir) / "work" / artifact.path).read_bytes()[offset:]

    async def disclose(self, handle: Handle) -> Disclosure:
        self._reach(handle.place)
        work = Path(handle.run_dir) / "work"
        found = [path.relative_to(work) for path in sorted(work.rglob("*")) if path.is_file()]
        fresh = (path for path in found if path.parts[0] != "out")
        return Disclosure(files=tuple(Artifact(path=str(p), size=(work / p).stat().st_size) for p in fresh))

    async def stop(self, handle: Handle, *, grace_s: float = 10.0) -> StopResult:
        if self.silent:
            raise Unreachable("silence")
        if not self._alive(handle):
            return StopResult.GONE
        self.end(handle, "canceled")
        return StopResult.STOPPED

    async def arm(self, handle: Handle, attempt: int) -> None:
        self._reach(handle.place)
        self.armed.append(handle.token)

    async def hold(self, handle: Handle) -> None:
        self._reach(handle.place)
        self.held.append(handle.token)

    # -- inside

    def _handle(self, place: Place, token: str) -> Handle:
        run_dir = f"{place.root}{place.run_root}/gw-{token}"
        return Handle(backend=self.name, token=token, run_dir=run_dir, place=place)

    def _reach(self, place: Place) -> None:
        if self.silent or not Path(place.root).is_dir():
            raise Unreachable("the machine does not answer")

    def _alive(self, handle: Handle) -> bool:
        return handle.run_dir in self.processes.living.get(str(handle.place.instance_id), set())

    @staticmethod
    def _status(handle: Handle) -> dict[str, Any] | None:
        path = Path(handle.run_dir) / "pretend.json"
        return json.loads(path.read_text()) if path.exists() else None

    def _say(self, handle: Handle, **changes: object) -> None:
        path = Path(handle.run_dir) / "pretend.json"
        path.write_text(json.dumps((self._status(handle) or {}) | changes))
