"""Choose the next settings of a search with Optuna's ask-and-tell interface, based only on the ledger."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import count
from types import ModuleType
from typing import Any

from gpuwarden.core.errors import NotSupported
from gpuwarden.core.fan_out import FanOutPlan, Search, bounds, cells_of, drawn, grid
from gpuwarden.core.installing import install_command
from gpuwarden.core.models import Cell


def chosen(
    plan: FanOutPlan, before: Sequence[Cell], reached: Mapping[int, float | None], wanted: int
) -> tuple[Cell, ...]:
    """Return the next cells of a search. `reached` maps each ended cell to its objective, or to None if it has none.

    All other cells count as running, so that several cells can be requested at once without duplicates. Raises
    NotSupported if Optuna is not installed.
    """
    try:
        import optuna
    except ImportError as missing:
        raise NotSupported(
            "a search with Optuna requires the package optuna, which is not installed",
            f"Install it: {install_command('optuna', 'tune')}. Or use --random or --grid, which do not need it.",
        ) from missing
    search = plan.search
    assert search is not None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    kinds = optuna.distributions
    space: dict[str, Any] = {
        name: kinds.FloatDistribution(*ends, log=True) if ends else kinds.CategoricalDistribution(text.split(","))
        for name, text in search.space.items()
        for ends in [bounds(text)]
    }
    sampler = optuna.samplers.TPESampler(seed=search.seed + len(before), constant_liar=True)
    study = optuna.create_study(sampler=sampler, direction="maximize" if search.maximize else "minimize")
    for cell in before:
        study.add_trial(_trial(optuna, cell, space, reached))
    known = {cell.config for cell in before}
    found: list[Cell] = []
    while len(found) < wanted:
        asked = study.ask(space).params
        settings = {k: f"{v:.6g}" if isinstance(v, float) else str(v) for k, v in asked.items()}
        (cell,) = cells_of(plan.base, [settings], len(before) + len(found))
        if cell.config in known:  # the search must not repeat a configuration
            cell = _unused(plan, search, known, cell.index)
        known.add(cell.config)
        found.append(cell)
    return tuple(found)


def _unused(plan: FanOutPlan, search: Search, known: Container[str], index: int) -> Cell:
    """Return a cell that is not in `known`: the next combination of choices, or a random draw for ranges."""
    if any(bounds(text) for text in search.space.values()):
        settings = (each for seed in count(index) for each in drawn(search.space, 1, seed))
    else:
        settings = (each for each in grid({name: text.split(",") for name, text in search.space.items()}))
    cells = (cells_of(plan.base, [each], index)[0] for each in settings)
    return next(cell for cell in cells if cell.config not in known)


def _trial(optuna: ModuleType, cell: Cell, space: Mapping[str, Any], reached: Mapping[int, float | None]) -> Any:
    """Return a cell as an Optuna trial that is completed with its objective, failed, or running."""
    states, params = optuna.trial.TrialState, {}
    for name, distribution in space.items():
        text = cell.settings[name]
        if isinstance(distribution, optuna.distributions.FloatDistribution):
            params[name] = min(max(float(text), distribution.low), distribution.high)
        else:
            params[name] = text
    value = reached.get(cell.index)
    state = states.COMPLETE if value is not None else states.FAIL if cell.index in reached else states.RUNNING
    return optuna.trial.create_trial(state=state, value=value, params=params, distributions=dict(space))
