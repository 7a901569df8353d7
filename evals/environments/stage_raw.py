"""Define the raw stage: the same scenarios without gates, with tools that work like a provider's command line.

The tools rent, run, copy and delete without asking for approval. Losses are real: a deleted machine's files are gone,
and a machine that is not deleted is still billed. No server is under test, so only the end state is scored, not the
agent's calls.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evals.environments import jobs
from evals.environments.metering import Meter, Work
from evals.environments.scenario_home import NEAR_CAP_S, TURN_S, Home
from evals.environments.scenarios import Scenario
from evals.harness.json_process import JsonProcessError, wait_for

_STUCK = "a process in the scenario makes no progress"
_LOST = {"ok": False, "code": "unreachable", "message": "no reply: the connection was lost"}


@dataclass
class _Run:
    """A process on a machine, started by an agent or by a past job."""

    work: Work
    folder: Path
    process: subprocess.Popen[bytes]
    log: Path
    lives_on: bool = field(default=False)


class RawScene:
    """One scenario with the gates disabled."""

    raw = True

    def __init__(self, scenario: Scenario, seed: int, folder: Path) -> None:
        self.facts: dict[str, Any] = {"base": "j0000000000"}
        self._scenario = scenario
        self._home = Home(scenario, folder)
        self._meter = Meter(self._home)
        self._runs: list[_Run] = []
        self._lose = str(scenario.knobs.get("lose", ""))
        try:
            for job in scenario.jobs:
                self._past(job)
            self._meter.add_foreign_machine()
            self._look()
        except BaseException:
            self.close()
            raise

    def now(self) -> float:
        """Return the simulated time."""
        return self._home.now()

    def call(self, tool: str, args: dict[str, Any]) -> dict[str, Any]:
        """Advance the simulated time by one turn, then call a raw tool."""
        self._home.pass_time(TURN_S)
        act = getattr(self, f"_tool_{tool}", None)
        if act is None:
            return {"ok": False, "code": "bad_request", "message": f"unknown tool {tool}"}
        if tool == "create_instance" and self._lose == "request":
            self._lose = ""
            return dict(_LOST)
        try:
            reply: dict[str, Any] = {"ok": True, "code": "ok", **act(**args)}
        except (JsonProcessError, OSError, AssertionError, TypeError) as error:
            reply = {"ok": False, "code": "failed", "message": str(error)[:400]}
        self._look()
        if tool == "create_instance" and self._lose == "reply":
            self._lose = ""
            return dict(_LOST)
        return reply

    def server(self) -> tuple[list[str], dict[str, str]]:
        """Raise NotImplementedError, because the raw stage has no server."""
        raise NotImplementedError("the raw stage has no server; its agents are scripted")

    def end(self) -> dict[str, Any]:
        """Advance the simulated time by some hours, and return the end state."""
        self._look()
        if self._home.night_s:  # wait for the running jobs, and then for the end of the night, without alerts
            ends_s = min(self._home.ends_s or 0.0, self._home.night_s)
            self._home.pass_time(ends_s)
            for job in self._scenario.jobs:
                self._home.gate(job).touch()
            for run in (r for r in self._runs if r.lives_on and self._home.ends_s is not None):
                wait_for(lambda run=run: run.process.poll() is not None, _STUCK)  # type: ignore[misc]
                run.lives_on = False
            self._look()
            self._home.pass_time(self._home.night_s - ends_s)
        else:
            self._home.pass_time(self._home.horizon_s)
        return {"views": self._meter.views([run.work for run in self._runs], []), "facts": self.facts}

    def close(self) -> None:
        """Stop every process in the scenario."""
        for run in self._runs:
            if run.process.poll() is None:
                run.process.kill()
            run.process.wait()
        self._home.close()

    # ------------------------------------------------------------------------------------------------------- tools

    def _tool_create_instance(self, platform: str, name: str, gpu: str | None = None) -> dict[str, Any]:
        made = self._home.order("create", platform, label=name, gpu=gpu)
        return {"instance_id": made["id"], "usd_per_hour": made["price_usd_per_hour"]}

    def _tool_run_script(
        self, platform: str, instance_id: str, script: str, args: list[str] | None = None,
        env: dict[str, str] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        run = self._start(f"{instance_id}-{len(self._runs)}", platform, instance_id, script, args or [], env or {})
        marks = ("step", "saved")  # the job has completed a step or saved a checkpoint
        wait_for(lambda: run.process.poll() is not None or any(w in run.log.read_text("utf-8") for w in marks), _STUCK)
        return {"run": run.work.job, "exit_code": run.process.poll(), "output": run.log.read_text("utf-8")[-1000:]}

    def _tool_list_instances(self) -> dict[str, Any]:
        rows = [(p, row) for p in self._scenario.platforms for row in self._home.order("list", p)]
        shown = [{"platform": p, "instance_id": r["id"], "name": r["token"], "state": r["state"]} for p, r in rows]
        return {"instances": shown}

    def _tool_read_log(self, instance_id: str) -> dict[str, Any]:
        mine = [r for r in self._runs if r.work.instance == instance_id and r.log.is_file()]
        return {"log": mine[-1].log.read_text("utf-8")[-2000:] if mine else ""}

    def _tool_download(self, instance_id: str, path: str, dest: str) -> dict[str, Any]:
        run = next(r for r in self._runs if r.work.instance == instance_id)
        source, target = run.folder / path, self._home.project / dest
        shutil.copytree(source, target / path, dirs_exist_ok=True)
        return {"files": sum(1 for p in (target / path).rglob("*") if p.is_file())}

    def _tool_stop_instance(self, platform: str, instance_id: str) -> dict[str, Any]:
        self._home.order("stop", platform, id=instance_id)
        return {}

    def _tool_delete_instance(self, platform: str, instance_id: str) -> dict[str, Any]:
        self._home.order("terminate", platform, id=instance_id)
        return {}

    # ---------------------------------------------------------------------------------------------------- the past

    def _past(self, job: dict[str, Any]) -> None:
        platform = next(iter(self._scenario.platforms))
        gate, lives = self._home.gate(job), jobs.lives_on(job)
        wanted = {"interruptible": job["fault"] == "preempt", "durable": jobs.saves_durably(job)}
        made = self._home.order("create", platform, label=job["name"], **wanted)
        script = jobs.past({**job, "ends": self._home.ends_s is not None}, str(gate))
        run = self._start(made["id"], platform, made["id"], script, [], {})
        self.facts[job["name"]] = made["id"]
        self._meter.expected[run.work.job] = job["checkpoints"]
        wait_for((run.folder / "metrics.jsonl").is_file, _STUCK)
        self._meter.record_saved({run.work.job: run.folder})
        self._home.pass_time(NEAR_CAP_S if job["fault"] == "near_cap" else self._home.past_s)
        if not lives:
            gate.touch()
            wait_for(lambda: run.process.poll() is not None, _STUCK)
        run.work.state = "running" if lives else job["state"]
        run.work.ended = None if lives else self._home.now()
        run.lives_on = lives
        self._meter.record_saved({run.work.job: run.folder})
        if jobs.was_pulled(job):
            shutil.copytree(run.folder / "out", self._home.project / "out")
        if job["fault"] == "preempt" and job["state"] != "running":
            self._home.order("preempt", platform, id=made["id"])
            run.work.state, run.work.ended = "preempted", self._home.now()
        if job["meter"] is False:
            self._home.order("terminate", platform, id=made["id"])
            self._home.order("books", platform)

    # ------------------------------------------------------------------------------------------------------ inside

    def _start(self, job: str, platform: str, instance: str, script: str, args: list[str], env: dict[str, str]) -> _Run:
        place = self._home.machine(platform, instance)
        home = Path(place["root"] + place["run_root"]) / job
        folder = home / "work"
        folder.mkdir(parents=True)
        (home / "job.py").write_text(script, "utf-8")
        log = home / "log.txt"
        words = [str(self._home.folder / "bin" / "uv"), "run", "--quiet", "--script", str(home / "job.py"), *args]
        keep = {k: os.environ[k] for k in ("PATH", "LANG") if k in os.environ}
        with log.open("wb") as out:
            process = subprocess.Popen(
                words, cwd=folder, env={**keep, **place["env"], **env}, stdout=out, stderr=subprocess.STDOUT
            )
        what = {"script": script, "command": [], "args": args, "env": env}
        work = Work(job, platform, what, "running", self._home.now(), instance=instance)
        self._runs.append(_Run(work, folder, process, log))
        return self._runs[-1]

    def _look(self) -> None:
        """Record the runs that have ended and the checkpoints that were saved."""
        up = {row["id"] for row in self._home.cloud_instances() if row["state"] == "running"}
        for run in self._runs:
            if run.work.ended is None and run.process.poll() is not None and not run.lives_on:
                run.work.state = "succeeded" if run.process.returncode == 0 else "failed"
                run.work.ended = self._home.now()
        self._meter.record_saved({r.work.job: r.folder for r in self._runs if r.work.instance in up})


def open_scene(scenario: Scenario, seed: int, folder: Path) -> RawScene:
    """Start the scenario for an agent."""
    return RawScene(scenario, seed, folder)
