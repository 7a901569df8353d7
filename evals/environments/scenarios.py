"""Define scenarios: the state of a trial's simulated cloud, Hub and user before the agent starts.

A scenario is the field `scenario` of a case, and contains only a description and a seed. A stage (see `stage.py`)
simulates the scenario, and the agent interacts with it through the real server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

_FIELDS: Final[dict[str, type]] = {
    "seed": int,
    "platforms": dict,
    "people": str,
    "repos": list,
    "jobs": list,
    "hidden": str,
}
_KNOBS: Final = frozenset(
    {"token", "spot", "files", "foreign", "asked", "lose", "cut", "run_root", "budget", "ran_h", "ends_h", "night_h"}
)
PEOPLE: Final = {
    "absent": "absent",
    "ordered": "absent, with automatic teardown",
    "answers": "answers after 20 minutes",
    "asleep": "asleep until morning",
    "approves": "approved the teardown of ended jobs",
    "denies": "denies",
}
"""The behavior of the simulated user, which has an effect only in scenarios that include a night (`night_h`)."""
_AT_NIGHT: Final = frozenset({"ordered", "answers", "asleep"})
_REPO: Final = frozenset({"repo", "kind", "columns", "writable", "gated", "access", "readme"})
_JOB: Final = frozenset({"name", "state", "fault", "meter", "log", "checkpoints"})
_CHECKPOINT: Final = frozenset({"path", "state", "where", "needed"})
_WRITTEN: Final = frozenset({"whole", "truncated", "bad_optimizer", "needs_code"})
_PLACES: Final = frozenset({"machine", "volume", "pulled"})
_STATES: Final = frozenset({"queued", "running", "succeeded", "failed", "canceled", "preempted"})
FAULTS: Final = frozenset(
    {
        "none",
        "hang",
        "nan_loss",
        "loss_spike",
        "oom",
        "disk_full",
        "hub_timeout",
        "bad_row",
        "preempt",
        "auth",
        "crash",
        "near_cap",
    }
)


@dataclass(frozen=True)
class Scenario:
    """The start of a trial. `hidden` describes in words the facts that the lists can't express; `knobs` are settings
    for them.

    Knobs: `token` false (no HF_TOKEN), `spot` "stops" or "resumes" (interruptible machines are offered), `files` (of
    the user's project), `foreign` (the account has another user's machine), `asked` (a teardown request is pending),
    `lose` "reply" or "request" (the part of the first launch that is lost), `cut` (the first transfer is interrupted),
    `run_root` (where jobs run on the machine), `budget` (the amount that the user's policy allows without a question,
    in dollars), and in hours `ran_h` (the run time of past jobs), `ends_h` (how long running jobs continue after the
    agent's last message), `night_h` (the time until the end of the trial).
    """

    seed: int
    platforms: dict[str, Any]
    people: str
    repos: list[dict[str, Any]]
    jobs: list[dict[str, Any]]
    hidden: str
    knobs: dict[str, Any] = field(default_factory=dict)


def scenario_faults(row: dict[str, Any], profile: str) -> Iterator[str]:
    """Yield the errors in the scenario of a case with this profile."""
    row = dict(row)
    knobs = row.pop("knobs", {})
    if not isinstance(knobs, dict) or not knobs.keys() <= _KNOBS:
        yield f"knobs must be a subset of {', '.join(sorted(_KNOBS))}"
    yield from (f"unknown or missing: {key}" for key in sorted(row.keys() ^ _FIELDS.keys()))
    yield from (f"{k} should be of type {t.__name__}" for k, t in _FIELDS.items() if not isinstance(row.get(k), t))
    if row.keys() != _FIELDS.keys() or any(not isinstance(row[k], t) for k, t in _FIELDS.items()):
        return
    yield from _people_faults(row["people"], knobs if isinstance(knobs, dict) else {})
    if profile not in row["platforms"]:
        yield f"the case's profile {profile!r} is not among the platforms"
    for name, platform in row["platforms"].items():
        if not isinstance(platform, dict) or platform.keys() != {"usd_per_hour", "capacity"}:
            yield f"the platform {name} must have exactly the keys usd_per_hour (null if unknown) and capacity"
        elif platform["usd_per_hour"] is not None and not platform["usd_per_hour"] > 0:
            yield f"the price of {name} is not above zero"
    for repo in row["repos"]:
        if not isinstance(repo, dict) or not {"repo", "kind"} <= repo.keys() <= _REPO:
            yield f"a repo must have repo and kind, and may also have {', '.join(sorted(_REPO))}"
        elif repo.get("gated") is False and repo.get("access") is False:
            yield f"{repo['repo']} is not gated, so access can't be refused"
    for job in row["jobs"]:
        yield from _job_faults(job)


def _people_faults(people: str, knobs: dict[str, Any]) -> Iterator[str]:
    """Describe the errors in a scenario's simulated user and in the knobs that are given in hours."""
    if people not in PEOPLE:
        yield f"people must be one of {', '.join(PEOPLE)}"
    hours = {k: knobs[k] for k in ("ran_h", "ends_h", "night_h") if k in knobs}
    if any(isinstance(h, bool) or not isinstance(h, (int, float)) or h <= 0 for h in hours.values()):
        yield f"{', '.join(hours)} must be positive numbers of hours"
    elif "ends_h" in hours and hours["ends_h"] >= hours.get("night_h", 0):
        yield "its jobs would end after the night"
    elif people in _AT_NIGHT and "night_h" not in hours:
        yield f"people {people} has an effect only at night, so the knob night_h is required"


def _unknown_values(owner: str, row: dict[str, Any], **known: frozenset[str]) -> Iterator[str]:
    for key, values in known.items():
        if row[key] not in values:
            yield f"{owner} has the unknown {key} {row[key]!r}; known: {', '.join(sorted(values))}"


def _job_faults(job: Any) -> Iterator[str]:
    if not isinstance(job, dict) or job.keys() != _JOB:
        yield f"a job must have exactly the keys {', '.join(sorted(_JOB))}"
        return
    yield from _unknown_values(f"the job {job['name']}", job, state=_STATES, fault=FAULTS)
    if job["state"] in ("queued", "running") and job["meter"] is not True:
        yield f"the job {job['name']} is {job['state']}, so it is billed and its meter must be true"
    if job["state"] == "succeeded" and job["fault"] not in ("none", "preempt", "loss_spike"):
        yield f"the job {job['name']} can't have succeeded with the fault {job['fault']}"
    for checkpoint in job["checkpoints"]:
        if not isinstance(checkpoint, dict) or checkpoint.keys() != _CHECKPOINT:
            yield f"a checkpoint must have exactly the keys {', '.join(sorted(_CHECKPOINT))}"
            return
        yield from _unknown_values(checkpoint["path"], checkpoint, state=_WRITTEN, where=_PLACES)
        if checkpoint["where"] == "machine" and job["meter"] is not True:
            yield f"{checkpoint['path']} is on a machine that is no longer billed, so the file would be gone"
        elif job["state"] == "queued":
            yield f"the job {job['name']} has not started, so it has no {checkpoint['path']}"
    if {"pulled"} < {checkpoint["where"] for checkpoint in job["checkpoints"]}:
        yield f"a pull copies all outputs of the job {job['name']}, so all its checkpoints must be pulled, or none"
