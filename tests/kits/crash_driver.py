"""Run one use case in a child process, and kill it with SIGKILL at a chosen line or time.

`python crash_driver.py FOLDER` imports everything, reads the profiles, and carries out each use case once, for a
separate job: loading is most of the cost of a short command, and a crash during it loses nothing. FOLDER has the
sockets of the processes that fork children to load files or supervise a cloud.

The driver then reads orders from stdin, one JSON object per line. For each order it forks a child that opens the house
in `home` and carries out `phase`. With `line`, the child kills itself when it is about to run that many lines of
gpuwarden, counted across all of its threads; with `after`, the parent kills it after that many milliseconds. With
`stranger`, the process has the key of another account on the same platform. `through`, an ssh_config and a port, is the
route to machines. `only_checks` requests a receipt for a platform without metering; `profiles` are the user's profiles.
The answer contains how the child ended, the use case's reply, and the child's lifetime in milliseconds.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import select
import signal
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import anyio

import gpuwarden
from gpuwarden.backends.ssh import SshBackend, _Machine
from gpuwarden.core.clock import Clock, SystemClock
from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import JobSpec, Place
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.artifacts.verify import verify_job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.lifecycle.monitoring.inventory import list_instances
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.lifecycle.teardown.gate import approve, request
from gpuwarden.profiles import load_profile, profile_names
from gpuwarden.providers.rehearsal import RehearsalProvider
from gpuwarden.rehearsal.cloud import Cloud
from lifecycle_kit import FAST, PLATFORM, open_house, rent_cloud, training
from waiting import real_time
from warm import start_forks

PACKAGE = str(Path(gpuwarden.__file__).parent)


class Behind(SshBackend):
    """The rehearsal's machines behind SSH, reached through a proxy that cuts connections."""

    name = "local"

    def __init__(self, clock: Clock, config: Path, port: int) -> None:
        super().__init__(clock, config)
        self._port = port

    async def _at(self, place: Place) -> _Machine:
        return await super()._at(place.model_copy(update={"host": "127.0.0.1", "port": self._port}))


class PlainClock:
    """The system clock, for a cloud that starts no host processes: due transitions happen at the next poll."""

    now, sleep = SystemClock().now, SystemClock().sleep


class Tripwire:
    """Record the lines of gpuwarden that run, and kill the process at one of them."""

    def __init__(self, line: int | None, note: int) -> None:
        self.line, self.note = line, note
        self.lines: list[tuple[CodeType, int]] = []

    def arm(self) -> None:
        threading.settrace(self.enter)
        sys.settrace(self.enter)

    def disarm(self) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def enter(self, frame: FrameType, event: str, arg: object) -> Any:
        return self.step if frame.f_code.co_filename.startswith(PACKAGE) else None

    def step(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.lines.append((frame.f_code, frame.f_lineno))
            if len(self.lines) == self.line:
                os.write(self.note, json.dumps({"killed_at": place(*self.lines[-1])}).encode())
                os.kill(os.getpid(), signal.SIGKILL)
        return self.step

    def map(self) -> dict[str, list[int]]:
        """Return, for each line, the counts at which it was about to run."""
        counts: dict[tuple[CodeType, int], list[int]] = {}
        for count, line in enumerate(self.lines, 1):
            counts.setdefault(line, []).append(count)
        return {place(*line): found for line, found in counts.items()}


def place(code: CodeType, line: int) -> str:
    """Return a line's name: its file within the package, and its number."""
    return f"{code.co_filename.removeprefix(PACKAGE)}:{line}"


async def act(ctx: Context, order: dict[str, Any]) -> dict[str, Any]:
    """Carry out one use case; return the reply to its caller."""
    match order["phase"]:
        case "quote":
            spec = JobSpec.model_validate(order["spec"])
            return {"receipt": (await submit(ctx, spec, dry_run=order.get("only_checks", False))).receipt}
        case "submit":
            done = await submit(ctx, JobSpec.model_validate(order["spec"]), receipt=order["receipt"])
            return {"job": done.job.id if done.job else None}
        case "check":
            seen = await check(ctx, order["job"])
            return {"state": seen.job.state, "why": seen.job.why}
        case "pull":
            got = await pull(ctx, order["job"])
            return {"files": [f.local for f in got.received.files], "complete": got.received.complete}
        case "verify":
            return {"verdict": (await verify_job(ctx, order["job"])).verdict}
        case "list":
            found = await list_instances(ctx)
            return {"rows": [[r.instance_id, r.billing, r.ours] for r in found.rows], "unknown": found.unknown}
        case "teardown":
            view = await request(ctx, order["job"], "terminate")
        case _:  # approve
            view = await approve(ctx, order["ticket"], order["digest"], channel="terminal", by="a person in a test")
    return {
        "ticket": view.record.id,
        "digest": view.record.digest,
        "state": view.record.state,
        "findings": [f.message for f in view.findings],
    }


async def through_ssh(ctx: Context, order: dict[str, Any]) -> dict[str, Any]:
    """Carry out one use case on machines reached over SSH."""
    config, port = order["through"]
    ctx._backends["local"] = backend = Behind(ctx.clock, Path(config), port)
    try:
        return await act(ctx, order)
    finally:
        await backend.aclose()


def child(order: dict[str, Any], note: int) -> None:
    """Run one use case from opening the house to closing it."""
    wire = Tripwire(order.get("line"), note)
    if "through" not in order:
        wire.arm()
    clock = SystemClock() if order.get("hosts") else PlainClock()
    ctx = open_house(Path(order["home"]), clock)
    ctx.own_profiles = Path(order["profiles"]) if "profiles" in order else None
    if order.get("stranger"):
        elsewhere = Path(order["home"]) / "another-account"
        ctx._providers[PLATFORM] = RehearsalProvider(Cloud(elsewhere, ctx.profile(PLATFORM), clock, settings=FAST))
    try:
        answer = anyio.run(through_ssh if "through" in order else act, ctx, order)
    except WardenError as error:
        answer = {"error": error.code, "message": error.message}
    wire.disarm()
    Path(order["map"]).write_text(json.dumps(wire.map()))
    os.write(note, json.dumps({"answer": answer}).encode())


def carry_out(order: dict[str, Any]) -> dict[str, Any]:
    """Fork a child, kill it at the requested time if there is one, and wait for it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        code = 1
        try:
            child(order, writer)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    began = real_time()
    if "after" in order and not select.select([reader], [], [], order["after"] / 1000)[0]:
        os.kill(pid, signal.SIGKILL)
    with open(reader, "rb") as pipe:
        note = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    lived = max(0, int(1000 * (real_time() - began)))
    report = json.loads(note) if note else {}
    return {"killed": code < 0, "code": code, "lived_ms": lived, **report}


def load_all() -> None:
    """Import the modules that use cases import lazily, and fill the profile cache."""
    for package in ("backends", "checkpoints", "core", "hub", "ledger", "lifecycle", "providers", "remote", "rules"):
        module = importlib.import_module(f"gpuwarden.{package}")
        for found in pkgutil.walk_packages(module.__path__, f"{module.__name__}."):
            importlib.import_module(found.name)
    for name in profile_names():
        load_profile(name)


async def live_once(home: Path) -> None:
    """Carry out every use case, so that lazy imports, deferred models, and patterns are ready before the first fork."""
    ctx = open_house(home, PlainClock())
    rent_cloud(ctx)
    spec = training(home.with_name("training")).model_dump(mode="json")
    quoted = await act(ctx, {"phase": "quote", "spec": spec})
    job = await act(ctx, {"phase": "submit", "spec": spec, **quoted})
    while (await act(ctx, {"phase": "check", **job}))["state"] != "succeeded":
        await anyio.sleep(0.05)
    for phase in ("list", "pull", "verify"):
        await act(ctx, {"phase": phase, **job})
    view = await act(ctx, {"phase": "teardown", **job})
    await act(ctx, {"phase": "approve", **view})
    ctx.ledger.close()


def main(folder: str) -> None:
    """Answer orders until stdin closes."""
    load_all()
    start_forks(folder)
    with tempfile.TemporaryDirectory() as folder:
        anyio.run(live_once, Path(folder, "home"))
    for text in sys.stdin:
        sys.stdout.write(json.dumps(carry_out(json.loads(text))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
