"""Provide an agent's interface: sealed and recorded tools, recorded messages, and a maximum number of calls.

Scripted agents and the loop that queries an endpoint use `call` and `say`. An agent that is a program connects to the
server through the proxy in `proxy.py`, which uses `sealed`; the agent's own harness writes the transcript
(`hand_over`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evals.environments.stage import Scene
from evals.scoring.surface import HERE
from evals.transcripts.canonical import FORMAT
from evals.transcripts.seals import Sealer, without_seal

RECORD = "record.jsonl"
"""The name of the proxy's record of an agent program's calls. It is kept next to the transcript for debugging."""


class LimitReached(Exception):
    """The agent has made the maximum number of calls that its case allows."""


class SceneDied(Exception):
    """The scenario failed, not the agent, so the trial's verdict is INFRA."""


class AgentDied(Exception):
    """The agent's program or the model endpoint failed, so the trial's verdict is INFRA."""


class Recorder:
    """Forwards an agent's calls to a scene and records the session in the canonical format. It is thread-safe."""

    def __init__(
        self, scene: Scene, prompt: str, key: bytes, max_calls: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.scene = scene
        self.prompt = prompt
        self.sealer = Sealer(key)
        self.max_calls = max_calls
        self.clock = clock
        self.raw = bool(getattr(scene, "raw", False))
        """True if no server is under test. The tools are then the provider's own, and their replies are not sealed."""
        self.shells = 0
        """The number of commands that the agent's shell has run."""
        self._head: dict[str, Any] = {"type": "meta", "format": FORMAT}
        self._rows: list[dict[str, Any]] = []
        self._used: dict[str, float] = {}
        self._foreign: bytes | None = None
        self._calls = 0
        self._lock, self._scene = threading.Lock(), threading.Lock()
        self.say(prompt, role="user")

    def call(self, tool: str, args: dict[str, Any]) -> dict[str, Any]:
        """Call a tool. Raises LimitReached after the maximum number of calls."""
        return without_seal(self.sealed(tool, args))

    def sealed(self, tool: str, args: dict[str, Any]) -> dict[str, Any]:
        """Make a call and seal its reply. Calls run one at a time, so that the seals are in the order of the calls."""
        with self._scene:
            id, at = self.begin(tool, args, server="cloud" if self.raw else "gpuwarden")  # noqa: A001
            try:
                reply = self.scene.call(tool, args)
            except Exception as error:
                raise SceneDied(f"{tool}: {error!r}") from error
            sealed = reply if self.raw else self.sealer.seal(tool, args, reply, at)
            self._row({"type": "result", "id": id, "ok": reply.get("ok"), "result": sealed})
            return sealed

    def begin(self, tool: str, args: Any, *, server: str = "gpuwarden") -> tuple[str, float]:
        """Record the start of a call, and return its id and its time. Raises LimitReached."""
        with self._lock:
            if self._calls >= self.max_calls:
                raise LimitReached
            self._calls += 1
            id, at = f"c{self._calls}", self.clock()  # noqa: A001
            self._rows.append({"type": "call", "id": id, "server": server, "tool": tool, "args": args, "at": at})
            return id, at

    def answered(self, id: str, text: str, *, ok: bool) -> None:  # noqa: A002
        """Record the answer to a call that failed before it reached the server or was for the harness's own tool."""
        self._row({"type": "result", "id": id, "ok": ok, "result": text})

    def shell(self, argv: list[str], typed: dict[str, str] | None = None) -> dict[str, Any]:
        """Run a command as a harness's shell tool would; with `typed`, run it at a terminal that answers prompts."""
        args = {"command": " ".join(argv[2:] if argv[1:2] == ["-m"] else argv)}
        id, _ = self.begin("Bash", args, server="")  # noqa: A001
        self.shells += 1
        try:
            reply: dict[str, Any] = self.scene.shell(argv, typed)  # type: ignore[attr-defined]
        except Exception as error:
            raise SceneDied(f"shell: {error!r}") from error
        self.answered(id, reply["output"], ok=reply["ok"])
        return reply

    def load_skill(self, name: str) -> str:
        """Read a skill with the harness's own tool, as a model would."""
        id, _ = self.begin("Skill", {"skill": name}, server="")  # noqa: A001
        text = (HERE.parent / "skills" / name / "SKILL.md").read_text("utf-8")
        self.answered(id, text, ok=True)
        return text

    def say(self, text: str, *, role: str = "assistant") -> None:
        """Record a message."""
        self._row({"type": "say", "role": role, "text": text})

    def used(self, *, model: str = "", **more: float) -> None:
        """Add these amounts to the agent's usage: `tokens`, `turns`, `usd`."""
        if model:
            self._head["model"] = model
        for name, value in more.items():
            self._used[name] = self._used.get(name, 0) + value

    def _row(self, row: dict[str, Any]) -> None:
        with self._lock:
            self._rows.append(row)

    def hand_over(self, transcript: bytes) -> None:
        """Store the transcript that the agent's harness wrote. This transcript is scored instead of the recorder's."""
        self._foreign = transcript

    def write(self, path: Path, ended: str, why: str = "") -> None:
        """Close the transcript and write it."""
        # A scripted agent uses no model. For other agents, the endpoint reported the figures.
        used = self._used if "model" in self._head else {"tokens": 0, "usd": 0.0, "turns": self._calls + 1}
        end = {"type": "end", "ended": ended, **({"why": why} if why else {}), **used}
        own = "".join(json.dumps(row) + "\n" for row in (self._head, *self._rows, end))
        if self._foreign is None:
            path.write_text(own, "utf-8")
        else:
            path.write_bytes(self._foreign)
            path.with_name(RECORD).write_text(own, "utf-8")
