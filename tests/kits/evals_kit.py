"""Fixtures for the tests with real agents: a scene with the real server, a small case, and single-trial runs."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from evals.environments.scenarios import Scenario
from evals.environments.stage import OpenScene
from evals.harness import runner
from evals.harness.mcp_client import McpClient
from evals.harness.runner import Play, new_run
from evals.scoring.cases import Case, load_cases
from evals.scoring.checks import Check
from evals.scoring.trials import Trial, read_run, score_run

from doors import environment

HOME = Path(tempfile.mkdtemp(prefix="gpuwarden-evals-"))
ASKED = Check("ASKED", "calls", {"call": {"tool": "list_instances", "ok": True}, "min": 1}, False, False, "")
_OVER_CAP = load_cases()["over-cap"]
CASE = replace(
    _OVER_CAP,
    id="plumbing",
    prompt="Which machines are billing? The word is {word}.",
    checks=(ASKED,),
    scenario=replace(_OVER_CAP.scenario, hidden="the agent must not read this"),
    limits={"tool_calls": 8},
)
KEY = "sk-test-0123456789abcdef0123"


class RealServer:
    """A scene with the real server and a home without rented machines.

    All scenes share the server that receives the calls, because only the layers in front of it are under test.
    """

    shared: ClassVar[list[McpClient]] = []

    def __init__(self, scenario: Scenario, seed: int, folder: Path) -> None:
        self.facts = {"word": f"w{seed}"}
        self.calls: list[str] = []

    def call(self, tool: str, args: dict[str, Any]) -> dict[str, Any]:
        if not self.shared:
            self.shared.append(McpClient(*self.server(), HOME))
        self.calls.append(tool)
        return self.shared[0].call(tool, args)

    def server(self) -> tuple[list[str], dict[str, str]]:
        return [sys.executable, "-m", "gpuwarden", "mcp"], environment(HOME / "home", HF_HUB_OFFLINE="1")

    def end(self) -> dict[str, Any]:
        return {"views": {"jobs": [], "leases": []}, "facts": self.facts}

    def close(self) -> None:
        pass


@atexit.register
def _close() -> None:
    for client in RealServer.shared:
        client.close()
    shutil.rmtree(HOME, ignore_errors=True)


def play_once(folder: Path, play: Play, *, case: Case = CASE, open_scene: OpenScene = RealServer) -> Trial:
    """Run, write, and score one trial of one case, as a full run does."""
    head = new_run(folder, "test", "none", [case.id], 1, "p")
    runner.run(head, play, open_scene, {case.id: case})
    (trial,) = score_run(read_run(folder), {case.id: case})
    return trial
