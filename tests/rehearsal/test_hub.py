"""The rehearsal Hub, as the real huggingface_hub sees it over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gpuwarden.rehearsal.hub.seed import TOKEN, USER
from gpuwarden.rehearsal.hub.server import Fault, HubServer
from hubserver import READER, STRANGER, hub_server

# huggingface_hub's own plain LFS upload passes a deprecated argument to its HTTP client.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with hub_server(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def api(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from huggingface_hub import HfApi, constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    return HfApi(endpoint=hub.url, token=TOKEN)


def weights(folder: Path, n: int = 1000) -> Path:
    path = folder / "model.safetensors"
    save_file({"w": np.arange(n, dtype=np.float32), "b": np.zeros((4, 5), dtype=np.float16)}, path)
    return path


def test_whoami_returns_the_user(api: Any) -> None:
    assert api.whoami()["name"] == USER


def test_files_are_uploaded_described_and_downloaded(api: Any, tmp_path: Path) -> None:
    folder = tmp_path / "up"
    folder.mkdir()
    content = weights(folder).read_bytes()
    (folder / "README.md").write_text("---\nlicense: mit\ntags: [one]\n---\n# hello\n")
    api.create_repo(f"{USER}/m")
    api.create_repo(f"{USER}/m", exist_ok=True)
    api.upload_folder(repo_id=f"{USER}/m", folder_path=folder)
    info = api.model_info(f"{USER}/m", files_metadata=True)
    assert info.safetensors["total"] == 1020
    assert info.safetensors["parameters"] == {"F32": 1000, "F16": 20}
    assert info.card_data.license == "mit"
    assert "one" in info.tags
    got = api.hf_hub_download(f"{USER}/m", "model.safetensors", local_dir=tmp_path / "down")
    assert Path(got).read_bytes() == content
    assert {f.path for f in api.list_repo_tree(f"{USER}/m")} == {"README.md", "model.safetensors"}
    (found,) = api.get_paths_info(f"{USER}/m", "model.safetensors")
    assert found.lfs.size == len(content)
    assert found.size == len(content)


def test_history_branches_and_deletes(api: Any) -> None:
    api.create_repo(f"{USER}/h", repo_type="dataset")
    first = api.upload_file(path_or_fileobj=b"one", path_in_repo="d/a.txt", repo_id=f"{USER}/h", repo_type="dataset")
    api.create_tag(f"{USER}/h", tag="v1", repo_type="dataset")
    api.upload_file(path_or_fileobj=b"two", path_in_repo="d/a.txt", repo_id=f"{USER}/h", repo_type="dataset")
    api.delete_folder("d", repo_id=f"{USER}/h", repo_type="dataset")
    assert api.list_repo_files(f"{USER}/h", repo_type="dataset") == []
    assert api.list_repo_files(f"{USER}/h", repo_type="dataset", revision="v1") == ["d/a.txt"]
    assert api.list_repo_refs(f"{USER}/h", repo_type="dataset").tags[0].target_commit == first.oid
    assert len(api.list_repo_commits(f"{USER}/h", repo_type="dataset")) == 4


def test_a_file_range_is_downloaded(hub: HubServer, api: Any, tmp_path: Path) -> None:
    from huggingface_hub.utils import get_session

    hub.store.put("model", f"{USER}/r", {"x.bin": bytes(range(100))})
    reply = get_session().get(f"{hub.url}/{USER}/r/resolve/main/x.bin", headers={"Range": "bytes=10-19"})
    assert reply.status_code == 206
    assert reply.content == bytes(range(10, 20))


def test_lists_search_filter_and_pages(hub: HubServer, api: Any) -> None:
    for n in range(7):
        card = f"---\ntags: [{'odd' if n % 2 else 'even'}]\n---\n"
        hub.store.put("dataset", f"many/set-{n}", {"README.md": card}, downloads=n)
    assert [d.id for d in api.list_datasets(author="many", sort="downloads", limit=2)] == ["many/set-6", "many/set-5"]
    assert {d.id for d in api.list_datasets(search="set 3", author="many")} == {"many/set-3"}
    assert {d.id for d in api.list_datasets(filter="odd", author="many")} == {"many/set-1", "many/set-3", "many/set-5"}


def test_missing_private_gated_and_renamed_repos_behave_as_expected(hub: HubServer, api: Any) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    with pytest.raises(RepositoryNotFoundError):
        api.model_info("no/where")
    assert api.model_info("gpt2").id == "openai-community/gpt2"
    assert api.model_info("meta-llama/Llama-3.2-1B").gated == "manual"
    with pytest.raises(GatedRepoError):
        api.auth_check("meta-llama/Llama-3.2-1B")
    api.create_repo(f"{USER}/secret", private=True)
    with pytest.raises(RepositoryNotFoundError):
        HfApi(endpoint=hub.url, token=STRANGER).model_info(f"{USER}/secret")
    with pytest.raises(HfHubHTTPError, match="401"):
        HfApi(endpoint=hub.url, token=False).model_info(f"{USER}/secret")
    with pytest.raises(HfHubHTTPError, match="401"):
        HfApi(endpoint=hub.url, token="hf_wrong").model_info("gpt2")
    with pytest.raises(HfHubHTTPError, match="403"):
        HfApi(endpoint=hub.url, token=READER).create_repo("reader/m")


def test_rename_and_delete(api: Any) -> None:
    api.create_repo(f"{USER}/old")
    api.move_repo(f"{USER}/old", f"{USER}/new")
    assert api.model_info(f"{USER}/old").id == f"{USER}/new"
    api.delete_repo(f"{USER}/new")
    assert not api.repo_exists(f"{USER}/new")


@pytest.mark.slow
def test_state_survives_a_restart(tmp_path: Path) -> None:
    with hub_server(tmp_path) as first:
        first.store.put("model", "a/b", {"f": b"x"})
    with hub_server(tmp_path, seeded=False) as second:
        repo = second.store.get("model", "a/b")
        assert repo is not None
        assert second.store.text(repo, "f") == "x"
        assert second.store.moved_to("model", "gpt2") == "openai-community/gpt2"


@pytest.mark.slow
def test_parquet_rows_and_columns(hub: HubServer) -> None:
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq
    from huggingface_hub.utils import get_session

    table = pa.table({"text": ["a", "b"], "label": pa.array([1, 2], pa.int32()), "tags": [["x"], []]})
    sink = io.BytesIO()
    pq.write_table(table, sink)
    hub.store.put("dataset", f"{USER}/p", {"data/train-00000-of-00001.parquet": sink.getvalue()})
    get = get_session().get
    where = {"dataset": f"{USER}/p", "config": "default", "split": "train"}
    rows = get(f"{hub.viewer_url}/rows", params=where).json()
    assert [f["type"] for f in rows["features"]][:2] == [
        {"dtype": "string", "_type": "Value"},
        {"dtype": "int32", "_type": "Value"},
    ]
    assert rows["rows"][1]["row"] == {"text": "b", "label": 2, "tags": []}
    for route in ("splits", "info", "size", "is-valid"):
        assert get(f"{hub.viewer_url}/{route}", params={"dataset": f"{USER}/p"}).status_code == 200


@pytest.mark.slow
def test_jobs_run_stream_time_out_and_cancel(hub: HubServer, api: Any) -> None:
    job = api.run_job(
        image="python:3.12",
        command=[sys.executable, "-c", "import os; print('hello', os.environ['WHO'], len(os.environ['KEY']))"],
        env={"WHO": "me"},
        secrets={"KEY": "hunter2"},
        labels={"gpuwarden": "t1"},
        namespace=USER,
    )
    assert list(api.fetch_job_logs(job_id=job.id, namespace=USER, follow=True)) == ["hello me 7"]
    done = api.wait_for_job(job.id, namespace=USER, poll_interval=0.05)
    assert done.status.stage == "COMPLETED"
    assert [j.id for j in api.list_jobs(namespace=USER, labels={"gpuwarden": "t1"})] == [job.id]
    assert "hunter2" not in json.dumps([str(j) for j in api.list_jobs(namespace=USER)])

    slow = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
    late = api.run_job(image="x", command=slow, timeout=1, namespace=USER)
    gone = api.run_job(image="x", command=slow, namespace=USER)
    api.cancel_job(job_id=gone.id, namespace=USER)
    late = api.wait_for_job(late.id, namespace=USER, poll_interval=0.1)
    assert (late.status.stage, late.status.message) == ("ERROR", "Job timeout")
    assert api.inspect_job(job_id=gone.id, namespace=USER).status.stage == "CANCELED"
    assert {h.name for h in api.list_jobs_hardware()} >= {"cpu-basic", "t4-small", "h200"}


@pytest.mark.slow
def test_a_job_loses_its_files_and_keeps_what_it_pushed(hub: HubServer, api: Any) -> None:
    script = (
        "from huggingface_hub import HfApi; import os, pathlib;"
        "pathlib.Path('model.bin').write_bytes(b'w' * 10);"
        "api = HfApi(token=os.environ['HF_TOKEN']); api.create_repo('rehearsal/out', exist_ok=True);"
        "api.upload_file(path_or_fileobj='model.bin', path_in_repo='model.bin', repo_id='rehearsal/out')"
    )
    job = api.run_job(
        image="x",
        command=[sys.executable, "-c", script],
        secrets={"HF_TOKEN": TOKEN},
        env={"HF_HUB_DISABLE_XET": "1"},
        namespace=USER,
    )
    done = api.wait_for_job(job.id, namespace=USER, poll_interval=0.1)
    assert done.status.stage == "COMPLETED", list(api.fetch_job_logs(job_id=job.id, namespace=USER))
    assert [p for p in (hub.store.root / "jobs").iterdir() if p.is_dir()] == []
    assert api.file_exists("rehearsal/out", "model.bin")


def test_rate_limits_and_faults_reach_the_client(hub: HubServer, api: Any) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    hub.conditions.faults.append(Fault(r"GET /api/models/Qwen", status=500, times=1))
    with pytest.raises(HfHubHTTPError, match="500"):
        api.model_info("Qwen/Qwen2.5-0.5B")
    hub.conditions.quota = 1
    api.model_info("Qwen/Qwen2.5-0.5B")
    with pytest.raises(HfHubHTTPError, match=r"Retry after \d+ seconds"):
        api.model_info("Qwen/Qwen2.5-0.5B")


@pytest.mark.slow
def test_files_are_transferred_with_real_xet(hub: HubServer, tmp_path: Path) -> None:
    """Runs in a separate process, since huggingface_hub reads its settings at import."""
    script = """
import os, pathlib, sys
from huggingface_hub import HfApi
api = HfApi(token=os.environ["HF_TOKEN"])
big = pathlib.Path(sys.argv[1]); big.write_bytes(os.urandom(3_000_000))
api.create_repo("rehearsal/x")
api.upload_file(path_or_fileobj=str(big), path_in_repo="big.bin", repo_id="rehearsal/x")
got = api.hf_hub_download("rehearsal/x", "big.bin", cache_dir=sys.argv[2])
assert pathlib.Path(got).read_bytes() == big.read_bytes()
print("same")
"""
    env = {**os.environ, **hub.env, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
    env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "0"}
    argv = [sys.executable, "-c", script, str(tmp_path / "big.bin"), str(tmp_path / "cache")]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "same", done.stderr[-2000:]
    repo = hub.store.get("model", "rehearsal/x")
    assert repo is not None
    assert repo.commits[-1].files["big.bin"].xet, "the upload did not go through xet"


def test_hostile_names_never_reach_a_file(hub: HubServer, api: Any) -> None:
    from huggingface_hub.utils import get_session

    api.create_repo(f"{USER}/here")
    send, headers = get_session().post, {"Authorization": f"Bearer {TOKEN}"}
    for target in ("../../x/y", f"{USER}/../../x", "stranger/x", "/etc/x"):
        body = {"fromRepo": f"{USER}/here", "toRepo": target, "type": "model"}
        assert send(f"{hub.url}/api/repos/move", json=body, headers=headers).status_code == 403
    line = json.dumps({"key": "header", "value": {"summary": "x"}})
    for oid in ("../../../../etc/passwd", "x", "A" * 64):
        file = json.dumps({"key": "lfsFile", "value": {"path": "p", "algo": "sha256", "oid": oid, "size": 1}})
        url = f"{hub.url}/api/models/{USER}/here/commit/main"
        assert send(url, content=f"{line}\n{file}".encode(), headers=headers).status_code == 400
    assert api.list_repo_files(f"{USER}/here") == []


@pytest.mark.slow
def test_rehearse_hub_serves_the_hub_and_prints_how_to_reach_it(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "gpuwarden", "rehearse-hub"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = dict(process.stdout.readline().removeprefix("export ").strip().split("=", 1) for _ in range(3))
        try:
            from huggingface_hub import HfApi

            api = HfApi(endpoint=said["HF_ENDPOINT"], token=said["HF_TOKEN"])
            assert api.whoami()["name"] == USER
            assert api.dataset_info("trl-lib/Capybara").id == "trl-lib/Capybara"
            assert [*tmp_path.glob("gpuwarden-hub-*")]
        finally:
            process.terminate()
    assert process.returncode == 0 and not [*tmp_path.glob("gpuwarden-*")], "it cleans up after itself"
