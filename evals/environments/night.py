"""Play the night after an agent's last word: jobs end, the watch looks, people do what they do.

The watch is the real command, started as a timer starts it. A person sits at a pseudo-terminal. Nothing happens between
the looks, so that the hours in between are passed at once.
"""

from __future__ import annotations

import json
import subprocess
from typing import Final

from evals.environments import simulated_user
from evals.environments.metering import FOREIGN
from evals.environments.world_home import GPUWARDEN, PIN, Home, read_status
from evals.harness.json_process import JsonProcessError, wait_for

LOOKS_S: Final = (0, 330, 330, 60, 60)
"""The times between the looks at a job that has ended: its proof and its notice, one in the grace, which a watch that
looks less often gives again, its end after it, two more."""
ANSWERS_AFTER_S: Final = 1_200
"""Seconds from the alert to the answer of a person who `answers`."""
WAKES_BEFORE_S: Final = 3_600
"""Seconds before the night's end at which a person who is `asleep` looks at what bills."""


def pass_night(home: Home) -> None:
    """Play the night of a gated world, to its end."""
    end = home.now() + home.night_s
    finish_jobs(home)
    for pause in LOOKS_S:
        home.pass_time(pause)
        _watch(home)
    if home.world.people in ("answers", "asleep"):
        asleep = home.world.people == "asleep"
        home.pass_time(max(0.0, end - WAKES_BEFORE_S - home.now()) if asleep else ANSWERS_AFTER_S)
        _answer(home)
    home.pass_time(max(0.0, end - home.now()))


def finish_jobs(home: Home) -> None:
    """Let time pass until the jobs that run have ended, where the world says when they do."""
    if home.ends_s is None:
        return
    home.pass_time(home.ends_s)
    for job in home.world.jobs:
        home.gate(job).touch()
    wait_for(lambda: not any(_runs(home, row) for row in _machines(home, "running")), "a job of the world does not end")


def _runs(home: Home, row: dict[str, object]) -> bool:
    """Return true if the supervisor on a machine reports a job that runs."""
    found = read_status(home.machine(str(row["platform"]), str(row["id"])))
    return any(status.get("state") == "running" for _, status in found)


def _machines(home: Home, *states: str) -> list[dict[str, object]]:
    """Return the agent's machines in some states."""
    return [r for r in home.cloud_instances() if r["state"] in states and r["label"] != FOREIGN]


def _watch(home: Home) -> None:
    """Have the watch look once. It exits with 1 where an alert is open."""
    _run(home, "watch", "--once", "--json")


def _answer(home: Home) -> None:
    """Be the person: ask for the end of everything that bills, and approve what is proven."""
    for row in _machines(home, "running"):
        job = str(row["label"]).rpartition("-i")[0]
        asked = _run(home, "teardown", job, "--json")
        if asked.get("state") == "awaiting_human":
            simulated_user.approve(str(asked["ticket"]), home.env, home.project, PIN)
    for _ in range(2):
        home.pass_time(60)
        _watch(home)


def _run(home: Home, *words: str) -> dict[str, object]:
    """Run a command of the product's, and return its reply."""
    done = subprocess.run(
        [*GPUWARDEN, *words], env=home.env, cwd=home.project, capture_output=True, text=True, check=False, timeout=90,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        reply: dict[str, object] = json.loads(done.stdout)
    except ValueError as error:
        raise JsonProcessError(f"{' '.join(words)}: {done.stdout[-300:]} {done.stderr[-300:]}") from error
    return reply
