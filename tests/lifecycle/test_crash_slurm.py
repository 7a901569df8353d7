"""SIGKILL at any point while real Slurm daemons run gpuwarden's jobs: none is submitted twice and none is lost.

These are the lives of `test_crash.py`, with the ledger compared with Slurm's own queue. Slurm commands that gpuwarden
started outlive it, as on a login node: an `sbatch` may be carried out after its caller is dead.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crash_driver import PlainClock
from crash_kit import MODEL, SEED, Driver, Life, Tally, digests
from gpuwarden.core.states import Job
from gpuwarden.ledger.store import Ledger
from lifecycle_kit import launches, moves_along_the_tables, open_house, training
from slurm_kit import Cluster, own_profiles

pytestmark = [pytest.mark.prove, pytest.mark.real]


class SlurmLife(Life):
    """One job in Slurm's queue, one state folder, many deaths."""

    def __init__(self, cluster: Cluster, driver: Driver, tally: Tally, folder: Path, rng: random.Random) -> None:
        folder.mkdir()
        self.cluster, self.driver, self.tally, self.rng = cluster, driver, tally, rng
        self.home, self.said, self.kind, self.hosts = folder / "home", folder / "said", "slurm", False
        self.spec = training(self.said, 0.2, platform="slurm/local", max_cost_usd=None)
        self.profiles = own_profiles(folder)
        self.home.mkdir()
        open_house(self.home, PlainClock()).ledger.close()

    def step(self, phase: str, **more: Any) -> dict[str, Any]:
        return super().step(phase, profiles=str(self.profiles), only_checks=True, **more)

    def wrong(self, ledger: Ledger) -> Iterator[str]:
        yield from moves_along_the_tables(ledger)
        said, jobs = launches(self.said), [e.subject for e in ledger.events(kind="job.accepted")]
        if len(jobs) > 1 or len({job for job, _ in said}) > 1 or len(set(said)) != len(said):
            yield f"one order became {jobs}, which ran as {said}"
        for job in jobs:
            numbers = self.cluster.jobs(f"gw-{job.removeprefix('job/')}")
            if len(numbers) > 1:
                yield f"{job} was submitted as {numbers}"
            if numbers and ledger.last(job, "submit.intent") is None:
                yield f"{job} is in Slurm's queue and no intent of it in the ledger"

    def live(self) -> None:
        """Run from the check to a proven copy; the allocation ends by itself."""
        job = self.accepted(self.spec.model_dump(mode="json"))
        seen = self.until("check", lambda a: a["state"] in {"succeeded", "failed"}, job=job)
        assert seen["state"] == Job.SUCCEEDED, seen
        self.step("list")
        pulled = self.until("pull", lambda a: a.get("complete"), job=job)
        assert self.step("verify", job=job) == {"verdict": "proven"}
        assert digests(pulled["files"]) == [MODEL]
        assert launches(self.said) == [(job, 1)], "it ran once"
        assert len(self.cluster.jobs(f"gw-{job}")) == 1
        ledger = Ledger(self.home / "ledger.db", PlainClock())
        assert ledger.state(f"job/{job}") == Job.SUCCEEDED
        ledger.close()


@pytest.mark.attack("ending", "kills gpuwarden at any line while Slurm queues, starts and runs its job")
def test_death_at_any_line_submits_no_job_twice_and_loses_none(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    tally, driver = Tally(), Driver(tmp_path)
    print(f"GPUWARDEN_CRASH_SEED={SEED}")
    try:
        for n in range(10):
            SlurmLife(cluster, driver, tally, tmp_path / f"life{n}", random.Random(f"{SEED}-{n}")).live()
            if sum(tally.kills.values()) >= 12 and {"submit", "check"} <= set(tally.kills):
                break
    finally:
        driver.close()
    print(f"{sum(tally.kills.values())} kills at {len(tally.points)} points in {n + 1} lives: {dict(tally.kills)}")
    assert {"submit", "check"} <= set(tally.kills)
