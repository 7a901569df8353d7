"""What the tests of real agents share: a scene with the real server in it, a small case, and runs of one trial."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from evals import runner
from evals.cases import Case, Check, load_cases
from evals.runner import Play, new_run
from evals.stage import OpenScene
from evals.trials import Trial, read_run, score_run
from evals.wire import Client
from evals.worlds import World, load_worlds

from doors import environment

WORLDS = load_worlds()
ASKED = Check("ASKED", "calls", {"call": {"tool": "list_instances", "ok": True}, "min": 1}, False, False, "")
CASE = replace(
    load_cases()["over-cap"],
    id="plumbing",
    prompt="Which machines are billing? The word is {word}.",
    checks=(ASKED,),
    limits={"tool_calls": 8},
)
KEY = "sk-test-0123456789abcdef0123"


class RealServer:
    """A scene whose server is the real one, over a home of its own in which nothing is rented."""

    def __init__(self, world: World, seed: int, folder: Path) -> None:
        self.home = folder / "home"
        self.facts = {"word": f"w{seed}"}
        self.client: Client | None = None
        self.calls: list[str] = []

    def call(self, tool: str, args: dict[str, Any]) -> dict[str, Any]:
        if self.client is None:
            self.client = Client(*self.server()).__enter__()
        self.calls.append(tool)
        result = self.client.request("tools/call", {"name": tool, "arguments": args})
        found: dict[str, Any] = json.loads(result["content"][0]["text"])
        return found

    def server(self) -> tuple[list[str], dict[str, str]]:
        return [sys.executable, "-m", "gpuwarden", "mcp"], environment(self.home, HF_HUB_OFFLINE="1")

    def end(self) -> dict[str, Any]:
        return {"views": {"jobs": [], "leases": []}, "facts": self.facts}

    def close(self) -> None:
        if self.client is not None:
            self.client.close()


def play_once(folder: Path, play: Play, *, case: Case = CASE, open_scene: OpenScene = RealServer) -> Trial:
    """One trial of one case, played, written and scored as a run is."""
    head = new_run(folder, "test", "none", [case.id], 1, "p")
    runner.run(head, play, open_scene, {case.id: case}, WORLDS)
    (trial,) = score_run(read_run(folder), {case.id: case})
    return trial
