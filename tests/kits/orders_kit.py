"""Machines that end by a standing order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from gpuwarden.core.policy import Ending
from gpuwarden.lifecycle.monitoring.watch import Watcher
from pretend_machines import Processes
from teardown_kit import House

MINUTE = 60.0


class Ordered(House):
    """A house under a policy with a standing order, watched by one watch."""

    def __init__(self, home: Path, processes: Processes, order: str = "terminate", **ending: object) -> None:
        super().__init__(home, processes)
        self.ctx.policy = self.ctx.policy.model_copy(
            update={"ending": Ending.model_validate({"when_proven": order, **ending})}
        )
        self.watcher = Watcher(self.ctx)

    async def watched(self, minutes: float, step_s: float = 60.0) -> list[str]:
        """Let the watch look every `step_s` seconds for so long; the kinds of the alerts that it raised."""
        raised_kinds: list[str] = []
        for _ in range(int(minutes * MINUTE / step_s)):
            self.clock.advance(step_s)
            raised_kinds += [a.kind for a in (await self.watcher.round()).news if a.raised]
        return raised_kinds

    def bills(self) -> bool:
        return any(truth.meter for truth in self.cloud.truths().values())


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes()
    names = ("of", "terminate", "kill", "held")
    patches = [patch(f"gpuwarden.rehearsal.processes.{name}", getattr(made, name)) for name in names]
    for each in patches:
        each.start()
    yield made
    for each in patches:
        each.stop()


@pytest.fixture
def ending_house(tmp_path: Path, processes: Processes) -> Ordered:
    return Ordered(tmp_path / "home", processes)
