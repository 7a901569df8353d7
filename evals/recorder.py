"""What a scripted agent holds in its hands: tools that are sealed and recorded, words that are recorded, a limit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evals.canonical import FORMAT
from evals.seals import Sealer
from evals.stage import Scene
from evals.surface import HERE


class LimitReached(Exception):
    """The agent has made all the calls that its case allows."""


class SceneDied(Exception):
    """The world broke, not the agent: the trial is INFRA."""


class Recorder:
    """Stands between an agent and a scene, and writes down in our own form what passes."""

    def __init__(
        self, scene: Scene, prompt: str, key: bytes, max_calls: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.scene = scene
        self.sealer = Sealer(key)
        self.max_calls = max_calls
        self.clock = clock
        self.raw = bool(getattr(scene, "raw", False))
        """Whether there is no server under test: tools are then the provider's own, and nothing is sealed."""
        self.shells = 0
        """How many commands the agent's shell has run."""
        self._rows: list[dict[str, Any]] = [{"type": "meta", "format": FORMAT}]
        self._calls = 0
        self.say(prompt, role="user")

    def call(self, tool: str, args: dict[str, Any]) -> dict[str, Any]:
        """Call a tool. Raises LimitReached before the call that would be one too many."""
        if self._calls >= self.max_calls:
            raise LimitReached
        self._calls += 1
        id, at = f"c{self._calls}", self.clock()  # noqa: A001
        server = "cloud" if self.raw else "gpuwarden"
        self._rows.append({"type": "call", "id": id, "server": server, "tool": tool, "args": args, "at": at})
        try:
            reply = self.scene.call(tool, args)
        except Exception as error:
            raise SceneDied(f"{tool}: {error!r}") from error
        sealed = reply if self.raw else self.sealer.seal(tool, args, reply, at)
        self._rows.append({"type": "result", "id": id, "ok": reply.get("ok"), "result": sealed})
        return reply

    def shell(self, argv: list[str], typed: dict[str, str] | None = None) -> dict[str, Any]:
        """Run a command, as a harness's own shell tool does; with `typed` at a terminal, where it answers prompts."""
        if self._calls >= self.max_calls:
            raise LimitReached
        self._calls += 1
        self.shells += 1
        id = f"c{self._calls}"  # noqa: A001
        args = {"command": " ".join(argv[2:] if argv[1:2] == ["-m"] else argv)}
        self._rows.append({"type": "call", "id": id, "server": "", "tool": "Bash", "args": args, "at": self.clock()})
        try:
            reply: dict[str, Any] = self.scene.shell(argv, typed)  # type: ignore[attr-defined]
        except Exception as error:
            raise SceneDied(f"shell: {error!r}") from error
        self._rows.append({"type": "result", "id": id, "ok": reply["ok"], "result": reply["output"]})
        return reply

    def load_skill(self, name: str) -> str:
        """Read a skill, as a harness does when a model asks for it: its own tool, not the server's."""
        self._calls += 1
        id, text = f"c{self._calls}", (HERE.parent / "skills" / name / "SKILL.md").read_text("utf-8")  # noqa: A001
        row = {"type": "call", "id": id, "server": "", "tool": "Skill", "args": {"skill": name}, "at": self.clock()}
        self._rows += [row, {"type": "result", "id": id, "ok": True, "result": text}]
        return text

    def say(self, text: str, *, role: str = "assistant") -> None:
        """Say something."""
        self._rows.append({"type": "say", "role": role, "text": text})

    def write(self, path: Path, ended: str, why: str = "") -> None:
        """Close the transcript and write it."""
        used = {"tokens": 0, "usd": 0.0, "turns": self._calls + 1}  # no model was asked
        end = {"type": "end", "ended": ended, **used, **({"why": why} if why else {})}
        path.write_text("".join(json.dumps(row) + "\n" for row in (*self._rows, end)), "utf-8")
