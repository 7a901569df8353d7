"""Machines that are ended by automatic teardown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final
from unittest.mock import patch

import pytest

from gpuwarden.core.policy import TeardownPolicy, Watch
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.notify import ENDING_SOON, Alert
from pretend_machines import Processes
from teardown_kit import House

MINUTE = 60.0


class Phone:
    """A channel that delivers alerts to the user, unless it is `down`."""

    def __init__(self) -> None:
        self.down = False
        self.taken: list[Alert] = []
        self.at: list[float] = []

    async def take(self, ctx: Context, alert: Alert) -> str | None:
        if self.down:
            return "no answer"
        self.taken.append(alert)
        self.at.append(ctx.clock.now())
        return None

    def notices(self) -> list[float]:
        """Return the times of the automatic teardown notices."""
        return [at for alert, at in zip(self.taken, self.at, strict=True) if alert.kind == ENDING_SOON]


CALLED: Final = Watch(desktop=("call",))
"""The setting that makes alerts reach the phone."""


class Ordered(House):
    """A `House` with a watch, whose policy has automatic teardown."""

    def __init__(self, home: Path, processes: Processes, order: str = "terminate", **ending: object) -> None:
        super().__init__(home, processes)
        self.ctx.policy = self.ctx.policy.model_copy(
            update={"teardown": TeardownPolicy.model_validate({"automatic": order, **ending})}
        )
        self.watcher = Watcher(self.ctx)

    async def watched(self, minutes: float, step_s: float = 60.0) -> list[str]:
        """Run the watch every `step_s` seconds for `minutes`; return the kinds of the alerts that it raised."""
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
def phone() -> Iterator[Phone]:
    """Replace the `desktop` channel that `CALLED` uses."""
    made = Phone()
    with patch("gpuwarden.lifecycle.notify._desktop", made.take):
        yield made


@pytest.fixture
def ending_house(tmp_path: Path, processes: Processes) -> Ordered:
    return Ordered(tmp_path / "home", processes)
