"""Compare a fan-out's plan with its queues and their copies, to find each cell's state and the cells to launch.

All functions in this module are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpuwarden.core.models import Cell


class CellState(StrEnum):
    """The known state of a cell. Only `verified` counts as success."""

    WAITING = "waiting"
    RUNNING = "running"
    VERIFIED = "verified"
    UNPROVEN = "unproven"
    FAILED = "failed"
    SKIPPED = "skipped"
    MISSING = "missing"
    GIVEN_UP = "given_up"


class Outcome(StrEnum):
    """The outcome of one cell, according to the copy of its queue's outputs."""

    PROVEN = "proven"
    UNPROVEN = "unproven"
    FAILED = "failed"


@dataclass(frozen=True)
class QueueState:
    """One launched queue. `ended`: its job has ended. `collected`: its outputs have since been copied and examined."""

    job: str
    cells: tuple[int, ...]
    ended: bool
    succeeded: bool = False
    collected: bool = False


@dataclass(frozen=True)
class CellFolder:
    """One cell's folder in the copy of a queue. `config` is the configuration digest that the folder contains."""

    job: str
    index: int
    config: str
    outcome: Outcome


@dataclass(frozen=True)
class Reconciled:
    """The result of comparing a plan with its queues and their copies.

    `states` and `tries` contain every cell in the plan. `duplicates` lists cells that completed more than once.
    `strangers` lists folders (job and index) whose cell is not in that job's queue or has another configuration.
    `launchable` lists the cells that a machine may run now.
    """

    states: dict[int, CellState]
    tries: dict[int, int]
    duplicates: tuple[int, ...]
    strangers: tuple[tuple[str, int], ...]
    launchable: tuple[int, ...]

    def count(self, *states: CellState) -> int:
        """Return the number of cells in one of these states."""
        return sum(state in states for state in self.states.values())

    @property
    def open(self) -> bool:
        """Return whether any cell can be launched or is running."""
        return bool(self.launchable) or self.count(CellState.RUNNING) > 0


def reconcile(
    cells: Sequence[Cell],
    queues: Sequence[QueueState],
    folders: Sequence[CellFolder],
    max_tries: int,
    resumed: Mapping[int, int] | None = None,
) -> Reconciled:
    """Compare a plan with the launched queues and the contents of their copies.

    A cell is launchable if it has not completed, no open queue may still run it, and it has tries left. Until the copy
    of a queue has been examined, the queue's cells are not launchable, because the copy may contain them. `resumed`
    maps each cell that was given more tries to the number of queues at that time. For those queues, only proven results
    count.
    """
    before = resumed or {}
    configs = {cell.index: cell.config for cell in cells}
    given = {(queue.job, index) for queue in queues for index in queue.cells}
    fits = [s for s in folders if configs.get(s.index) == s.config and (s.job, s.index) in given]
    strangers = sorted({(s.job, s.index) for s in folders} - {(s.job, s.index) for s in fits})
    seen = {(s.job, s.index): s.outcome for s in fits}
    of: dict[int, list[QueueState]] = {index: [] for index in configs}
    for number, queue in enumerate(queues):
        for index in queue.cells:
            if number >= before.get(index, 0) or seen.get((queue.job, index)) is Outcome.PROVEN:
                of.setdefault(index, []).append(queue)
    states = {index: _state(index, of[index], seen, max_tries) for index in configs}
    ran = {(queue.job, index) for index, mine in of.items() for queue in mine}
    ended = Counter(index for (job, index), how in seen.items() if how is not Outcome.FAILED and (job, index) in ran)
    again = {CellState.WAITING, CellState.FAILED, CellState.SKIPPED, CellState.MISSING}
    return Reconciled(
        states,
        {index: len(of[index]) for index in configs},
        tuple(sorted(index for index, count in ended.items() if count > 1)),
        tuple(strangers),
        tuple(index for index, state in states.items() if state in again),
    )


def _state(
    index: int, queues: Sequence[QueueState], seen: Mapping[tuple[str, int], Outcome], max_tries: int
) -> CellState:
    """Return the state of one cell from its queues, oldest first."""
    outcomes = [seen.get((queue.job, index)) for queue in queues]
    if Outcome.PROVEN in outcomes:
        return CellState.VERIFIED
    if not queues:
        return CellState.WAITING
    if any(not (queue.ended and queue.collected) for queue in queues):
        return CellState.RUNNING
    if Outcome.UNPROVEN in outcomes:
        return CellState.UNPROVEN
    if len(queues) >= max_tries:
        return CellState.GIVEN_UP
    last, outcome = queues[-1], outcomes[-1]
    if outcome is Outcome.FAILED:
        return CellState.FAILED
    return CellState.SKIPPED if last.succeeded else CellState.MISSING
