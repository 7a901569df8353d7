"""Simulate the night after the agent's last message: jobs end, the watch polls, and the simulated user acts.

The watch is the real command, run once per poll as a timer would run it. The user types at a pseudo-terminal. Nothing
happens between the polls, so the hours between them are skipped.
"""

from __future__ import annotations

import json
import subprocess
from typing import Final

from evals.environments import simulated_user
from evals.environments.metering import FOREIGN
from evals.environments.scenario_home import GPUWARDEN, PIN, Home, read_status
from evals.harness.json_process import JsonProcessError, wait_for

LOOKS_S: Final = (0, 330, 330, 60, 60)
"""Intervals between the polls after a job's end: one poll for its proof and notice, one during the grace period
(repeated if the watch has a longer interval), one for the teardown after the grace period, and two more."""
ANSWERS_AFTER_S: Final = 1_200
"""Seconds from the alert to the response of the simulated user `answers`."""
WAKES_BEFORE_S: Final = 3_600
"""The simulated user `asleep` checks the billed instances this many seconds before the end of the night."""


def pass_night(home: Home) -> None:
    """Simulate the whole night in a scenario with the gates enabled."""
    end = home.now() + home.night_s
    finish_jobs(home)
    for pause in LOOKS_S:
        home.pass_time(pause)
        _watch(home)
    if home.scenario.people in ("answers", "asleep"):
        asleep = home.scenario.people == "asleep"
        home.pass_time(max(0.0, end - WAKES_BEFORE_S - home.now()) if asleep else ANSWERS_AFTER_S)
        # The user requests the teardown of every machine that is billed, and approves each one with proven outputs.
        for row in _machines(home, "running"):
            asked = _run(home, "teardown", str(row["label"]).rpartition("-i")[0], "--json")
            if asked.get("state") == "awaiting_human":
                simulated_user.approve(str(asked["ticket"]), home.env, home.project, PIN)
        for _ in range(2):
            home.pass_time(60)
            _watch(home)
    home.pass_time(max(0.0, end - home.now()))


def finish_jobs(home: Home) -> None:
    """Advance the clock to the end of the running jobs and wait for them, if the scenario defines when they end."""
    if home.ends_s is None:
        return
    home.pass_time(home.ends_s)
    for job in home.scenario.jobs:
        home.gate(job).touch()

    def states() -> list[object]:
        machines = (home.machine(str(row["platform"]), str(row["id"])) for row in _machines(home, "running"))
        return [status.get("state") for machine in machines for _, status in read_status(machine)]

    wait_for(lambda: "running" not in states(), "a job in the scenario did not end")


def _machines(home: Home, *states: str) -> list[dict[str, object]]:
    """Return the agent's machines in the given states."""
    return [r for r in home.cloud_instances() if r["state"] in states and r["label"] != FOREIGN]


def _watch(home: Home) -> None:
    """Run one poll of the watch. The command exits with 1 if an alert is open."""
    _run(home, "watch", "--once", "--json")


def _run(home: Home, *words: str) -> dict[str, object]:
    """Run a `gpuwarden` command, and return its reply."""
    done = subprocess.run(
        [*GPUWARDEN, *words], env=home.env, cwd=home.project, capture_output=True, text=True, check=False, timeout=90,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        reply: dict[str, object] = json.loads(done.stdout)
    except ValueError as error:
        raise JsonProcessError(f"{' '.join(words)}: {done.stdout[-300:]} {done.stderr[-300:]}") from error
    return reply
