"""Adaptive searches with Optuna's ask and tell: the study is rebuilt from the ledger every time."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from pydantic import ValidationError

from gpuwarden.core.errors import NotSupported
from gpuwarden.core.fan_out import FanOutPlan, Search
from gpuwarden.core.guidance import manual_text
from gpuwarden.core.installing import install_command
from gpuwarden.core.models import Cell, JobSpec
from gpuwarden.lifecycle.fan_out.search import chosen
from real_parts import need
from wording import Wording

BASE = JobSpec(name="tune", platform="local", script="pass", outputs=("out",), timeout_s=60)


def _plan(space: dict[str, str], trials: int = 20, **given: bool) -> FanOutPlan:
    return FanOutPlan(base=BASE, search=Search(space=space, trials=trials, **given))


def _run(plan: FanOutPlan, batch: int) -> tuple[list[Cell], dict[int, float | None]]:
    """Ask for cells in batches until all are chosen. Cell 3 fails; the best learning rate is 0.01."""
    cells: list[Cell] = []
    reached: dict[int, float | None] = {}
    while len(cells) < plan.size:
        cells += chosen(plan, cells, reached, min(batch, plan.size - len(cells)))
        for cell in cells:
            lr = float(cell.settings["lr"])
            reached[cell.index] = None if cell.index == 3 else abs(lr - 0.01) + (cell.settings["opt"] == "sgd")
    return cells, reached


@pytest.mark.slow
def test_a_search_improves_is_reproducible_and_never_repeats_a_cell() -> None:
    need("optuna", importlib.util.find_spec("optuna") is not None)
    plan = _plan({"lr": "1e-5..1e0", "opt": "adam,sgd"}, 40)
    cells, reached = _run(plan, 4)
    assert [cell.index for cell in cells] == list(range(40)) and len({cell.config for cell in cells}) == 40
    late = [value for index, value in reached.items() if index >= 20 and value is not None]
    early = [value for index, value in reached.items() if index < 20 and value is not None]
    assert sorted(late)[len(late) // 2] < sorted(early)[len(early) // 2]
    assert _run(plan, 4)[0] == cells  # another process, from the same ledger
    upwards = _plan({"lr": "1e-5..1e0", "opt": "adam,sgd"}, 40, maximize=True)
    assert _run(upwards, 4)[0] != cells


@pytest.mark.slow
def test_choices_are_used_up_without_a_collision(wording: Wording) -> None:
    need("optuna", importlib.util.find_spec("optuna") is not None)
    plan = _plan({"lr": "0.1,0.2,0.3", "opt": "adam,sgd"}, 6)
    cells, _ = _run(plan, 2)
    assert len({tuple(cell.settings.values()) for cell in cells}) == 6
    with pytest.raises(ValidationError) as refused:
        _plan({"lr": "0.1,0.2,0.3", "opt": "adam,sgd"}, 7)
    wording(refused.value.errors()[0]["ctx"]["error"])


def test_a_missing_optuna_names_its_install_command(monkeypatch: pytest.MonkeyPatch, wording: Wording) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(NotSupported) as missing:
        chosen(_plan({"lr": "1e-5..1e0"}), (), {}, 1)
    wording(missing)
    assert install_command("optuna", "tune") in manual_text(missing.value.next_steps)
