"""A clock that a test advances, and helpers for clouds, machines and their processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuwarden.core.models import Instance, InstanceState, Known, Place, Resources
from gpuwarden.core.profile import Profile
from gpuwarden.profiles import load_profile, profile_names
from gpuwarden.rehearsal.cloud import Cloud
from gpuwarden.rehearsal.model import Fault, Faults, Settings

RENTED = [n for n in profile_names() if load_profile(n).meter.metered]
QUICK = Settings(boot_s=10, stop_s=5, resume_s=20, default_usd_per_hour=3600.0, residue_usd_per_hour=36.0, catalog={})


class HandClock:
    """A clock that a test advances."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.time = now

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds


class World:
    """A cloud, its clock, and a user's operations."""

    def __init__(self, root: Path, profile: Profile, *faults: Fault, seed: int = 0, settings: Settings = QUICK) -> None:
        self.clock = HandClock()
        self.cloud = Cloud(
            root, profile, self.clock, settings=settings, faults=Faults(seed=seed, faults=faults), supervise=False
        )

    def wait(self, seconds: float) -> None:
        self.clock.time += seconds
        self.cloud.tick()

    def rent(self, *, interruptible: bool = False, durable: bool = False) -> Instance:
        """Rent an instance and wait until it runs."""
        answer = self.cloud.create(Resources(interruptible=interruptible, durable_storage=durable), "token")
        assert isinstance(answer, Known)
        self.wait(10)
        return self.get(answer.value.id)

    def get(self, ident: str) -> Instance:
        answer = self.cloud.get(ident)
        assert isinstance(answer, Known) and answer.value is not None
        return answer.value

    def state(self, ident: str) -> InstanceState:
        return self.cloud.truth(ident).state

    def end(self, ident: str) -> None:
        """Stop the instance if that is required, terminate it, and wait."""
        if self.cloud.profile.verbs.terminate_needs_stop:
            self.cloud.stop(ident)
            self.wait(5)
        self.cloud.terminate(ident)
        self.wait(5)


def on(place: Place | None, path: str) -> Path:
    """Return the local path for a path on a machine."""
    assert place is not None
    return Path(place.root + path)


@contextmanager
def process(place: Place | None, code: str, *, ready: bool = True) -> Iterator[subprocess.Popen[str]]:
    """Run a real Python process on an instance until the block ends. If `ready`, wait for its first line."""
    assert place is not None
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, **place.env},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        if ready:
            assert child.stdout is not None
            child.stdout.readline()
        yield child
    finally:
        child.kill()
        child.communicate()
