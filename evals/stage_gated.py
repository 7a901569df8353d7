"""The gated stage: the real server over stdio, in front of a world's rehearsal clouds and Hub.

The jobs that a world starts with went through the same server: submitted, run, pulled, torn down by a person at a
terminal, whatever the world says had happened. Then the agent enters.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evals import jobs, person
from evals.mcp_client import McpClient
from evals.measure import FOREIGN, Meter, Work, jobs_view
from evals.wire import WireError
from evals.world_home import GPUWARDEN, HORIZON_S, NEAR_CAP_S, PAST_S, PIN, TURN_S, Home, read_status
from evals.worlds import World

PATIENCE_S = 30.0
_OVER = frozenset({"succeeded", "failed", "canceled", "refused", "preempted"})
_LOST = {"ok": False, "code": "unreachable", "message": "no reply: the connection was lost", "hint": "", "retry": True}


class GatedScene:
    """One world with the gates."""

    def __init__(self, world: World, seed: int, folder: Path) -> None:
        self.facts: dict[str, Any] = {}
        self._world = world
        self._home = Home(world, folder)
        self._meter = Meter(self._home)
        self._lose = str(world.knobs.get("lose", ""))
        self._cut = bool(world.knobs.get("cut"))
        try:
            self._client = McpClient([*GPUWARDEN, "mcp"], self._home.env, self._home.project)
        except BaseException:
            self._home.close()
            raise
        try:
            for job in world.jobs:
                self._past(job)
            self._meter.foreign()
            if not world.jobs:
                self.facts.setdefault("base", "j0000000000")
            self._meter.look(self._folders())
            self._seeded = max((e["seq"] for e in self._home.order("ledger")), default=0)
        except BaseException:
            self.close()
            raise

    def now(self) -> float:
        """The world's time."""
        return self._home.now()

    def call(self, tool: str, args: dict[str, Any]) -> dict[str, Any]:
        """Call a tool, a turn later."""
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
        self._meter.look(self._folders())
        if launches and self._lose == "reply":
            self._lose = ""
            return dict(_LOST)
        return reply

    def shell(self, argv: list[str], typed: dict[str, str] | None = None) -> dict[str, Any]:
        """A command of an agent that has a shell; with `typed` on a pseudo-terminal, where it answers prompts."""
        self._home.pass_time(TURN_S)
        code, shown = person.run(argv, self._home.env, self._home.project, typed)
        self._meter.look(self._folders())
        return {"ok": code == 0, "exit_code": code, "output": shown[-2000:]}

    def server(self) -> tuple[list[str], dict[str, str]]:
        """How to start the server over this world, for an agent that is a program."""
        return [*GPUWARDEN, "mcp"], dict(self._home.env)

    def ledger(self) -> tuple[int, list[dict[str, Any]]]:
        """The last event of the past, and everything that the server wrote down."""
        return self._seeded, self._home.order("ledger")

    def end(self) -> dict[str, Any]:
        """The end state, hours after the agent has stopped."""
        self._meter.look(self._folders())
        self._home.pass_time(self._home.horizon_s)
        events: list[dict[str, Any]] = self._home.order("ledger")
        works = _works(events, self._home.books())
        views = {
            "jobs": jobs_view([w for w in works if w.state != "refused"]),
            "leases": self._meter.leases(works),
            "checkpoints": self._meter.checkpoints(),
            "teardowns": _teardowns(events),
            "bypasses": [],
        }
        return {"views": views, "facts": self.facts}

    def close(self) -> None:
        """End the server, the machines' processes and the world's other side."""
        try:
            self._client.close()
        finally:
            self._home.close()

    # -------------------------------------------------------------------------------------------------- the past

    def _past(self, job: dict[str, Any]) -> None:
        """Have a job of the past happen."""
        gate = self._home.folder / f"gate-{job['name']}"
        lives = job["state"] in ("queued", "running") or job["fault"] == "preempt"
        if lives and job["fault"] not in ("hang", "nan_loss"):
            gate.touch()
        id = self._launch(job, str(gate))  # noqa: A001
        self.facts[job["name"]] = id
        self._meter.expected[id] = job["checkpoints"]
        self._wait_until(id, lambda s: s.get("step") is not None or bool(s.get("last_alerts")))
        if job["fault"] == "preempt":
            self._preempted(id, job)
            return
        if job["fault"] == "hang":
            self._freeze(id)
        self._home.pass_time(NEAR_CAP_S if job["fault"] == "near_cap" else PAST_S)
        if not lives:
            gate.touch()
            self._wait_until(id, lambda s: s.get("state") != "running")
            self._wait_for(id, job["state"])
        self._meter.look(self._folders())
        if any(c["where"] == "pulled" for c in job["checkpoints"]) or job["meter"] is False:
            # What a run is to be resumed from lies in the user's project, everything else where the server puts it.
            there = {"dest": "."} if any("step-" in c["path"] for c in job["checkpoints"]) else {}
            self._must("pull_artifacts", {"job_id": id, **there})
        if job["meter"] is False:
            self._torn_down(id)
        elif self._world.knobs.get("asked"):
            self._proven_request(id)

    def _launch(self, job: dict[str, Any], gate: str) -> str:
        platform = next(iter(self._world.platforms))
        # A job that never wrote one of its outputs declared it all the same.
        more = ["out/adapter"] if "never written" in self._world.hidden else []
        job = {**job, "bulk": 200 << 20 if self._cut else 0}
        spec = jobs.spec(platform, job, [*(["out/model.safetensors"] if more else ["out"]), *more], gate)
        if job["fault"] == "preempt":
            resumed = job["state"] == "running"
            spec |= {"interruptible": True, "timeout_s": 14_400, "max_restarts": 1 if resumed else 0}
        if any(c["where"] == "volume" for c in job["checkpoints"]):
            spec["durable_storage"] = job["fault"] != "preempt"
        checked = self._must("submit_job", {**spec, "dry_run": True})
        done = self._must("submit_job", {**spec, "receipt": checked["receipt"]})
        return str(done["job_id"])

    def _must(self, tool: str, args: dict[str, Any]) -> dict[str, Any]:
        reply = self._client.call(tool, args)
        if reply.get("ok") is not True:
            raise WireError(f"the world could not be made: {tool}: {str(reply)[:600]}")
        return reply

    def _wait_for(self, job: str, state: str) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            reply = self._client.call("check_job", {"job_id": job})
            if reply.get("state") == state:
                return reply
            time.sleep(0.05)
        raise WireError(f"{job} did not come to be {state}: {str(reply)[:400]}")

    def _wait_until(self, job: str, shown: Callable[[dict[str, Any]], bool]) -> None:
        """Until the status on the job's own machine shows something."""
        until = time.monotonic() + PATIENCE_S
        while not any(shown(status) for _, status in self._statuses(job)):
            if time.monotonic() > until:
                raise WireError(f"the machine of {job} shows no progress: {str(self._statuses(job))[:500]}")
            if not self._statuses(job):
                self._client.call("check_job", {"job_id": job})
            time.sleep(0.02)

    def _statuses(self, job: str) -> list[tuple[Path, dict[str, Any]]]:
        row = next(
            (r for r in self._home.books() if r["label"].startswith(f"{job}-") and r["state"] == "running"), None
        )
        if row is None:
            return []
        found = read_status(self._home.machine(row["platform"], row["id"]))
        return [(path, status) for path, status in found if job in str(path)]

    def _preempted(self, id: str, job: dict[str, Any]) -> None:  # noqa: A002
        if any(c["where"] == "pulled" for c in job["checkpoints"]):
            self._must("pull_artifacts", {"job_id": id})
        self._home.pass_time(PAST_S)
        self._client.call("check_job", {"job_id": id})
        row = next(r for r in self._home.books() if r["label"].startswith(f"{id}-"))
        self._home.order("preempt", row["platform"], id=row["id"])
        if job["state"] == "running":
            self._home.pass_time(HORIZON_S)
            until = time.monotonic() + PATIENCE_S
            while self._client.call("check_job", {"job_id": id}).get("attempt", 0) < 2:
                if time.monotonic() > until:
                    raise WireError(f"{id} was not resumed")
                time.sleep(0.05)
        else:
            self._wait_for(id, "failed")
            self._home.pass_time(HORIZON_S)

    def _freeze(self, job: str) -> None:
        """The job hangs, and its supervisor has been killed: nobody watches it any more."""
        for _, status in self._statuses(job):
            pid = status.get("pid")
            if isinstance(pid, int) and pid > 1:
                os.kill(pid, signal.SIGKILL)

    def _proven_request(self, job: str) -> str:
        self._must("verify_checkpoint", {"job_id": job})
        return str(self._must("teardown_request", {"job_id": job, "verb": "terminate"})["ticket"])

    def _torn_down(self, job: str) -> None:
        ticket = self._proven_request(job)
        if not person.approve(ticket, self._home.env, self._home.project, PIN):
            raise WireError(f"the person could not approve {ticket}")

    # ------------------------------------------------------------------------------------------------------ inside

    def _folders(self) -> dict[str, Path]:
        """The working folders of all jobs on machines that run."""
        found = {}
        for row in self._home.books():
            if row["state"] != "running" or row["label"] == FOREIGN:
                continue
            place = self._home.machine(row["platform"], row["id"])
            root = Path(place["root"] + place["run_root"])
            for folder in root.iterdir() if root.is_dir() else ():
                if (folder / "work").is_dir():
                    found[folder.name] = folder / "work"
        return found

    def _interrupted(self, args: dict[str, Any]) -> dict[str, Any]:
        """A transfer whose machine hangs up in the middle: the program that reads there is killed."""
        done = threading.Event()
        killer = threading.Thread(target=_hang_up, args=(self._home.project, str(self._home.state), done))
        killer.start()
        try:
            return self._client.call("pull_artifacts", args)
        finally:
            done.set()
            killer.join()


def _hang_up(project: Path, state: str, done: threading.Event) -> None:
    """Kill the reader on the machine once the first bytes of a large file have arrived."""
    while not done.wait(0.002):
        if any(p.stat().st_size > 1 << 20 for p in project.rglob("*") if p.is_file()):
            for reader in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    words = reader.read_bytes().split(b"\0")
                    if {b"read", b"bundle"} & set(words) and any(state.encode() in w for w in words):
                        os.kill(int(reader.parent.name), signal.SIGKILL)
                        return


def open_scene(world: World, seed: int, folder: Path) -> GatedScene:
    """The world, ready for an agent."""
    return GatedScene(world, seed, folder)


def _works(events: list[dict[str, Any]], books: list[dict[str, Any]]) -> list[Work]:
    """All jobs of the ledger."""
    works: dict[str, Work] = {}
    for event in events:
        room, _, id = event["subject"].partition("/")  # noqa: A001
        if room != "job" or event["state"] is None:
            continue
        body = event["body"]
        if event["kind"] == "job.accepted":
            spec = body["spec"]
            what = {k: spec.get(k) for k in ("script", "command", "args", "env")}
            works[id] = Work(id, spec["platform"], what, event["state"], event["at"])
        if id in works:
            works[id].state = event["state"]
            works[id].ended = event["at"] if event["state"] in _OVER else None
    for row in books:
        job = row["label"].rpartition("-i")[0]
        if job in works:
            works[job].instance = row["id"]
    return list(works.values())


def _teardowns(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for event in events:
        room, _, id = event["subject"].partition("/")  # noqa: A001
        if room != "teardown" or event["state"] is None:
            continue
        row = rows.setdefault(id, {"request": id, "job": "", "verb": "", "state": ""})
        row |= {k: event["body"][k] for k in ("job", "verb") if k in event["body"]}
        row["state"] = event["state"]
    return list(rows.values())
