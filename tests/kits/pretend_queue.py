"""In-memory Slurm, for tests that run thousands of job lifecycles in seconds.

The backend is real, including its conclusions from Slurm's rows and the runner's status. The run folders and the
cluster that answers the agent are emulated: a job is a row of `squeue --json` and a runner status.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpuwarden.backends._slurm_rows import Row
from gpuwarden.backends.slurm import SlurmBackend
from gpuwarden.core.clock import Clock
from gpuwarden.core.engine import EngineLimits, EngineRequest, Queue
from gpuwarden.core.errors import BadReply, Unreachable
from gpuwarden.core.models import Handle, JobSpec, Place
from gpuwarden.core.readiness import Needs, Readiness
from gpuwarden.core.rules import Finding
from gpuwarden.remote import launch

LOW = Queue(name="low", default=True, open=True, state="UP", max_s=86_400, nodes=2, cpus=4, preempts="requeue")


class PretendQueue(SlurmBackend):
    """A cluster with a queue that a test advances.

    `weather` lists faults for the next calls (see `_ask`). The files stay available while the controller is `down`.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.rows: list[dict[str, Any]] = []
        self.purged: list[dict[str, Any]] = []
        self.folders: dict[str, dict[str, Any]] = {}
        self.sbatches: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.weather: list[str] = []
        self.dropped: set[int] = set()
        self.down = False

    # -- test controls

    def row(self, stem: str) -> dict[str, Any] | None:
        """Return the newest row of a job, even if it has left the queue."""
        return next((r for r in reversed(self.purged + self.rows) if r["name"].startswith(f"{stem}-a")), None)

    def start(self, row: dict[str, Any]) -> None:
        """Start a waiting job on a machine."""
        if row["job_state"] == ["PENDING"]:
            row |= {"job_state": ["RUNNING"], "start_time": self._clock.now()}
            attempt = int(row["name"].rpartition("-a")[2])
            self.folders[row["current_working_directory"]] = {
                "folder": "present", "token": row["token"], "state": "running", "attempt": attempt,
                "requeues": row["restart_cnt"], "started_at": self._clock.now(), "alive": True,
            }  # fmt: skip

    def end(self, row: dict[str, Any], state: str = "COMPLETED") -> None:
        """End a job normally: its runner writes the status, and Slurm receives the runner's exit code."""
        if row["job_state"] == ["RUNNING"]:
            ok = state == "COMPLETED"
            word = {"COMPLETED": "succeeded", "FAILED": "failed", "CANCELLED": "canceled"}[state]
            self._over(row, state, 0 if ok else 1)
            self.folders[row["current_working_directory"]] |= {
                "state": word, "exit_code": 0 if ok else 1, "ended_at": self._clock.now(), "alive": False,
            }  # fmt: skip

    def requeue(self, row: dict[str, Any]) -> None:
        """Preempt a running job and queue it again, as a job with a higher priority does."""
        if row["job_state"] == ["RUNNING"]:
            row |= {"job_state": ["PENDING"], "restart_cnt": row["restart_cnt"] + 1, "start_time": 0}
            self.folders[row["current_working_directory"]] |= {"alive": False}

    def drop(self, row: dict[str, Any]) -> None:
        """Drop a waiting job from the queue, as Ray does."""
        row |= {"job_state": ["NODE_FAIL"]}
        self.dropped.add(row["job_id"])

    def purge(self) -> None:
        """Remove ended jobs from the queue, as Slurm does after MinJobAge. This cluster has no accounting."""
        over = [r for r in self.rows if r["job_state"][0] not in {"PENDING", "RUNNING"}]
        self.purged += over
        self.rows = [r for r in self.rows if r not in over]

    def _over(self, row: dict[str, Any], state: str, code: int) -> None:
        row |= {"job_state": [state], "end_time": self._clock.now(), "exit_code": {"return_code": code}}

    # -- the cluster

    async def _rows(self, handles: Sequence[Handle]) -> tuple[dict[str, Row], dict[str, str]]:
        rows, blind = await super()._rows(handles)
        return {stem: replace(row, dropped=row.id in self.dropped) for stem, row in rows.items()}, blind

    async def _ask(self, place: Place, verb: str, **request: Any) -> dict[str, Any]:
        """Answer the agent's request, or lose it before (`lost_request`) or after (`lost_reply`) it is carried out."""
        self.asked[verb] += 1
        luck = self.weather.pop(0) if self.weather else ""
        if self.down or luck == "lost_request":
            raise Unreachable("the controller does not answer")
        answer: dict[str, Any] = getattr(self, f"_{verb}")(request)
        if luck == "lost_reply":
            raise Unreachable("the controller does not answer")
        if luck == "bad_reply":
            raise BadReply("the answer about Slurm is not understood")
        return answer

    def _submit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name, folder = request["name"], request["folder"]
        known = next((r for r in (*self.rows, *self.purged) if r["name"] == name), None)
        if known is None:
            self.sbatches[name] += 1
            token = name.rpartition("-a")[0].removeprefix("gw-")
            known = {
                "job_id": 100 + len(self.rows) + len(self.purged), "name": name, "job_state": ["PENDING"],
                "state_reason": "Priority", "partition": "low", "nodes": "", "restart_cnt": 0,
                "submit_time": self._clock.now(), "start_time": 0, "end_time": 0, "time_limit": 60,
                "current_working_directory": folder, "token": token,
            }  # fmt: skip
            self.rows.append(known)
        return {"ok": True, "id": known["job_id"]}

    def _jobs(self, request: Mapping[str, Any]) -> dict[str, Any]:
        stems = request["folders"]
        rows = [r for r in self.rows if r["name"].rpartition("-a")[0] in stems]
        none = {"rc": 1, "out": "", "err": "accounting is off", "kept": False}
        return {"ok": True, "queue": {"rows": rows, "rc": 0}, "accounting": none, "messages": {}}

    def _stop(self, request: Mapping[str, Any]) -> dict[str, Any]:
        live = [r for r in self.rows if r["name"].rpartition("-a")[0] == request["name"]
                and r["job_state"][0] in {"PENDING", "RUNNING"}]  # fmt: skip
        for row in live:
            if row["job_state"] == ["RUNNING"]:
                self.end(row, "CANCELLED")
            self._over(row, "CANCELLED", 0)
        return {"ok": True, "result": "stopped" if live else "gone"}

    # -- its files

    def files(self, place: Place) -> Any:
        return self

    async def check(self, place: Place) -> list[Finding]:
        return []

    async def readiness(self, place: Place, needs: Needs) -> Readiness:
        return Readiness()

    async def limits(self, spec: JobSpec, place: Place) -> EngineLimits:
        return EngineLimits(engine="slurm", version="24.05.3", request=EngineRequest(), queues=(LOW,))

    async def stage(self, spec: JobSpec, place: Place, token: str, inputs: Mapping[str, Path] | None) -> Any:
        return await self.handle_of(place, token), SimpleNamespace(spec={"files": {}}, runner="runner.py")

    async def handle_of(self, place: Place, token: str) -> Handle:
        run_dir = f"{place.run_root}/{launch.run_name(token)}"
        return Handle(backend=self.name, token=token, run_dir=run_dir, place=place)

    async def put_file(self, handle: Handle, name: str, content: bytes) -> None:
        self.folders.setdefault(handle.run_dir, {"folder": "absent"})

    async def ask_lines(self, *asked: Any, **more: Any) -> list[dict[str, Any]]:
        raise Unreachable("there is no log in this cluster")

    async def _look(self, handles: Sequence[Handle]) -> dict[str, dict[str, Any]]:
        now = {"now": self._clock.now(), "updated_at": self._clock.now()}
        return {h.run_dir: {**self.folders.get(h.run_dir, {"folder": "missing"}), **now} for h in handles}
