"""Hugging Face's own clients against the rehearsal Hub: the `hf` command line, huggingface_hub, and npm's hub client.

Each runs in a separate process with an empty home. If a client and the published description disagree, the client is
right: the description lacks, or differs on, buckets' `visibility` and query parameter `expand`, jobs' `network`, and
the shape of `xorbs` in a reconstruction.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeClock
from gpuwarden.rehearsal.hub.access import HubError
from gpuwarden.rehearsal.hub.schedules import next_time
from gpuwarden.rehearsal.hub.seed import TOKEN, USER
from gpuwarden.rehearsal.hub.server import HubServer
from gpuwarden.remote.sandbox.detect import detect
from gpuwarden.remote.sandbox.words import Kind
from hubserver import READER, hub_server
from paths import KITS
from real_parts import need

Run = Callable[..., str]
PYTHON = sys.executable
HF = Path(sys.executable).with_name("hf")
CLIENTS = Path(os.environ.get("GPUWARDEN_CLIENTS", "/nowhere"))
SCRIPT = "import sys\nprint('hello', sys.argv[1:])\nopen('/data/made.txt', 'w').write('made')\n"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with hub_server(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def env(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "NO_COLOR": "1"}
    quiet |= {"HF_HUB_DISABLE_EXPERIMENTAL_WARNING": "1", "LANG": "C.UTF-8", "PATH": os.defpath}
    return {**quiet, "HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_USER": USER}


@pytest.fixture
def hf(env: dict[str, str], tmp_path: Path) -> Run:
    """Return a function that runs `hf` and returns its output; it fails if the exit status isn't the expected one."""
    need("the hf command line", HF.exists())

    def run(*words: str, status: int = 0, **more: str) -> str:
        done = subprocess.run(
            [str(HF), *words], env=env | more, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == status, (words, done.stdout, done.stderr)
        return done.stdout if status == 0 else done.stdout + done.stderr

    return run


def mounts() -> None:
    """Skip or fail the test if a job's volume can't be mounted."""
    need("bubblewrap, which mounts a job's volumes", detect().kind is Kind.BUBBLEWRAP)


def rows(text: str) -> list[dict[str, Any]]:
    found = json.loads(text)
    assert isinstance(found, list)
    return found


# ------------------------------------------------------------------------------------------------------- `hf jobs`


@pytest.mark.prove
@pytest.mark.real("hf")
def test_a_job_is_started_inspected_and_canceled(hf: Run, hub: HubServer) -> None:
    flags = ("--flavor", "t4-small", "--label", "team=x", "--attempts", "2", "--ssh", "--expose", "8000")
    assert "t4-small" in {row["name"] for row in rows(hf("jobs", "hardware", "--format", "json"))}
    started = hf(
        "jobs", "run", "-d", "-q", *flags, "--env", "A=b", "--secrets", "S=hidden", "python:3.12", "sleep", "50"
    )
    job_id = started.strip().rpartition("/")[2]
    (job,) = rows(hf("jobs", "inspect", job_id, "--format", "json"))
    assert (job["docker_image"], job["retry"], job["secrets"]) == ("python:3.12", 1, ["S"])
    assert (job["status"]["ssh_url"], job["environment"]) == (f"ssh://{job_id}@ssh.hf.jobs", {"A": "b"})
    assert job["status"]["expose_urls"] == [f"https://{job_id}--8000.hf.jobs"]
    assert hf("jobs", "ps", "-q").split() == [job_id]
    (use,) = rows(hf("jobs", "stats", job_id, "--format", "json"))
    assert job_id in json.dumps(use)
    hf("jobs", "labels", job_id, "--name", "renamed", "--label", "team=y")
    assert hub.jobs.jobs[job_id].request["labels"] == {"name": "renamed", "team": "y"}
    assert hf("jobs", "ps", "-q", "--label", "team=y").split() == [job_id]
    hf("jobs", "cancel", job_id)
    assert "CANCELED" in hf("jobs", "wait", job_id, status=1)
    again = hf("jobs", "rerun", "-d", "-q", job_id).strip().rpartition("/")[2]
    assert hub.jobs.jobs[again].initiator == {"type": "duplicated-job", "id": job_id}


@pytest.mark.prove
@pytest.mark.real("hf")
def test_a_jobs_log_outcome_and_refusal_are_reported(hf: Run, hub: HubServer) -> None:
    said = hf("jobs", "run", "hf.co/spaces/me/space", PYTHON, "-c", "print('one'); print('two')")
    assert "one\ntwo\n" in said
    (job,) = hub.jobs.jobs.values()
    assert job.request["spaceId"] == "me/space"
    assert hf("jobs", "logs", "--tail", "1", job.id).strip() == "two"
    assert hf("jobs", "wait", "-q", job.id).split()[0] == job.id
    failing = ("import os, sys, pathlib", "print(len(os.environ['JOB_ID']))", "sys.exit(3)")
    assert "exit code: 3" in hf("jobs", "run", "--attempts", "2", "i", PYTHON, "-c", "; ".join(failing), status=1)
    assert [j.failures for j in hub.jobs.jobs.values()] == [0, 2]
    assert "flavor" in hf("jobs", "run", "--flavor", "tpu-v9", "i", "true", status=1).lower()
    assert "403" in hf("jobs", "run", "-d", "--namespace", "reader", "i", "true", status=1, HF_TOKEN=READER)


@pytest.mark.slow
@pytest.mark.real("hf")
def test_a_local_script_is_sent_through_a_bucket_and_saves_files_there(hf: Run, hub: HubServer, tmp_path: Path) -> None:
    mounts()
    (tmp_path / "train.py").write_text(SCRIPT)
    assert "hello ['a', 'b']" in hf("jobs", "uv", "run", "train.py", "a", "b")
    files = dict(hub.buckets.buckets[f"{USER}/jobs-artifacts"].walk())
    assert sorted(path.partition("/")[2] for path in files) == ["made.txt", "train.py"]
    (made,) = (path for path in files if path.endswith("made.txt"))
    hf("buckets", "cp", f"hf://buckets/{USER}/jobs-artifacts/{made}", "back.txt")
    assert (tmp_path / "back.txt").read_text() == "made"


@pytest.mark.slow
@pytest.mark.real("hf")
def test_volumes_are_mounted_and_only_buckets_can_be_written(hf: Run, hub: HubServer, tmp_path: Path) -> None:
    mounts()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.txt").write_text("given")
    hub.buckets.make(f"{USER}/b")
    look = "cat /in/x.txt; ls /ds/data; touch /ds/no 2>/dev/null && echo written; echo kept > /b/kept.txt"
    flags = ("-v", "./in:/in", "-v", "hf://datasets/trl-lib/Capybara:/ds", "-v", f"hf://buckets/{USER}/b:/b")
    assert "giventrain.jsonl\n" in (said := hf("jobs", "run", *flags, "i", "sh", "-c", look))
    assert "written" not in said
    assert [path for path, _ in hub.buckets.buckets[f"{USER}/b"].walk()] == ["kept.txt"]
    assert "404" in hf("jobs", "run", "-v", f"hf://buckets/{USER}/none:/b", "i", "true", status=1)


@pytest.mark.slow
@pytest.mark.real("hf")
def test_scheduled_jobs_run_when_due(hf: Run, tmp_path: Path) -> None:
    clock = FakeClock(1_800_000_600.0)  # ten minutes past an hour
    with hub_server(tmp_path / "scheduled", clock=clock) as hub:
        at = {"HF_ENDPOINT": hub.url}
        words = ("--flavor", "cpu-basic", "--label", "a=b", "i", PYTHON, "-c", "print('tick')")
        hf("jobs", "scheduled", "run", "@hourly", "--name", "n", *words, **at)
        (made,) = hub.schedules.schedules.values()
        (shown,) = rows(hf("jobs", "scheduled", "ps", "--format", "json", **at))
        assert shown["id"] == made.id
        hf("jobs", "scheduled", "suspend", made.id, **at)
        assert made.suspend
        assert hf("jobs", "scheduled", "ps", "-q", **at).split() == []
        clock.advance(7200)
        assert hf("jobs", "scheduled", "ps", "-a", "-q", **at).split() == [made.id]
        assert hub.jobs.jobs == {}
        hf("jobs", "scheduled", "resume", made.id, **at)
        hf("jobs", "scheduled", "trigger", made.id, **at)
        clock.advance(3600)
        hf("jobs", "scheduled", "inspect", made.id, **at)
        assert len(hub.jobs.jobs) == 2
        assert {job.initiator["id"] for job in hub.jobs.jobs.values()} == {made.id}
        hf("jobs", "scheduled", "reschedule", made.id, "30 9 * * 1", **at)
        hf("jobs", "scheduled", "labels", made.id, "--label", "c=d", **at)
        assert (made.schedule, made.spec["labels"]["c"]) == ("30 9 * * 1", "d")
        hf("jobs", "scheduled", "delete", made.id, **at)
        assert hub.schedules.schedules == {}


# ---------------------------------------------------------------------------------------------------- `hf buckets`


@pytest.mark.slow
@pytest.mark.real("hf")
def test_bucket_commands_work(hf: Run, hub: HubServer, tmp_path: Path) -> None:
    up, back = tmp_path / "up", tmp_path / "back"
    (up / "sub").mkdir(parents=True)
    (up / "a.txt").write_text("a")
    (up / "sub" / "big.bin").write_bytes(os.urandom(300_000))
    (up / "empty").touch()
    name = f"{USER}/ck"
    hf("buckets", "create", "ck", "--private")
    hf("buckets", "sync", str(up), f"hf://buckets/{name}")
    assert hf("buckets", "list", name, "-R", "-q").split() == ["a.txt", "empty", "sub/big.bin"]
    assert "sub/" in hf("buckets", "list", name)
    hf("buckets", "sync", f"hf://buckets/{name}", str(back))
    assert {p.name: p.read_bytes() for p in back.rglob("*") if p.is_file()} == {
        p.name: p.read_bytes() for p in up.rglob("*") if p.is_file()
    }
    hf("buckets", "cp", f"hf://buckets/{name}/a.txt", f"hf://buckets/{name}/b.txt")
    hf("buckets", "remove", f"{name}/a.txt", "-y")
    hf("buckets", "settings", name, "--public")
    info = json.loads(hf("buckets", "info", name, "--format", "json"))
    assert (info["private"], info["total_files"], info["size"]) == (False, 3, 300_001)
    hf("buckets", "move", name, f"{USER}/moved")
    assert [row["id"] for row in rows(hf("buckets", "list", "--format", "json"))] == [f"{USER}/moved"]
    hf("buckets", "delete", f"{USER}/moved", "-y")
    assert hub.buckets.buckets == {}


HUB = """
import json, os, pathlib, sys
from huggingface_hub import HfApi
from huggingface_hub.errors import BucketNotFoundError, EntryNotFoundError, HfHubHTTPError
from hf_xet import hash_files

api, top, user = HfApi(token=os.environ["HF_TOKEN"]), pathlib.Path(sys.argv[1]), os.environ["HF_USER"]
b, big = f"{user}/py", os.urandom(500_000)
(top / "big.bin").write_bytes(big)
api.create_bucket(b, private=True)
api.create_bucket(b, private=True, exist_ok=True)
api.batch_bucket_files(b, add=[(str(top / "big.bin"), "d/big.bin"), (b"small", "s.txt")])
tree = {f.path: f for f in api.list_bucket_tree(b, recursive=True)}
(found,) = api.get_bucket_paths_info(b, ["d/big.bin", "missing"])
assert found.xet_hash == tree["d/big.bin"].xet_hash == hash_files([str(top / "big.bin")])[0].hash
assert sorted(f.path for f in api.list_bucket_tree(b, prefix="d", recursive=True)) == ["d/big.bin"]
api.batch_bucket_files(b, copy=[("bucket", b, found.xet_hash, "d/again.bin")], delete=["s.txt"])
api.download_bucket_files(b, [("d/again.bin", top / "down.bin")], raise_on_missing_files=True)
assert (top / "down.bin").read_bytes() == big
plan = api.sync_bucket(str(top), f"hf://buckets/{b}/all", dry_run=True)
assert sorted(o.path for o in plan.operations if o.action == "upload") == ["big.bin", "down.bin"], plan
api.sync_bucket(str(top), f"hf://buckets/{b}/all")
assert api.bucket_info(b).total_files == 4
errors = []
for call in (
    lambda: api.bucket_info(f"{user}/none"),
    lambda: list(api.list_bucket_tree(f"{user}/none")),
    lambda: api.batch_bucket_files(b, copy=[("bucket", b, "ab" * 32, "x")]),
    lambda: api.download_bucket_files(b, [("missing", top / "m")], raise_on_missing_files=True),
    lambda: api.create_bucket(b),
):
    try:
        call()
    except Exception as error:
        errors.append(type(error).__name__)
api.delete_bucket(b)
print(json.dumps(errors))
"""


@pytest.mark.prove
def test_huggingface_hub_bucket_calls_work(env: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    done = subprocess.run(
        [PYTHON, "-c", HUB, str(folder)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = [
        "BucketNotFoundError",
        "BucketNotFoundError",
        "BucketBatchError",
        "EntryNotFoundError",
        "HfHubHTTPError",
    ]
    assert json.loads(done.stdout.splitlines()[-1]) == expected


# ------------------------------------------------------------------------------------------------------ JavaScript


@pytest.mark.slow
@pytest.mark.real("@huggingface/hub")
def test_the_javascript_client_works(env: dict[str, str]) -> None:
    node, modules = shutil.which("node"), CLIENTS / "huggingface"
    if "GPUWARDEN_CLIENTS" not in os.environ:
        pytest.skip("GPUWARDEN_CLIENTS names no folder of installed clients (tools/install_clients.sh makes one)")
    need("node, and @huggingface/hub in GPUWARDEN_CLIENTS", node is not None and (modules / "node_modules").is_dir())
    script = KITS / "clients_hub.mjs"
    done = subprocess.run(
        [str(node), str(script), str(modules)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    small, big, mixed = ["a/readme.md", 9], ["same.bin", 300_000], ["x/mixed.bin", 400_000]
    assert json.loads(done.stdout) == {
        "whoAmI": USER, "createRepo": 24, "uploadFiles": 40, "listFiles": [["a", 0], small, big],
        "pathsInfo": hashlib.sha1(b"blob 9\0hello js\n").hexdigest(),
        "downloadFile": "hello js\n", "downloadXet": True, "fileExists": False, "fileDownloadInfo": 300_000,
        "modelInfo": True, "listModels": [f"{USER}/from-js"], "listDatasets": ["trl-lib/tldr"],
        "datasetInfo": "trl-lib/Capybara", "createBranch": "ok", "listCommits": 2, "deleteFile": 40,
        "checkRepoAccess": "ok", "bucketCreate": 24, "bucketUpload": "ok", "bucketList": [small, big, mixed],
        "bucketDownload": True, "bucketCopy": "ok", "bucketCopyEqual": True, "bucketDeleteFile": "ok",
        "bucketDelete": "ok", "deleteRepo": "ok", "repoExists": False,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------- refusals


def ask(hub: HubServer, method: str, path: str, body: Any = None) -> tuple[int, str]:
    import httpx2

    headers = {"Authorization": f"Bearer {TOKEN}"}
    reply = httpx2.request(method, hub.url + path, json=body, headers=headers)
    return reply.status_code, reply.headers.get("x-error-message", "")


JOB = {"flavor": "cpu-basic", "dockerImage": "i", "command": ["true"]}


@pytest.mark.parametrize(
    ("method", "path", "body", "says"),
    [
        ("GET", "/api/models?serch=x", None, "serch"),
        ("GET", "/api/models?sort=size", None, "size"),
        ("GET", "/api/models/sshleifer/tiny-gpt2?blob=true", None, "blob"),
        ("GET", f"/api/jobs/{USER}?status=RUNNING", None, "status"),
        ("GET", f"/api/jobs/{USER}?stage=DONE", None, "DONE"),
        ("GET", f"/api/jobs/{USER}?label=nonsense", None, "nonsense"),
        ("GET", f"/api/scheduled-jobs/{USER}?stage=RUNNING", None, "stage"),
        ("GET", f"/api/buckets/{USER}?limit=3", None, "limit"),
        ("POST", "/api/repos/create", {"name": "x", "vizibility": "private"}, "vizibility"),
        ("POST", f"/api/jobs/{USER}", {**JOB, "timeout": 5}, "timeout"),
        ("POST", f"/api/jobs/{USER}", {**JOB, "attempts": 0}, "attempts"),
        ("POST", f"/api/jobs/{USER}", {**JOB, "flavor": "tpu"}, "flavor"),
        ("POST", f"/api/jobs/{USER}", {**JOB, "spaceId": "a/b"}, "spaceId"),
        ("POST", f"/api/jobs/{USER}", {**JOB, "secrets": [{"key": "A"}]}, "secrets"),
        ("POST", f"/api/jobs/{USER}", {**JOB, "labels": {"a": "b c"}}, "labels"),
        ("POST", f"/api/jobs/{USER}", {**JOB, "volumes": [{"type": "bucket", "source": "a/b", "mountPath": "x"}]}, "m"),
        (
            "POST",
            f"/api/jobs/{USER}",
            {**JOB, "volumes": [{"type": "disk", "source": "a/b", "mountPath": "/x"}]},
            "type",
        ),
        ("POST", f"/api/scheduled-jobs/{USER}", {"jobSpec": JOB, "schedule": "hourly"}, "schedule"),
        ("POST", f"/api/scheduled-jobs/{USER}", {"jobSpec": JOB, "cron": "@hourly", "schedule": "@daily"}, "cron"),
        (
            "POST",
            f"/api/scheduled-jobs/{USER}",
            {"jobSpec": {**JOB, "ssh": {"enabled": True}}, "schedule": "@daily"},
            "SSH",
        ),
    ],
)
def test_undocumented_requests_are_refused(hub: HubServer, method: str, path: str, body: Any, says: str) -> None:
    status, message = ask(hub, method, path, body)
    assert (status, says in message) == (400, True), message
    assert hub.jobs.jobs == {}


def test_a_bucket_keeps_its_paths_inside(hub: HubServer, tmp_path: Path) -> None:
    bucket = hub.buckets.make(f"{USER}/b")
    (bucket.files / "link").symlink_to(tmp_path)
    (tmp_path / "outside.txt").write_text("outside")
    for path in ("../x", "/x", "a/../../x", "", "link/outside.txt", "link", "a\\b", "a//b"):
        with pytest.raises(ValueError, match="path"):
            bucket.place(path)
    assert ask(hub, "GET", f"/buckets/{USER}/b/resolve/link/outside.txt")[0] == 404
    assert list(bucket.walk()) == []


def test_small_files_have_their_git_ids(hub: HubServer) -> None:
    repo = hub.store.put("model", f"{USER}/ids", {"a.txt": "hello\n", "b.bin": b"weights"})
    files = repo.commits[-1].files
    assert files["a.txt"].oid() == "ce013625030ba8dba906f756967f9e9ca394464a"  # git hash-object of "hello\n"
    sha = hashlib.sha256(b"weights").hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize 7\n".encode()
    assert files["b.bin"].oid() == hashlib.sha1(b"blob %d\0" % len(pointer) + pointer).hexdigest()


SUNDAY = datetime(2026, 11, 22, 6, 0, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("schedule", "comes"),
    [
        ("@hourly", "2026-11-22T07:00"),
        ("@daily", "2026-11-23T00:00"),
        ("@weekly", "2026-11-29T00:00"),
        ("@annually", "2027-01-01T00:00"),
        ("*/15 * * * *", "2026-11-22T06:15"),
        ("30 9 * * 1", "2026-11-23T09:30"),
        ("0 6 1 * 7", "2026-11-29T06:00"),
        ("5,10 5-7 * * *", "2026-11-22T06:05"),
        ("0 0 29 2 *", "2028-02-29T00:00"),
    ],
)
def test_the_next_time_of_a_schedule_is_calculated(schedule: str, comes: str) -> None:
    at = next_time(schedule, SUNDAY.timestamp())
    assert datetime.fromtimestamp(at, UTC).isoformat() == f"{comes}:00+00:00"


@pytest.mark.parametrize("schedule", ["0 0 31 2 *", "0 0 * * * *", "0 x * * *"])
def test_an_invalid_or_impossible_schedule_is_refused(schedule: str) -> None:
    with pytest.raises(HubError):
        next_time(schedule, SUNDAY.timestamp())
