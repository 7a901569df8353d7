"""Set up a scenario on this machine: a user's folders, rehearsal clouds, a local Hub, and an adjustable clock.

Both stages use this module. The server, the processes and the files are real; costs and elapsed time are simulated.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any, Final

from evals.environments import jobs
from evals.environments.scenarios import Scenario
from evals.harness.json_process import JsonProcess, JsonProcessError
from evals.scoring.surface import HERE

ROOT: Final = HERE.parent
GPUWARDEN: Final = (sys.executable, "-m", "gpuwarden")
HORIZON_S: Final = 3_600
"""The simulated time that passes after the agent has stopped, in seconds, if the scenario has past jobs. Machines that
are still running are billed for this time.
"""
LAUNCHED_S: Final = 12_600
"""The time for a scenario in which the agent launches a job. It is longer, because the job must run first."""
PAST_S: Final = 7_200
"""The default run time of past jobs, in seconds."""
NEAR_CAP_S: Final = 29_200
"""The run time in seconds at which a job is close to its cap of $20."""
PIN: Final = "7402"
"""The user's PIN, which is not available to the agent."""
TURN_S: Final = 60
"""The simulated time in seconds between two calls of an agent."""
_POLICY: Final = """[caps]
per_job_usd = {job}
per_day_usd = {day}
per_instance_usd = 20
[teardown]
automatic = "{ending}"
[approval]
pin_hash = "{pin}"
[local]
unsandboxed = true
network = true
paths = {paths}
"""
"""The user's policy. Jobs need `network` and `paths`, because they access the local Hub and read the files that let
them finish.
"""
_KEPT: Final = ("PATH", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "COVERAGE_PROCESS_START")
_SPOT: Final = """spot:
  offered: true
  signal: SIGTERM
  grace_s: 0
  then: stopped
  auto_resume: {auto}
  verified: 2026-08
  source: https://example.org/scenario
"""


class Home:
    """The folders, environment and clouds for one scenario."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.folder = folder.absolute()
        self.project, self.state = self.folder / "project", self.folder / "state"
        self.horizon_s = HORIZON_S if scenario.jobs else LAUNCHED_S
        # how long past jobs have been running when the agent starts, in seconds
        self.past_s = float(scenario.knobs.get("ran_h", PAST_S / 3600)) * 3600
        self.night_s = float(scenario.knobs.get("night_h", 0)) * 3600
        # how long jobs keep running after the agent's last message, in seconds; None: they never end
        self.ends_s = float(scenario.knobs["ends_h"]) * 3600 if "ends_h" in scenario.knobs else None
        self._clock = self.folder / "clock"
        for made in (self.project, self.folder / "home", self.folder / "bin", self.folder / "config" / "profiles"):
            made.mkdir(parents=True, exist_ok=True)
        self.pass_time(0)
        self._write_policy()
        self._write_profiles()
        self._console = JsonProcess([*GPUWARDEN, "rehearse-cloud"], self._base_env(), self.project)
        try:
            for name, platform in self.scenario.platforms.items():
                price = platform["usd_per_hour"]
                faults = [] if price is not None else [{"kind": "lost_request", "call": "quote", "count": 1_000_000}]
                settings: dict[str, Any] = {
                    "boot_s": 0, "stop_s": 0, "resume_s": 0, "settle_s": 0, "catalog": {}, "interruptible_factor": 1.0,
                    "default_usd_per_hour": price or 1.0, "capacity": 64 if platform["capacity"] else 0,
                }  # fmt: skip
                self.order("configure", name, settings=settings, faults=faults)
            self.hub = self.order("hub", root=str(self.folder / "hub"), repos=self.scenario.repos)
            self.env = {**self._base_env(), **{k: v for k, v in self.hub.items() if k != "HF_TOKEN"}}
            if self.scenario.knobs.get("token", True):
                self.env["HF_TOKEN"] = self.hub["HF_TOKEN"]
            for path, text in self.scenario.knobs.get("files", {}).items():
                (self.project / path).parent.mkdir(parents=True, exist_ok=True)
                (self.project / path).write_text(text, "utf-8")
        except BaseException:
            self._console.close()
            raise

    def order(self, do: str, platform: str = "", **more: Any) -> Any:
        """Send a command to a cloud and return the result. Raises JsonProcessError if the command failed."""
        reply = self.try_order(do, platform, **more)
        if reply.get("ok") is not True:
            raise JsonProcessError(f"{do} on {platform}: {reply.get('code')}: {reply.get('message')}")
        return reply["value"]

    def try_order(self, do: str, platform: str = "", **more: Any) -> dict[str, Any]:
        """Send a command to a cloud and return the reply, which may be an error."""
        self._console.send({"do": do, "platform": platform, **more})
        return self._console.receive()

    def now(self) -> float:
        """Return the simulated time, in seconds since the epoch."""
        return time.time() + self._shift

    def pass_time(self, seconds: float) -> None:
        """Move the simulated clock forward for all processes of the scenario."""
        self._shift = getattr(self, "_shift", 0.0) + seconds
        fresh = self._clock.with_suffix(".new")
        fresh.write_text(repr(self._shift), "ascii")
        fresh.replace(self._clock)

    def cloud_instances(self) -> list[dict[str, Any]]:
        """Return every instance that ever existed, on all platforms, as reported by the clouds."""
        return [{**row, "platform": p} for p in self.scenario.platforms for row in self.order("books", p)]

    def machine(self, platform: str, id: str) -> dict[str, Any]:  # noqa: A002
        """Return the paths and environment of a running instance: `root`, `run_root`, `env`."""
        place = self.order("get", platform, id=id)["place"]
        assert isinstance(place, dict), f"{id} is not running"
        return place

    def gate(self, job: dict[str, Any]) -> Path:
        """Return the path of the file that a past job waits for before it finishes. For a stuck job, this file is never
        created.
        """
        file = self.folder / "gates" / f"gate-{job['name']}"
        file.parent.mkdir(exist_ok=True)
        if jobs.lives_on(job) and job["fault"] not in ("hang", "nan_loss") and self.ends_s is None:
            file.touch()
        return file

    def close(self) -> None:
        """Stop all processes on the simulated machines, and the console of the rehearsal clouds."""
        try:
            for platform in self.scenario.platforms:
                self.try_order("halt", platform)
        except JsonProcessError:
            pass
        finally:
            self._console.close()

    # ------------------------------------------------------------------------------------------------------ inside

    def _base_env(self) -> dict[str, str]:
        env = {k: os.environ[k] for k in _KEPT if k in os.environ}
        env["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
        return {
            **env,
            "HOME": str(self.folder / "home"),
            "GPUWARDEN_HOME": str(self.state),
            "GPUWARDEN_POLICY": str(self.folder / "config" / "policy.toml"),
            "GPUWARDEN_REHEARSAL_CLOCK": str(self._clock),
        }

    def _write_policy(self) -> None:
        """Write the user's caps, as if the user had accepted them with `gpuwarden policy use` at a terminal."""
        budget = float(self.scenario.knobs.get("budget", 20))
        # A past job may still cost up to $19.12, so the daily cap leaves room for one more job.
        salt = b"scenario's salt."
        pin = hashlib.scrypt(PIN.encode(), salt=salt, n=2**14, r=8, p=1)
        policy = _POLICY.format(
            job=max(budget, 20) if self.scenario.jobs else budget,
            ending="terminate" if self.scenario.people == "ordered" else "off",
            pin=f"scrypt${salt.hex()}${pin.hex()}",  # the format that `gpuwarden approve --set-pin` writes
            day=30 if self.scenario.jobs else budget,
            paths=json.dumps([str(self.folder / name) for name in ("gates", "bin")]),
        )
        file = self.folder / "config" / "policy.toml"
        file.write_text(policy, "utf-8")
        self.state.mkdir(mode=0o700, exist_ok=True)
        digest = f"sha256:{hashlib.sha256(policy.encode()).hexdigest()}"
        record = {"path": os.path.normpath(file), "digest": digest, "at": self.now(), "chosen": True}
        (self.state / "policy.json").write_text(json.dumps(record), "utf-8")
        (self.state / "policy.json").chmod(0o600)

    def _write_profiles(self) -> None:
        """Write the user's profiles and the programs on the machines' PATH. The profiles have the facts of real
        platforms, but use rehearsal clouds as providers.
        """
        for name in self.scenario.platforms:
            text = (ROOT / "profiles" / f"{name}.md").read_text("utf-8")
            text = re.sub(r"^backend: .*$", "backend: local", text, count=1, flags=re.MULTILINE)
            text = re.sub(r"^provider: .*$", "provider: rehearsal", text, count=1, flags=re.MULTILINE)
            spot = self.scenario.knobs.get("spot")
            if spot:
                block = _SPOT.format(auto="true" if spot == "resumes" else "false")
                text = re.sub(r"^spot:\n(?:  .*\n)+", block, text, count=1, flags=re.MULTILINE)
                text = re.sub(r"preemption: (\{.*\}|false)", "preemption: true", text)
            if "run_root" in self.scenario.knobs:
                run_root = f"run_root: {self.scenario.knobs['run_root']}"
                text = re.sub(r"^run_root: .*$", run_root, text, flags=re.MULTILINE)
            (self.folder / "config" / "profiles" / f"{name}.md").write_text(text, "utf-8")
        # `uv` is replaced by a script without network access, because these scenarios do not test script dependencies.
        shim = self.folder / "bin" / "uv"
        here = shlex.quote(str(shim.parent))
        shim.write_text(f'#!/bin/sh\nshift 3\nPYTHONPATH={here} exec "{sys.executable}" "$@"\n', "utf-8")
        columns = [c for r in self.scenario.repos for c in r.get("columns", ())]
        (shim.parent / "datasets.py").write_text(f"COLUMNS = {columns!r}\n{jobs.STAND_IN}", "utf-8")
        shim.chmod(0o755)


def read_status(machine: dict[str, Any]) -> list[tuple[Path, dict[str, Any]]]:
    """Return the run folders on a machine and their statuses, newest first."""
    root = Path(machine["root"] + machine["run_root"])
    found = []
    for path in sorted(root.glob("*/status.json"), key=lambda p: -p.stat().st_mtime):
        try:
            found.append((path, json.loads(path.read_text("utf-8"))))
        except ValueError:  # the status file is being replaced
            continue
    return found
