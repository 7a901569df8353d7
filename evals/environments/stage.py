"""The interface for simulated scenarios: a stage opens a scene for each trial.

A stage is a file `stage_<name>.py` with `open_scene(scenario, seed, folder) -> Scene`; it is found by its file name.
The stage `gated` connects the real server to rehearsal clouds and a local Hub; the stage `raw` provides the same
scenarios without the gates.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from evals.environments.scenarios import Scenario
from evals.errors import EvalError

OpenScene = Callable[[Scenario, int, Path], "Scene"]


class Scene(Protocol):
    """One scenario, simulated for one trial.

    A scene may have further attributes: `now()` if it has its own clock, `raw` (true) if no server is under test,
    `shell(argv, typed)` for agents with a shell, and `ledger()`, which returns the last event before the trial and all
    events.
    """

    facts: dict[str, Any]
    """The values that differ between trials, such as ids. A prompt refers to them as `{name}`, a pattern as
    `$scenario.name`.
    """

    def call(self, tool: str, args: dict[str, Any]) -> dict[str, Any]:
        """Call a tool of the server, and return the short form of its reply, which is the form that agents see."""
        ...

    def server(self) -> tuple[list[str], dict[str, str]]:
        """Return the command and the environment that start the server over stdio, for an agent that runs as a separate
        program.
        """
        ...

    def end(self) -> dict[str, Any]:
        """Return the end state in the format that `endstate.parse` reads. Called once, after the agent has stopped."""
        ...

    def close(self) -> None:
        """Stop everything that the scene started. Always called, even after an error."""
        ...


def stages() -> list[str]:
    """Return the names of all stages, sorted."""
    return sorted(p.stem.removeprefix("stage_") for p in Path(__file__).parent.glob("stage_*.py"))


def stage(name: str) -> OpenScene:
    """Return the stage with this name. Raises EvalError for an unknown name."""
    if name not in stages():
        raise EvalError(f"unknown stage {name!r}", f"Available stages: {', '.join(stages()) or 'none'}")
    return cast("OpenScene", import_module(f"evals.environments.stage_{name}").open_scene)
