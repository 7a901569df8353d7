"""Features of Hugging Face Jobs alone: images, volumes, buckets, attempts, SSH, namespaces, schedules, metrics."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gpuwarden.app import open_context
from gpuwarden.backends._hf_options import Volume, read_options, settle, volumes_of
from gpuwarden.backends.hf_jobs import HfJobsBackend, beat_of, ssh_of
from gpuwarden.core.errors import BadRequest, NotSupported, Refused
from gpuwarden.core.models import Handle, Heartbeat, InstanceState, JobSpec, Known, Resources, Unknown, Verdict
from gpuwarden.core.states import Job
from gpuwarden.interfaces.cli.jobs import read_options as read_pairs
from gpuwarden.interfaces.results.check import checked
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.artifacts.verify import verify_job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.inventory import list_instances
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.providers.hf_jobs import HfJobsProvider
from gpuwarden.rehearsal.hub.seed import TOKEN, USER
from gpuwarden.rehearsal.hub.server import HubServer
from gpuwarden.remote.sandbox.detect import detect
from gpuwarden.remote.sandbox.words import Kind
from hf_jobs_kit import PLACE, ended
from lifecycle_kit import until
from real_parts import need
from waiting import soon
from wording import Wording

pytestmark = pytest.mark.anyio
ORG = "rehearsal-org"


@pytest.fixture
def ctx(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    policy = tmp_path / "policy.toml"
    policy.write_text("[caps]\nper_job_usd = 5\nper_day_usd = 50\nper_instance_usd = 5\n")
    env = {**server.env, "HF_TOKEN": TOKEN, "GPUWARDEN_HOME": str(tmp_path / "home"), "GPUWARDEN_POLICY": str(policy)}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return open_context("cli", env=env)


def job(text: str = "", **fields: Any) -> JobSpec:
    given = {"platform": "hf-jobs", "command": [sys.executable, "-c", text], "timeout_s": 600, "gpu": "t4-small"}
    return JobSpec.model_validate(given | fields)


def mounts() -> None:
    need("bubblewrap, which mounts a job's volumes", detect().kind is Kind.BUBBLEWRAP)


# -------------------------------------------------------------------------------------------------------- options


def test_volumes_use_the_hf_command_line_syntax() -> None:
    volume = Volume.parse("hf://buckets/me/ck/run1:/ckpt")
    assert volume.body == {
        "type": "bucket", "source": "me/ck", "mountPath": "/ckpt", "readOnly": False, "path": "run1"
    }  # fmt: skip
    assert Volume.parse("hf://datasets/me/d@v1:/data/").body == {
        "type": "dataset", "source": "me/d", "mountPath": "/data", "readOnly": True, "revision": "v1"
    }  # fmt: skip
    assert Volume.parse("hf://me/m:/m").type == "model"
    assert not Volume.parse("hf://buckets/me/ck:/ckpt:ro").writable


@pytest.mark.parametrize(
    "options",
    [
        {"imge": "x"},
        {"image": "x", "space": "a/b"},
        {"space": "nonsense"},
        {"attempts": 0},
        {"attempts": 11},
        {"labels": {"gpuwarden-job": "j1"}},
        {"labels": {"name": "n"}},
        {"labels": {"a": "b c"}},
        {"volumes": ["./here:/in"]},
        {"volumes": ["hf://buckets/me/ck:/"]},
        {"volumes": ["hf://buckets/me/ck:/a/../b"]},
        {"volumes": ["hf://datasets/me/d:/d:rw"]},
        {"volumes": ["hf://me/a:/x", "hf://me/b:/x/y"]},
        {"namespace": "../me"},
        {"schedule": "@hourly"},
    ],
)
def test_an_invalid_option_is_refused_with_the_valid_names(options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as no:
        read_options(job(options=options))
    assert no.value.message.startswith("options") and all(name in no.value.message for name in options)
    assert "image, space, namespace, attempts, volumes" in str(no.value.next_steps)


def test_outputs_on_a_mounted_bucket_resolve_to_bucket_paths(wording: Wording) -> None:
    spec = job(options={"volumes": "hf://buckets/me/ck/all:/ckpt"}, outputs=["/ckpt/run1", "/hub/models/me/m"])
    settled = settle(spec)
    assert settled.outputs == ("/hub/buckets/me/ck/all/run1", "/hub/models/me/m")
    assert settle(settled) == settled
    assert [v.mount for v in volumes_of(settled)] == ["/ckpt"]
    (made,) = volumes_of(settle(job(outputs=["/hub/buckets/me/ck/run1", "/hub/buckets/me/ck/run2"])))
    assert (made.mount, made.source, made.path, made.writable) == ("/hub/buckets/me/ck", "me/ck", "", True)
    # The mounted folder doesn't cover a folder beside it.
    both = settle(job(options={"volumes": ["hf://buckets/me/ck/all:/ckpt"]}, outputs=["/hub/buckets/me/ck/alles"]))
    assert [v.mount for v in volumes_of(both)] == ["/ckpt", "/hub/buckets/me/ck"]
    assert settle(job(options={"volumes": ["hf://buckets/me/ck:/c:ro"]}, outputs=["/c/x"])).outputs == ("/c/x",)
    with pytest.raises(BadRequest) as refused:
        settle(job(outputs=["/hub/buckets/me"]))
    wording(refused, "/hub/buckets/me")


def test_omitted_options_leave_no_trace() -> None:
    spec = job()
    assert "options" not in spec.model_dump(mode="json")
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    with_some = job(options={"ssh": True})
    assert with_some.digest != spec.digest
    assert JobSpec.model_validate_json(with_some.model_dump_json()) == with_some
    with pytest.raises(ValidationError) as refused:
        job(options={"image": "x" * 9_000})
    assert [error["loc"] for error in refused.value.errors()] == [("options",)]


def test_options_are_parsed_from_the_command_line(wording: Wording) -> None:
    pairs = ("image=org/image:1", "attempts=2", "ssh=true", "volumes=hf://me/a:/a", "volumes=hf://me/b:/b")
    assert read_pairs((*pairs, 'labels={"team": "x"}')) == {
        "image": "org/image:1", "attempts": 2, "ssh": True, "volumes": ["hf://me/a:/a", "hf://me/b:/b"],
        "labels": {"team": "x"},
    }  # fmt: skip
    with pytest.raises(BadRequest) as refused:
        read_pairs(("ssh",))
    wording(refused)


async def test_the_local_platform_refuses_options(ctx: Context, wording: Wording) -> None:
    with pytest.raises(BadRequest) as refused:
        await submit(ctx, job(platform="local", options={"image": "x"}), dry_run=True)
    wording(refused, "local")


# ----------------------------------------------------------------------------------------------- the request body


@pytest.mark.slow
async def test_the_hub_receives_the_requested_options(backend: HfJobsBackend, server: HubServer) -> None:
    server.buckets.make(f"{USER}/there")
    options = {"image": "org/image:1", "attempts": 2, "ssh": True, "labels": {"team": "x"}}
    spec = job("import time; time.sleep(60)", options={**options, "volumes": [f"hf://buckets/{USER}/there:/c:ro"]})
    spec = settle(spec.model_copy(update={"outputs": (f"/hub/buckets/{USER}/new/run1",)}))
    await backend.submit(spec, PLACE, "j1", secrets={})
    (sent,) = server.jobs.jobs.values()
    assert sent.request["dockerImage"] == "org/image:1"
    assert (sent.request["attempts"], sent.request["ssh"]) == (2, {"enabled": True})
    assert sent.request["labels"]["team"] == "x"
    assert [v["mountPath"] for v in sent.request["volumes"]] == ["/c", f"/hub/buckets/{USER}/new"]
    assert server.buckets.buckets[f"{USER}/new"].private


async def test_a_job_runs_in_a_space_and_an_organization(
    backend: HfJobsBackend, provider: HfJobsProvider, server: HubServer
) -> None:
    options = {"space": "me/space", "namespace": ORG}
    spec = job("import time; time.sleep(60)", options=options)
    made = await provider.create(Resources(gpu="t4-small", options=spec.options), "lease-2")
    assert isinstance(made, Known) and made.value.place is not None
    handle = await backend.submit(spec, made.value.place, "j2", secrets={})
    (sent,) = server.jobs.jobs.values()
    assert (sent.owner, sent.request["spaceId"]) == (ORG, "me/space")
    assert await backend.find(made.value.place, "j2") == Known(handle)
    seen = await provider.get("lease-2")
    assert isinstance(seen, Known) and seen.value is not None
    await provider.terminate("lease-2")
    assert sent.stage == "CANCELED"
    with pytest.raises(NotSupported):
        await backend.submit(job(options={"namespace": "stranger"}), PLACE, "j3", secrets={})


async def test_leaving_an_organization_hides_no_other_job(provider: HfJobsProvider, server: HubServer) -> None:
    for token, options in (("lease-4", {"namespace": ORG}), ("lease-5", {})):
        await provider.create(Resources(gpu="t4-small", options=options), token)
    server.store.users[TOKEN] = replace(server.store.users[TOKEN], orgs=())
    assert isinstance(await provider.list(), Unknown), "a job of the reservation there may run"
    server.store.users[TOKEN] = replace(server.store.users[TOKEN], orgs=(ORG,))
    await provider.terminate("lease-4")
    server.store.users[TOKEN] = replace(server.store.users[TOKEN], orgs=())
    listed = await provider.list()
    assert isinstance(listed, Known) and [i.id for i in listed.value] == ["lease-5"]


@pytest.mark.slow
async def test_a_duplicated_job_is_not_taken_for_ours(
    backend: HfJobsBackend, provider: HfJobsProvider, server: HubServer
) -> None:
    made = await provider.create(Resources(gpu="t4-small"), "lease-3")
    assert isinstance(made, Known) and made.value.place is not None
    handle = await backend.submit(job("print(1)"), made.value.place, "j4", secrets={})
    await ended(backend, handle)
    (first,) = server.jobs.jobs.values()
    request = {**first.request, "command": ["sleep", "60"]}
    again = server.jobs.runs.start(USER, first.user, request, {"type": "duplicated-job", "id": first.id})
    assert await backend.find(made.value.place, "j4") == Known(handle)
    assert await backend.submit(job("print(1)"), made.value.place, "j4", secrets={}) == handle
    # The copy bills under the same lease, so terminating the lease ends it.
    seen = await provider.get("lease-3")
    assert isinstance(seen, Known) and seen.value is not None
    await provider.terminate("lease-3")
    assert again.stage == "CANCELED"


# ---------------------------------------------------------------------------------------------------- live metrics


def test_hub_usage_and_ssh_addresses_are_parsed() -> None:
    usage = {"gpus": {"a": {"utilization": 7, "memory_used_bytes": 5}, "b": {"utilization": 93}}}
    assert beat_of(usage | {"memory_used_bytes": 10, "memory_total_bytes": 20}) == Heartbeat(
        gpu_util=93, gpu_mem_used=5, mem_used=10, mem_limit=20
    )
    for odd in ({}, {"gpus": []}, {"gpus": {"a": 1}, "memory_used_bytes": "x"}, {"memory_used_bytes": -1}):
        assert beat_of(odd) is None
    assert ssh_of({"status": {"sshUrl": f"ssh://{'a' * 24}@ssh.hf.jobs"}}) == f"{'a' * 24}@ssh.hf.jobs"
    assert ssh_of({"status": {"sshUrl": "ssh://x; rm -rf"}}) == ssh_of({}) == ""


@pytest.mark.slow
async def test_a_running_jobs_usage_and_ssh_address_are_shown(ctx: Context, server: HubServer) -> None:
    spec = job("import time; print('up', flush=True); time.sleep(60)", options={"ssh": True}, max_cost_usd=1.0,
               secrets=["HF_TOKEN"], outputs=["/hub/models/rehearsal/x"])  # fmt: skip
    launched = await submit(ctx, spec, receipt=(await submit(ctx, spec)).receipt)
    assert launched.job is not None
    reply = checked(await until(ctx, launched.job.id, lambda seen: checked(seen).usage))
    assert reply.usage["mem_limit"] == 15 << 30
    assert reply.usage["gpu_util"] == 0
    (running,) = server.jobs.jobs.values()
    assert f"ssh {running.id}@ssh.hf.jobs" in reply.why


# ----------------------------------------------------------------------------------------- listing billing resources


@pytest.mark.slow
async def test_other_jobs_and_schedules_are_listed_as_spending(
    provider: HfJobsProvider, server: HubServer, ctx: Context, wording: Wording
) -> None:
    from huggingface_hub import HfApi

    api = HfApi(server.url, token=TOKEN)
    other = api.run_job(image="i", command=["sleep", "60"], flavor="a100-large", namespace=USER)
    spec = {"image": "i", "command": ["true"], "flavor": "t4-small", "namespace": USER}
    hourly = api.create_scheduled_job(**spec, schedule="@hourly")
    paused = api.create_scheduled_job(**spec, schedule="@daily", suspend=True)
    await soon(lambda: server.jobs.jobs[other.id].stage == "RUNNING")
    listed = await provider.list()
    assert isinstance(listed, Known)
    rows = {instance.id: instance for instance in listed.value}
    assert rows[other.id].meter is True
    assert rows[other.id].price_usd_per_hour == pytest.approx(2.5, rel=0.01)
    assert (rows[f"scheduled-{hourly.id}"].meter, rows[f"scheduled-{hourly.id}"].state) == (None, InstanceState.RUNNING)
    assert (rows[f"scheduled-{paused.id}"].meter, rows[f"scheduled-{paused.id}"].state) == (
        False,
        InstanceState.STOPPED,
    )
    spec = job("print(1)", max_cost_usd=1.0, secrets=["HF_TOKEN"], outputs=["/hub/models/rehearsal/x"])
    await submit(ctx, spec, receipt=(await submit(ctx, spec)).receipt)
    shown = {row.instance_id: row for row in (await list_instances(ctx)).rows}
    assert "@hourly" in shown[f"scheduled-{hourly.id}"].note
    assert shown[f"scheduled-{hourly.id}"].billing is None  # None counts as billing
    assert shown[other.id].billing is True
    wording(shown[other.id].note)


# ---------------------------------------------------------------------------------------------- buckets, end to end

TRAIN = """# /// script
# requires-python = ">=3.11"
# dependencies = ["safetensors>=0.5", "numpy>=2"]
# ///
import numpy as np
from safetensors.numpy import save_file

save_file({"w": np.arange(4096, dtype=np.float32)}, "/ckpt/run1/model.safetensors")
print("saved")
"""


@pytest.mark.slow
async def test_a_bucket_output_survives_the_container_and_is_pulled_and_proven(
    ctx: Context, server: HubServer, tmp_path: Path
) -> None:
    mounts()
    (server.buckets.make(f"{USER}/ck").files / "run1").mkdir()
    spec = job(
        command=(), script=TRAIN, max_cost_usd=1.0, options={"volumes": [f"hf://buckets/{USER}/ck:/ckpt"]},
        outputs=["/ckpt/run1"],
    )  # fmt: skip
    issued = await submit(ctx, spec)
    assert not [f.rule for f in issued.findings if f.rule in {"PF-OUT-002", "PF-PUSH-003"}]
    launched = await submit(ctx, spec, receipt=issued.receipt)
    assert launched.job is not None
    assert launched.job.outputs == (f"/hub/buckets/{USER}/ck/run1",)
    seen = await until(ctx, launched.job.id)
    assert seen.job.state is Job.SUCCEEDED, seen.log
    pulled = await pull(ctx, launched.job.id)
    (file,) = pulled.received.files
    assert (
        Path(file.local).read_bytes()
        == (server.buckets.buckets[f"{USER}/ck"].files / "run1" / "model.safetensors").read_bytes()
    )
    assert pulled.manifest.files[0].sha256
    proven = await verify_job(ctx, launched.job.id)
    assert proven.verdict is Verdict.PROVEN, proven


@pytest.mark.slow
async def test_a_changed_bucket_file_counts_as_a_new_file(backend: HfJobsBackend, server: HubServer) -> None:
    bucket = server.buckets.make(f"{USER}/b")
    (bucket.files / "run").mkdir()
    big = bucket.files / "run" / "a b%20#.bin"
    big.write_bytes(b"1" * 200_000)
    handle = Handle(backend="hf_jobs", token="t", run_dir=f"/jobs/{USER}/{'0' * 24}", place=PLACE)
    path = f"/hub/buckets/{USER}/b/run"
    (one,) = (await backend.manifest(handle, [path])).files
    assert b"".join([c async for c in backend.read(handle, one, 199_990)]) == b"1" * 10
    asked = len([line for line in server.conditions.requests if "/resolve/" in line])
    (same,) = (await backend.manifest(handle, [path])).files
    assert same == one
    assert len([line for line in server.conditions.requests if "/resolve/" in line]) == asked, "the content was known"
    big.write_bytes(b"2" * 200_000)
    (other,) = (await backend.manifest(handle, [path])).files
    assert other.sha256 != one.sha256
    assert other.stamp != one.stamp
    assert (await backend.list_files(handle, [path])).files[0].sha256 is None
    assert (await backend.manifest(handle, [f"/hub/buckets/{USER}/none/x"])).missing


async def test_a_container_path_output_is_refused(ctx: Context) -> None:
    with pytest.raises(Refused) as no:
        await submit(ctx, job("print(1)", outputs=["/out"], max_cost_usd=1.0), dry_run=True)
    assert "PF-OUT-002" in json.dumps([f.rule for f in no.value.findings])


async def test_the_worst_cost_counts_every_hub_attempt(ctx: Context) -> None:
    once = await submit(ctx, job("print(1)", outputs=["/hub/models/rehearsal/x"], max_cost_usd=2.0), dry_run=True)
    spec = job("print(1)", outputs=["/hub/models/rehearsal/x"], max_cost_usd=2.0, options={"attempts": 3})
    thrice = await submit(ctx, spec, dry_run=True)
    assert once.worst_cost_usd is not None and thrice.worst_cost_usd is not None
    assert thrice.worst_cost_usd == pytest.approx(3 * once.worst_cost_usd)
