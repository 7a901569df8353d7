"""Real processes: a machine that powers off kills all of its processes, and no others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gpuwarden.core.clock import SystemClock
from gpuwarden.core.models import InstanceState, Known, Place, Resources
from gpuwarden.core.profile import Profile
from gpuwarden.profiles import load_profile
from gpuwarden.rehearsal import processes
from gpuwarden.rehearsal.cloud import Cloud
from gpuwarden.rehearsal.model import MARKER, Fault, Settings
from paths import KITS
from rehearsal_kit import World, on, process
from waiting import eventually
from wording import Wording

S = InstanceState
VAST = load_profile("vastai")
SLEEP = "import time; print('up', flush=True); time.sleep(60)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
ESCAPED = (
    "import os; os.setsid() if os.fork() == 0 else os._exit(0); os.fork(); print(os.getpid(), flush=True); " + SLEEP
)
POLITE = """
import signal, sys, time
def saved(*_):
    open(sys.argv[1], 'w').write('checkpoint'); sys.exit(0)
signal.signal(signal.SIGTERM, saved); print('up', flush=True); time.sleep(60)
"""


def with_grace(seconds: float) -> Profile:
    spot = VAST.spot.model_copy(update={"signal": "SIGTERM", "grace_s": seconds})
    return VAST.model_copy(update={"spot": spot})


@pytest.mark.parametrize("code", [SLEEP, DEAF, ESCAPED], ids=["plain", "ignores SIGTERM", "setsid and fork"])
@pytest.mark.parametrize("verb", ["stop", "terminate", "preempt", "vanish"])
def test_a_machine_that_ends_leaves_no_process(tmp_path: Path, code: str, verb: str) -> None:
    world = World(tmp_path, VAST)
    box, other = world.rent(interruptible=True), world.rent(interruptible=True)
    with process(box.place, code), process(other.place, SLEEP) as spared, process(no_marker(), SLEEP) as stranger:
        assert world.cloud.truth(box.id).processes
        if verb == "vanish":
            world.cloud.inject(box.id, Fault(kind="vanish"))
        else:
            getattr(world.cloud, verb)(box.id)
        world.wait(5)
        assert world.cloud.truth(box.id).processes == ()
        assert world.state(box.id) in {S.STOPPED, S.INTERRUPTED, S.GONE}
        assert spared.poll() is None
        assert stranger.poll() is None


def no_marker() -> Place:
    """Return a place whose processes carry no marker."""
    return Place(platform="local", run_root="/tmp")


def test_preemption_sends_sigterm_then_sigkill_after_the_grace_period(tmp_path: Path) -> None:
    world = World(tmp_path, with_grace(30))
    box = world.rent(interruptible=True)
    politely = POLITE.replace("sys.argv[1]", repr(str(tmp_path / "saved")))
    with process(box.place, politely) as polite, process(box.place, DEAF) as deaf:
        world.cloud.preempt(box.id)
        assert polite.wait(60) == 0, "the signal comes at once"
        assert (tmp_path / "saved").read_text() == "checkpoint"
        world.wait(29)
        assert deaf.poll() is None, "within its grace"
        seen = world.get(box.id)
        assert (seen.state, seen.meter) == (S.STOPPING, True)
        world.wait(1)
        assert deaf.wait(60) == -signal.SIGKILL
    assert world.state(box.id) == S.INTERRUPTED


def test_no_sigterm_is_sent_where_the_platform_sends_none(tmp_path: Path) -> None:
    world = World(tmp_path, VAST)
    box = world.rent(interruptible=True)
    with process(box.place, POLITE.replace("sys.argv[1]", repr(str(tmp_path / "saved")))) as polite:
        world.cloud.preempt(box.id)
        assert polite.wait(60) == -signal.SIGKILL
    assert not (tmp_path / "saved").exists()


def test_a_process_started_on_a_stopped_machine_is_killed_at_the_next_check(tmp_path: Path) -> None:
    world = World(tmp_path, VAST)
    box = world.rent()
    world.cloud.stop(box.id)
    world.wait(5)
    late = on(box.place, "/workspace/late")
    late.mkdir(parents=True)
    with process(box.place, DEAF) as child:
        world.wait(1)
        assert child.wait(60) == -signal.SIGKILL
    world.cloud.start(box.id)
    world.wait(10)
    assert not late.exists(), "what was written to a machine that was off did not happen"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="start ticks are read from /proc")
def test_an_unmarked_process_is_killed_only_by_its_proven_status(tmp_path: Path) -> None:
    world = World(tmp_path, VAST)
    box = world.rent()
    run = on(box.place, "/workspace/gpuwarden/run")
    run.mkdir()
    with process(no_marker(), DEAF) as named, process(no_marker(), SLEEP) as reused:
        ticks = Path(f"/proc/{named.pid}/stat").read_text().rpartition(")")[2].split()[19]
        said = {"state": "running", "pid": named.pid, "start_ticks": ticks, "child_pid": reused.pid, "child_ticks": "1"}
        (run / "status.json").write_text(json.dumps(said))
        world.end(box.id)
        assert named.wait(60) == -signal.SIGKILL
        assert reused.poll() is None, "a pid alone proves nothing"


def test_the_calling_process_is_never_killed(tmp_path: Path) -> None:
    """gpuwarden itself, and its parent processes, may run inside a rehearsal."""
    world = World(tmp_path / "cloud", VAST)
    box = world.rent()
    asker = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]);"
        "from rehearsal_kit import World; from gpuwarden.profiles import load_profile;"
        "w = World(Path(sys.argv[2]), load_profile('vastai')); w.clock.time += 100; w.end(sys.argv[3]); print('alive')"
    )
    done = subprocess.run(
        [sys.executable, "-c", asker, str(KITS), str(tmp_path / "cloud"), box.id],
        env={**os.environ, MARKER: box.id},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "alive\n", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's file limit of another process is Linux's")
def test_a_full_disk_refuses_writes_until_there_is_room(tmp_path: Path, wording: Wording) -> None:
    world = World(tmp_path, VAST, Fault(kind="full_disk", size=100_000))
    box = world.rent()
    target = on(box.place, "/workspace/gpuwarden/big")
    code = f"""
import sys, time
print('up', flush=True)
for line in sys.stdin:
    try:
        with open({str(target)!r}, 'ab') as f: f.write(b'x' * 90_000)
        print('wrote', flush=True)
    except OSError as e: print('refused', e.errno, flush=True)
"""
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, **(box.place.env if box.place else {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None

    def write() -> str:
        child.stdin.write("go\n")  # type: ignore[union-attr]
        child.stdin.flush()  # type: ignore[union-attr]
        return child.stdout.readline()  # type: ignore[union-attr]

    try:
        child.stdout.readline()
        assert write() == "wrote\n"
        world.wait(1)
        assert write() == "wrote\n"
        world.wait(1)
        assert write().startswith("refused")
        wording(world.get(box.id).why)
        target.unlink()
        world.wait(1)
        assert write() == "wrote\n"
    finally:
        child.kill()
        child.communicate()


@pytest.fixture
def real_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start supervisors as a user would instead of as forks, so that their command lines identify them."""
    monkeypatch.setattr(processes, "subprocess", subprocess)


def hosts(root: Path) -> list[int]:
    found = []
    for p in psutil.process_iter():
        try:
            line = p.cmdline()
        except psutil.Error:
            continue
        if "gpuwarden.rehearsal.supervisor" in line and str(root) in line[-1]:
            found.append(p.pid)
    return found


@pytest.mark.usefixtures("real_hosts")
@pytest.mark.slow
def test_a_host_advances_an_unwatched_cloud_and_then_exits(tmp_path: Path) -> None:
    quick = Settings(boot_s=0.1, stop_s=0.1, resume_s=30)
    cloud = Cloud(tmp_path, VAST, SystemClock(), settings=quick)
    made = cloud.create(Resources(interruptible=True), "token")
    assert isinstance(made, Known)
    ident = made.value.id
    run = tmp_path / "instances" / ident / "fs" / "workspace" / "gpuwarden" / "run"
    eventually(run.parent.exists)
    assert len(hosts(tmp_path)) == 1
    cloud.list()
    assert len(hosts(tmp_path)) == 1, "one is enough"
    cloud.inject(ident, Fault(kind="preempt", step=3))
    run.mkdir()
    with process(Place(platform="x", run_root="/", env={MARKER: ident}), DEAF) as child:
        (run / "metrics.jsonl").write_text('{"step": 3}\n')
        assert child.wait(60) == -signal.SIGKILL
    cloud.terminate(ident)
    eventually(lambda: not (tmp_path / "instances" / ident).exists())
    eventually(lambda: not hosts(tmp_path))


@pytest.mark.usefixtures("real_hosts")
def test_a_host_exits_when_its_cloud_is_deleted(tmp_path: Path) -> None:
    root = tmp_path / "cloud"
    cloud = Cloud(root, VAST, SystemClock(), settings=Settings(boot_s=0.1))
    cloud.create(Resources(), "token")
    eventually(lambda: list(root.glob("instances/*/fs/workspace")))
    assert hosts(root)
    root.rename(tmp_path / "elsewhere")
    eventually(lambda: not hosts(root))
    assert not root.exists(), "it makes nothing anew on its way out"


@pytest.mark.usefixtures("real_hosts")
def test_a_host_without_a_cloud_ends(tmp_path: Path) -> None:
    host = [sys.executable, "-P", "-m", "gpuwarden.rehearsal.supervisor", str(tmp_path)]
    assert subprocess.run(host, start_new_session=True, stdin=subprocess.DEVNULL).returncode == 0
    eventually(lambda: not hosts(tmp_path))
