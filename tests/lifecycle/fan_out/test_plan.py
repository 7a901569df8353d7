"""Fan-out plans: no cell collides, gets lost or runs twice, whatever its queue leaves behind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gpuwarden.core.cell_states import CellFolder, CellState, Outcome, QueueState, reconcile
from gpuwarden.core.errors import BadRequest
from gpuwarden.core.fan_out import FanOutPlan, Search, cells_of, drawn, grid, pack, queue_spec, representatives, weight
from gpuwarden.core.models import Cell, JobSpec
from gpuwarden.interfaces.cli.fan_out import _indices
from wording import Wording

BASE = JobSpec(platform="local", script="print(1)", outputs=("out",), timeout_s=600)
COUNT = 6
CELLS = cells_of(BASE, grid({"lr": ["1e-5", "3e-5"]}, seeds=3))
TRIES = 3


def test_a_grid_has_every_combination_once_with_every_seed() -> None:
    found = grid({"lr": ["1e-5", "3e-5"], "model": ["a", "b"]}, seeds=5)
    assert len(found) == 20 == len({tuple(s.items()) for s in found})
    assert found[0] == {"lr": "1e-5", "model": "a", "seed": "0"} and found[-1]["seed"] == "4"


@pytest.mark.parametrize(
    ("axes", "seeds"),
    [
        pytest.param({"lr": ["1", "1"]}, 0, id="twice"),
        pytest.param({"lr": []}, 0, id="no value"),
        pytest.param({"lr": ["1", ""]}, 0, id="empty"),
        pytest.param({"seed": ["1"]}, 3, id="seed"),
        pytest.param({"a": [str(n) for n in range(40)], "b": [str(n) for n in range(40)]}, 0, id="too many"),
    ],
)
def test_a_grid_with_duplicate_empty_or_too_many_values_is_refused(
    axes: dict[str, list[str]], seeds: int, wording: Wording
) -> None:
    with pytest.raises(ValueError, match=r"seed|lr|1,600") as refused:
        grid(axes, seeds)
    wording(refused)


def test_duplicate_forged_or_misnumbered_cells_are_refused(wording: Wording) -> None:
    twin = cells_of(BASE, [{"lr": "1"}, {"lr": "1"}])
    with pytest.raises(ValidationError) as refused:
        FanOutPlan(base=BASE, cells=twin)
    wording(refused.value.errors()[0]["ctx"]["error"])
    forged = (Cell(index=0, settings={"lr": "1"}, config=twin[0].config[:-1] + "x"),)
    with pytest.raises(ValidationError) as refused:
        FanOutPlan(base=BASE, cells=forged)
    wording(refused.value.errors()[0]["ctx"]["error"])
    with pytest.raises(ValidationError) as refused:
        FanOutPlan(base=BASE, cells=cells_of(BASE, [{"lr": "1"}], first=1))
    wording(refused.value.errors()[0]["ctx"]["error"])
    with pytest.raises(ValidationError) as refused:
        FanOutPlan(base=BASE)
    wording(refused.value.errors()[0]["ctx"]["error"])
    assert FanOutPlan(base=BASE, search=Search(space={"lr": "1e-6..1e-3"}, trials=7)).size == 7


def test_a_setting_never_becomes_another_argument() -> None:
    with pytest.raises(ValidationError):
        cells_of(BASE, [{"--lr": "1"}])
    assert cells_of(BASE, [{"lr": "-1 --x"}])[0].args == ("--lr=-1 --x",)


def test_random_settings_are_reproducible_and_distinct(wording: Wording) -> None:
    space = {"lr": "1e-6..1e-3", "rank": "8,16"}
    assert drawn(space, 20, 1) == drawn(space, 20, 1) != drawn(space, 20, 2)
    assert all(1e-6 <= float(s["lr"]) <= 1e-3 and s["rank"] in {"8", "16"} for s in drawn(space, 20, 1))
    with pytest.raises(ValueError, match="3") as refused:
        drawn({"rank": "8,16"}, 3, 0)
    wording(refused)
    with pytest.raises(ValueError, match=r"3\.\.1") as refused:
        drawn({"lr": "3..1"}, 1, 0)
    wording(refused)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 8))
def test_packing_keeps_every_cell_within_the_greedy_bound(costs: list[int], machines: int) -> None:
    cells = cells_of(BASE, [{"n": str(n), "epochs": str(cost)} for n, cost in enumerate(costs)])
    queues = pack(cells, machines, "epochs")
    assert sorted(c.index for q in queues for c in q) == list(range(len(costs)))
    assert 1 <= len(queues) <= machines and all(queues)
    heaviest = max(sum(weight(c, "epochs") for c in q) for q in queues)
    assert heaviest <= sum(costs) / machines + max(costs)  # the greedy rule's bound


def test_a_weight_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="epochs"):
        pack(CELLS, 2, "epochs")


def test_a_queue_has_time_for_each_of_its_turns() -> None:
    plan = FanOutPlan(base=BASE.model_copy(update={"gpu_count": 2}), cells=CELLS)
    spec = queue_spec(plan, CELLS[:5], "q")
    assert (spec.timeout_s, spec.outputs, spec.cell_timeout_s) == (3 * 600 + 300, ("cells",), 600)
    assert JobSpec.model_validate_json(spec.model_dump_json()).digest == spec.digest


def test_one_cell_stands_for_all_that_differ_in_numbers_only() -> None:
    cells = cells_of(BASE, grid({"model": ["a", "b"], "lr": ["1", "2"]}, seeds=3))
    assert [c.settings["model"] for c in representatives(FanOutPlan(base=BASE, cells=cells))] == ["a", "b"]


def test_a_plain_job_omits_the_cell_fields_from_its_digest() -> None:
    assert "cells" not in BASE.model_dump() and "cell_timeout_s" not in BASE.model_dump()


# -------------------------------------------------------------------------------------------------- reconciliation

queue = st.builds(
    lambda cells, ended, succeeded, collected: (tuple(sorted(cells)), ended, ended and succeeded, collected),
    st.sets(st.integers(0, COUNT + 1), min_size=1),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
sighting = st.tuples(
    st.integers(0, 5), st.integers(0, COUNT + 1), st.sampled_from(["own", "other"]), st.sampled_from(list(Outcome))
)


@given(st.lists(queue, max_size=6), st.lists(sighting, max_size=12))
def test_reconciling_never_loses_or_wrongly_relaunches_a_cell(
    queues: list[tuple[tuple[int, ...], bool, bool, bool]], folders: list[tuple[int, int, str, Outcome]]
) -> None:
    launched = [QueueState(f"j{n}", *each) for n, each in enumerate(queues)]
    digests = {cell.index: cell.config for cell in CELLS}
    seen = [CellFolder(f"j{n}", i, digests.get(i, "?") if whose == "own" else "!", o) for n, i, whose, o in folders]
    found = reconcile(CELLS, launched, seen, TRIES)
    assert set(found.states) == set(range(COUNT))  # no cell is lost or invented
    assert sum(found.count(state) for state in CellState) == COUNT
    for index in found.launchable:
        mine = [q for q in launched if index in q.cells]
        assert len(mine) < TRIES and all(q.ended and q.collected for q in mine)
    for index, state in found.states.items():
        proofs = [s for s in seen if (s.index, s.config) == (index, digests[index]) and s.outcome is Outcome.PROVEN]
        if state is CellState.VERIFIED:
            assert proofs and index not in found.launchable
    for job, index in found.strangers:
        asked = {(q.job, i) for q in launched for i in q.cells}
        here = [s for s in seen if (s.job, s.index) == (job, index)]
        assert here and ((job, index) not in asked or any(s.config != digests.get(index) for s in here))


def _seen(job: str, index: int, outcome: Outcome, config: str = "") -> CellFolder:
    return CellFolder(job, index, config or CELLS[index].config, outcome)


def test_missing_duplicate_skipped_and_strange_cells_are_classified() -> None:
    queues = [
        QueueState("a", (0, 1, 2), ended=True, succeeded=True, collected=True),
        QueueState("b", (3, 0), ended=True, succeeded=False, collected=True),
    ]
    seen = [
        _seen("a", 0, Outcome.PROVEN),
        _seen("b", 0, Outcome.PROVEN),
        _seen("a", 1, Outcome.PROVEN, "sha256:other"),
        _seen("a", 2, Outcome.FAILED),
    ]
    found = reconcile(CELLS, queues, seen, TRIES)
    assert found.states == {
        0: CellState.VERIFIED,
        1: CellState.SKIPPED,  # the queue reports it as done, but the folder is for another cell
        2: CellState.FAILED,
        3: CellState.MISSING,
        4: CellState.WAITING,
        5: CellState.WAITING,
    }
    assert found.duplicates == (0,) and found.strangers == (("a", 1),) and found.launchable == (1, 2, 3, 4, 5)


def test_a_cell_out_of_tries_is_given_up_and_an_unproven_cell_is_not_rerun() -> None:
    dead = [QueueState(name, (0,), ended=True, collected=True) for name in "abc"]
    assert reconcile(CELLS[:1], dead[:2], [], TRIES).launchable == (0,)
    assert reconcile(CELLS[:1], dead, [], TRIES).states[0] is CellState.GIVEN_UP
    doubt = reconcile(CELLS[:1], dead[:1], [_seen("a", 0, Outcome.UNPROVEN)], TRIES)
    assert doubt.states[0] is CellState.UNPROVEN and not doubt.open


def test_a_resumed_cell_gets_new_tries_and_a_proven_cell_stays_verified() -> None:
    cells = cells_of(BASE, grid({"lr": ["1", "2"]}))
    queues = [QueueState(f"j{n}", (0, 1), ended=True, collected=True) for n in range(2)]
    seen = [
        CellFolder("j0", 0, cells[0].config, Outcome.PROVEN),
        CellFolder("j1", 1, cells[1].config, Outcome.UNPROVEN),
    ]
    now = reconcile(cells, queues, seen, 2)
    assert now.states == {0: CellState.VERIFIED, 1: CellState.UNPROVEN} and now.launchable == ()
    again = reconcile(cells, queues, seen, 2, {0: 2, 1: 2})
    assert again.states == {0: CellState.VERIFIED, 1: CellState.WAITING} and again.launchable == (1,)
    queues.append(QueueState("j2", (1,), ended=True, collected=True))
    proven = [*seen, CellFolder("j2", 1, cells[1].config, Outcome.PROVEN)]
    assert reconcile(cells, queues, proven, 2, {1: 2}).duplicates == ()
    assert reconcile(cells, queues, proven, 3).duplicates == (1,)  # without the request, it is a duplicate


@pytest.mark.parametrize(("text", "found"), [("", []), ("3", [3]), ("0,3,7-9", [0, 3, 7, 8, 9])])
def test_cells_are_named_by_index_and_range(text: str, found: list[int]) -> None:
    assert _indices(text) == found


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1-2-3", "12345", "1,x"])
def test_an_invalid_index_is_refused(text: str, wording: Wording) -> None:
    with pytest.raises(BadRequest) as refused:
        _indices(text)
    wording(refused)
