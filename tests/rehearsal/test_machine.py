"""For any calls in any order and with any faults, the rules for money, files, and processes hold."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import InstanceState, Known, Resources
from gpuwarden.core.profile import Profile, Survival
from gpuwarden.profiles import load_profile
from gpuwarden.rehearsal import processes
from gpuwarden.rehearsal.model import MARKER, Fault
from real_parts import amount
from rehearsal_kit import RENTED, World

S = InstanceState
OFF = {S.STOPPED, S.INTERRUPTED}
CALLS = ["create", "find", "get", "list", "start", "stop", "terminate"]
call_faults = st.builds(
    Fault,
    kind=st.sampled_from(["lost_request", "lost_reply", "bad_reply"]),
    call=st.sampled_from(CALLS),
    probability=st.sampled_from([0.1, 0.5]),
)
instance_faults = st.builds(
    Fault,
    kind=st.sampled_from(["slow_boot", "failed_boot", "preempt", "vanish", "bills_when_stopped", "comes_back"]),
    at=st.integers(1, 3),
    seconds=st.sampled_from([0.0, 7.0, 60.0]),
)


def frail() -> Profile:
    """Return a frail platform: it loses its root at every stop and interruption, its data disk only at the end."""
    vast = load_profile("vastai")
    root, volume = vast.storage
    frail_root = Survival(stop=False, terminate=False, preemption=False, job_end=True)
    data = root.model_copy(update={"tier": "data-disk", "path": "/workspace"})
    tiers = (root.model_copy(update={"survives": frail_root}), data, volume)
    return vast.model_copy(update={"id": "frail", "storage": tiers})


class Life(RuleBasedStateMachine):
    """Drives a cloud, with an independent record of the files written and of the costs last observed."""

    instances = Bundle("instances")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="rehearsal-"))
        self.costs: dict[str, float] = {}
        self.files: dict[str, dict[str, str]] = {}  # instance -> path -> event that deleted it, or ""
        self.volumes: set[Path] = set()
        self.states: dict[str, InstanceState] = {}
        self.children: list[subprocess.Popen[bytes]] = []

    @initialize(
        name=st.sampled_from(["frail", *RENTED]),
        seed=st.integers(0, 1000),
        faults=st.lists(call_faults | instance_faults, max_size=4),
    )
    def open(self, name: str, seed: int, faults: list[Fault]) -> None:
        self.world = World(self.folder, frail() if name == "frail" else load_profile(name), *faults, seed=seed)

    @rule(target=instances, durable=st.booleans(), interruptible=st.booleans())
    def create(self, durable: bool, interruptible: bool) -> object:
        resources = Resources(durable_storage=durable, interruptible=interruptible)
        try:
            answer = self.world.cloud.create(resources, "token")
        except WardenError:
            return multiple()
        if not isinstance(answer, Known):
            return multiple()
        assert answer.value.meter is True
        self.wait(10)
        self.write_everywhere(answer.value.id)
        self.start_a_process(answer.value.id)
        return answer.value.id

    @rule(
        ident=instances,
        verb=st.sampled_from(["start", "stop", "preempt", "terminate"]),
        seconds=st.sampled_from([10.0, 0.0, 400.0]),
    )
    def act(self, ident: str, verb: str, seconds: float) -> None:
        try:
            getattr(self.world.cloud, verb)(ident)
        except WardenError:
            return
        self.world.wait(seconds)

    @rule(ident=instances, verb=st.sampled_from(["stop", "preempt", "terminate"]))
    def work_and_end(self, ident: str, verb: str) -> None:
        self.work(ident)
        self.act(ident, verb, 5.0)

    @rule(ident=instances)
    def work(self, ident: str) -> None:
        self.write_everywhere(ident)
        self.start_a_process(ident)

    @rule(seconds=st.sampled_from([0.5, 5.0, 10.0, 25.0, 400.0, -1.0, -1000.0]))
    def wait(self, seconds: float) -> None:
        self.world.clock.time += seconds

    def write_everywhere(self, ident: str) -> None:
        answer = self.world.cloud.get(ident)
        if not isinstance(answer, Known) or answer.value is None or answer.value.place is None:
            return
        record = self.world.cloud.store.state().records[ident]
        for tier in self.world.cloud.profile.tiers(requested=record.durable):
            file = Path(answer.value.place.root) / tier.path.lstrip("/") / f"of-{ident}"
            file.write_text("x")
            if tier.survives.terminate is True:
                self.volumes.add(file.resolve())
            self.files.setdefault(ident, {})[tier.tier] = str(file)

    def start_a_process(self, ident: str) -> None:
        if len(self.children) < 2 and self.world.state(ident) == S.RUNNING:
            env = {MARKER: ident, "PATH": "/usr/bin:/bin"}
            deaf = ["sh", "-c", "trap '' TERM; exec sleep 60"]
            self.children.append(subprocess.Popen(deaf, env=env, start_new_session=True))

    @invariant()
    def the_laws(self) -> None:
        if not hasattr(self, "world"):
            return
        cloud = self.world.cloud
        for ident, truth in cloud.truths().items():
            record = cloud.store.state().records[ident]
            before = self.states.get(ident)
            assert record.pending == ()
            assert truth.cost_usd >= self.costs.get(ident, 0.0), "money never comes back"
            if truth.meter:
                assert truth.state != S.GONE and truth.state != S.INTERRUPTED
            else:
                assert truth.state in {*OFF, S.GONE}
            if truth.state in {*OFF, S.GONE}:
                assert truth.processes == ()
                assert not (cloud.root / "instances" / ident / "fs").exists()
            if truth.state == S.INTERRUPTED or (before is not None and truth.state != before):
                assert record.interruptible or truth.state != S.INTERRUPTED
            self.costs[ident], self.states[ident] = truth.cost_usd, truth.state
            self.deleted_is_deleted(ident, truth.state)
        for volume_file in self.volumes:
            assert volume_file.exists(), "what outlives terminate outlives everything that happened"

    def deleted_is_deleted(self, ident: str, state: InstanceState) -> None:
        profile = self.world.cloud.profile
        home = self.world.cloud.root / "instances" / ident
        event = {S.STOPPED: "stop", S.INTERRUPTED: "preemption", S.GONE: "terminate"}.get(state)
        for tier in profile.storage:
            written = self.files.get(ident, {}).get(tier.tier)
            if written is None or event is None:
                continue
            inside = Path(written).relative_to(home / "fs")
            kept = (home / "fs.off" / inside).exists() or Path(written).exists()
            if getattr(tier.survives, event) is not True:
                assert not kept, (tier.tier, event)
            if event == "terminate":
                self.files[ident].pop(tier.tier)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            for ident in self.states:
                processes.kill(ident)
        for child in self.children:
            child.kill()
            child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


TestLife = pytest.mark.endurance(pytest.mark.slow(Life.TestCase))
# No shrinking: with real processes it takes minutes, and the first failure prints all of its steps anyway.
TestLife.settings = settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    max_examples=amount(15, 60),
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
