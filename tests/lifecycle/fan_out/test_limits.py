"""Fan-out limits: who may raise them, holds on launches, and the watch's alerts, each raised once."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mcp.client.client import Client

from gpuwarden.core.errors import BadRequest, Conflict, Refused
from gpuwarden.core.fan_out import FanOutPlan, cells_of, grid
from gpuwarden.core.guidance import Action
from gpuwarden.core.models import JobSpec, Verdict
from gpuwarden.core.policy import Caps, Policy
from gpuwarden.core.states import Job
from gpuwarden.interfaces.cli.approval import grant_spending, open_spending, spending_facts
from gpuwarden.interfaces.cli.wording import command
from gpuwarden.interfaces.mcp.server import make_server
from gpuwarden.interfaces.mcp.wording import in_call
from gpuwarden.interfaces.results import fanned_out
from gpuwarden.ledger.events import AlertRaised, CellProven, FanOutLimited
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.fan_out import collecting
from gpuwarden.lifecycle.fan_out.accepting import fan_out
from gpuwarden.lifecycle.fan_out.deciding import end_fan_out, resume_fan_out
from gpuwarden.lifecycle.fan_out.holds import Hold
from gpuwarden.lifecycle.fan_out.launching import FanOutResult, advance_fan_out
from gpuwarden.lifecycle.fan_out.limits import LimitIncrease, change_limits
from gpuwarden.lifecycle.fan_out.records import fan_out_ids, fan_out_status, read_fan_out
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.records import job_ids, read_job
from gpuwarden.lifecycle.submission.submit import NeedsApproval
from gpuwarden.rehearsal.model import Fault
from gpuwarden.remote.sandbox.detect import Kind, Sandbox
from lifecycle_kit import PLATFORM, WEALTHY, clock_of_today, open_house, records, rent_cloud
from wording import Wording

pytestmark = pytest.mark.anyio
TINY = 0.0001
"""A budget too small for any machine."""


@pytest.fixture(autouse=True)
def _without_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwarden.backends.local.detect", lambda: Sandbox(Kind.NONE))


def _plan(**limits: object) -> FanOutPlan:
    base = JobSpec(name="sweep", platform=PLATFORM, script="print(1)", outputs=("out",), timeout_s=3600)
    values = {"base": base, "cells": cells_of(base, grid({"lr": ["1", "2"]})), "max_machines": 1, "max_tries": 1}
    return FanOutPlan.model_validate(values | limits)


async def _accepted(ctx: Context, **limits: object) -> FanOutResult:
    plan = _plan(**limits)
    asked = await fan_out(ctx, plan)
    assert asked.receipt is not None
    if asked.ask:
        grant_spending(ctx, open_spending(ctx, asked.receipt), "terminal", "user x")
    return await fan_out(ctx, plan, receipt=asked.receipt)


def _id(found: FanOutResult) -> str:
    assert found.now is not None
    return found.now.fan.id


async def _rise(ctx: Context, fan_id: str, **limits: Any) -> LimitIncrease:
    found = await change_limits(ctx, fan_id, "test", **limits)
    assert isinstance(found, LimitIncrease)
    return found


async def test_raising_a_budget_needs_its_own_receipt_and_happens_once(tmp_path: Path, wording: Wording) -> None:
    ctx = open_house(tmp_path / "home", clock_of_today())
    cloud = rent_cloud(ctx)
    held = await _accepted(ctx, max_cost_usd=TINY)
    fan_id = _id(held)
    assert held.held is not None and held.held.by is Hold.BUDGET and records(cloud) == []
    (step,) = held.next_steps
    least = math.ceil((held.held.needs or 0) * 100) / 100
    assert step.action is Action.RESUME and step.parameters["max_cost_usd"] == least
    assert command(step).startswith("gpuwarden fan-out --resume --max-cost ")
    wording(in_call(step), fan_id, "gpuwarden fan-out --resume --max-cost")
    rise = await _rise(ctx, fan_id, max_cost_usd=300.0)
    assert not rise.issued.ask and (await advance_fan_out(ctx, fan_id)).held is not None  # checked, not yet applied
    with pytest.raises(Conflict) as refused:
        await change_limits(ctx, fan_id, "test", max_cost_usd=301.0, receipt=rise.receipt)
    wording(refused)
    for _ in range(2):  # the second call is a repeat
        assert await change_limits(ctx, fan_id, "test", max_cost_usd=300.0, receipt=rise.receipt) is None
    (event,) = ctx.ledger.events(f"fanout/{fan_id}", kind=FanOutLimited)
    assert (event.data.max_cost_usd, event.data.receipt, event.data.by) == (300.0, rise.receipt, "test")
    moved = await advance_fan_out(ctx, fan_id)
    assert moved.held is None and len(records(cloud)) == 1
    assert (await fan_out(ctx, _plan(max_cost_usd=TINY), receipt=held.now.fan.receipt)).adopted  # type: ignore[union-attr]


async def test_lowering_a_limit_needs_no_receipt_and_voids_earlier_receipts(tmp_path: Path, wording: Wording) -> None:
    ctx = open_house(tmp_path / "home", clock_of_today())
    rent_cloud(ctx)
    fan_id = _id(await _accepted(ctx, max_cost_usd=TINY))
    rise = await _rise(ctx, fan_id, max_cost_usd=300.0, max_machines=2)
    assert await change_limits(ctx, fan_id, "test", max_cost_usd=TINY / 2) is None
    with pytest.raises(Conflict) as refused:
        await change_limits(ctx, fan_id, "test", max_cost_usd=300.0, max_machines=2, receipt=rise.receipt)
    wording(refused)
    with pytest.raises(BadRequest) as refused:
        await change_limits(ctx, fan_id, "test", max_cost_usd=TINY / 3, receipt=rise.receipt)
    wording(refused)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(BadRequest):
            await change_limits(ctx, fan_id, "test", max_cost_usd=bad)
    with pytest.raises(BadRequest):
        await change_limits(ctx, fan_id, "test", max_machines=257)
    assert (await _rise(ctx, fan_id, max_machines=2)).issued.machines == 2  # a higher machine count is a rise as well


async def test_caps_apply_to_the_total_after_several_small_rises(tmp_path: Path, wording: Wording) -> None:
    policy = Policy(rehearsal_caps=Caps(per_job_usd=20.0, per_day_usd=1e6, per_instance_usd=1e6))
    ctx = open_house(tmp_path / "home", clock_of_today(), policy=policy)
    rent_cloud(ctx)
    fan_id = _id(await _accepted(ctx, max_cost_usd=TINY))
    for most in (10.0, 19.0):
        rise = await _rise(ctx, fan_id, max_cost_usd=most)
        assert not rise.issued.ask
        await change_limits(ctx, fan_id, "test", max_cost_usd=most, receipt=rise.receipt)
    rise = await _rise(ctx, fan_id, max_cost_usd=21.0)
    wording(rise.issued.ask, "per_job_usd", "$20.00")
    with pytest.raises(NeedsApproval):
        await change_limits(ctx, fan_id, "test", max_cost_usd=21.0, receipt=rise.receipt)
    shown = "\n".join(spending_facts(rise.issued, None))
    wording(shown, fan_id, "$21.00")
    grant_spending(ctx, open_spending(ctx, rise.receipt), "terminal", "user x")
    assert await change_limits(ctx, fan_id, "test", max_cost_usd=21.0, receipt=rise.receipt) is None


async def test_raising_an_approved_budget_needs_approval_and_the_rise_does_not_expire(
    tmp_path: Path, wording: Wording
) -> None:
    policy = Policy(rehearsal_caps=Caps(per_job_usd=0.001, per_day_usd=1e6, per_instance_usd=1e6))
    ctx = open_house(tmp_path / "home", clock_of_today(), policy=policy)
    cloud = rent_cloud(ctx)
    fan_id = _id(await _accepted(ctx, max_cost_usd=0.002))
    local = ctx.policy.local
    ctx.policy = WEALTHY.model_copy(update={"local": local})  # the caps would allow it now
    rise = await _rise(ctx, fan_id, max_cost_usd=300.0)
    wording(rise.issued.ask, "$0.002", fan_id)
    with pytest.raises(NeedsApproval):
        await change_limits(ctx, fan_id, "test", max_cost_usd=300.0, receipt=rise.receipt)
    grant_spending(ctx, open_spending(ctx, rise.receipt), "terminal", "user x")
    await change_limits(ctx, fan_id, "test", max_cost_usd=300.0, receipt=rise.receipt)
    ctx.policy = policy.model_copy(update={"local": local})
    await ctx.clock.sleep(2 * policy.receipt_ttl_s)
    assert (await advance_fan_out(ctx, fan_id)).held is None and len(records(cloud)) == 1


async def test_the_worst_cost_in_the_receipt_is_the_default_budget(tmp_path: Path) -> None:
    ctx = open_house(tmp_path / "home", clock_of_today())
    rent_cloud(ctx)
    asked = await fan_out(ctx, _plan(), dry_run=True)
    found = await _accepted(ctx)
    assert found.now is not None and asked.worst_cost is not None
    assert found.now.fan.budget == asked.worst_cost


async def test_launching_the_cells_of_an_unfinished_fan_out_again_needs_approval(
    tmp_path: Path, wording: Wording
) -> None:
    ctx = open_house(tmp_path / "home", clock_of_today())
    rent_cloud(ctx)
    fan_id = _id(await _accepted(ctx, max_cost_usd=TINY))
    again = await fan_out(ctx, _plan(max_cost_usd=300.0))
    wording(again.ask, fan_id)
    with pytest.raises(NeedsApproval):
        await fan_out(ctx, _plan(max_cost_usd=300.0), receipt=again.receipt)
    end_fan_out(ctx, fan_id, "test")
    assert fan_out_status(ctx, read_fan_out(ctx.ledger, fan_id)).over
    assert not (await fan_out(ctx, _plan(max_cost_usd=300.0))).ask


async def test_an_agent_resumes_only_a_fan_out_that_it_ended_itself(tmp_path: Path, wording: Wording) -> None:
    home = tmp_path / "home"
    ctx = open_house(home, clock_of_today(), actor="mcp")
    rent_cloud(ctx)
    fan_id = _id(await _accepted(ctx, max_cost_usd=TINY))
    person = open_house(home, ctx.clock, actor="cli")
    async with Client(make_server(ctx)) as client:
        for end, code in ((ctx, "running"), (person, "refused")):
            end_fan_out(end, fan_id, "test")
            body = (await client.call_tool("cancel_job", {"job_id": fan_id, "action": "resume"})).structured_content
            assert body is not None and (body["code"] == code), body
        more = {"job_id": fan_id, "action": "resume", "max_cost_usd": 300.0}
        body = (await client.call_tool("cancel_job", more)).structured_content
        assert body is not None and body["code"] == "bad_request"
    with pytest.raises(Refused) as refused:
        resume_fan_out(ctx, fan_id, "test")
    wording(refused, fan_id)
    assert not resume_fan_out(person, fan_id, "test").fan.ended
    assert not ctx.ledger.events(kind=FanOutLimited)


@pytest.mark.parametrize("left", ["unsent", "lost_request", "lost_reply"])
async def test_ending_a_fan_out_after_a_death_rents_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """The process dies before ordering, or the order or its reply is lost; then the user ends the fan-out."""
    home = tmp_path / "home"
    ctx = open_house(home, clock_of_today())
    lost = () if left == "unsent" else (Fault.model_validate({"kind": left, "call": "create"}),)
    cloud = rent_cloud(ctx, *lost)

    async def die(ctx: Context, job_id: str) -> None:
        raise KeyboardInterrupt

    if left == "unsent":
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("gpuwarden.lifecycle.fan_out.launching.advance", die)
            await _accepted(ctx)
    else:
        await _accepted(ctx)
    (fan_id,), (job,) = fan_out_ids(ctx.ledger), job_ids(ctx.ledger)
    end_fan_out(ctx, fan_id, "test")
    restarted = open_house(home, ctx.clock)
    restarted._providers[PLATFORM] = ctx._providers[PLATFORM]
    watcher = Watcher(restarted)
    for _ in range(8):
        await watcher.round()
        await ctx.clock.sleep(60)
    rented = [record.token for record in records(cloud)]
    assert rented == ([f"{job}-i1"] if left == "lost_reply" else [])
    assert (read_job(ctx.ledger, job).state is Job.CANCELED) is (left != "lost_reply")
    now = (await advance_fan_out(restarted, fan_id)).now
    assert now is not None and (now.over or left == "lost_reply")


async def test_the_watch_raises_each_alert_once_and_clears_resolved_alerts(tmp_path: Path, wording: Wording) -> None:
    home = tmp_path / "home"
    ctx = open_house(home, clock_of_today())
    cloud = rent_cloud(ctx)
    fan_id = _id(await _accepted(ctx, max_cost_usd=TINY))
    subject, watcher = f"fanout/{fan_id}", Watcher(ctx)
    said = Counter[tuple[str, str]]()

    async def rounds(watch: Watcher, count: int = 3) -> None:
        for _ in range(count):
            found = await watch.once()
            assert not {k: v for k, v in found.trouble.items() if "fan" in v}, found.trouble
            said.update((a.kind, "raised" if a.raised else "cleared") for a in found.news if a.subject == subject)
            await ctx.clock.sleep(60)

    await rounds(watcher)
    assert said == {("fan_out_budget", "raised"): 1}
    (alert,) = [e.data for e in ctx.ledger.standing_alerts() if e.subject == subject]
    wording(alert.text, fan_id)
    first = Watcher(open_house(home, ctx.clock))
    first.fan_outs.ctx._providers[PLATFORM] = ctx._providers[PLATFORM]
    assert not (await first.round()).news  # a new process clears no alert before its own first check
    end_fan_out(ctx, fan_id, "test")
    await ctx.clock.sleep(1000)
    await rounds(watcher)
    assert said == {("fan_out_budget", "raised"): 1, ("fan_out_budget", "cleared"): 1, ("fan_out_over", "raised"): 1}
    (over,) = [e.data for e in ctx.ledger.events(subject, kind=AlertRaised) if e.data.condition == "fan_out_over"]
    wording(over.text, fan_id)
    resume_fan_out(ctx, fan_id, "test")
    await rounds(watcher)
    assert said["fan_out_budget", "raised"] == 2 and records(cloud) == []


def test_checking_a_rise_changes_nothing_and_names_the_call_to_make(tmp_path: Path, wording: Wording) -> None:
    import anyio

    async def go() -> None:
        ctx = open_house(tmp_path / "home", clock_of_today())
        rent_cloud(ctx)
        held = await _accepted(ctx, max_cost_usd=TINY)
        rise = await _rise(ctx, _id(held), max_cost_usd=300.0)
        reply = fanned_out(FanOutResult(held.plan, now=held.now, rise=rise))
        assert reply.code == "checked" and reply.receipt == rise.receipt
        assert not ctx.ledger.events(kind=FanOutLimited)
        wording(reply.message, _id(held))
        assert command(reply.next[-1]).split()[1:4] == ["fan-out", "--resume", "--max-cost"]
        assert f"--receipt {rise.receipt}" in command(reply.next[-1])

    anyio.run(go)


async def test_misspelled_cell_folders_do_not_count_as_the_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may create `cells/1`, or folders for cells its queue was not given; collecting still works."""
    ctx = open_house(tmp_path / "home", clock_of_today())
    rent_cloud(ctx)
    fan_id = _id(await _accepted(ctx, max_cost_usd=300.0, cells=cells_of(_plan().base, grid({"lr": ["1", "2", "3"]}))))
    fan = read_fan_out(ctx.ledger, fan_id)
    queue = fan.queues[0].model_copy(update={"cells": (0, 1)})
    places = {}
    for folder, index in (("00001", 1), ("1", 1), ("\u0661", 1), ("000001", 1), ("00002", 2), ("99999", 1)):
        (tmp_path / folder).mkdir()
        cell = fan.cells[index]
        (tmp_path / folder / "cell.json").write_text(
            json.dumps({"index": index, "config": cell.config, "state": "done", "exit_code": 0})
        )
        (tmp_path / folder / "out").write_text("x")
        places |= {f"cells/{folder}/{name}": str(tmp_path / folder / name) for name in ("cell.json", "out")}
    job = SimpleNamespace(id=queue.job, handle="h", state=Job.SUCCEEDED, lease=None)
    report = SimpleNamespace(verdict=Verdict.PROVEN)

    async def done(*_: object) -> object:
        return report

    for name, value in (("pull", done), ("verify_job", done), ("read_job", lambda *_: job)):
        monkeypatch.setattr(collecting, name, value)
    monkeypatch.setattr(collecting, "last_pull", lambda *_: SimpleNamespace(places=places))
    monkeypatch.setattr(
        collecting, "read_fan_out", lambda ledger, name: replace(read_fan_out(ledger, name), queues=(queue,))
    )
    assert await collecting.collect(ctx, fan_id) == {}
    assert [e.data.index for e in ctx.ledger.events(f"fanout/{fan_id}", kind=CellProven)] == [1]
