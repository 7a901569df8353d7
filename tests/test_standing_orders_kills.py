"""Random kills and cuts while machines end by a standing order: nothing unproven is lost, and nothing bills unseen."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio
import pytest

from fakes import FakeClock
from gpuwarden.core.errors import WardenError
from gpuwarden.core.policy import Ending
from gpuwarden.core.states import Job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.ending.orders import object_to
from gpuwarden.lifecycle.execution.situation import standing_order
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.records import read_job
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.providers.rehearsal import RehearsalProvider
from gpuwarden.rehearsal.cloud import Cloud
from gpuwarden.rehearsal.faulty_backend import lossy
from gpuwarden.rehearsal.model import Fault, Faults
from lifecycle_kit import WEALTHY, promises, story
from pretend_machines import PretendBackend, Processes
from test_lifecycle_properties import PACE, Died, Fuse, Mortal, MortalLedger
from test_next_step import weights

RUNS = int(os.environ.get("GPUWARDEN_ENDINGS", "30"))
GRACE_S = 600.0
PLATFORM = "rehearsal/vastai"


class Night:
    """One job that succeeds while nobody looks, a watch that dies now and then, and a network that fails."""

    def __init__(self, home: Path, seed: int) -> None:
        self.home, self.random = home, random.Random(seed)
        self.clock, self.fuse, self.processes = FakeClock(), Fuse(), Processes()
        self.backend, self.content = PretendBackend(self.processes), weights()
        self.policy = WEALTHY.model_copy(
            update={"ending": Ending(when_proven=self.random.choice(("terminate", "stop")))}
        )
        self.cloud: Cloud | None = None
        self.deaths, self.objected = 0, False
        self.open()

    def open(self) -> None:
        """A new process over the same home and the same cloud."""
        self.fuse.left = None
        ledger = MortalLedger(self.home / "ledger.db", self.clock, "watch")
        ledger.fuse = self.fuse
        ledger._db.execute("PRAGMA synchronous = OFF")  # the machine itself never dies here
        self.ctx = Context(ledger, self.policy, self.clock, self.home, env={})
        if self.cloud is None:
            profile = self.ctx.profile(PLATFORM)
            self.cloud = Cloud(self.home / "cloud", profile, self.clock, settings=PACE, supervise=False)
        provider: Any = Mortal(RehearsalProvider(self.cloud), self.fuse)
        self.ctx._providers[PLATFORM] = provider
        self.ctx._backends["local"] = Mortal(lossy(self.backend, self.cloud), self.fuse)  # type: ignore[assignment]
        self.watcher = Watcher(self.ctx)

    def do(self, use: Any, *args: Any, dies: int | None = None, **kwargs: Any) -> Any:
        self.fuse.left = dies
        try:
            return anyio.run(partial(use, *args, **kwargs))
        except WardenError:
            return None
        except Died:
            self.deaths += 1
            self.ctx.ledger.close()
            self.open()
            return None
        finally:
            self.fuse.left = None

    def begin(self) -> None:
        from gpuwarden.core.models import JobSpec

        spec = JobSpec(platform=PLATFORM, command=("train",), outputs=("out",), timeout_s=3600, max_cost_usd=900)
        checked = self.do(submit, self.ctx, spec)
        self.job = self.do(submit, self.ctx, spec, receipt=checked.receipt).job.id
        self.clock.advance(11)
        self.do(check, self.ctx, self.job)
        handle = read_job(self.ctx.ledger, self.job).handle
        assert handle is not None
        self.handle = handle
        self.backend.write(handle, "model.safetensors", self.content)
        self.backend.end(handle)

    def bills(self) -> bool:
        assert self.cloud is not None
        return any(truth.meter for truth in self.cloud.truths().values())

    def there(self) -> bytes | None:
        """Files on the machine's disk; None once it is gone."""
        file = Path(self.handle.run_dir) / "work" / "out" / "model.safetensors"
        return file.read_bytes() if file.exists() else None

    def here(self) -> set[bytes]:
        found = (self.home / "artifacts").rglob("model.safetensors")
        return {file.read_bytes() for file in found}

    def something_happens(self) -> None:
        """A cut, a lost reply, a late write, a damaged copy, an objection: each of them rarely."""
        assert self.cloud is not None
        match self.random.randrange(14):
            case 0:
                self.backend.silent = True
            case 1 | 2:
                self.backend.silent = False
            case 3:
                kind = self.random.choice(("lost_request", "lost_reply", "bad_reply"))
                call = self.random.choice(("get", "stop", "terminate", "list", "find"))
                fault = Fault(kind=kind, call=call, count=self.random.randint(1, 3))  # type: ignore[arg-type]
                self.cloud.configure(faults=Faults(faults=(fault,)))
            case 4 if self.random.random() < 0.3 and self.bills():
                self.content = weights()[:-4] + self.random.randbytes(2) + b"\0\0"
                self.backend.write(self.handle, "model.safetensors", self.content)
            case 5 if self.random.random() < 0.3:
                for copy in (self.home / "artifacts").rglob("model.safetensors"):
                    copy.write_bytes(b"damaged")
            case 6 if self.random.random() < 0.1 and not self.objected and standing_order(self.ctx, self.job):
                self.objected = object_to(self.ctx, self.job, "command line", "test") and self.bills()

    def look(self, *, mortal: bool) -> None:
        before = self.there() if self.bills() else None
        for use in (lambda: self.watcher.keeper.round(), lambda: self.watcher.round()):
            dies = self.random.randint(0, 25) if mortal and self.random.random() < 0.5 else None
            self.do(use, dies=dies)
        ended = before is not None and not self.bills()
        if ended:
            assert not self.objected, "somebody wanted to keep it"
            assert before in self.here(), f"the only copy was on it\n{self.story()}"

    def story(self) -> str:
        return story(self.ctx.ledger.events())

    def comes_to_rest(self) -> None:
        """In good weather the machine ends within its grace, or an alert says why it bills."""
        assert self.cloud is not None
        self.backend.silent = False
        self.cloud.configure(faults=Faults())
        for _ in range(60):
            self.clock.advance(60)
            self.look(mortal=False)
            if not self.bills():
                break
        raised_kinds = {e.body["kind"] for e in self.ctx.ledger.events(kind="alert.raised")}
        assert not self.bills() or raised_kinds & {"finished_billing", "approval"}, f"it bills unseen\n{self.story()}"
        assert self.objected or not self.bills(), f"it could have ended\n{self.story()}"
        assert read_job(self.ctx.ledger, self.job).state is Job.SUCCEEDED
        wrong = promises(self.ctx.ledger, self.cloud)
        assert not wrong, f"{wrong}\n{self.story()}"


@pytest.fixture
def pretended() -> Iterator[None]:
    made = Processes()
    names = ("of", "terminate", "kill", "held")
    patches = [patch(f"gpuwarden.rehearsal.processes.{name}", getattr(made, name)) for name in names]
    for each in patches:
        each.start()
    yield
    for each in patches:
        each.stop()


@pytest.mark.slow
@pytest.mark.usefixtures("pretended")
def test_no_kill_and_no_cut_loses_a_checkpoint_or_hides_a_meter(tmp_path: Path) -> None:
    deaths, kept = 0, 0
    for seed in range(RUNS):
        night = Night(tmp_path / f"night-{seed}", seed)
        night.begin()
        for _ in range(25):
            night.clock.advance(night.random.choice((15.0, 60.0, 120.0)))
            night.something_happens()
            night.look(mortal=True)
            if not night.bills():
                break
        night.comes_to_rest()
        deaths, kept = deaths + night.deaths, kept + night.objected
        night.ctx.ledger.close()
    assert deaths > RUNS and (RUNS < 30 or kept), "the nights were too quiet to show anything"
