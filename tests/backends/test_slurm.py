"""The slurm backend against real daemons: the contract, and features that only a queue has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contract_arrays import ArrayContract
from contract_backend import BackendContract, ended, until
from doors import TRAIN
from gpuwarden.backends import _slurm_options as options
from gpuwarden.backends.slurm import SlurmBackend
from gpuwarden.core.cell_states import CellState
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.engine import UNLIMITED
from gpuwarden.core.errors import BadRequest, NoSandbox, NotSupported, Refused
from gpuwarden.core.fan_out import gridded
from gpuwarden.core.guidance import Action
from gpuwarden.core.models import Handle, Known, Place, StopResult, Unknown, Verdict
from gpuwarden.core.policy import Local
from gpuwarden.core.reasons import Code
from gpuwarden.core.rules import run_rules
from gpuwarden.core.states import TERMINAL_JOBS, Job
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.artifacts.verify import verify_job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.fan_out.accepting import fan_out
from gpuwarden.lifecycle.fan_out.launching import FanOutResult, advance_fan_out
from gpuwarden.lifecycle.monitoring.check import cancel, check
from gpuwarden.lifecycle.submission.facts import gather
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.lifecycle.teardown.gate import request
from gpuwarden.remote.host import node_talk
from gpuwarden.rules import catalog
from lifecycle_kit import until as until_checked
from slurm_kit import Cluster, SlurmEngine, login_node, place_of, train
from sshd import Sshd
from waiting import soon

pytestmark = [pytest.mark.anyio, pytest.mark.real]

# Counts its starts in a file, like a job that loads its checkpoint, and saves on SIGTERM.
RESUMES = """
n=$(cat count 2>/dev/null || echo 0); echo "from $n $KEY"
trap 'echo $((n + 1)) > count; echo saved; exit 0' TERM
while [ ! -e go ]; do sleep 0.1; done
"""


@pytest.fixture
def backend() -> SlurmBackend:
    return SlurmBackend(SystemClock())


@pytest.fixture
def place(cluster: Cluster, tmp_path: Path) -> Place:
    return place_of(cluster, tmp_path)


@pytest.fixture
def engine(cluster: Cluster) -> SlurmEngine:
    return SlurmEngine(cluster)


@pytest.fixture
def ctx(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Context:
    return login_node(tmp_path, cluster, monkeypatch)


async def told(backend: SlurmBackend, handle: Handle) -> list[str]:
    """Return the log's lines without the shell's messages about its children."""
    return [line for line in (await backend.logs(handle)).text.splitlines() if line != "Terminated"]


@pytest.mark.prove
class TestSlurm(BackendContract):
    @pytest.fixture
    def engine(self, cluster: Cluster) -> SlurmEngine:
        return SlurmEngine(cluster)


@pytest.mark.prove
class TestSlurmArrays(ArrayContract):
    """The cluster's configuration allows at most a hundred tasks."""


@pytest.mark.slow
async def test_the_cluster_reports_its_limits(backend: SlurmBackend, place: Place, engine: SlurmEngine) -> None:
    spec = engine.job("true", timeout_s=3_600, gpu="a100", gpu_count=2, options={"cpus": 2, "nodes": 2})
    found = await backend.limits(spec, place)
    assert (found.engine, found.version[:2].isdigit(), found.accounts, found.max_array) == ("slurm", True, None, 101)
    assert found.request.walltime_s == 3_840 and (found.request.gpu, found.request.gpus) == ("a100", 2)
    low, high, closed = found.queues
    assert (low.name, low.default, low.open, low.max_s, low.preempts) == ("low", True, True, 7_200, "requeue")
    assert (low.cpus, low.memory_mb, low.gpus, low.nodes, low.grace_s) == (4, 4_000, {}, 2, 10)
    assert (high.max_s, high.preempts, closed.open) == (UNLIMITED, "no", False)
    assert found.queue == low and found.requeue_s == 6.0
    assert found.refusal, "no machine has such a GPU, and Slurm says so"


@pytest.mark.prove
@pytest.mark.parametrize(
    ("given", "rules"),
    [
        ({}, set()),
        ({"timeout_s": 7_200}, {"PF-ENG-003"}),
        ({"timeout_s": 86_400, "options": {"walltime_s": 3_600}}, set()),
        ({"options": {"partition": "nope"}}, {"PF-ENG-002", "PF-ENG-006"}),
        ({"options": {"partition": "closed"}}, {"PF-ENG-002"}),
        ({"gpu": "a100"}, {"PF-ENG-005", "PF-ENG-006"}),
        ({"options": {"cpus": 64}}, {"PF-ENG-005", "PF-ENG-006"}),
        ({"options": {"nodes": 3}}, {"PF-ENG-005", "PF-ENG-006"}),
        ({"options": {"constraint": "a100"}}, {"PF-ENG-006"}),
    ],
)
async def test_the_submit_gate_refuses_jobs_that_would_wait_forever(
    ctx: Context, given: dict[str, Any], rules: set[str]
) -> None:
    facts = await gather(ctx, train(**given))
    found = run_rules(catalog.rules_of("submit"), facts)
    assert {f.rule for f in found if f.blocks} == rules
    assert all(f.fix for f in found)


RANKS = 'srun --overlap sh -c "echo rank on \\$SLURMD_NODENAME"'


@pytest.mark.slow
async def test_a_multi_node_job_checks_its_nodes_before_it_starts(
    backend: SlurmBackend, place: Place, engine: SlurmEngine
) -> None:
    handle = await backend.submit(engine.job(RANKS, options={"nodes": 2}), place, "w-two", secrets={})
    assert (await ended(backend, handle)).state is Job.SUCCEEDED
    assert sorted(await told(backend, handle)) == ["rank on n0", "rank on n1"]
    seen = json.loads((Path(handle.run_dir) / "nodes.json").read_text())
    assert sorted(node["node"] for node in seen["nodes"]) == ["n0", "n1"] and seen["problems"] == []


@pytest.mark.prove
@pytest.mark.parametrize(
    ("read", "other", "env", "code"),
    [
        ('\n        "now": ', '\n        "now": 900 * (os.environ["SLURMD_NODENAME"] == "n1") + ', {},
         "clock_off"),
        ('"torch": find_torch(request.get("python") or ""),', '"torch": {"torch": os.environ["SLURMD_NODENAME"]},', {},
         "torch_differs"),
        ('"interfaces": interfaces(),', '"interfaces": interfaces(),', {"NCCL_SOCKET_IFNAME": "eth99"},
         "interface_wrong"),
        ('SOURCE = ""', 'SOURCE = os.environ["SLURMD_NODENAME"] == "n1" and sys.exit(7) or ""', {},
         "silent"),
    ],
)  # fmt: skip
async def test_a_failed_node_check_ends_the_job_before_its_command(
    backend: SlurmBackend, place: Place, engine: SlurmEngine, monkeypatch: pytest.MonkeyPatch,
    read: str, other: str, env: dict[str, str], code: str,
) -> None:  # fmt: skip
    source = node_talk.agent_source()
    assert source.count(read) == 1
    monkeypatch.setattr(options, "agent_source", lambda: source.replace(read, other))
    spec = engine.job(RANKS, options={"nodes": 2}, env=env, max_restarts=3)
    handle = await backend.submit(spec, place, "w-bad", secrets={})
    seen = await ended(backend, handle)
    assert (seen.state, seen.reason, seen.exit_code) == (Job.FAILED, Code.NOT_STARTED, 96)
    found = json.loads((Path(handle.run_dir) / "nodes.json").read_text())["problems"]
    assert {problem["code"] for problem in found} == {code}
    assert all(problem["node"] in seen.why for problem in found)
    lines = await told(backend, handle)
    assert lines and all(line.startswith("[gpuwarden] ") for line in lines), "no rank has run"


@pytest.mark.slow
async def test_a_warned_job_saves_requeues_and_resumes(
    backend: SlurmBackend, place: Place, engine: SlurmEngine, cluster: Cluster
) -> None:
    handle = await backend.submit(engine.job(RESUMES), place, "w-warn", secrets={"KEY": "hunter22-hunter22"})
    await until(backend, handle, lambda o: o.log_bytes > 0)
    cluster.run("scancel", "--batch", "--signal=USR1", *cluster.jobs("gw-w-warn"))
    waits = await until(backend, handle, lambda o: o.state is Job.QUEUED)
    assert waits.allocation is not None and waits.allocation.restarts == 1 and waits.meter is False
    again = await until(backend, handle, lambda o: o.state is Job.RUNNING and o.reason is not Code.ENGINE_STARTS)
    assert again.attempt == 1 and again.meter is True
    (Path(handle.run_dir) / "work/go").touch()
    seen = await ended(backend, handle)
    assert (seen.state, seen.exit_code) == (Job.SUCCEEDED, 0)
    assert await told(backend, handle) == ["from 0 ***", "saved", "from 1 ***"]
    assert len(cluster.jobs("gw-w-warn")) == 1, "it is the same job of Slurm's"


@pytest.mark.slow
async def test_a_job_that_its_user_cancels_is_not_queued_again(
    backend: SlurmBackend, place: Place, engine: SlurmEngine, cluster: Cluster
) -> None:
    handle = await backend.submit(engine.job(RESUMES), place, "w-user", secrets={"KEY": "hunter22-hunter22"})
    await until(backend, handle, lambda o: o.log_bytes > 0)
    cluster.run("scancel", *cluster.jobs("gw-w-user"))
    seen = await ended(backend, handle)
    assert seen.state is Job.CANCELED
    assert seen.allocation is not None and seen.allocation.restarts == 0


@pytest.mark.prove
async def test_a_preempted_job_makes_room_and_resumes(
    backend: SlurmBackend, place: Place, engine: SlurmEngine, cluster: Cluster
) -> None:
    both = {"nodes": 2, "exclusive": True}
    low = await backend.submit(engine.job(RESUMES, options=both), place, "w-low", secrets={"KEY": "k" * 12})
    await until(backend, low, lambda o: o.log_bytes > 0)
    urgent = engine.job("echo urgent", options={**both, "partition": "high"})
    high = await backend.submit(urgent, place, "w-high", secrets={})
    assert (await until(backend, high, lambda o: o.state is Job.SUCCEEDED)).exit_code == 0
    await until(backend, low, lambda o: o.state is Job.RUNNING and bool(o.allocation and o.allocation.restarts))
    (Path(low.run_dir) / "work/go").touch()
    assert (await until(backend, low, lambda o: o.state is Job.SUCCEEDED)).attempt == 1
    assert await told(backend, low) == ["from 0 ***", "saved", "from 1 ***"]


@pytest.mark.prove
async def test_a_warned_job_without_restarts_is_reported_preempted(
    backend: SlurmBackend, place: Place, engine: SlurmEngine, cluster: Cluster
) -> None:
    handle = await backend.submit(engine.job(RESUMES, max_restarts=0), place, "w-never", secrets={"KEY": "k" * 12})
    await until(backend, handle, lambda o: o.log_bytes > 0)
    cluster.run("scancel", "--batch", "--signal=USR1", *cluster.jobs("gw-w-never"))
    seen = await ended(backend, handle)
    assert (seen.state, seen.reason) == (Job.PREEMPTED, Code.ENGINE_TOOK)


@pytest.mark.slow
async def test_a_job_that_waits_is_canceled_at_once(
    backend: SlurmBackend, place: Place, engine: SlurmEngine, cluster: Cluster
) -> None:
    handle = await backend.submit(engine.job("true", options={"partition": "closed"}), place, "w-wait", secrets={})
    seen = (await backend.poll([handle]))["w-wait"]
    assert (seen.state, seen.reason, seen.meter) == (Job.QUEUED, Code.ENGINE_QUEUE, False)
    assert seen.allocation is not None and seen.allocation.why == "PartitionDown"
    assert await backend.stop(handle) is StopResult.STOPPED
    assert (await backend.poll([handle]))["w-wait"].state is Job.CANCELED
    cluster.run("scancel", *cluster.jobs("gw-w-wait"))


@pytest.mark.prove
async def test_another_job_of_the_same_name_is_not_ours(
    backend: SlurmBackend, place: Place, engine: SlurmEngine, cluster: Cluster
) -> None:
    cluster.run("sbatch", "-J", "gw-w-name-a1", "-o", "/dev/null", "--wrap", "exit 5")
    assert await backend.find(place, "w-name") == Known(None)
    handle = await backend.submit(engine.job("echo ours"), place, "w-name", secrets={})
    assert (await ended(backend, handle)).state is Job.SUCCEEDED
    assert len(cluster.jobs("gw-w-name")) == 2


@pytest.mark.slow
async def test_a_submit_refused_by_slurm_leaves_no_job(
    backend: SlurmBackend, place: Place, engine: SlurmEngine
) -> None:
    with pytest.raises(BadRequest, match="invalid partition"):
        await backend.submit(engine.job("true", options={"partition": "nope"}), place, "w-no", secrets={})
    assert await backend.find(place, "w-no") == Known(None)


@pytest.mark.prove
async def test_a_batch_script_that_never_reached_the_job_reports_why(
    backend: SlurmBackend, place: Place, engine: SlurmEngine
) -> None:
    handle = await backend.submit(engine.job("true", options={"modules": ["cuda/12.4"]}), place, "w-mod", secrets={})
    seen = await ended(backend, handle)
    assert (seen.state, seen.exit_code) == (Job.FAILED, 98)
    assert "module" in seen.why and "not found" in seen.why


@pytest.mark.prove
async def test_a_job_forgotten_by_slurm_takes_its_runners_last_status_or_is_unknown(
    backend: SlurmBackend, place: Place, engine: SlurmEngine, cluster: Cluster
) -> None:
    done = await backend.submit(engine.job("exit 4"), place, "w-done", secrets={})
    lives = await backend.submit(engine.job("echo up; sleep 60"), place, "w-lives", secrets={})
    await ended(backend, done)
    await until(backend, lives, lambda o: o.log_bytes > 0)
    with engine._shimmed({"squeue": 'echo \'{"meta": {}, "errors": [], "jobs": []}\''}):
        seen = await backend.poll([done, lives])
        assert (seen["w-done"].state, seen["w-done"].exit_code) == (Job.FAILED, 4)
        assert (seen["w-lives"].state, seen["w-lives"].reason) == (Job.UNKNOWN, Code.UNLISTED)
        with engine._shimmed({"sacct": "echo 'sacct: error: slurm_persist_conn_open: Connection refused' >&2; exit 1",
                              "scontrol": "echo 'AccountingStorageType = accounting_storage/slurmdbd'"}):  # fmt: skip
            assert sorted(await backend.poll([done, lives])) == ["w-done"], "accounting is down: nobody knows"
            assert isinstance(await backend.find(place, "w-nothing"), Unknown)
    await backend.stop(lives, grace_s=0)


@pytest.mark.prove
async def test_a_job_forgotten_by_slurm_stays_unknown_while_its_runner_runs(
    ctx: Context, engine: SlurmEngine, cluster: Cluster
) -> None:
    """The list may come from another cluster, or `slurmctld` may have lost its state."""
    spec = train(script="import time\nprint('up', flush=True)\ntime.sleep(600)\n", name="forgot")
    launched = (await submit(ctx, spec)).job
    assert launched is not None
    job = launched.id
    await until_checked(ctx, job, lambda seen: seen.job.state is Job.RUNNING and bool(seen.log and seen.log.text))
    with engine._shimmed({"squeue": 'echo \'{"meta": {}, "errors": [], "jobs": []}\''}):
        seen = await check(ctx, job)
        assert (seen.job.state, seen.job.reason) == (Job.UNKNOWN, Code.UNLISTED)
        await cancel(ctx, job)
        assert (await check(ctx, job)).job.state is Job.UNKNOWN, "nothing was ended"
    await until_checked(ctx, job, lambda seen: seen.job.state is Job.CANCELED)
    assert f"gw-{job}" not in cluster.run("squeue", "-h", "-t", "pending,running", "-o", "%j")


@pytest.mark.prove
async def test_slurm_never_stores_or_shows_a_secret(
    backend: SlurmBackend, place: Place, engine: SlurmEngine, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2-of-the-server")
    spec = engine.job("env | cut -d= -f1 | sort; sleep 3", secrets=["TOKEN"])
    handle = await backend.submit(spec, place, "w-secret", secrets={"TOKEN": "hunter22-hunter22"})
    await until(backend, handle, lambda o: o.log_bytes > 0)
    (number,) = cluster.jobs("gw-w-secret")
    shown = cluster.run("scontrol", "show", "job", number) + cluster.run(
        "scontrol", "write", "batch_script", number, "-"
    )
    shown += cluster.run("squeue", "--json")
    written = b"".join(f.read_bytes() for f in Path(handle.run_dir).rglob("*") if f.is_file())
    assert "hunter2" not in shown and b"hunter2" not in written
    names = (await backend.logs(handle)).text.split()
    assert "TOKEN" in names and "SLURM_JOB_ID" in names
    assert not {"GPUWARDEN_ORDER", "HF_TOKEN"} & set(names)
    await backend.stop(handle, grace_s=0)


@pytest.mark.prove
async def test_a_slurm_job_runs_over_ssh(cluster: Cluster, engine: SlurmEngine, tmp_path: Path, sshd: Sshd) -> None:
    far = SlurmBackend(SystemClock(), config=sshd.config)
    place = place_of(cluster, tmp_path, "box")
    try:
        spec = engine.job("cat given.txt; mkdir -p out; echo hi > out/a", platform="slurm/box")
        (tmp_path / "given").write_text("brought\n")
        handle = await far.submit(spec, place, "w-far", secrets={}, inputs={"given.txt": tmp_path / "given"})
        assert handle.place.host_key == sshd.host_key
        assert (await ended(far, handle)).state is Job.SUCCEEDED
        assert (await far.logs(handle)).text == "brought\n"
        listing = await far.manifest(handle, ["out"])
        assert [f.path for f in listing.files] == ["out/a"]
        assert b"".join([part async for part in far.read(handle, listing.files[0])]) == b"hi\n"
        assert (await far.limits(spec, place)).queue is not None
        assert await far.stop(handle) is StopResult.GONE
        assert await far.find(place, "w-far") == Known(handle)
    finally:
        await far.aclose()


@pytest.mark.prove
async def test_the_whole_life_of_a_job_on_a_cluster(ctx: Context, cluster: Cluster) -> None:
    done = await submit(ctx, train())
    assert done.job is not None and done.receipt and done.quote is None and not done.ask, "nothing is metered"
    job_id = done.job.id

    async def over() -> bool:
        return (await check(ctx, job_id)).job.state in TERMINAL_JOBS

    await soon(over, 60, every=0.1)  # depends on Slurm's scheduling cycle
    seen = await check(ctx, job_id)
    assert seen.job.state is Job.SUCCEEDED and seen.lease is None and seen.log and "step 1" in seen.log.text
    assert [s.action for s in seen.next_steps][-2:] == [Action.PULL, Action.VERIFY]
    await pull(ctx, done.job.id)
    report = await verify_job(ctx, done.job.id)
    assert report.verdict is Verdict.PROVEN
    with pytest.raises(NotSupported):
        await request(ctx, done.job.id, "terminate")


ONCE = """
import os, pathlib, time
runs = pathlib.Path(os.environ["RUNS"])
with (runs / os.environ["GPUWARDEN_CELL"]).open("a") as file:
    file.write(f"{os.environ.get('SLURM_RESTART_COUNT', '0')}\\n")
while (runs / "hold").exists():
    time.sleep(0.1)
"""


async def advanced(ctx: Context, fan_id: str, good: Callable[[FanOutResult], bool]) -> FanOutResult:
    """Advance a fan-out until `good` accepts the result."""

    async def moved() -> FanOutResult | None:
        found = await advance_fan_out(ctx, fan_id)
        return found if good(found) else None

    found = await soon(moved, 120, every=0.2)  # Slurm waits half a minute before it runs a requeued task
    assert found is not None
    return found


@pytest.mark.prove
async def test_a_fan_out_array_requeues_a_killed_task_and_reruns_no_other(
    ctx: Context, cluster: Cluster, tmp_path: Path
) -> None:
    runs = tmp_path / "said"
    runs.mkdir()
    (runs / "hold").touch()
    base = train(name="sweep", script=ONCE + TRAIN, env={"RUNS": str(runs)}, max_restarts=2)
    listing = gridded(base, {"lr": ["1", "2", "3", "4", "5"]}, 0, max_machines=2)
    before = cluster.jobs("gw-j")  # other tests' jobs
    found = await fan_out(ctx, listing)
    assert found.now is not None and len(found.now.live) == 5 and found.now.busy == 2 and found.now.cost == 0
    fan_id = found.now.fan.id
    (number,) = {row.partition("_")[0] for row in cluster.jobs(f"gw-{fan_id}-r1")}
    assert set(cluster.jobs("gw-j")) <= set(before), "no cell went to the queue by itself"
    await advanced(ctx, fan_id, lambda _: len(list(runs.iterdir())) == 3)  # two running cells, and `hold`
    first = min(int(path.name) for path in runs.iterdir() if path.name != "hold")
    cluster.run("scontrol", "requeue", f"{number}_{first}")
    await advanced(ctx, fan_id, lambda _: len(list(runs.iterdir())) == 4)  # another cell has taken its place
    (runs / "hold").unlink()
    done = await advanced(ctx, fan_id, lambda found: found.now is not None and found.now.over)
    assert done.now is not None
    assert done.now.cells.count(CellState.VERIFIED) == 5, done.now.fan.found
    assert done.now.cells.duplicates == ()
    assert len(done.now.fan.queues) == 5 and {len(queue.cells) for queue in done.now.fan.queues} == {1}
    starts = {int(path.name): len(path.read_text().splitlines()) for path in runs.iterdir()}
    assert starts == {n: 2 if n == first else 1 for n in range(5)}, "only the one that was queued again ran again"
    assert done.next_steps == ()


@pytest.mark.prove
async def test_a_fan_out_too_large_for_an_array_is_refused_before_submission(ctx: Context, cluster: Cluster) -> None:
    listing = gridded(train(name="wide"), {"lr": [str(n) for n in range(102)]}, 0, max_machines=4)
    with pytest.raises(Refused, match="PF-ENG-008"):
        await fan_out(ctx, listing)
    assert not ctx.ledger.events(kind="job.accepted")


@pytest.mark.slow
async def test_the_login_nodes_own_cluster_is_refused_by_default(ctx: Context) -> None:
    ctx._backends.clear()
    ctx.policy = ctx.policy.model_copy(update={"local": Local()})
    with pytest.raises(NoSandbox):
        await submit(ctx, train())
