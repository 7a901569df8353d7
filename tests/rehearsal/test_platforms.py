"""Two rehearsals differ exactly where their profiles differ."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gpuwarden.core.errors import Conflict, NotSupported
from gpuwarden.core.models import InstanceState, Known, Place, Resources
from gpuwarden.core.profile import Event, Profile, Spot, Survival, Tier, UnknownFact
from gpuwarden.profiles import load_profile
from paths import KITS
from rehearsal_kit import QUICK, RENTED, World, on

S = InstanceState
STOPPABLE = [n for n in RENTED if load_profile(n).verbs.stop]
UNKNOWN = UnknownFact(unknown="try it and look")


def plant(world: World, place: Place | None, durable: bool) -> list[str]:
    """Write a file to every tier that is always present, and to memory; return the files' paths."""
    tiers = [tier.path.rstrip("/") for tier in world.cloud.profile.tiers(requested=durable)]
    paths = [f"{at}/deep/file" for at in (*tiers, "/dev/shm", "/run")]
    for path in paths:
        on(place, path).parent.mkdir(parents=True, exist_ok=True)
        on(place, path).write_text("checkpoint")
    return paths


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("name", STOPPABLE)
def test_stop_deletes_only_what_the_profile_says(tmp_path: Path, name: str, durable: bool) -> None:
    world = World(tmp_path, load_profile(name))
    box = world.rent(durable=durable)
    paths = plant(world, box.place, durable)
    world.cloud.stop(box.id)
    world.wait(5)
    assert not on(box.place, "/").exists(), "nobody reads a machine that is off"
    if "stop" not in world.cloud.profile.verbs.reversible:
        with pytest.raises(NotSupported):
            world.cloud.start(box.id)
        return
    world.cloud.start(box.id)
    world.wait(10)
    for path in paths:
        assert on(box.place, path).exists() == world.cloud.profile.survives(path, "stop", requested=durable), path


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("name", RENTED)
def test_terminate_leaves_volumes_to_the_next_instance(tmp_path: Path, name: str, durable: bool) -> None:
    world = World(tmp_path, load_profile(name))
    first = world.rent(durable=durable)
    paths = plant(world, first.place, durable)
    world.end(first.id)
    assert world.state(first.id) == S.GONE
    assert not on(first.place, "/").parent.exists()
    assert list((tmp_path / "trash").iterdir()) == []
    second = world.rent(durable=durable)
    for path in paths:
        assert on(second.place, path).exists() == world.cloud.profile.survives(path, "terminate", requested=durable)


@pytest.mark.parametrize("name", RENTED)
def test_instances_are_interruptible_only_if_the_profile_offers_spot(tmp_path: Path, name: str) -> None:
    world = World(tmp_path, load_profile(name))
    if not world.cloud.profile.spot.offered:
        with pytest.raises(NotSupported):
            world.cloud.create(Resources(interruptible=True), "token")
        assert world.cloud.list() == Known(())
        return
    box = world.rent(interruptible=True)
    paths = plant(world, box.place, durable=False)
    world.cloud.preempt(box.id)
    if world.cloud.profile.spot.then != "stopped":  # unknown counts as the worst case
        assert world.state(box.id) == S.GONE
        return
    assert world.state(box.id) == S.INTERRUPTED
    world.wait(20)
    assert world.state(box.id) == S.RUNNING
    for path in paths:
        assert on(box.place, path).exists() == world.cloud.profile.survives(path, "preemption")


def test_uninterruptible_instances_are_never_preempted(tmp_path: Path) -> None:
    world = World(tmp_path, load_profile("vastai"))
    box = world.rent()
    with pytest.raises(Conflict):
        world.cloud.preempt(box.id)
    assert world.state(box.id) == S.RUNNING


def test_money_follows_the_profile(tmp_path: Path) -> None:
    """One dollar per second while running, and one cent per second while stopped."""
    bills = {}
    for name in ("runpod", "autodl", "vastai"):
        world = World(tmp_path / name, load_profile(name))
        box = world.rent()
        assert world.get(box.id).cost_usd == pytest.approx(10)
        world.cloud.stop(box.id)
        world.wait(5)
        stopped = world.get(box.id)
        assert (stopped.state, stopped.meter, stopped.stopped_usd_per_hour) == (S.STOPPED, False, 36.0)
        world.wait(100)
        bills[name] = world.cloud.truth(box.id).cost_usd
    assert bills == {name: pytest.approx(15 + 1) for name in bills}


def test_granularity_rounds_up_every_started_period(tmp_path: Path) -> None:
    world = World(tmp_path, load_profile("lambda"))
    box = world.rent()
    assert world.get(box.id).cost_usd == pytest.approx(60)
    world.wait(51)
    assert world.get(box.id).cost_usd == pytest.approx(120)
    world.cloud.terminate(box.id)
    world.wait(5)
    assert world.get(box.id).cost_usd == pytest.approx(120)


def test_time_scale_speeds_up_only_billing(tmp_path: Path) -> None:
    world = World(tmp_path, load_profile("vastai"), settings=QUICK.model_copy(update={"time_scale": 60.0}))
    box = world.rent()
    assert box.state == S.RUNNING
    assert box.cost_usd == pytest.approx(600)


def test_a_clock_running_backwards_refunds_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, load_profile("vastai"))
    box = world.rent()
    world.wait(100)
    before = world.get(box.id).cost_usd
    world.clock.time -= 1000
    assert world.get(box.id).cost_usd == before


def test_a_stop_may_leave_the_meter_running(tmp_path: Path) -> None:
    runpod = load_profile("runpod")
    leaky = runpod.model_copy(update={"meter": runpod.meter.model_copy(update={"stops_on": ("terminate",)})})
    world = World(tmp_path, leaky)
    box = world.rent()
    world.cloud.stop(box.id)
    world.wait(5)
    before = world.cloud.truth(box.id)
    world.wait(100)
    assert world.get(box.id).meter is True
    assert before.state == S.STOPPED
    assert world.cloud.truth(box.id).cost_usd >= before.cost_usd + 100


def bent(event: Event, *, spot: Spot | None = None, kind: str = "rented", survives: object = UNKNOWN) -> Profile:
    """Return vastai's profile with one fact about its disk changed."""
    vast = load_profile("vastai")
    keeps = {"stop": True, "terminate": False, "preemption": True, "job_end": True, event: survives}
    root = vast.storage[0].model_copy(update={"survives": Survival.model_validate(keeps)})
    return vast.model_copy(update={"storage": (root, *vast.storage[1:]), "spot": spot or vast.spot, "kind": kind})


def test_unknown_survival_reads_as_death(tmp_path: Path) -> None:
    world = World(tmp_path, bent("preemption"))
    box = world.rent(interruptible=True)
    on(box.place, "/file").write_text("x")
    world.cloud.preempt(box.id)
    world.wait(20)
    assert world.state(box.id) == S.RUNNING
    assert not on(box.place, "/file").exists()


def test_unknown_interruption_reads_as_the_worst(tmp_path: Path) -> None:
    spot = load_profile("vastai").spot.model_copy(
        update=dict.fromkeys(("signal", "grace_s", "then", "auto_resume"), UNKNOWN)
    )
    world = World(tmp_path, bent("stop", spot=spot, survives=True))
    box = world.rent(interruptible=True)
    world.cloud.preempt(box.id)
    assert world.state(box.id) == S.GONE
    assert "preempted" in world.get(box.id).why


def test_the_end_of_a_job_deletes_files_if_the_profile_says_so(tmp_path: Path) -> None:
    world = World(tmp_path, bent("job_end", survives=False))
    box = world.rent()
    run = on(box.place, box.place.run_root) / "run"
    run.mkdir()
    (run / "status.json").write_text('{"state": "running"}')
    world.wait(1)
    assert (run / "status.json").exists()
    (run / "status.json").write_text('{"state": "succeeded"}')
    world.wait(1)
    assert not run.exists()
    assert world.state(box.id) == S.RUNNING


def test_the_end_of_a_serverless_job_ends_the_instance(tmp_path: Path) -> None:
    world = World(tmp_path, bent("job_end", kind="serverless", survives=False))
    box = world.rent()
    run = on(box.place, box.place.run_root) / "run"
    run.mkdir()
    (run / "status.json").write_text('{"state": "failed"}')
    world.wait(1)
    assert world.state(box.id) == S.GONE
    assert not on(box.place, "/").exists()


def test_sometimes_present_storage_can_be_absent(tmp_path: Path) -> None:
    autodl = load_profile("autodl")
    absent = World(tmp_path / "a", autodl, settings=QUICK.model_copy(update={"sometimes": False}))
    present = World(tmp_path / "b", autodl)
    assert not on(absent.rent().place, "/root/autodl-fs").exists()
    assert on(present.rent().place, "/root/autodl-fs").resolve() == tmp_path / "b/volumes/file-storage"


def test_a_tier_inside_a_volume_is_deleted_alone(tmp_path: Path) -> None:
    vast = load_profile("vastai")
    root, volume = vast.storage
    scratch = root.model_copy(
        update={
            "tier": "scratch",
            "path": "/data/scratch",
            "survives": Survival(stop=False, terminate=False, preemption=False, job_end=True),
        }
    )
    tiers: tuple[Tier, ...] = (root, volume, scratch)
    world = World(tmp_path, vast.model_copy(update={"storage": tiers}))
    box = world.rent(durable=True)
    on(box.place, "/data/keep").write_text("x")
    on(box.place, "/data/scratch/lose").write_text("x")
    world.cloud.stop(box.id)
    world.wait(5)
    world.cloud.start(box.id)
    world.wait(10)
    assert on(box.place, "/data/keep").exists()
    assert list(on(box.place, "/data/scratch").iterdir()) == []


@pytest.mark.parametrize("victim", ["/workspace", "/root", "/"])
def test_links_that_a_job_made_are_never_followed(tmp_path: Path, victim: str) -> None:
    """A job replaces a folder on its machine with a link to a folder on the host; the host's files survive."""
    precious = tmp_path / "host" / "gpuwarden"
    precious.mkdir(parents=True)
    (precious / "thesis.tex").write_text("x")
    world = World(tmp_path / "cloud", load_profile("runpod"))
    box = world.rent()
    place = on(box.place, victim)
    place.rename(tmp_path / "moved") if place.exists() else None
    place.symlink_to(tmp_path / "host")
    world.cloud.stop(box.id)
    world.wait(5)
    world.cloud.start(box.id)
    world.wait(10)
    world.end(box.id)
    assert (precious / "thesis.tex").read_text() == "x"
    assert list(precious.iterdir()) == [precious / "thesis.tex"]


AS_NOBODY = """
import os, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from gpuwarden.profiles import load_profile
from rehearsal_kit import World, on
profile = load_profile("runpod")  # while the checkout may still be read
if os.getuid() == 0:
    os.setuid(65534)
world = World(Path(sys.argv[1]), profile)
box = world.rent()
deep = on(box.place, "/opt/locked/deeper")
deep.mkdir(parents=True)
(deep / "file").write_text("x")
for folder in (deep, deep.parent, deep.parent.parent, on(box.place, "/workspace"), on(box.place, "/")):
    folder.chmod(0o000 if folder == deep else 0o555)
world.cloud.stop(box.id); world.wait(5)
world.cloud.start(box.id); world.wait(10)
assert not deep.parent.parent.exists()
assert on(box.place, "/workspace/gpuwarden").is_dir()
on(box.place, "/workspace").chmod(0o000)
world.end(box.id)
assert world.state(box.id) == "gone"
assert not list(Path(sys.argv[1], "trash").iterdir())
print("done")
"""


@pytest.mark.skipif(os.name != "posix", reason="modes of folders are POSIX")
def test_folders_locked_by_a_job_are_deleted(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        argv = [sys.executable, "-c", AS_NOBODY.format(here=str(KITS)), f"{folder}/cloud"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "done\n", done.stderr
