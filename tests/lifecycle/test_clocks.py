"""Danger clocks get a date if, and only if, the profile has a duration."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from fakes import FakeClock
from gpuwarden.core.models import Instance, InstanceState
from gpuwarden.core.profile import DangerClock
from gpuwarden.core.states import Job, Lease
from gpuwarden.interfaces.results import ClockReply, InstanceReply, InstancesReply
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.expirations import clocks_of, stopped_at
from gpuwarden.lifecycle.records import read_job, read_lease
from lifecycle_kit import open_house, training
from wording import Wording

DAY = 86_400.0
FACT = {"trigger": "idle", "effect": "gone", "verified": "2026-09", "source": "https://example.org"}


def rented(ctx: Context, tmp_path: Path, platform: str, *states: InstanceState, **spec: object) -> None:
    """Record a job and a lease whose machine was observed in these states, one day apart."""
    body = {"spec": training(tmp_path / "said", platform=platform, **spec).model_dump(mode="json")}
    ctx.ledger.append("job/j1", "job.accepted", body, state=Job.ACCEPTED)
    ctx.ledger.append("lease/l1", "create.intent", {"job": "j1", "platform": platform}, state=Lease.UNVERIFIED)
    for n, state in enumerate(states):
        seen = Instance(id="i1", state=state, created_at=ctx.clock.now() - 60 if n == 0 else None)
        ctx.ledger.append(
            "lease/l1",
            "lease.observed",
            {"instance": seen.model_dump(mode="json")},
            state=Lease.METERING if n == 0 else None,
        )
        ctx.clock.advance(DAY)  # type: ignore[attr-defined]


def dates(ctx: Context) -> list[float]:
    return [c.at for c in clocks_of(ctx, read_lease(ctx.ledger, "l1"), read_job(ctx.ledger, "j1"))]


def test_a_release_date_counts_from_the_first_sighting_of_the_latest_stop(tmp_path: Path) -> None:
    clock = FakeClock()
    w, start = open_house(tmp_path, clock), clock.now()
    off = InstanceState.STOPPED
    rented(w, tmp_path, "rehearsal/autodl", InstanceState.RUNNING, off, InstanceState.RUNNING, off, off)
    assert stopped_at(w, read_lease(w.ledger, "l1")) == start + 3 * DAY
    assert dates(w) == [start + 18 * DAY]


@pytest.mark.parametrize("state", [InstanceState.RUNNING, InstanceState.GONE])
def test_a_running_or_gone_machine_has_no_release_date(tmp_path: Path, state: InstanceState) -> None:
    ctx = open_house(tmp_path, FakeClock())
    rented(ctx, tmp_path, "rehearsal/autodl", state)
    assert dates(ctx) == []


@pytest.mark.parametrize(("timeout", "runs"), [(None, True), (3600, False)])
def test_the_default_timeout_clock_applies_only_to_jobs_without_a_timeout(
    tmp_path: Path, timeout: int | None, runs: bool
) -> None:
    clock = FakeClock()
    w, start = open_house(tmp_path, clock), clock.now()
    rented(w, tmp_path, "rehearsal/hf-jobs", InstanceState.RUNNING, timeout_s=timeout)
    assert dates(w) == ([start - 60 + 1800] if runs else [])


def test_a_duration_needs_a_start_and_prose_gives_no_date(wording: Wording) -> None:
    with pytest.raises(ValidationError) as refused:
        DangerClock.model_validate(FACT | {"after": "15 days", "after_s": 5})
    wording(refused.value.errors()[0]["ctx"]["error"])
    assert DangerClock.model_validate(FACT | {"after": "some day"}).fires_at(1.0, 1.0) is None
    unknown = DangerClock.model_validate(
        FACT | {"after": "some day", "after_s": {"unknown": "ask support"}, "counts_from": "stopped"}
    )
    assert unknown.fires_at(1.0, 1.0) is None


def test_rare_instance_fields_are_omitted_when_empty() -> None:
    row = InstanceReply(platform="p", instance_id="i", ours=True, state="running", billing=None)
    rare = {"stopped_usd_per_hour", "stopped_at", "clocks"}
    assert not rare & row.model_dump(mode="json").keys()
    clock = ClockReply(at=5.0, trigger="t", effect="e")
    told = row.model_copy(update={"clocks": [clock], "stopped_at": 1.0, "stopped_usd_per_hour": 0.1})
    assert rare <= InstancesReply(instances=[told]).short()["instances"][0].keys()
