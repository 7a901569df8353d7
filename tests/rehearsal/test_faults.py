"""Each fault has its documented effect on its target, and the same seed gives the same faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from faulty_backend import lossy
from gpuwarden.backends.base import Backend
from gpuwarden.core.errors import BadReply, NoCapacity, Unreachable
from gpuwarden.core.models import Handle, InstanceState, JobSpec, Known, Place, Resources, Unknown
from gpuwarden.profiles import load_profile
from gpuwarden.rehearsal.model import Fault, Faults
from rehearsal_kit import World, on

S = InstanceState
VAST = load_profile("vastai")


def test_a_lost_request_has_no_effect_but_a_lost_reply_does(tmp_path: Path) -> None:
    faults = [Fault(kind="lost_request", call="create", at=1), Fault(kind="lost_reply", call="create", at=2)]
    world = World(tmp_path, VAST, *faults)
    lost = world.cloud.create(Resources(), "one")
    assert isinstance(lost, Unknown)
    assert world.cloud.find("one") == Known(())
    done = world.cloud.create(Resources(), "two")
    assert done == lost, "the caller can't tell one from the other"
    found = world.cloud.find("two")
    assert isinstance(found, Known) and len(found.value) == 1


@pytest.mark.parametrize("kind", ["lost_reply", "bad_reply"])
def test_terminate_takes_effect_despite_a_lost_or_bad_reply(tmp_path: Path, kind: str) -> None:
    world = World(tmp_path, VAST, Fault(kind=kind, call="terminate"))
    box = world.rent()
    assert isinstance(world.cloud.terminate(box.id), Unknown)
    world.wait(5)
    assert world.state(box.id) == S.GONE
    assert world.cloud.terminate(box.id) == Known(None)


def test_no_capacity_is_a_refusal(tmp_path: Path) -> None:
    world = World(tmp_path, VAST, Fault(kind="no_capacity", call="create"))
    with pytest.raises(NoCapacity):
        world.cloud.create(Resources(), "one")
    assert world.cloud.truths() == {}
    assert isinstance(world.cloud.create(Resources(), "one"), Known)


def test_a_stale_list_lacks_new_instances_and_shows_gone_instances(tmp_path: Path) -> None:
    stale = [Fault(kind="stale", call=call, count=99, seconds=30) for call in ("find", "list", "get")]
    world = World(tmp_path, VAST, *stale)
    box = world.cloud.create(Resources(), "token")
    assert isinstance(box, Known)
    world.wait(29)
    assert world.cloud.list() == world.cloud.find("token") == Known(())
    assert world.cloud.get(box.value.id) == Known(None)
    world.wait(1)
    assert isinstance(listed := world.cloud.list(), Known) and len(listed.value) == 1
    world.cloud.terminate(box.value.id)
    world.wait(34)
    assert world.state(box.value.id) == S.GONE
    assert isinstance(listed := world.cloud.find("token"), Known)
    assert [(i.state, i.meter) for i in listed.value] == [(S.TERMINATING, True)]
    assert world.get(box.value.id).state == S.TERMINATING
    world.wait(1)
    assert world.cloud.list() == Known(())


def test_slow_and_failed_boots_are_simulated(tmp_path: Path) -> None:
    world = World(tmp_path, VAST, Fault(kind="slow_boot", at=1, seconds=100), Fault(kind="failed_boot", at=2))
    slow, failed = world.rent(), world.rent()
    assert slow.state == S.BOOTING
    assert failed.state == S.FAILED and failed.meter is True and failed.place is None
    world.wait(90)
    assert world.state(slow.id) == S.RUNNING
    before = world.get(failed.id).cost_usd
    world.wait(10)
    assert before is not None and world.get(failed.id).cost_usd == pytest.approx(before + 10), (
        "it bills until it is ended"
    )
    world.end(failed.id)
    assert world.state(failed.id) == S.GONE


def test_preemption_at_a_step_happens_once(tmp_path: Path) -> None:
    world = World(tmp_path, VAST, Fault(kind="preempt", step=20))
    box = world.rent(interruptible=True)
    run = on(box.place, box.place.run_root if box.place else "") / "run"
    run.mkdir()
    metrics = run / "metrics.jsonl"
    metrics.write_text('cut off}\n{"step": 19, "loss": 1.0}\n[1]\n{"step": 2')
    world.wait(1)
    assert world.state(box.id) == S.RUNNING
    metrics.write_text(json.dumps({"step": 21}) + "\n")
    world.wait(1)
    assert world.state(box.id) == S.INTERRUPTED
    world.wait(20)
    assert world.state(box.id) == S.RUNNING
    world.wait(100)
    assert world.state(box.id) == S.RUNNING


def test_preemption_at_a_time_happens_when_due(tmp_path: Path) -> None:
    world = World(tmp_path, VAST, Fault(kind="preempt", seconds=50))
    box = world.rent(interruptible=True)
    world.wait(1000)
    seen = world.get(box.id)
    assert seen.state == S.RUNNING, "preempted and resumed while nobody looked"
    computed, residue = 10 + 50 + (1000 - 50 - 20), 20 * 0.01
    assert seen.cost_usd == pytest.approx(computed * 0.5 + residue), "interruptible is half the price"


def test_a_vanished_instance_is_no_longer_listed(tmp_path: Path) -> None:
    world = World(tmp_path, VAST, Fault(kind="vanish", seconds=50))
    box = world.rent()
    world.wait(50)
    assert world.cloud.get(box.id) == Known(None)
    assert world.cloud.list() == Known(())
    truth = world.cloud.truth(box.id)
    assert (truth.state, truth.meter) == (S.GONE, False)
    assert not on(box.place, "/").exists()


def test_a_stopped_instance_may_still_bill(tmp_path: Path) -> None:
    world = World(tmp_path, VAST, Fault(kind="bills_when_stopped"))
    box = world.rent()
    world.cloud.stop(box.id)
    world.wait(5)
    one = world.get(box.id)
    world.wait(100)
    two = world.get(box.id)
    assert one.state == two.state == S.STOPPED
    assert one.cost_usd is not None and two.cost_usd is not None and two.cost_usd >= one.cost_usd + 100
    assert two.meter is True, "the books tell on it"


def test_a_gone_instance_may_come_back(tmp_path: Path) -> None:
    world = World(tmp_path, VAST, Fault(kind="comes_back", seconds=60))
    box = world.rent()
    on(box.place, "/file").write_text("x")
    world.end(box.id)
    assert world.get(box.id).state == S.GONE
    world.wait(60)
    back = world.get(box.id)
    assert (back.state, back.meter) == (S.RUNNING, True)
    assert not on(back.place, "/file").exists(), "the machine is back, its files are not"
    world.end(box.id)
    world.wait(1000)
    assert world.state(box.id) == S.GONE


def test_a_submit_request_or_reply_can_be_lost(tmp_path: Path) -> None:
    kinds = ("lost_request", "lost_reply", "bad_reply")
    world = World(tmp_path, VAST, *(Fault(kind=k, call="submit", at=i) for i, k in enumerate(kinds, 1)))
    launched = []
    with pytest.raises(Unreachable), world.cloud.submitting():
        launched.append("request lost")
    with pytest.raises(Unreachable), world.cloud.submitting():
        launched.append("reply lost")
    with pytest.raises(BadReply), world.cloud.submitting():
        launched.append("reply odd")
    with world.cloud.submitting():
        launched.append("well")
    assert launched == ["reply lost", "reply odd", "well"]


class OneJob:
    """The part of a backend that the test needs."""

    name = "one"
    submitted = 0

    async def submit(self, spec: JobSpec, place: Place, token: str, **_: object) -> Handle:
        self.submitted += 1
        return Handle(backend=self.name, token=token, run_dir="/run", place=place)


@pytest.mark.anyio
async def test_a_lossy_backend_submits_without_a_reply(tmp_path: Path) -> None:
    world = World(tmp_path, VAST, Fault(kind="lost_reply", call="submit"))
    one = OneJob()
    backend = lossy(cast("Backend", one), world.cloud)
    spec, place = JobSpec(platform="rehearsal/vastai", command=("true",)), Place(platform="x", run_root="/")
    with pytest.raises(Unreachable):
        await backend.submit(spec, place, "token", secrets={})
    assert one.submitted == 1
    assert (await backend.submit(spec, place, "token", secrets={})).token == "token"
    assert backend.name == "one"


@given(seed=st.integers(0, 2**32), p=st.floats(0, 1))
def test_draws_depend_only_on_the_seed(seed: int, p: float) -> None:
    faults = Faults(seed=seed, faults=(Fault(kind="lost_reply", call="create", probability=p),))
    hits = [bool(faults.on_call("create", n)) for n in range(1, 40)]
    again = Faults.model_validate_json(faults.model_dump_json())
    assert hits == [bool(again.on_call("create", n)) for n in range(1, 40)]
    assert p not in {0.0, 1.0} or all(h == bool(p) for h in hits)


def test_draws_occur_at_about_their_probability() -> None:
    faults = Faults(seed=7, faults=(Fault(kind="lost_reply", call="get", probability=0.25),))
    assert 400 < sum(bool(faults.on_call("get", n)) for n in range(2000)) < 600


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "lost_reply"},
        {"kind": "preempt", "call": "create"},
        {"kind": "stale", "call": "create"},
        {"kind": "preempt", "steps": 3},
        {"kind": "preempt", "at": 0},
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Fault.model_validate(wrong)


def test_an_invalid_cloud_file_is_reported(tmp_path: Path) -> None:
    world = World(tmp_path, VAST)
    world.rent()
    (tmp_path / "state.json").write_text('{"nonce": 3}')
    said = world.cloud.list()
    assert isinstance(said, Unknown) and "state.json" in said.why
    (tmp_path / "cloud.json").write_text("{")
    with pytest.raises(BadReply, match=r"cloud\.json"):
        World(tmp_path, VAST)


def test_a_cloud_whose_folder_is_deleted_answers_unknown(tmp_path: Path) -> None:
    world = World(tmp_path / "cloud", VAST)
    (tmp_path / "cloud").rename(tmp_path / "away")
    assert isinstance(world.cloud.list(), Unknown)
    assert not (tmp_path / "cloud").exists()
