"""Run jobs whose processes are killed with SIGKILL at any point, and count the kills."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from crash_driver import PlainClock
from gpuwarden.core.models import InstanceState
from gpuwarden.core.states import Lease, Teardown
from gpuwarden.ledger.store import Ledger
from gpuwarden.rehearsal.model import Fault, Settings
from lifecycle_kit import (
    FAST,
    launches,
    open_house,
    promises,
    records,
    rent_cloud,
    stopped_leases,
    story,
    training,
)
from paths import KITS
from waiting import eventually
from warm import sockets_folder

SEED = int(os.environ.get("GPUWARDEN_CRASH_SEED", "0")) or random.SystemRandom().randrange(1, 1_000_000)
STRANGER = ("check", "pull", "verify", "teardown", "approve", "list")
"""With two accounts, the steps that the other account's key attempts first, killed at the same line."""
CALM_AFTER = 5
"""The number of consecutive kills after which a step may complete, so that every life ends."""
LIFE_S = 300.0
"""Time limit for one step of a life: each poll takes several processes, most of which are killed."""


class Driver:
    """The warm process that forks the processes to be killed."""

    def __init__(self, folder: Path) -> None:
        self.errors = (folder / "driver.err").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, str(KITS / "crash_driver.py"), sockets_folder()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, bufsize=1,
            env={**os.environ, "TMPDIR": str(folder)},  # a killed process does not clean up
        )  # fmt: skip

    def order(self, **order: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            pytest.fail(f"the driver died: {self.errors.read()[-4000:]}")
        reply: dict[str, Any] = json.loads(line)
        if not reply["killed"] and reply["code"] != 0:
            self.errors.seek(0)
            pytest.fail(f"{order['phase']} ended with a traceback: {self.errors.read()[-4000:]}")
        return reply

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()
        self.errors.close()


@dataclass
class Tally:
    """The kills of all lives. `maps` holds each step's lines, and `lived_ms` its longest duration."""

    kills: Counter[str] = field(default_factory=Counter)
    points: set[str] = field(default_factory=set)
    maps: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    lived_ms: dict[str, int] = field(default_factory=dict)

    def fresh(self, phase: str) -> list[str]:
        """Return a step's lines at which no process has been killed yet."""
        return [at for at in self.maps[phase] if f"{phase} {at}" not in self.points]


def digests(files: list[str]) -> list[str]:
    """Return the digests of the copied files."""
    return sorted(hashlib.sha256(Path(f).read_bytes()).hexdigest() for f in files)


class Life:
    """One job with one cloud and one home folder, whose processes are killed many times."""

    def __init__(self, driver: Driver, tally: Tally, home: Path, rng: random.Random, kind: str) -> None:
        self.driver, self.tally, self.home, self.rng, self.kind = driver, tally, home, rng, kind
        self.said = home.with_name(f"{home.name}.said")  # the home itself is not visible to jobs
        self.resumed = kind == "preempted"
        self.spec = training(self.said, 0.4 if self.resumed else 0.05, interruptible=self.resumed)
        self.hosts = kind == "hosts"
        home.mkdir()
        ctx = open_house(home, PlainClock())
        self.cloud = rent_cloud(ctx, *FAULTS.get(kind, ()), settings=SETTINGS, seed=rng.randrange(1_000_000))
        ctx.ledger.close()

    def step(self, phase: str, **more: Any) -> dict[str, Any]:
        """Carry out a use case in one process after another, until one survives to answer."""
        for tries in range(100):
            plan = self.plan(phase) if tries < CALM_AFTER else {}
            map_file = self.home / "map.json"
            order = {"phase": phase, "home": str(self.home), "hosts": self.hosts, **plan, **more}
            if self.kind in {"accounts", "cuts"} and phase in STRANGER and self.rng.random() < 0.5:
                self.hold(phase, self.driver.order(**order, map=str(self.home / "another.json"), stranger=True))
            reply = self.driver.order(**order, map=str(map_file))
            self.hold(phase, reply)
            if not reply["killed"]:
                self.tally.maps.setdefault(phase, {}).update(json.loads(map_file.read_text()))
                self.tally.lived_ms[phase] = max(self.tally.lived_ms.get(phase, 0), reply["lived_ms"])
                answer: dict[str, Any] = reply["answer"]
                return answer
        raise AssertionError(f"{phase} never came to an end")

    def plan(self, phase: str) -> dict[str, Any]:
        """Choose the next process's end: usually at a line not tried yet, sometimes at a random time or never."""
        if phase not in self.tally.maps or self.rng.random() < 0.15:
            return {}
        if self.rng.random() < 0.2:
            return {"after": self.rng.randrange(self.tally.lived_ms[phase] + 1)}
        at = self.rng.choice(self.tally.fresh(phase) or list(self.tally.maps[phase]))
        return {"line": self.rng.choice(self.tally.maps[phase][at])}

    def hold(self, phase: str, reply: dict[str, Any]) -> None:
        """Assert the invariants after a process, killed or not."""
        if reply["killed"]:
            self.tally.kills[phase] += 1
            self.tally.points.add(f"{phase} {reply.get('killed_at', 'in time')}")
        ledger = Ledger(self.home / "ledger.db", PlainClock())
        try:
            wrong = list(self.wrong(ledger))
            at = reply.get("killed_at", "a moment") if reply["killed"] else "its end"
            assert not wrong, f"after {phase} died at {at}: {wrong}\n{self.told(ledger)}"
        finally:
            ledger.close()

    def wrong(self, ledger: Ledger) -> Iterator[str]:
        """Yield the violated invariants."""
        yield from promises(ledger, self.cloud)
        yield from self.twice(ledger)
        truths = self.cloud.truths()
        for name, machine in stopped_leases(ledger).items():
            if truths[machine].meter:
                yield f"{name} is stopped in the ledger and bills"

    def twice(self, ledger: Ledger) -> Iterator[str]:
        said = launches(self.said)
        if len(set(said)) != len(said):
            yield f"an attempt was launched twice: {said}"
        if len({job for job, _ in said}) > 1 or len(ledger.events(kind="job.accepted")) > 1:
            yield f"two jobs came of one: {said}"
        alive = [r.id for r in records(self.cloud) if r.state != InstanceState.GONE]
        if len(alive) > 1:
            yield f"two machines live: {alive}"

    def told(self, ledger: Ledger) -> str:
        return f"seed {SEED}, life {self.home.name} ({self.kind})\n{story(ledger.events())}"

    # -- the course of a life

    def live(self) -> None:
        """Run the job from the quote to its confirmed end, and approve the teardown once the copy is proven."""
        spec = self.spec.model_dump(mode="json")
        job = self.accepted(spec)
        seen = self.until("check", lambda a: a["state"] in {"succeeded", "failed"}, job=job)
        assert seen["state"] == "succeeded", seen
        self.step("list")
        pulled = self.until("pull", lambda a: a.get("complete"), job=job)
        assert self.step("verify", job=job) == {"verdict": "proven"}
        self.torn_down(job)
        self.ended(pulled["files"])

    def saved(self) -> list[str]:
        """Return the digests of the job's outputs."""
        return [MODEL]

    def accepted(self, spec: dict[str, Any]) -> str:
        for _ in range(100):
            receipt = self.until("quote", lambda a: a.get("receipt"), spec=spec)["receipt"]
            answer = self.step("submit", spec=spec, receipt=receipt)
            if answer.get("job"):
                return str(answer["job"])
            assert answer["error"] in {"conflict", "refused", "approval_required"}, answer  # or no price for now
        raise AssertionError("never accepted")

    def torn_down(self, job: str) -> None:
        def down() -> bool:
            view = self.step("teardown", job=job)
            if view.get("state") == Teardown.AWAITING_HUMAN:
                assert all(r.state == InstanceState.RUNNING for r in records(self.cloud)), "touched before a yes"
                self.step("approve", ticket=view["ticket"], digest=view["digest"])
            return bool(view.get("state") == Teardown.VERIFIED_STOPPED)

        eventually(down, LIFE_S)

    def until(self, phase: str, done: Any, **more: Any) -> dict[str, Any]:
        return eventually(lambda: self.step(phase, **more), LIFE_S, good=done)

    def ended(self, files: list[str]) -> None:
        """Assert that all outputs are safe, all machines are off, and every operation was done once."""
        ledger = Ledger(self.home / "ledger.db", PlainClock())
        try:
            assert digests(files) == self.saved(), files
            attempts = [attempt for _, attempt in launches(self.said)]
            assert attempts and attempts == sorted(set(attempts)), attempts
            # A machine may be preempted before its job's first line; no other event prevents the launch of an attempt.
            assert attempts == list(range(1, len(attempts) + 1)) or self.kind == "preempted", self.told(ledger)
            assert len(attempts) == 1 or self.resumed, attempts
            truths = self.cloud.truths()
            assert truths and not any(t.meter for t in truths.values())
            assert not any(t.processes for t in truths.values())
            assert len(truths) == 1 or self.kind == "faults", self.told(ledger)
            states = {ledger.state(s) for s in ledger.subjects("lease")}
            assert states <= {Lease.STOPPED, Lease.NONE}, self.told(ledger)
        finally:
            ledger.close()


MODEL = hashlib.sha256(
    (lambda head, body: len(head).to_bytes(8, "little") + head + body)(
        b'{"w": {"dtype": "F32", "shape": [256], "data_offsets": [0, 1024]}}'.ljust(72),
        b"".join(__import__("struct").pack("<f", n) for n in range(256)),
    )
).hexdigest()
SETTINGS: Settings = FAST
_LOSSY = ("create", "find", "get", "terminate", "quote", "list")
FAULTS: dict[str, tuple[Fault, ...]] = {
    "preempted": (Fault(kind="preempt", seconds=0.15),),
    "faults": tuple(
        Fault.model_validate({"kind": kind, "call": call, "probability": 0.08})
        for call in _LOSSY
        for kind in ("lost_request", "lost_reply", "bad_reply")
    ),
    "lies": (
        Fault(kind="false_refusal", call="create", probability=0.5),
        Fault(kind="lost_reply", call="create", probability=0.3),
        *(Fault(kind="bad_reply", call=call, probability=0.1) for call in _LOSSY),
        *(Fault(kind="stale", call=call, probability=0.3, seconds=0.04) for call in ("find", "get", "list")),
    ),
}
FAULTS["cuts"] = FAULTS["lies"]
