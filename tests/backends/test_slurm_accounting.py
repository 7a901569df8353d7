"""The slurm backend on a cluster that enforces accounting limits, with a real slurmdbd on MariaDB."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from contract_backend import ended, until
from gpuwarden.backends.slurm import SlurmBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.engine import Ceiling
from gpuwarden.core.errors import Refused
from gpuwarden.core.fan_out import gridded
from gpuwarden.core.models import Place
from gpuwarden.core.reasons import Code
from gpuwarden.core.rules import Finding, run_rules
from gpuwarden.core.states import Job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.fan_out.accepting import fan_out
from gpuwarden.lifecycle.submission.facts import gather
from gpuwarden.rules import catalog
from slurm_kit import Accounted, SlurmEngine, login_node, place_of, train

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.prove]
GONE = {"squeue": 'echo \'{"meta": {}, "errors": [], "jobs": []}\''}
"""A queue that has forgotten all jobs, as Slurm's does some minutes after they end."""


@pytest.fixture
def backend() -> SlurmBackend:
    return SlurmBackend(SystemClock())


@pytest.fixture
def place(accounted: Accounted, tmp_path: Path) -> Place:
    return place_of(accounted, tmp_path)


@pytest.fixture
def engine(accounted: Accounted) -> SlurmEngine:
    return SlurmEngine(accounted)


@pytest.fixture
def ctx(tmp_path: Path, accounted: Accounted, monkeypatch: pytest.MonkeyPatch) -> Context:
    return login_node(tmp_path, accounted, monkeypatch)


async def found(ctx: Context, tasks: int = 1, **given: Any) -> list[Finding]:
    """Return the engine rules' findings about a job before it is submitted."""
    facts = await gather(ctx, train(**given), tasks=tasks)
    return [f for f in run_rules(catalog.rules_of("submit"), facts) if f.rule.startswith("PF-ENG")]


def words(finding: Finding) -> set[str]:
    """Return the words and numbers in a finding's message."""
    return set(re.findall(r"\w+", finding.message))


async def test_account_limits_are_read_with_current_usage(
    backend: SlurmBackend, place: Place, engine: SlurmEngine
) -> None:
    waits = [await backend.submit(engine.job("true", options={"partition": "closed"}), place, "w-there", secrets={})]
    seen = await backend.limits(engine.job("true"), place)
    assert (seen.accounts, seen.refusal, seen.unread) == (("nlp", "root"), "", "")
    assert seen.qos is not None and set(seen.qos) == {"normal", "short", "none", "spent"}
    own = "your account nlp"
    assert set(seen.ceilings) == {
        Ceiling(owner=own, kind="submitted", most=6, used=1),
        Ceiling(owner=own, kind="running", most=2),
        Ceiling(owner=own, kind="walltime", most=3_600),
        Ceiling(owner=own, kind="job", most=4, resource="cpu"),
        Ceiling(owner=own, kind="job_minutes", most=200, resource="cpu"),
        Ceiling(owner="the account nlp", kind="submitted", most=40, used=1),
        Ceiling(owner="the account nlp", kind="minutes", most=1_800, resource="wall"),
        Ceiling(owner="the account science", kind="job", most=1, resource="node"),
        Ceiling(owner="the account science", kind="minutes", most=100_000, resource="cpu"),
    }
    short = await backend.limits(engine.job("true", options={"qos": "short"}), place)
    assert {(c.kind, c.most, c.used) for c in short.ceilings if c.owner == "the QOS short"} == {
        ("walltime", 600, 0), ("submitted", 3, 0), ("job", 3, 0),
    }  # fmt: skip
    assert not {c.kind for c in short.ceilings if c.owner == own} & {"walltime", "submitted", "job"}, "QOS goes before"
    await backend.stop(waits[0], grace_s=0)


@pytest.mark.parametrize(
    ("given", "rule", "said"),
    [
        ({"options": {"account": "vision"}}, "PF-ENG-004", ("vision", "nlp", "root")),
        ({"options": {"account": "nope"}}, "PF-ENG-004", ("nope", "nlp", "root")),
        ({"options": {"qos": "long"}}, "PF-ENG-004", ("long",)),
        ({"timeout_s": 3_700}, "PF-ENG-003", ("3960", "nlp", "3600")),
        ({"options": {"qos": "short"}}, "PF-ENG-003", ("840", "short", "600")),
        (
            {"options": {"nodes": 2}},
            "PF-ENG-009",
            ("science", "1", "2"),
        ),
        (
            {"options": {"qos": "short", "cpus": 4}, "timeout_s": 300},
            "PF-ENG-009",
            ("short", "3", "4"),
        ),
        (
            {"options": {"cpus": 4}, "timeout_s": 3_000},
            "PF-ENG-009",
            ("nlp", "200", "216"),
        ),
        (
            {"options": {"qos": "spent"}},
            "PF-ENG-009",
            ("spent", "12", "14"),
        ),
        ({"options": {"qos": "none"}}, "PF-ENG-008", ("none",)),
    ],
)
async def test_the_gate_applies_accounting_limits_and_names_the_figure(
    ctx: Context, given: dict[str, Any], rule: str, said: tuple[str, ...]
) -> None:
    blocks = [f for f in await found(ctx, **given) if f.blocks]
    assert [f.rule for f in blocks] == [rule], blocks
    assert set(said) <= words(blocks[0]) and blocks[0].fix


async def test_a_fan_out_above_the_submit_limit_is_refused_before_submission(
    ctx: Context, accounted: Accounted
) -> None:
    plan = gridded(train(name="wide"), {"lr": [str(n) for n in range(7)]}, 0, max_machines=2)
    with pytest.raises(Refused, match="PF-ENG-008") as refused:
        await fan_out(ctx, plan)
    (block,) = [f for f in refused.value.findings if f.rule == "PF-ENG-008" and f.blocks]
    assert {"nlp", "6", "0", "7"} <= words(block)
    assert not ctx.ledger.events(kind="job.accepted") and not accounted.jobs("gw-f")
    (note,) = [f for f in await found(ctx, tasks=6) if not f.blocks and f.rule == "PF-ENG-008"]
    assert {"nlp", "2", "0"} <= words(note)
    assert {f.rule for f in await found(ctx, tasks=4, timeout_s=300, options={"qos": "short"}) if f.blocks} == {
        "PF-ENG-008"
    }, "the QOS allows three"


async def test_a_job_above_the_submit_limit_is_refused_with_one_finding(
    ctx: Context, backend: SlurmBackend, place: Place, engine: SlurmEngine
) -> None:
    quick = engine.job("true", timeout_s=300, options={"qos": "short", "partition": "closed"})
    handles = [await backend.submit(quick, place, f"w-q{n}", secrets={}) for n in range(3)]
    blocks = [f for f in await found(ctx, timeout_s=300, options={"qos": "short"}) if f.blocks]
    assert [f.rule for f in blocks] == ["PF-ENG-008"], "Slurm's own refusal has no figure, and is not said beside it"
    assert {"short", "3", "1"} <= words(blocks[0])
    for handle in handles:
        await backend.stop(handle, grace_s=0)
    assert not [f for f in await found(ctx, timeout_s=300, options={"qos": "short"}) if f.blocks]


async def test_unreachable_accounting_blocks_instead_of_lifting_limits(ctx: Context, accounted: Accounted) -> None:
    with accounted.without_accounts():
        blocks = [f for f in await found(ctx) if f.blocks]
        assert [f.rule for f in blocks] == ["PF-ENG-001"]

        assert "PF-ENG-004" in {f.rule for f in await found(ctx, options={"account": "nope"}) if f.blocks}, (
            "the controller still knows the accounts"
        )
    assert not [f for f in await found(ctx) if f.blocks]


async def test_a_job_that_has_left_the_queue_is_read_from_accounting(
    backend: SlurmBackend, place: Place, engine: SlurmEngine, accounted: Accounted
) -> None:
    done = await backend.submit(engine.job("sleep 1"), place, "w-done", secrets={})
    failed = await backend.submit(engine.job("exit 3"), place, "w-failed", secrets={})
    waits = await backend.submit(engine.job("true", options={"partition": "closed"}), place, "w-waits", secrets={})
    for handle in (done, failed):
        await ended(backend, handle)
    await backend.stop(waits, grace_s=0)
    killed = await backend.submit(engine.job("sleep 60", max_restarts=0), place, "w-killed", secrets={})
    broken = await backend.submit(engine.job("sleep 60", max_restarts=0), place, "w-broken", secrets={})
    for handle in (killed, broken):
        await until(backend, handle, lambda o: o.reason is Code.ALIVE)
    (number,) = accounted.jobs("gw-w-killed")
    accounted.run("scancel", number)
    (number,) = accounted.jobs("gw-w-broken")
    node = accounted.run("squeue", "-h", "-j", number, "-o", "%N").strip()
    accounted.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    try:
        for handle in (killed, broken):
            await ended(backend, handle)
        with engine._shimmed(GONE):
            for handle, state in (
                (done, Job.SUCCEEDED),
                (failed, Job.FAILED),
                (waits, Job.CANCELED),
                (killed, Job.CANCELED),
                (broken, Job.PREEMPTED),
            ):
                # The controller reports an end to the database with a delay.
                seen = await until(backend, handle, lambda o, s=state: o.state is s and o.allocation is not None)
                assert seen.meter is False and seen.allocation is not None
                if handle in (done, failed):
                    assert (seen.exit_code, seen.allocation.id.isdigit()) == (0 if handle is done else 3, True)
                    assert "billing=1" in seen.allocation.resources and "cpu=1" in seen.allocation.resources
                if handle is done:
                    assert seen.allocation.used_s, "what it used of its account"
    finally:
        if "down" in accounted.run("sinfo", "-h", "-n", node, "-o", "%t"):
            accounted.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
