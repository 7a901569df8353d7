"""Fan-outs on rehearsal machines with real processes: killed, preempted and resumed until every cell is proven."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio
import pytest

from gpuwarden.core.cell_states import CellState
from gpuwarden.core.errors import BadRequest, Conflict
from gpuwarden.core.fan_out import FanOutPlan, cells_of, grid
from gpuwarden.core.guidance import Action
from gpuwarden.core.models import JobSpec
from gpuwarden.core.policy import Caps, Policy, TeardownPolicy
from gpuwarden.core.states import Teardown
from gpuwarden.ledger.events import CellProven
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.fan_out.accepting import fan_out
from gpuwarden.lifecycle.fan_out.deciding import end_fan_out, resume_fan_out
from gpuwarden.lifecycle.fan_out.launching import FanOutResult, Hold, advance_fan_out
from gpuwarden.lifecycle.fan_out.records import fan_out_status, read_fan_out
from gpuwarden.lifecycle.leases.auto_teardown import automatic_teardown
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.records import read_job, read_lease
from gpuwarden.lifecycle.submission.submit import NeedsApproval
from gpuwarden.lifecycle.teardown.gate import approve, request
from gpuwarden.providers.rehearsal import RehearsalProvider
from gpuwarden.rehearsal import processes
from gpuwarden.rehearsal.cloud import Cloud
from gpuwarden.rehearsal.model import Fault
from gpuwarden.remote.sandbox.detect import Kind, Sandbox
from lifecycle_kit import PLATFORM, WEALTHY, clock_of_today, moves_on, open_house, promises, records, rent_cloud
from waiting import soon
from wording import Wording

pytestmark = [pytest.mark.anyio, pytest.mark.prove]

BUDGET = 3.0
CELL = """
import json, os, signal, struct, sys, time
said, lr, seed = sys.argv[1], *(word.partition("=")[2] for word in sys.argv[2:4])
cell = os.environ["GPUWARDEN_CELL"]
with open(said, "a") as file:
    print(cell, file=file)
if cell == "7" and not os.path.exists(said + ".once"):
    open(said + ".once", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
while os.path.exists(said + ".hold" + cell):
    time.sleep(0.05)
if os.path.exists(said + ".fail" + cell):
    sys.exit(3)
os.makedirs("out", exist_ok=True)
head = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
head += b" " * (-len(head) % 8)
with open("out/model.tmp", "wb") as file:
    file.write(struct.pack("<Q", len(head)) + head + struct.pack("<4f", *range(4)))
os.rename("out/model.tmp", "out/model.safetensors")
with open("out/result.json", "w") as file:
    json.dump({"objective": {"name": "eval_loss", "value": float(lr) * 1e5 + int(seed) / 10}}, file)
"""


@pytest.fixture(autouse=True)
def _without_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the sandbox, since cells report that they run in a file outside their machine's folder."""
    monkeypatch.setattr("gpuwarden.backends.local.detect", lambda: Sandbox(Kind.NONE))


def _plan(home: Path, cells: list[dict[str, str]], **limits: object) -> FanOutPlan:
    base = JobSpec(
        name="sweep",
        platform=PLATFORM,
        script=CELL,
        args=(str(home.parent / "said"),),
        outputs=("out",),
        timeout_s=60,
        max_cost_usd=100.0,
        interruptible=True,
        max_restarts=2,
    )
    values = {"base": base, "cells": cells_of(base, cells), "max_machines": 4, "max_cost_usd": 400.0}
    return FanOutPlan.model_validate(values | limits)


async def _launched(ctx: Context, plan: FanOutPlan) -> str:
    asked = await fan_out(ctx, plan)
    assert asked.now is None and asked.receipt is not None  # one receipt for the plan; nothing is launched
    done = await fan_out(ctx, plan, receipt=asked.receipt)
    assert done.now is not None
    return done.now.fan.id


async def _over(ctx: Context, cloud: Cloud, fan_id: str) -> FanOutResult:
    """Advance until nothing runs or waits. Processes end in real time; the fake clock skips everything else."""

    async def round() -> FanOutResult:
        found = await advance_fan_out(ctx, fan_id)
        await _end_idle(ctx, fan_id)
        moves_on(cloud, 5)
        return found

    def over(found: FanOutResult) -> bool:
        now = found.now
        assert now is not None
        return not now.idle and bool(now.over or (found.held and not now.live))

    return await soon(round, within=100, every=0.1, good=over)  # several processes, one after another


async def _strike(ctx: Context, fan_id: str, cloud: Cloud, said: Path, cell: int, how: str) -> None:
    """Wait until a held cell runs, then take its machine or kill its processes, and let the cell run next time."""

    async def runs() -> bool:
        await advance_fan_out(ctx, fan_id)
        moves_on(cloud, 1)
        return str(cell) in (said.read_text().split() if said.exists() else [])

    await soon(runs, every=0.1)
    (queue,) = [queue for queue in read_fan_out(ctx.ledger, fan_id).queues if cell in queue.cells]
    lease = read_job(ctx.ledger, queue.job).lease
    machine = read_lease(ctx.ledger, lease).instance_id if lease else None
    assert machine is not None
    if how == "preempt":
        cloud.preempt(machine)
    else:
        processes.kill(machine)
    said.with_name(f"{said.name}.hold{cell}").unlink()


async def _end_idle(ctx: Context, fan_id: str) -> None:
    """Tear down the machines of ended queues, as a user does who is asked about them."""
    for job in fan_out_status(ctx, read_fan_out(ctx.ledger, fan_id)).idle:
        asked = automatic_teardown(ctx, job) is None or read_job(ctx.ledger, job).state == "failed"
        if asked and job in read_fan_out(ctx.ledger, fan_id).collected:
            view = await request(ctx, job, "terminate")
            if view.record.state in {Teardown.AWAITING_HUMAN, Teardown.BLOCKED}:
                loss = read_job(ctx.ledger, job).spec.name if view.record.state is Teardown.BLOCKED else None
                assert view.record.digest is not None
                await approve(ctx, view.record.id, view.record.digest, channel="terminal", by="test", loss=loss)


@pytest.mark.prove
async def test_forty_cells_on_four_machines_with_three_kills_and_two_preemptions(tmp_path: Path) -> None:
    """Each queue takes every fourth cell: one strike hits each machine, and cell 7 is killed alone."""
    home, said = tmp_path / "home", tmp_path / "said"
    ctx = open_house(home, clock_of_today())
    cloud = rent_cloud(ctx, Fault(kind="lost_reply", call="create", at=2))  # so one machine is adopted
    strikes = {16: "kill", 17: "preempt", 18: "kill", 19: "preempt"}
    for cell in strikes:
        (tmp_path / f"said.hold{cell}").touch()
    plan = _plan(home, grid({"lr": ["1e-5", "3e-5", "1e-4", "3e-4"]}, seeds=10), max_cost_usd=BUDGET)
    fan_id = await _launched(ctx, plan)
    with anyio.fail_after(500):
        for cell, how in strikes.items():
            await _strike(ctx, fan_id, cloud, said, cell, how)
            ctx = open_house(home, ctx.clock)  # another process continues, as after a crash
            ctx._providers[PLATFORM] = RehearsalProvider(cloud)
    found = await _over(ctx, cloud, fan_id)
    now = found.now
    assert now is not None and now.cells.count(CellState.VERIFIED) == 40 and not now.cells.strangers
    proofs = ctx.ledger.events(f"fanout/{fan_id}", kind=CellProven)
    assert Counter(e.data.index for e in proofs) == dict.fromkeys(range(40), 1)  # each proven once
    assert now.cells.duplicates == ()
    assert max(now.cells.tries.values()) == 2 and len(now.fan.queues) > 4  # lost cells went to another machine
    assert now.cost <= BUDGET and sum(cloud.truth(one.id).cost_usd or 0.0 for one in records(cloud)) <= BUDGET
    assert not any(truth.meter for truth in cloud.truths().values())
    assert promises(ctx.ledger, cloud) == []


@pytest.mark.prove
async def test_the_watch_finishes_a_fan_out_and_ends_its_proven_machines(tmp_path: Path) -> None:
    """Automatic teardown ends the proven machines; the user is asked about the one where everything was killed."""
    orders = TeardownPolicy(automatic="terminate", grace_minutes=1)
    policy = WEALTHY.model_copy(update={"teardown": orders})
    home, said = tmp_path / "home", tmp_path / "said"
    ctx = open_house(home, clock_of_today(), policy=policy)
    cloud = rent_cloud(ctx)
    (tmp_path / "said.hold2").touch()
    fan_id = await _launched(ctx, _plan(home, grid({"lr": ["1", "2"]}, seeds=3), max_machines=2, max_cost_usd=3.0))
    await _strike(ctx, fan_id, cloud, said, 2, "kill")
    watcher = Watcher(ctx)

    async def all_off() -> bool:
        found = await watcher.once()
        assert "watch" not in found.trouble
        await _end_idle(ctx, fan_id)
        moves_on(cloud, 15)
        return not any(truth.meter for truth in cloud.truths().values())

    await soon(all_off, within=100, every=0.05)  # several processes, one after another
    now = fan_out_status(ctx, read_fan_out(ctx.ledger, fan_id))
    assert now.over and now.cells.count(CellState.VERIFIED) == 6 and now.cost <= 3.0 and len(now.fan.queues) == 3
    granted = ctx.ledger.events(kind="approval.granted")
    assert sorted(e.body["channel"] for e in granted) == ["automatic_teardown", "automatic_teardown", "terminal"]
    assert promises(ctx.ledger, cloud) == []
    await watcher.once()
    assert len(records(cloud)) == 3  # a finished fan-out launches nothing more


async def test_an_exhausted_budget_stops_launches_but_not_running_cells(tmp_path: Path) -> None:
    ctx = open_house(tmp_path / "home", clock_of_today())
    cloud = rent_cloud(ctx)
    probe = await fan_out(ctx, _plan(tmp_path / "home", [{"lr": "1", "seed": "0"}]), dry_run=True)
    assert probe.price is not None
    one = probe.price * 3 * (60 + 300) / 3600  # a queue of one cell, interrupted as often as allowed
    plan = _plan(tmp_path / "home", grid({"lr": ["1", "2"]}, seeds=2), max_cost_usd=one * 1.5)
    fan_id = await _launched(ctx, plan)
    first = await advance_fan_out(ctx, fan_id)
    assert first.held is not None and first.held.by is Hold.BUDGET
    assert first.now is not None and len(first.now.live) == 1 == len(records(cloud)) and first.now.cost <= one * 1.5
    rest = await _over(ctx, cloud, fan_id)
    assert rest.now is not None and rest.now.cells.count(CellState.VERIFIED) >= 1


async def test_a_repeated_call_adopts_and_new_arguments_need_a_new_receipt(tmp_path: Path, wording: Wording) -> None:
    ctx = open_house(tmp_path / "home", clock_of_today())
    cloud = rent_cloud(ctx)
    plan = _plan(tmp_path / "home", [{"lr": "1", "seed": "0"}])
    asked = await fan_out(ctx, plan)
    other = _plan(tmp_path / "home", [{"lr": "2", "seed": "0"}])
    with pytest.raises(Conflict) as refused:
        await fan_out(ctx, other, receipt=asked.receipt)
    wording(refused)
    first = await fan_out(ctx, plan, receipt=asked.receipt)
    again = await fan_out(ctx, plan, receipt=asked.receipt)
    assert first.now and again.now and again.adopted and again.now.fan.id == first.now.fan.id
    assert len(records(cloud)) == 1
    assert end_fan_out(ctx, first.now.fan.id, "test").live  # no further launches; running cells continue
    with pytest.raises(BadRequest):
        await fan_out(ctx, plan, dry_run=True, receipt=asked.receipt)


async def test_a_given_up_cell_resumed_by_index_is_verified(tmp_path: Path, wording: Wording) -> None:
    """Cell 1 fails on its only machine; the user fixes the cause and resumes that cell alone."""
    ctx = open_house(tmp_path / "home", clock_of_today())
    cloud = rent_cloud(ctx)
    (tmp_path / "said.fail1").touch()
    plan = _plan(tmp_path / "home", grid({"lr": ["1", "2"]}, seeds=1), max_machines=1, max_tries=1)
    fan_id = await _launched(ctx, plan)
    over = await _over(ctx, cloud, fan_id)
    assert over.now is not None
    assert over.now.cells.states == {0: CellState.VERIFIED, 1: CellState.GIVEN_UP}, over.now.fan.found
    assert [step.action for step in over.next_steps] == [Action.RESUME]
    with pytest.raises(BadRequest) as refused:
        resume_fan_out(ctx, fan_id, "test", [2])
    wording(refused, fan_id, "2")
    with pytest.raises(BadRequest) as refused:
        resume_fan_out(ctx, fan_id, "test", [0])
    wording(refused, "0")
    (tmp_path / "said.fail1").unlink()
    resumed = resume_fan_out(ctx, fan_id, "test", [1])
    assert resumed.cells.launchable == (1,), (resumed.cells, resumed.fan.resumed)
    done = await _over(ctx, cloud, fan_id)
    assert done.now is not None and done.now.cells.count(CellState.VERIFIED) == 2 and done.next_steps == ()
    assert [queue.cells for queue in done.now.fan.queues] == [(0, 1), (1,)] and promises(ctx.ledger, cloud) == []


async def test_changed_inputs_hold_the_cells_that_are_left(tmp_path: Path) -> None:
    """Inputs always come from the folder that the fan-out was started in; if they change, the fan-out is held."""
    ctx = open_house(tmp_path / "home", clock_of_today())
    ctx.cwd = tmp_path / "work"
    ctx.cwd.mkdir()
    (ctx.cwd / "rows.txt").write_text("one")
    cloud = rent_cloud(ctx)
    (tmp_path / "said.fail1").touch()
    plan = _plan(tmp_path / "home", [{"lr": "1", "seed": "0"}], max_tries=1)
    base = plan.base.model_copy(update={"inputs": ("rows.txt",)})
    cells = cells_of(base, grid({"lr": ["1", "2"]}, seeds=1))
    fan_id = await _launched(
        ctx, FanOutPlan.model_validate({**dict(plan), "base": base, "cells": cells, "max_machines": 1})
    )
    await _over(ctx, cloud, fan_id)
    (ctx.cwd / "rows.txt").write_text("two")
    (tmp_path / "said.fail1").unlink()
    resume_fan_out(ctx, fan_id, "test")
    watch = open_house(tmp_path / "home", ctx.clock, actor="watch")
    watch._providers[PLATFORM] = RehearsalProvider(cloud)
    held = (await advance_fan_out(watch, fan_id)).held
    assert held is not None and held.by is Hold.REFUSED and "rows.txt" in held.detail and len(records(cloud)) == 1
    (ctx.cwd / "rows.txt").write_text("one")
    done = await _over(watch, cloud, fan_id)
    assert done.now is not None and done.now.cells.count(CellState.VERIFIED) == 2


async def test_a_whole_manifest_above_the_caps_needs_approval_before_anything_is_rented(tmp_path: Path) -> None:
    small = Policy(rehearsal_caps=Caps(per_job_usd=0.01, per_day_usd=100, per_instance_usd=100))
    ctx = open_house(tmp_path / "home", clock_of_today(), policy=small)
    cloud = rent_cloud(ctx)
    plan = _plan(tmp_path / "home", grid({"lr": ["1", "2"]}, seeds=3))
    asked = await fan_out(ctx, plan)
    assert "per_job_usd" in asked.ask
    with pytest.raises(NeedsApproval):
        await fan_out(ctx, plan, receipt=asked.receipt)
    assert records(cloud) == []  # nothing was rented
