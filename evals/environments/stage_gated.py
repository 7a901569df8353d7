"""Define the gated stage: the real server over stdio, in front of a scenario's rehearsal clouds and Hub.

The scenario's earlier jobs went through the same server (`seeding.py`) before the agent starts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evals.environments import night, simulated_user
from evals.environments.metering import Meter, Work
from evals.environments.scenario_home import GPUWARDEN, TURN_S, Home
from evals.environments.scenarios import Scenario
from evals.environments.seeding import Seeder, working_folders
from evals.harness.mcp_client import McpClient

_OVER = frozenset({"succeeded", "failed", "canceled", "refused", "preempted"})
_LOST = {"ok": False, "code": "unreachable", "message": "no reply: the connection was lost", "hint": "", "retry": True}


class GatedScene:
    """One scenario with the gates enabled."""

    def __init__(self, scenario: Scenario, seed: int, folder: Path) -> None:
        self.facts: dict[str, Any] = {}
        self._home = Home(scenario, folder)
        self._meter = Meter(self._home)
        self._lose = str(scenario.knobs.get("lose", ""))
        self._cut = bool(scenario.knobs.get("cut"))
        try:
            self._client = McpClient([*GPUWARDEN, "mcp"], self._home.env, self._home.project)
        except BaseException:
            self._home.close()
            raise
        try:
            past = Seeder(self._home, self._meter, self._client, self.facts)
            for job in scenario.jobs:
                past.happen(job)
            self._meter.add_foreign_machine()
            if not scenario.jobs:
                self.facts.setdefault("base", "j0000000000")
            self._look()
            self._seeded = max((e["seq"] for e in self._home.order("ledger")), default=0)
            self._left: int | None = None  # set at the end: the last event before the night
        except BaseException:
            self.close()
            raise

    def now(self) -> float:
        """Return the scenario's time."""
        return self._home.now()

    def call(self, tool: str, args: dict[str, Any]) -> dict[str, Any]:
        """Advance the simulated clock by one turn, then call a tool."""
        self._home.pass_time(TURN_S)
        launches = tool == "submit_job" and "receipt" in args
        if launches and self._lose == "request":
            self._lose = ""
            return dict(_LOST)
        if tool == "pull_artifacts" and self._cut:
            self._cut = False
            reply = self._interrupted(args)
        else:
            reply = self._client.call(tool, args)
        self._look()
        if launches and self._lose == "reply":
            self._lose = ""
            return dict(_LOST)
        return reply

    def shell(self, argv: list[str], typed: dict[str, str] | None = None) -> dict[str, Any]:
        """Run a command for an agent with a shell. With `typed`, the command runs on a pseudo-terminal, and prompts are
        answered.
        """
        self._home.pass_time(TURN_S)
        code, shown = simulated_user.run(argv, self._home.env, self._home.project, typed)
        self._look()
        return {"ok": code == 0, "exit_code": code, "output": shown[-2000:]}

    def server(self) -> tuple[list[str], dict[str, str]]:
        """Return the command that starts the server for this scenario, for an agent that is a separate program."""
        return [*GPUWARDEN, "mcp"], dict(self._home.env)

    def ledger(self) -> tuple[int, list[dict[str, Any]]]:
        """Return the last event before the agent started, and all events up to the agent's last message."""
        events = self._home.order("ledger")
        return self._seeded, events if self._left is None else [e for e in events if e["seq"] <= self._left]

    def end(self) -> dict[str, Any]:
        """Return the end state, several hours after the agent stopped."""
        self._look()
        if self._home.night_s:
            self._client.close()  # the agent's client and server are closed during the night
            self._left = self._home.order("ledger")[-1]["seq"]
            night.pass_night(self._home)
        else:
            self._home.pass_time(self._home.horizon_s)
        events: list[dict[str, Any]] = self._home.order("ledger")
        rows: dict[str, dict[str, Any]] = {}
        for event in events:
            prefix, _, id = event["subject"].partition("/")  # noqa: A001
            if prefix != "teardown" or event["state"] is None:
                continue
            row = rows.setdefault(id, {"request": id, "job": "", "verb": "", "state": ""})
            row |= {k: event["body"][k] for k in ("job", "verb") if k in event["body"]}
            row["state"] = event["state"]
        views = self._meter.views(_works(events, self._home.cloud_instances()), list(rows.values()))
        return {"views": views, "facts": self.facts}

    def close(self) -> None:
        """Stop the server, the machines' processes and the scenario's console."""
        try:
            self._client.close()
        finally:
            self._home.close()

    # ------------------------------------------------------------------------------------------------------ inside

    def _look(self) -> None:
        self._meter.record_saved(working_folders(self._home))

    def _interrupted(self, args: dict[str, Any]) -> dict[str, Any]:
        """Pull artifacts, and interrupt the connection after the first bytes of a large file have arrived.

        To interrupt it, kill the program that reads the file on the machine.
        """
        project, state, done = self._home.project, os.fsencode(self._home.state), threading.Event()

        def readers() -> Iterator[int]:
            for process in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    words = process.read_bytes().split(b"\0")
                    if {b"read", b"bundle"} & set(words) and any(state in w for w in words):
                        yield int(process.parent.name)

        def kill_reader() -> None:
            while not done.wait(0.001):
                # Find the reader before checking the bytes, because on a busy machine the reader may finish before it
                # is found.
                found = list(readers())
                if found and any(p.stat().st_size > 1 << 20 for p in project.rglob("*") if p.is_file()):
                    for reader in found:
                        with contextlib.suppress(OSError):
                            os.kill(reader, signal.SIGKILL)
                    return

        killer = threading.Thread(target=kill_reader)
        killer.start()
        try:
            return self._client.call("pull_artifacts", args)
        finally:
            done.set()
            killer.join()


def open_scene(scenario: Scenario, seed: int, folder: Path) -> GatedScene:
    """Start the scenario and the server, ready for an agent."""
    return GatedScene(scenario, seed, folder)


def _works(events: list[dict[str, Any]], instances: list[dict[str, Any]]) -> list[Work]:
    """Return all jobs in the ledger."""
    works: dict[str, Work] = {}
    for event in events:
        prefix, _, id = event["subject"].partition("/")  # noqa: A001
        if prefix != "job" or event["state"] is None:
            continue
        body = event["body"]
        if event["kind"] == "job.accepted":
            spec = body["spec"]
            what = {k: spec.get(k) for k in ("script", "command", "args", "env")}
            works[id] = Work(id, spec["platform"], what, event["state"], event["at"])
        if id in works:
            works[id].state = event["state"]
            works[id].ended = event["at"] if event["state"] in _OVER else None
    for row in instances:
        job = row["label"].rpartition("-i")[0]
        if job in works:
            works[job].instance = row["id"]
    return list(works.values())
