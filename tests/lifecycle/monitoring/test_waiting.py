"""Everything that waits for the user is listed once, with its command and cost, until it is answered."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console

from gpuwarden.core.guidance import Action
from gpuwarden.interfaces.cli.screen import KINDS, drawn
from gpuwarden.interfaces.results.overview import status_of
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.artifacts.verify import verify_job
from gpuwarden.lifecycle.leases.meter import spent
from gpuwarden.lifecycle.monitoring.overview import cached_overview
from gpuwarden.lifecycle.monitoring.waiting import Kind, what_waits
from gpuwarden.lifecycle.records import read_job
from lifecycle_kit import weights
from orders_kit import Ordered
from pretend_machines import Processes

pytestmark = pytest.mark.anyio
SCREEN = 24
MACHINES = 15


@pytest.fixture
def asking(tmp_path: Path, processes: Processes) -> Ordered:
    return Ordered(tmp_path / "home", processes, "off")


async def test_every_kind_of_question_has_a_text() -> None:
    assert KINDS.keys() == set(get_args(Kind))


async def test_a_proven_machine_waits_for_a_request(asking: Ordered) -> None:
    job = await asking.proven()
    (waiting,) = what_waits(asking.ctx)
    (step,) = waiting.next_steps
    assert (waiting.kind, waiting.job_id, step.action) == ("unasked", job, Action.TEARDOWN)
    assert waiting.cost_usd == spent(asking.ctx, str(read_job(asking.ctx.ledger, job).lease))
    await asking.asks(job)
    assert [each.kind for each in what_waits(asking.ctx)] == ["teardown"]


@pytest.mark.slow
async def test_a_broken_checkpoint_waits_for_the_user(asking: Ordered) -> None:
    job = await asking.started()
    asking.backend.write(asking.handle(job), "model.safetensors", weights()[:100])
    asking.backend.end(asking.handle(job))
    await asking.after(1, job)
    assert what_waits(asking.ctx) == [], "an agent can still copy and verify it"
    await pull(asking.ctx, job)
    await verify_job(asking.ctx, job)
    ticket = (await asking.asks(job)).record.id
    (waiting,) = what_waits(asking.ctx)
    (step,) = waiting.next_steps
    assert (waiting.kind, step.action) == ("blocked", Action.APPROVE)
    assert step.parameters["ticket"] == ticket and step.parameters["without_proof"] is True


@pytest.mark.slow
async def test_many_waiting_machines_fit_one_screen_without_repeated_alerts(asking: Ordered) -> None:
    jobs = [await asking.proven(name=f"train-{n}") for n in range(MACHINES)]
    raised = await asking.watched(15)
    assert raised.count("finished_billing") == MACHINES
    seen = cached_overview(asking.ctx, {})
    assert len(seen.waiting) == MACHINES and seen.alerts == ()
    console = Console(width=120, record=True)
    console.print(drawn(status_of(seen)))
    lines = console.export_text().splitlines()
    assert len(lines) <= SCREEN
    assert all(sum(f"teardown --verb terminate {job}" in line for line in lines) == 1 for job in jobs)
    for job in jobs:
        await asking.until_off(await asking.yes(await asking.asks(job)))
    seen = cached_overview(asking.ctx, {})
    assert seen.waiting == () and seen.alerts == (), "no watch has looked since"
