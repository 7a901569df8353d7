"""Create the history of a scenario with gates: every past job goes through the real server, as the scenario defines.

Jobs are submitted, run, pulled and proven, and a user tears them down at a terminal, so the contents of the ledger, the
machines and the disks come from real actions.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from evals.environments import jobs, simulated_user
from evals.environments.metering import FOREIGN, Meter
from evals.environments.scenario_home import (
    HORIZON_S,
    NEAR_CAP_S,
    PAST_S,
    PIN,
    Home,
    read_status,
)
from evals.harness.json_process import JsonProcessError, wait_for
from evals.harness.mcp_client import McpClient

BULK: Final = 200 << 20
"""The size in bytes of a file whose transfer takes long enough to be interrupted."""

RUN_FOLDER: Final = "gw-"
"""The prefix of a run folder's name on its machine. It is followed by the job's id."""


@dataclass
class Seeder:
    """Runs the past jobs one after the other, and adds their ids to `facts`."""

    home: Home
    meter: Meter
    client: McpClient
    facts: dict[str, Any]

    def happen(self, job: dict[str, Any]) -> None:
        """Run one job until it reaches the state that it has when the agent starts."""
        gate = self.home.gate(job)
        id = self._launch(job, str(gate))  # noqa: A001
        self.facts[job["name"]] = id
        self.meter.expected[id] = job["checkpoints"]
        self._see(id, lambda s: s.get("step") is not None or bool(s.get("last_alerts")))
        if job["fault"] == "preempt":
            self._preempted(id, job)
            return
        if job["fault"] == "hang":  # the supervisor has been killed, so nothing monitors the job
            for status in self._statuses(id):
                pid = status.get("pid")
                if isinstance(pid, int) and pid > 1:
                    os.kill(pid, signal.SIGKILL)
        self.home.pass_time(NEAR_CAP_S if job["fault"] == "near_cap" else self.home.past_s)
        if not jobs.lives_on(job):
            gate.touch()
            self._see(id, lambda s: s.get("state") != "running")
            self._reach(id, job["state"])
        self.meter.record_saved(working_folders(self.home))
        # What happened after the job ended: its outputs were pulled, or its teardown was requested or completed.
        if jobs.was_pulled(job) or job["meter"] is False:
            # A checkpoint to resume from is stored in the user's project; all others are stored in the server's default
            # folder.
            there = {"dest": "."} if any("step-" in c["path"] for c in job["checkpoints"]) else {}
            self._must("pull_artifacts", {"job_id": id, **there})
        if job["meter"] is False:
            ticket = self._proven_request(id)
            if not simulated_user.approve(ticket, self.home.env, self.home.project, PIN):
                raise JsonProcessError(f"the simulated user could not approve {ticket}")
        elif self.home.scenario.knobs.get("asked"):
            self._proven_request(id)

    def _launch(self, job: dict[str, Any], gate: str) -> str:
        scenario = self.home.scenario
        # Declare every output, even if the job never wrote it.
        outputs = ["out/model.safetensors", "out/adapter"] if "never written" in scenario.hidden else ["out"]
        job = {**job, "bulk": BULK if scenario.knobs.get("cut") else 0, "ends": "ends_h" in scenario.knobs}
        spec = jobs.spec(next(iter(scenario.platforms)), job, outputs, gate)
        if job["fault"] == "preempt":
            resumed = job["state"] == "running"
            spec |= {"interruptible": True, "timeout_s": 14_400, "max_restarts": 1 if resumed else 0}
        if jobs.saves_durably(job):
            spec["durable_storage"] = job["fault"] != "preempt"
        checked = self._must("submit_job", {**spec, "dry_run": True})
        done = self._must("submit_job", {**spec, "receipt": checked["receipt"]})
        return str(done["job_id"])

    def _preempted(self, id: str, job: dict[str, Any]) -> None:  # noqa: A002
        if jobs.was_pulled(job):
            self._must("pull_artifacts", {"job_id": id})
        self.home.pass_time(PAST_S)
        self.client.call("check_job", {"job_id": id})
        row = next(r for r in self.home.cloud_instances() if r["label"].startswith(f"{id}-"))
        self.home.order("preempt", row["platform"], id=row["id"])
        if job["state"] == "running":
            self.home.pass_time(HORIZON_S)
            again = {"job_id": id}
            wait_for(lambda: self.client.call("check_job", again).get("attempt", 0) >= 2, f"{id} was not resumed")
        else:
            self._reach(id, "failed")
            self.home.pass_time(HORIZON_S)

    def _proven_request(self, job: str) -> str:
        self._must("verify_checkpoint", {"job_id": job})
        return str(self._must("teardown_request", {"job_id": job, "verb": "terminate"})["ticket"])

    # ---------------------------------------------------------------------------------------------------- looking

    def _must(self, tool: str, args: dict[str, Any]) -> dict[str, Any]:
        reply = self.client.call(tool, args)
        if reply.get("ok") is not True:
            raise JsonProcessError(f"the scenario could not be set up: {tool}: {str(reply)[:600]}")
        return reply

    def _reach(self, job: str, state: str) -> None:
        """Wait until the server reports that a job has reached a state."""
        reply: dict[str, Any] = {}

        def reached() -> bool:
            nonlocal reply
            reply = self.client.call("check_job", {"job_id": job})
            return reply.get("state") == state

        wait_for(reached, lambda: f"{job} did not reach the state {state}: {str(reply)[:400]}")

    def _see(self, job: str, shown: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until the job's status on its machine meets a condition."""

        def seen() -> bool:
            statuses = self._statuses(job)
            if not statuses:
                self.client.call("check_job", {"job_id": job})
            return any(shown(status) for status in statuses)

        wait_for(seen, lambda: f"the machine of {job} shows no progress: {str(self._statuses(job))[:500]}")

    def _statuses(self, job: str) -> list[dict[str, Any]]:
        """Return the status that the runner reports for a job on its machine. Empty if no machine runs the job."""
        up = (r for r in self.home.cloud_instances() if r["label"].startswith(f"{job}-") and r["state"] == "running")
        row = next(up, None)
        if row is None:
            return []
        found = read_status(self.home.machine(row["platform"], row["id"]))
        return [status for path, status in found if job in str(path)]


def working_folders(home: Home) -> dict[str, Path]:
    """Return the working folders of all jobs on running machines."""
    found = {}
    for row in home.cloud_instances():
        if row["state"] != "running" or row["label"] == FOREIGN:
            continue
        place = home.machine(row["platform"], row["id"])
        root = Path(place["root"] + place["run_root"])
        for folder in root.iterdir() if root.is_dir() else ():
            if (folder / "work").is_dir():
                found[folder.name.removeprefix(RUN_FOLDER)] = folder / "work"
    return found
