"""Two processes share one cloud, and a process killed at any moment leaves it consistent."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest

from gpuwarden.core.clock import SystemClock
from gpuwarden.core.models import InstanceState, Known, Resources
from gpuwarden.profiles import load_profile
from gpuwarden.rehearsal import processes
from gpuwarden.rehearsal.cloud import Cloud
from gpuwarden.rehearsal.model import Settings
from paths import KITS
from real_parts import amount
from warm import warm

S = InstanceState
QUICK = Settings(boot_s=0.002, stop_s=0.002, resume_s=0.002, capacity=1000)

# Rents, starts a process, stops, starts, preempts, and terminates in an endless loop. Each line that it prints is an
# answer that it got.
DRIVER = """
import os, random, subprocess, sys
from pathlib import Path
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import Resources
from gpuwarden.profiles import load_profile
from gpuwarden.rehearsal.cloud import Cloud

cloud = Cloud(Path(sys.argv[1]), load_profile("runpod"), SystemClock(), supervise=False)
dice = random.Random(int(sys.argv[2]))
quiet = subprocess.DEVNULL
print(os.getpid(), flush=True)
while True:
    box = cloud.create(Resources(durable_storage=dice.random() < 0.5), "token").value
    print("created", box.id, flush=True)
    for _ in range(6):
        seen = cloud.get(box.id).value
        if seen is not None and seen.place is not None:
            root = Path(seen.place.root)
            try:
                (root / "scratch").write_text("x")
                (root / "workspace/gpuwarden/ckpt").write_text(seen.id)
                env = {**os.environ, **seen.place.env}
                subprocess.Popen(["sleep", "30"], env=env, stdout=quiet, stderr=quiet, start_new_session=True)
            except FileNotFoundError:
                pass
        try:
            verb = dice.choice(["stop", "start", "terminate"])
            getattr(cloud, verb)(box.id)
            print(verb, box.id, flush=True)
        except WardenError:
            pass
"""


def started(program: str, *words: object) -> subprocess.Popen[str]:
    argv = [*warm(), "-c", program, *map(str, words)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_and_kill(root: Path, seed: int, after_s: float) -> list[list[str]]:
    with started(DRIVER, root, seed) as child:
        assert child.stdout
        pid = int(child.stdout.readline())
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
        out, err = child.communicate()
    assert (child.returncode, err) == (-signal.SIGKILL, "")
    return [line.split() for line in out.splitlines() if line.count(" ") == 1]


def check_whole(cloud: Cloud) -> None:
    """Check the invariants of a cloud after any crash, once it has been polled."""
    cloud.tick()
    state = cloud.store.state()
    held = processes.held(set(state.records))
    for ident, record in state.records.items():
        home = cloud.root / "instances" / ident
        assert record.pending == ()
        if record.state in {S.GONE, S.STOPPED, S.INTERRUPTED}:
            assert ident not in held, record.state
        if record.state == S.GONE:
            assert not home.exists()
        if record.state == S.STOPPED:
            assert not (home / "fs").exists()
            assert not (home / "fs.off" / "scratch").exists(), "the container disk dies at a stop"
        if record.state == S.RUNNING:
            assert (home / "fs" / "workspace" / "gpuwarden").is_dir()
    assert not list((cloud.root / "trash").glob("*"))
    stray = {p.name for p in (cloud.root / "instances").glob("*")} - state.records.keys()
    assert not stray


def crash_often(root: Path, times: int, seed: int) -> None:
    dice = random.Random(seed)
    cloud = Cloud(root, load_profile("runpod"), SystemClock(), settings=QUICK, supervise=False)
    costs: dict[str, float] = {}
    for n in range(times):
        printed = run_and_kill(root, n, dice.random() * 0.12)
        check_whole(cloud)
        known = cloud.store.state().records
        for _, ident in printed:
            assert ident in known, "an answered create is never forgotten"
        truths = cloud.truths()
        for ident, truth in truths.items():
            assert truth.cost_usd >= costs.get(ident, 0.0)
            assert truth.meter == (truth.state not in {S.STOPPED, S.GONE})
        costs = {ident: truth.cost_usd for ident, truth in truths.items()}
        for ident, truth in truths.items():
            if truth.state != S.GONE:
                cloud.terminate(ident)
    time.sleep(0.01)
    check_whole(cloud)
    assert cloud.list() == Known(())


@pytest.mark.prove
def test_the_cloud_survives_sigkill_at_random_moments(tmp_path: Path) -> None:
    crash_often(tmp_path, 15, seed=1)


@pytest.mark.long
@pytest.mark.prove
@pytest.mark.endurance
def test_the_cloud_survives_sigkill_at_very_many_random_moments(tmp_path: Path) -> None:
    crash_often(tmp_path, amount(50, 200), seed=2)


STEPS = ["save", "power_on", "power_off", "wipe", "erase", "trash", "sweep", "kill"]
DYING = (
    f"import sys; sys.path.append({str(KITS)!r})"
    """
import os, signal
from pathlib import Path
from gpuwarden.rehearsal import disk, processes, store
from gpuwarden.profiles import load_profile
from rehearsal_kit import World, on

step, nth, late = sys.argv[2], int(sys.argv[3]), sys.argv[4] == "after"
seen = 0
def arm(owner, name):
    real = getattr(owner, name)
    def dying(*a, **k):
        global seen
        seen += 1
        if seen == nth and not late: os.kill(os.getpid(), signal.SIGKILL)
        out = real(*a, **k)
        if seen == nth: os.kill(os.getpid(), signal.SIGKILL)
        return out
    setattr(owner, name, dying)
home = {"save": store.Store, "trash": disk, "sweep": disk, "kill": processes}.get(step, disk.Disk)
world = World(Path(sys.argv[1]), load_profile("runpod"))
arm(home, step)
box = world.rent()
on(box.place, "/scratch").write_text("x")
on(box.place, "/workspace/ckpt").write_text("x")
world.cloud.stop(box.id); world.wait(5)
world.cloud.start(box.id); world.wait(10)
world.cloud.stop(box.id); world.wait(5)
world.cloud.terminate(box.id); world.wait(5)
print("survived")
"""
)


@pytest.mark.prove
@pytest.mark.parametrize("step", STEPS)
def test_the_cloud_survives_sigkill_before_and_after_every_kind_of_step(tmp_path: Path, step: str) -> None:
    """Each effect is interrupted at its first and second occurrence, before and after; the next call completes it."""
    for nth, when in product((1, 2), ("before", "after")):
        root = tmp_path / f"{nth}-{when}"
        with started(DYING, root, step, nth, when) as dying:
            ends = {-signal.SIGKILL} if nth == 1 else {-signal.SIGKILL, 0}  # some steps occur only once
            assert dying.wait() in ends, dying.communicate()
        cloud = Cloud(root, load_profile("runpod"), SystemClock(), supervise=False)
        check_whole(cloud)
        for ident in cloud.store.state().records:
            json.loads((root / "state.json").read_text())
            cloud.stop(ident) if cloud.truth(ident).state != S.GONE else None
            cloud.terminate(ident)


@pytest.mark.slow
def test_concurrent_processes_share_one_cloud(tmp_path: Path) -> None:
    """Renting from several processes at once loses nothing and gives every instance a unique id."""
    code = (
        "import sys; from pathlib import Path; from gpuwarden.core.clock import SystemClock;"
        "from gpuwarden.core.models import Resources; from gpuwarden.profiles import load_profile;"
        "from gpuwarden.rehearsal.cloud import Cloud;"
        "c = Cloud(Path(sys.argv[1]), load_profile('vastai'), SystemClock(), supervise=False);"
        "print(*(c.create(Resources(), sys.argv[2]).value.id for _ in range(10)))"
    )
    cloud = Cloud(tmp_path, load_profile("vastai"), SystemClock(), settings=QUICK, supervise=False)
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), f"t{n}"], stdout=subprocess.PIPE, text=True)
        for n in range(3)
    ]
    mine = cloud.create(Resources(), "mine")
    assert isinstance(mine, Known)
    ids = {n: child.communicate(timeout=300)[0].split() for n, child in enumerate(children)}
    for n, rented in ids.items():
        found = cloud.find(f"t{n}")
        assert isinstance(found, Known)
        assert [i.id for i in found.value] == rented and len(rented) == 10
    listed = cloud.list()
    assert isinstance(listed, Known) and len({i.id for i in listed.value}) == 31
    other = Cloud(tmp_path, load_profile("vastai"), SystemClock(), supervise=False)
    other.terminate(mine.value.id)
    time.sleep(0.01)
    assert cloud.truth(mine.value.id).state == S.GONE
