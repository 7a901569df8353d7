"""No operation slows down as ended jobs accumulate, and the watch lets other tasks run between two jobs."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from bench.ledger import LIVE, House, begins, machine

from counting import counted_lines, lines_run
from gpuwarden.core.models import InstanceState
from gpuwarden.core.states import LIVE_LEASES, TERMINAL_JOBS, Job, Lease
from gpuwarden.ledger import events as ev
from gpuwarden.ledger.audit import audit
from gpuwarden.lifecycle.leases.meter import confirmed_end, lease_now
from gpuwarden.lifecycle.monitoring.inventory import leases_of, unsettled
from gpuwarden.lifecycle.monitoring.overview import job_page
from gpuwarden.lifecycle.monitoring.waiting import what_waits
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.records import job_ids, lease_ids, read_job
from grown_ledger import grown, steps

FEW, MANY = 40, 400
BLOCKED_SHARE = 1 / 100
"""Maximum share of the lines of a round over 152 jobs that may run without interruption; two jobs need more."""


@pytest.mark.prove
@pytest.mark.parametrize("platform", ["local", "vastai"])
def test_operation_cost_is_independent_of_the_number_of_ended_jobs(tmp_path: Path, platform: str) -> None:
    few, many = grown(tmp_path / "few", platform, FEW), grown(tmp_path / "many", platform, MANY)

    def operations(house: House) -> dict[str, Callable[[], object]]:
        w, ledger, job = house.ctx, house.ledger, read_job(house.ledger, LIVE[0])
        watcher = Watcher(w)
        anyio.run(watcher.round)  # the first round detects the machines
        watcher._next_sweep = 0.0
        return {
            "round": lambda: anyio.run(watcher.round),
            "read": lambda: read_job(ledger, job.id),
            "state": lambda: ledger.state(job.subject),
            "move": lambda: ledger.add(job.subject, ev.JobUnknown(why="x")),
            "page": lambda: ledger.page("job"),
            "page of a state": lambda: ledger.page("job", Job.SUCCEEDED),
            "unsettled": lambda: unsettled(w),
            "leases": lambda: (leases_of(w, job), lease_ids(ledger, *LIVE_LEASES), ledger.resting()),
            "alerts": ledger.standing_alerts,
            "what waits": lambda: what_waits(w),
            "a page of jobs": lambda: job_page(w, limit=10),
            "script": lambda: ledger.jobs_of_script("sha256:x", Job.SUCCEEDED),
            "guard": lambda: ledger._db.rows("SELECT run_dir FROM live_runs"),
        }

    assert audit(many.ledger).broken is None
    first, second = operations(few), operations(many)
    grew = {
        name: (before, after)
        for name, work in first.items()
        if (after := steps(many, second[name])) > 1.2 * (before := steps(few, work)) + 50
    }
    assert grew == {}


@pytest.mark.prove
def test_a_round_yields_to_other_tasks_with_many_live_jobs(tmp_path: Path) -> None:
    house = House(tmp_path, "vastai")
    for n in range(150):
        house.write(begins(f"jmore{n}", "vastai"))
    watcher = Watcher(house.ctx)
    anyio.run(watcher.round)  # the first round detects the machines
    whole = lines_run(lambda: anyio.run(watcher.round))
    assert anyio.run(most_in_a_row, watcher) < BLOCKED_SHARE * whole
    assert len(unsettled(house.ctx)) == 152 and not watcher.ctx.unseen, "every round was a whole one"


async def most_in_a_row(watcher: Watcher) -> int:
    """Return the maximum number of Python lines that run between two turns of another task during one round."""
    with counted_lines(threads=False) as lines:
        most = last = 0
        async with anyio.create_task_group() as together:

            async def turn() -> None:
                nonlocal most, last
                while True:
                    await anyio.lowlevel.checkpoint()
                    now = lines()
                    most, last = max(most, now - last), now

            together.start_soon(turn)
            await watcher.round()
            together.cancel_scope.cancel()
    assert most > 0
    return most


def test_pages_follow_without_gaps(tmp_path: Path) -> None:
    house = grown(tmp_path, "local", 25)
    pages = [house.ledger.page("job", limit=10)]
    while pages[-1]:
        pages.append(house.ledger.page("job", limit=10, before=pages[-1][-1]))
    shown = [row.subject for page in pages for row in page]
    assert shown == [f"job/{j}" for j in reversed(job_ids(house.ledger))] and len(shown) == 28
    succeeded = house.ledger.page("job", Job.SUCCEEDED, limit=100)
    assert [r.state for r in succeeded] == ["succeeded"] * 26
    assert (succeeded[0].platform, succeeded[0].name) == ("local", "train") and succeeded[0].opened <= succeeded[
        0
    ].since


def test_jobs_are_found_by_their_script_digest(tmp_path: Path) -> None:
    ledger = grown(tmp_path, "local", 5).ledger
    spec = {"name": "x", "platform": "local", "script": "print(1)", "timeout_s": 60}
    for name, more in {"new": {"script_digest": "sha256:a"}, "old": {}, "other": {"script_digest": "sha256:b"}}.items():
        ledger.append(f"job/{name}", "job.accepted", {"spec": spec, **more}, state=Job.ACCEPTED)
        ledger.add(f"job/{name}", ev.JobSubmitting())
        ledger.add(f"job/{name}", ev.JobSucceeded())
    assert ledger.jobs_of_script("sha256:a", Job.SUCCEEDED) == ["job/new", "job/old"]
    assert ledger.jobs_of_script("sha256:c", Job.SUCCEEDED) == ["job/old"], "the others took no script along"


def test_current_state_follows_every_event(tmp_path: Path) -> None:
    house = grown(tmp_path, "vastai", 3)
    ledger, lease = house.ledger, f"{LIVE[0]}-i1"
    assert ledger.platforms() == ["vastai"] and ledger.leases_of_instance(f"m-{LIVE[0]}") == [f"lease/{lease}"]
    assert ledger.subjects("lease", job=LIVE[0]) == [f"lease/{lease}"] and ledger.resting() == []
    assert ledger.subjects("teardown", job="j1x") == ["teardown/tj1x"]
    off = machine(LIVE[0], InstanceState.STOPPED)
    ledger.add(f"lease/{lease}", ev.LeaseStopped(saw="stopped", instance=off))
    assert ledger.resting() == [f"lease/{lease}"] and confirmed_end(house.ctx, lease) == "stopped"
    ledger.add(f"lease/{lease}", ev.LeaseGone(saw="gone"))
    assert ledger.resting() == [] and confirmed_end(house.ctx, lease) == "gone"
    ledger.add(f"lease/{lease}", ev.LeaseCameBack(instance=machine(LIVE[0])))
    assert ledger.state(f"lease/{lease}") == Lease.METERING and confirmed_end(house.ctx, lease) is None
    assert lease_now(house.ctx, lease).billed == 1.5


def test_the_guards_view_lists_every_nonterminal_state() -> None:
    view = files("gpuwarden.ledger").joinpath("schema.sql").read_text("utf-8").partition("CREATE VIEW live_runs")[2]
    listed = re.search(r"c\.state IN \(([^)]*)\)", view)
    assert listed and set(re.findall(r"'(\w+)'", listed[1])) == set(Job) - TERMINAL_JOBS
