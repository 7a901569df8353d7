"""The HF Jobs backend and provider against the rehearsal Hub, where jobs are real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp.client import Client

from contract_backend import EngineContract
from gpuwarden.app import open_context
from gpuwarden.backends.base import load_backend
from gpuwarden.backends.hf_jobs import HfJobsBackend, observation
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import AuthFailed, BadReply, BadRequest, Unreachable
from gpuwarden.core.models import (
    Handle,
    InstanceState,
    JobSpec,
    Known,
    Observation,
    Place,
    Resources,
    StopResult,
    Unknown,
)
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job
from gpuwarden.hub.client import HubClient, HubConfig, HubResponse
from gpuwarden.hub.jobs import flavor_of, moment, prices
from gpuwarden.interfaces.mcp.server import make_server
from gpuwarden.providers.hf_jobs import HfJobsProvider
from gpuwarden.rehearsal.hub.seed import TOKEN, USER
from gpuwarden.rehearsal.hub.server import Fault, HubServer
from hf_jobs_kit import PLACE, HubEngine, ended
from hubserver import READER, config
from waiting import soon
from wording import Wording

pytestmark = pytest.mark.anyio


@pytest.mark.slow
class TestHfJobs(EngineContract):
    @pytest.fixture
    def place(self) -> Place:
        return PLACE

    @pytest.fixture
    def engine(self, server: HubServer) -> HubEngine:
        return HubEngine(server)


def job(text: str, **fields: Any) -> JobSpec:
    given = {"platform": "hf-jobs", "command": [sys.executable, "-c", text], "timeout_s": 60, "gpu": "t4-small"}
    return JobSpec.model_validate(given | fields)


@pytest.mark.slow
async def test_run_poll_and_read_the_log_in_pieces(backend: HfJobsBackend, server: HubServer) -> None:
    handle = await backend.submit(
        job("import os; print('hello', len(os.environ['KEY'])); print('bye')"), PLACE, "j1", secrets={"KEY": "hunter22"}
    )
    seen = await ended(backend, handle)
    assert (seen.state, seen.exit_code, seen.meter) == (Job.SUCCEEDED, 0, False)
    assert seen.started_at is not None
    chunk = await backend.logs(handle)
    assert chunk.text == "hello 8\nbye\n"
    assert (await backend.logs(handle, 3, 4)).text == "lo 8"
    assert (await backend.logs(handle, -4)).text == "bye\n"
    assert (await backend.logs(handle, chunk.next)).text == ""
    (sent,) = server.jobs.jobs.values()
    assert sent.request["labels"]["gpuwarden-job"] == "j1"
    assert "hunter22" not in json.dumps([sent.request[k] for k in ("command", "environment", "labels")])


@pytest.mark.slow
async def test_a_script_arrives_unchanged_with_its_arguments(backend: HfJobsBackend) -> None:
    first = "# \u00e9 ' \" $HOME `x` \\"
    script = first + "\nimport sys\nprint(sys.argv[1:], open(__file__, encoding='utf-8').readline(), end='')\n"
    spec = job("", command=(), script=script, args=("a b", "$(x)", "--n=1"))
    handle = await backend.submit(spec, PLACE, "j2", secrets={})
    assert (await ended(backend, handle)).state is Job.SUCCEEDED
    assert (await backend.logs(handle)).text == "['a b', '$(x)', '--n=1'] # \u00e9 ' \" $HOME `x` \\\n"


@pytest.mark.slow
async def test_the_log_of_a_quiet_running_job_does_not_block(backend: HfJobsBackend) -> None:
    handle = await backend.submit(job("import time; print('up', flush=True); time.sleep(600)"), PLACE, "j3", secrets={})
    chunk = await soon(lambda: backend.logs(handle), good=lambda chunk: chunk.text)
    assert chunk.text == "up\n"
    assert await backend.stop(handle) is StopResult.STOPPED
    assert await backend.stop(handle) is StopResult.GONE
    assert (await ended(backend, handle)).state is Job.CANCELED


@pytest.mark.slow
async def test_failure_and_timeout_are_reported(backend: HfJobsBackend) -> None:
    failed = await backend.submit(job("import sys; sys.exit(7)"), PLACE, "j4", secrets={})
    late = await backend.submit(job("import time; time.sleep(60)", timeout_s=1), PLACE, "j5", secrets={})
    seen = await ended(backend, failed)
    assert (seen.state, seen.exit_code) == (Job.FAILED, 7)
    seen = await ended(backend, late)
    assert (seen.state, seen.reason) == (Job.FAILED, Code.TIME_LIMIT)


@pytest.mark.slow
async def test_a_token_starts_one_job_per_attempt(backend: HfJobsBackend, server: HubServer) -> None:
    first = await backend.submit(job("print(1)"), PLACE, "j6", secrets={})
    assert await backend.submit(job("print(1)"), PLACE, "j6", secrets={}) == first
    assert await backend.find(PLACE, "j6") == Known(first)
    assert await backend.find(PLACE, "never") == Known(None)
    again = await backend.submit(job("print(1)"), PLACE, "j6", secrets={}, attempt=2)
    assert again != first
    assert await backend.find(PLACE, "j6") == Known(again)
    assert len(server.jobs.jobs) == 2


@pytest.mark.slow
async def test_jobs_are_adopted_after_a_lost_reply(backend: HfJobsBackend, server: HubServer) -> None:
    server.conditions.faults.append(Fault("POST /api/jobs/", drop=True, times=1))
    handle = await backend.submit(job("print(1)"), PLACE, "j7", secrets={})
    assert len(server.jobs.jobs) == 1
    assert (await ended(backend, handle)).state is Job.SUCCEEDED


@pytest.mark.slow
async def test_a_failed_submit_starts_no_job(backend: HfJobsBackend, server: HubServer, wording: Wording) -> None:
    with pytest.raises(BadRequest) as refused:
        await backend.submit(job("print(1)", gpu="tpu-v9"), PLACE, "j8", secrets={})
    wording(refused, "tpu-v9")
    with pytest.raises(AuthFailed):
        reader = HfJobsBackend(SystemClock(), config(server, READER))
        await reader.submit(job("print(1)"), PLACE, "j8", secrets={})
    with pytest.raises(AuthFailed) as refused:
        await HfJobsBackend(SystemClock(), config(server, None)).submit(job("print(1)"), PLACE, "j8", secrets={})
    wording(refused)
    with pytest.raises(BadRequest) as refused:
        import random

        noise = "".join(random.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=200_000))
        await backend.submit(job("", command=(), script=f"x = '{noise}'"), PLACE, "j8", secrets={})
    wording(refused)
    server.conditions.faults.append(Fault("GET /api/jobs/rehearsal$", status=200, body=b'{"jobs": []}'))
    assert isinstance(await backend.find(PLACE, "j8"), Unknown)
    with pytest.raises(BadReply):
        await backend.submit(job("print(1)"), PLACE, "j8", secrets={})
    server.conditions.faults[:] = [Fault("", status=503)]
    with pytest.raises(Unreachable):
        await backend.poll([Handle(backend="hf_jobs", token="t", run_dir=f"/jobs/{USER}/{'0' * 24}", place=PLACE)])
    assert server.jobs.jobs == {}


async def test_a_job_that_the_hub_forgot_is_unknown_not_failed(backend: HfJobsBackend) -> None:
    handle = Handle(backend="hf_jobs", token="t", run_dir=f"/jobs/{USER}/{'0' * 24}", place=PLACE)
    assert (await backend.poll([handle]))["t"].state is Job.UNKNOWN
    assert await backend.stop(handle) is StopResult.GONE


async def test_outputs_are_repos(backend: HfJobsBackend, server: HubServer) -> None:
    weights = b"w" * 5_000
    server.store.put("model", f"{USER}/out", {"model.safetensors": weights, "config.json": "{}", "sub/a.txt": "a"})
    handle = Handle(backend="hf_jobs", token="t", run_dir=f"/jobs/{USER}/{'0' * 24}", place=PLACE)
    root = f"/hub/models/{USER}/out"
    listed = await backend.manifest(handle, [root, "/job/out", "/hub/models/no/where"])
    assert {f.path.removeprefix(root + "/") for f in listed.files} == {"model.safetensors", "config.json", "sub/a.txt"}
    assert all(f.sha256 for f in listed.files)
    assert listed.missing == ("/job/out", "/hub/models/no/where")
    (big,) = (f for f in listed.files if f.path.endswith("model.safetensors"))
    assert b"".join([c async for c in backend.read(handle, big)]) == weights
    assert b"".join([c async for c in backend.read(handle, big, 4_990)]) == weights[4_990:]
    assert [f.path for f in (await backend.list_files(handle, [f"{root}/sub"])).files] == [f"{root}/sub/a.txt"]


def test_stages_are_mapped() -> None:
    def seen(stage: str, message: str = "") -> Observation:
        return observation({"id": "0" * 24, "status": {"stage": stage, "message": message}})

    assert (seen("SCHEDULING").state, seen("SCHEDULING").meter) == (Job.QUEUED, None)
    assert (seen("RUNNING").state, seen("RUNNING").meter) == (Job.RUNNING, True)
    assert (seen("DELETED").state, seen("CANCELED").state) == (Job.UNKNOWN, Job.CANCELED)
    assert seen("ERROR", "Job timeout").reason is Code.TIME_LIMIT


def test_gpus_map_to_flavors() -> None:
    known = {"a100-large": 2.5, "a100x4": 10.0, "t4-small": 0.4, "l4x1": 0.8, "cpu-basic": 0.01}
    assert flavor_of("a100", 1, known) == "a100-large"
    assert flavor_of("A100-large", 4, known) == "a100x4"
    assert flavor_of("l4", 1, known) == "l4x1"
    assert flavor_of(None, 1, known) == "cpu-basic"
    with pytest.raises(BadRequest):
        flavor_of("a100", 3, known)


async def test_an_unusable_price_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"name": str(cost), "unitCostMicroUSD": cost, "unitLabel": "hour"} for cost in (-1, 1e308, 10**400, 5e5)]

    async def told(*_: object) -> HubResponse:
        return HubResponse(200, [*rows, "t4", None], {})

    monkeypatch.setattr(HubClient, "get", told)
    async with HubClient(HubConfig(endpoint="http://127.0.0.1:1"), clock=SystemClock()) as hub:
        assert await prices(hub) == {"500000.0": 0.5}


@pytest.mark.parametrize("text", ["soon", "", None, 5, "\ud800"])
def test_an_invalid_time_is_none(text: object) -> None:
    assert moment(text) is None


def test_the_backend_is_found_by_name() -> None:
    assert load_backend("hf_jobs", SystemClock()).name == "hf_jobs"


# ------------------------------------------------------------------------------------------------------- provider


@pytest.mark.slow
async def test_a_reservation_lives_and_ends_with_its_job(provider: HfJobsProvider, backend: HfJobsBackend) -> None:
    wanted = Resources(gpu="t4-small")
    price = await provider.quote(wanted)
    assert isinstance(price, Known)
    assert price.value.price_usd_per_hour == pytest.approx(0.4, rel=0.01)
    made = await provider.create(wanted, "lease-9")
    assert isinstance(made, Known)
    assert (made.value.state, made.value.meter) == (InstanceState.RUNNING, False)
    assert made.value.place is not None
    handle = await backend.submit(job("import time; time.sleep(600)"), made.value.place, "j1", secrets={})
    seen = await soon(
        lambda: provider.get("lease-9"),
        good=lambda seen: not (isinstance(seen, Known) and seen.value and not seen.value.meter),
    )
    assert isinstance(seen, Known)
    assert seen.value is not None
    assert seen.value.meter is True
    assert seen.value.cost_usd is not None
    assert await provider.terminate("lease-9") == Known(None)
    assert (await ended(backend, handle)).state is Job.CANCELED
    assert await provider.get("lease-9") == Known(None)
    assert await provider.terminate("lease-9") == Known(None)
    assert await provider.list() == Known(())


@pytest.mark.slow
async def test_a_reservation_without_a_job_can_be_released(provider: HfJobsProvider, server: HubServer) -> None:
    await provider.create(Resources(gpu="t4-small"), "lease-8")
    found = await provider.find("lease-8")
    assert isinstance(found, Known)
    assert len(found.value) == 1
    await provider.terminate("lease-8")
    assert await provider.find("lease-8") == Known(())
    server.conditions.faults.append(Fault("", status=503))
    assert isinstance(await provider.get("lease-8"), Unknown)
    assert isinstance(await provider.terminate("lease-8"), Unknown)


# --------------------------------------------------------------------------------- a job's whole life, through MCP

SCRIPT = """# /// script
# requires-python = ">=3.11"
# dependencies = ["huggingface_hub>=2", "safetensors>=0.5", "numpy>=2"]
# ///
import json
import os
import numpy as np
from huggingface_hub import HfApi, hf_hub_download
from safetensors.numpy import save_file

rows = open(hf_hub_download("{data}", "data/train.jsonl", repo_type="dataset"), encoding="utf-8").readlines()
print("rows", len(rows), json.loads(rows[0])["source"], flush=True)
if os.environ.get("BREAK"):
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
save_file({{"w": np.arange(64, dtype=np.float32)}}, "model.safetensors")
api = HfApi(token=os.environ["HF_TOKEN"])
api.create_repo("rehearsal/walked", exist_ok=True)
api.upload_file(path_or_fileobj="model.safetensors", path_in_repo="model.safetensors", repo_id="rehearsal/walked")
print("pushed")
"""


@pytest.mark.prove
async def test_full_job_lifecycle_through_mcp(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("[caps]\nper_job_usd = 5\nper_day_usd = 50\nper_instance_usd = 5\n")
    env = {**server.env, "HF_TOKEN": TOKEN, "GPUWARDEN_HOME": str(tmp_path / "home"), "GPUWARDEN_POLICY": str(policy)}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    ctx = open_context("mcp", env=env)
    request: dict[str, Any] = {
        "platform": "hf-jobs", "gpu": "t4-small", "secrets": ["HF_TOKEN"], "timeout_s": 1200, "max_cost_usd": 1.0,
        "outputs": ["/hub/models/rehearsal/walked"], "env": {"HF_HUB_DISABLE_XET": "1"},
    }  # fmt: skip
    async with Client(make_server(ctx)) as client:

        async def call(tool: str, **args: Any) -> dict[str, Any]:
            reply = (await client.call_tool(tool, args)).structured_content
            assert isinstance(reply, dict)
            return reply

        async def finished(job_id: str) -> dict[str, Any]:
            return await soon(
                lambda: call("check_job", job_id=job_id),
                every=0.2,
                good=lambda seen: seen["state"] in {"succeeded", "failed", "canceled"},
            )

        # Look up the id first: it is wrong, and the tools suggest the right one.
        found = await call("hub_repo_details", repo_ids=["trl-lib/capybara"], repo_type="dataset")
        assert found["repos"][0]["did_you_mean"][0] == "trl-lib/Capybara"
        searched = await call("dataset_search", query="capybara", author="trl-lib")
        assert [d["id"] for d in searched["datasets"]] == ["trl-lib/Capybara"]

        # A dry run refuses the wrong id and names the rule; the right id gets a receipt, and nothing runs yet.
        wrong = await call("submit_job", **request, script=SCRIPT.format(data="trl-lib/capybara"), dry_run=True)
        assert (wrong["ok"], wrong["code"]) == (False, "refused")
        assert "PF-HUB-001" in {f["rule"] for f in wrong["findings"]}
        good = request | {"script": SCRIPT.format(data="trl-lib/Capybara")}
        checked = await call("submit_job", **good)
        assert checked["ok"], checked
        assert checked["receipt"]
        assert server.jobs.jobs == {}

        # The reply to the launch is lost; the job is adopted, and only one exists.
        server.conditions.faults.append(Fault("POST /api/jobs/", drop=True, times=1))
        launched = await call("submit_job", **good, receipt=checked["receipt"])
        assert launched["ok"], launched
        seen = await finished(launched["job_id"])
        assert seen["state"] == "succeeded", seen
        assert "rows 20" in json.dumps(seen)
        assert len(server.jobs.jobs) == 1

        # The outputs that the job pushed are pulled from the Hub and proven by loading them.
        pulled = await call("pull_artifacts", job_id=launched["job_id"])
        assert pulled["ok"], pulled
        proven = await call("verify_checkpoint", job_id=launched["job_id"])
        assert proven["verdict"] == "proven", json.dumps(proven)

        # A failed job is reported as failed, with its log as data.
        broken = good | {"env": {"HF_HUB_DISABLE_XET": "1", "BREAK": "1"}}
        second = await call("submit_job", **broken)
        failed = await finished((await call("submit_job", **broken, receipt=second["receipt"]))["job_id"])
        assert failed["state"] == "failed"
        assert "CUDA out of memory" in json.dumps(failed)
        assert TOKEN not in json.dumps([wrong, checked, launched, seen, pulled, proven, failed])


async def test_a_repo_changed_after_the_check_blocks_the_launch(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("[caps]\nper_job_usd = 5\nper_day_usd = 50\nper_instance_usd = 5\n")
    env = {**server.env, "HF_TOKEN": TOKEN, "GPUWARDEN_HOME": str(tmp_path / "home"), "GPUWARDEN_POLICY": str(policy)}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    from gpuwarden.core.errors import Conflict
    from gpuwarden.lifecycle.submission.submit import submit

    ctx = open_context("cli", env=env)
    spec = job("", command=(), script=SCRIPT.format(data="trl-lib/Capybara"), secrets=["HF_TOKEN"],
               outputs=["/hub/models/rehearsal/walked"], timeout_s=1200, max_cost_usd=1.0)  # fmt: skip
    issued = await submit(ctx, spec)
    server.store.put("dataset", "trl-lib/Capybara", {"README.md": "changed"})
    with pytest.raises(Conflict, match="trl-lib/Capybara"):
        await submit(ctx, spec, receipt=issued.receipt)
    assert server.jobs.jobs == {}
