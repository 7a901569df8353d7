"""Artifact stores: the runner uploads whole checkpoints, and the gate counts files that the store's checksums prove."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from pydantic import ValidationError

from gpuwarden.checkpoints.sealing import parts as sealed_parts
from gpuwarden.core.credentials import without_login
from gpuwarden.core.errors import AuthFailed, BadReply, Unreachable, WardenError
from gpuwarden.core.policy import ArtifactStores
from gpuwarden.core.sanitize import secret_values
from gpuwarden.core.store_address import VERSIONS, StoreAddress, StoredFile
from gpuwarden.hub.client import HubConfig
from gpuwarden.lifecycle.artifacts.store_contents import StoreList
from gpuwarden.lifecycle.artifacts.store_copy import disagreement
from gpuwarden.remote import s3_store
from gpuwarden.remote.launch import checker
from gpuwarden.remote.runner import parts, uploader
from gpuwarden.remote.runner.redact import Redactor
from gpuwarden.remote.runner.store_clients import Changed, HubBucket, HubStore, S3Store
from gpuwarden.remote.runner.store_report import report_mac
from gpuwarden.remote.s3_store import S3Reader
from real_parts import need
from runner_kit import call
from store_kit import ADMIN, BUCKET, READER, SAVE, WRITER, S3Server, s3_server
from waiting import eventually

KEY = "5e" * 32


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


# ------------------------------------------------------------------------------------------------- parts and addresses


def test_both_sides_use_the_same_part_size_within_the_s3_limit() -> None:
    for size in (0, 1, parts.PART, parts.PART + 1, 72 << 30, 73 << 30, 5 << 40):
        step = parts.part_size(size)
        assert step == sealed_parts.part_size(size) and size <= step * 10_000


@pytest.mark.parametrize("made", [parts.PartsDigest, sealed_parts.PartsDigest])
def test_a_digest_of_parts_does_not_depend_on_chunking(made: Any) -> None:
    data = os.urandom(1000)
    for size in (999, 1000):  # the second one is a multiple of the part size
        found = made(250)
        for at in range(0, size, 77):
            found.update(data[at : min(at + 77, size)])
        digests = [hashlib.sha256(data[at : min(at + 250, size)]).digest() for at in range(0, size, 250)]
        assert found.hexdigest() == hashlib.sha256(b"".join(digests)).hexdigest()


@pytest.mark.parametrize(
    "text", ["", "s3://", "s3://B", "s3://bucket/../x", "s3://bucket/a b", "gs://bucket/x", "hf://alone", "bucket/x"]
)
def test_an_address_that_names_no_store_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="s3://bucket"):
        StoreAddress.parse(text)


@pytest.mark.parametrize(
    "text",
    ["", "s3://", "s3://runs/../x", "s3://runs//x", "hf://owner", "gs://x/y", "s3://ru*ns", "runs/team", "hf://a/b@c"],
)
def test_an_invalid_store_in_the_policy_is_refused(text: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ArtifactStores(allowed=(text,))
    assert [error["loc"] for error in refused.value.errors()] == [("allowed",)]


def test_a_hub_bucket_address_has_kind_bucket() -> None:
    store = StoreAddress.parse("hf://buckets/owner/name/path")
    assert (store.kind, store.root, store.path, str(store)) == (
        "bucket", "owner/name", "path", "hf://buckets/owner/name/path",
    )  # fmt: skip


def test_store_keys_contain_the_job_and_keep_absolute_paths_inside() -> None:
    store = StoreAddress.parse("s3://bucket/team/")
    assert store.key("j1", "out/a") == "team/j1/out/a"
    assert store.key("j1", "/data/out/a") == "team/j1/machine/data/out/a"


def test_the_uploader_gets_its_own_key_and_never_the_readers() -> None:
    env = {"AWS_ACCESS_KEY_ID": "reader", "AWS_REGION": "r", "GPUWARDEN_STORE_AWS_ACCESS_KEY_ID": "writer"}
    assert StoreAddress.parse("s3://bucket").handed(env) == {"AWS_ACCESS_KEY_ID": "writer", "AWS_REGION": "r"}


# -------------------------------------------------------------------------------------------- credentials of a store

SECRET = "hunter2-and-more-of-it"
AWS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}


@pytest.mark.parametrize("value", [f"{SECRET}\nX: y", f"{SECRET}\x00", f"{SECRET}\u00e9"])
def test_an_unsendable_credential_is_refused_by_name(value: str) -> None:
    address = StoreAddress.parse("s3://bucket")
    keep = {f"GPUWARDEN_STORE_{name}": "x" for name in AWS} | {"GPUWARDEN_STORE_AWS_SECRET_ACCESS_KEY": value}
    for name, use in (
        ("AWS_SESSION_TOKEN", lambda: S3Reader(address, AWS | {"AWS_SESSION_TOKEN": value})),
        ("GPUWARDEN_STORE_AWS_SECRET_ACCESS_KEY", lambda: address.handed(keep)),
        ("HF_TOKEN", lambda: HubConfig.from_env({"HF_TOKEN": value}).sendable_token),
    ):
        with pytest.raises(AuthFailed, match=name) as refusal:
            use()
        assert SECRET not in refusal.value.message


def test_trailing_line_breaks_and_logins_in_addresses_are_stripped() -> None:
    env = {"HF_TOKEN": f"{SECRET}\n", "HF_ENDPOINT": "http://me:pass@hub.test/", "GPUWARDEN_STORE_HF_TOKEN": "w\r\n"}
    config = HubConfig.from_env(env)
    assert (config.endpoint, config.sendable_token) == ("http://hub.test", SECRET)
    assert StoreAddress.parse("hf://a/b").handed(env) == {"HF_TOKEN": "w", "HF_ENDPOINT": "http://hub.test/"}
    assert secret_values(env) == (SECRET,)
    for url in ("http://u:p@h:9/x", "http://u:p/w@h:9/x", "//u@h:9/x", "u:p@h:9/x"):
        assert without_login(url).endswith("h:9/x") and "@" not in without_login(url)
    assert without_login("https://s3.test:9000") == "https://s3.test:9000"


class Client:
    """A boto3 client whose every request calls `act`."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __getattr__(self, name: str) -> Any:
        return lambda **given: self.act()


@pytest.fixture(autouse=True)
def boto3_there() -> None:
    need("boto3", find_spec("boto3") is not None)


def failing(error: BaseException) -> Callable[[], Any]:
    def act() -> Any:
        raise error

    return act


def botocore_failing(name: str, **given: str) -> Callable[[], Any]:
    def act() -> Any:
        from botocore import exceptions

        raise getattr(exceptions, name)(**given)

    return act


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (failing(ValueError(f"Invalid header value b'{SECRET}'")), BadReply),
        (failing(RecursionError(SECRET)), BadReply),
        (botocore_failing("ParamValidationError", report=SECRET), BadReply),
        (botocore_failing("HTTPClientError", error=SECRET), Unreachable),
        (botocore_failing("EndpointConnectionError", endpoint_url=f"http://u:{SECRET}@h"), Unreachable),
        (botocore_failing("PartialCredentialsError", provider=SECRET, cred_var=SECRET), AuthFailed),
        (botocore_failing("ProfileNotFound", profile=SECRET), AuthFailed),
        (dict, BadReply),
        (lambda: {"ContentLength": SECRET}, BadReply),
        (lambda: None, BadReply),
    ],
)
async def test_client_exceptions_become_our_errors_without_their_text(
    act: Callable[[], Any], kind: type[WardenError]
) -> None:
    reader = S3Reader(StoreAddress.parse("s3://bucket"), AWS | {"AWS_ENDPOINT_URL": f"http://me:{SECRET}@127.0.0.1:9"})
    reader._client = Client(act)
    with pytest.raises(kind) as failure:
        await reader.files(["k"])
    assert SECRET not in failure.value.message


@pytest.mark.anyio
async def test_canceling_a_store_request_stops_waiting_and_further_requests() -> None:
    asked, answer = threading.Event(), threading.Event()
    count = []

    def wait() -> dict[str, int]:
        count.append(1)
        asked.set()
        answer.wait(60)
        return {"ContentLength": 1}

    reader = S3Reader(StoreAddress.parse("s3://bucket"), AWS)
    reader._client = Client(wait)
    async with anyio.create_task_group() as group:
        group.start_soon(reader.files, [str(number) for number in range(1000)])
        await anyio.to_thread.run_sync(asked.wait)
        group.cancel_scope.cancel()
    assert not answer.is_set()
    answer.set()
    with pytest.raises(Unreachable):
        await reader.files(["k"])
    assert len(count) <= 8


@pytest.mark.anyio
async def test_a_manifest_is_read_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_store, "MAX_MANIFEST", 100)
    reader = S3Reader(StoreAddress.parse("s3://bucket"), AWS)
    for size in (0, 100):
        reader._client = Client(lambda size=size: {"Body": io.BytesIO(bytes(size))})
        assert await reader.manifest("k") == bytes(size)
    reader._client = Client(lambda: {"Body": io.BytesIO(bytes(101))})
    with pytest.raises(BadReply):
        await reader.manifest("k")


@pytest.mark.parametrize("env", [{"AWS_ENDPOINT_URL": "minio.test:9000"}, {"AWS_SECRET_ACCESS_KEY": ""}])
def test_unusable_client_settings_raise_our_errors(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    with pytest.raises((BadReply, AuthFailed)):
        S3Reader(StoreAddress.parse("s3://bucket"), AWS | env)


@pytest.mark.anyio
@pytest.mark.parametrize("checksum", ["\u00e9\u00e9==", f"{'A' * 43}=-\u00b2", f"{'A' * 43}=-{'9' * 5000}"])
async def test_an_invalid_checksum_is_ignored(checksum: str) -> None:
    reader = S3Reader(StoreAddress.parse("s3://bucket"), AWS)
    reader._client = Client(lambda: {"ContentLength": 4, "ChecksumSHA256": checksum})
    assert await reader.files(["k"]) == {"k": StoredFile(4)}


def test_the_uploaders_report_never_contains_a_secret() -> None:
    redactor = Redactor([SECRET])
    assert uploader.client_error(ValueError(f"Invalid header value b'{SECRET}'"), redactor) == "ValueError"
    for before in range(120, 165):
        assert SECRET[:6] not in uploader.client_error(OSError("x" * before + SECRET), redactor)
    assert "pass" not in uploader.client_error(OSError("can't reach http://me:pass@host/x"), redactor)


# ------------------------------------------------------------------------------------------------------- the uploader


def start(folder: Path, server: S3Server, text: str, *, who: tuple[str, str] = WRITER, **more: Any) -> None:
    """Start a job whose outputs are uploaded below `<test>/t/` in the bucket."""
    name, content = checker()
    (folder / name).write_bytes(content)
    where = {"scheme": "s3", "root": BUCKET, "path": folder.parent.name, "kind": "model"}
    fast = {"seal_after_s": 0.01, "seal_quiet_s": 0.2, "seal_every_s": 0.1, "archive": name, "outputs": ["out"]}
    spec = {"argv": [sys.executable, "-c", SAVE + text], "env": {}, "keep": where, "keep_every_s": 0.3, **fast, **more}
    keys = {f"GPUWARDEN_STORE_{name}": value for name, value in server.writer(who).items()}
    order = {"spec": spec, "secrets": {"GPUWARDEN_SEAL_KEY": KEY, **keys}, "token": "t", "attempt": 1}
    assert call("start", folder, order)["ok"]


def stored(folder: Path, server: S3Server) -> dict[str, Any]:
    """Return the objects in the store, by path."""
    prefix = f"{folder.parent.name}/t/"
    rows = server.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
    return {row["Key"].removeprefix(prefix): row for row in rows}


def manifest(folder: Path, server: S3Server) -> dict[str, Any]:
    key = f"{folder.parent.name}/t/gpuwarden-manifest.json"
    found: dict[str, Any] = json.loads(server.client().get_object(Bucket=BUCKET, Key=key)["Body"].read())
    return found


def reported(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "keep.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found


@pytest.fixture
def folder(tmp_path: Path, machines_vanish: None) -> Iterator[Path]:
    path = Path(os.path.realpath(tmp_path)) / "job"
    path.mkdir()
    yield path
    call("stop", path, {"grace_s": 0})


@pytest.mark.prove
def test_checkpoints_upload_during_the_job_and_other_files_after_its_end(folder: Path, s3: S3Server) -> None:
    text = """
save(10)
save(20, floats=6_000_000)  # 24 MB: three parts
open("out/notes.txt", "w").write("not a checkpoint")
os.makedirs("out/tmp-checkpoint-30")
open("out/tmp-checkpoint-30/model.safetensors", "wb").write(b"half")
while not os.path.exists("go"): time.sleep(0.02)
assert not any(name.startswith("GPUWARDEN_STORE") for name in os.environ)
"""
    start(folder, s3, text)
    eventually(lambda: "gpuwarden-manifest.json" in stored(folder, s3) and len(manifest(folder, s3)["files"]) == 4)
    names = {f"out/checkpoint-{step}/{n}" for step in (10, 20) for n in ("model.safetensors", "trainer_state.json")}
    assert set(stored(folder, s3)) == {*names, "gpuwarden-manifest.json"}  # no partial and no unsealed files
    assert all(row["mac"] for row in manifest(folder, s3)["files"]) and not manifest(folder, s3)["final"]
    (folder / "work" / "go").touch()
    eventually(lambda: reported(folder).get("state") == "done")
    assert json.loads((folder / "status.json").read_bytes())["state"] == "succeeded"
    body = manifest(folder, s3)
    assert body["final"] and {row["path"] for row in body["files"]} == {
        *names, "out/notes.txt", "out/tmp-checkpoint-30/model.safetensors"
    }  # fmt: skip
    large = next(row for row in body["files"] if row["size"] > parts.PART)
    key = f"{folder.parent.name}/t/{large['path']}"
    head = s3.client(READER).head_object(Bucket=BUCKET, Key=key, ChecksumMode="ENABLED")
    composite, count = head["ChecksumSHA256"].split("-")
    assert (base64.b64decode(composite).hex(), int(count)) == (large["parts_sha256"], 3)
    for text in ("keep.json", "keep-sent.json", "status.json", "runner.err"):
        assert WRITER[1] not in (folder / text).read_text()


@pytest.mark.slow
def test_an_interrupted_upload_resumes_at_the_next_part(
    folder: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "work" / "out").mkdir(parents=True)
    (folder / "work" / "out" / "big.bin").write_bytes(os.urandom(3 * parts.PART - 5))
    where = {"scheme": "s3", "root": BUCKET, "path": folder.parent.name, "kind": "model"}
    prefix = f"{folder.parent.name}/t/"
    order = {"keep": where, "outputs": ["out"], "token": "t", "prefix": prefix, "keys": s3.writer(ADMIN)}
    first = uploader.ArtifactUploader(str(folder), order)
    first.final = True
    sent = []

    def cut(count: int) -> None:
        sent.append(count)
        if len(sent) == 2:
            raise ConnectionError("the network is gone")

    monkeypatch.setattr(first, "pace", cut)
    with pytest.raises(ConnectionError):
        first.turn()
    assert not stored(folder, s3)  # a multipart upload isn't an object until it is complete
    second = uploader.ArtifactUploader(str(folder), order)
    second.final, more = True, []
    monkeypatch.setattr(second, "pace", more.append)
    assert second.turn() and len(more) == 1  # only the third part
    assert set(stored(folder, s3)) == {"out/big.bin", "gpuwarden-manifest.json"}


@pytest.mark.anyio
@pytest.mark.prove
@pytest.mark.parametrize("size", [100, parts.PART + 1])
async def test_uploading_a_new_version_needs_only_write_access(folder: Path, s3: S3Server, size: int) -> None:
    (folder / "work" / "out").mkdir(parents=True)
    where = {"scheme": "s3", "root": BUCKET, "path": folder.parent.name, "kind": "model"}
    prefix = f"{folder.parent.name}/t/"
    order = {"keep": where, "outputs": ["out"], "token": "t", "prefix": prefix, "keys": s3.writer()}
    upload = uploader.ArtifactUploader(str(folder), order)
    upload.final = True
    address = StoreAddress.parse(f"s3://{BUCKET}/{folder.parent.name}")
    for version in ("", "1", "", "1"):
        (folder / "work" / "out" / "last.pt").write_bytes(os.urandom(size))
        assert upload.turn()
        row = StoreList.model_validate(manifest(folder, s3)).files[0]
        assert row.version == version
        key = address.key("t", row.path, row.version)
        found = await S3Reader(address, s3.writer(READER)).files([key])
        assert disagreement(row.artifact, row, found[key]) is None
    names = {"out/last.pt", f"{VERSIONS}/1/out/last.pt", "gpuwarden-manifest.json"}
    assert set(stored(folder, s3)) == names


@pytest.mark.prove
def test_denied_store_access_is_an_alert_and_the_job_succeeds(folder: Path, s3: S3Server) -> None:
    start(folder, s3, "save(10)\nwhile not os.path.exists('go'): time.sleep(0.02)", who=READER, heartbeat_s=0.2)

    def alerts() -> list[dict[str, Any]]:
        status = json.loads((folder / "status.json").read_bytes())
        return [alert for alert in status["last_alerts"] if alert["kind"] == "keep"]

    assert "AccessDenied" in eventually(alerts)[0]["text"]
    (folder / "work" / "go").touch()
    eventually(lambda: json.loads((folder / "status.json").read_bytes())["state"] == "succeeded")
    assert not stored(folder, s3)


@pytest.mark.prove
def test_a_killed_uploader_is_restarted(folder: Path, s3: S3Server) -> None:
    start(folder, s3, "save(10)\nwhile not os.path.exists('go'): time.sleep(0.02)\nsave(20)", heartbeat_s=0.2)
    eventually(lambda: "gpuwarden-manifest.json" in stored(folder, s3) and "pid" in reported(folder))
    first = reported(folder)["pid"]
    os.kill(first, signal.SIGKILL)
    eventually(lambda: reported(folder)["pid"] != first)
    (folder / "work" / "go").touch()
    eventually(lambda: reported(folder)["state"] == "done")
    assert len(manifest(folder, s3)["files"]) == 4


def test_a_missing_client_library_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "has_module", lambda python, module: False)
    monkeypatch.setattr(uploader, "input_closed", lambda seconds: True)
    with pytest.raises(SystemExit):
        uploader.become_client(str(folder), "s3", False)
    assert "import boto3" in reported(folder)["error"] and "uv" in reported(folder)["error"]


def test_the_last_manifest_is_written_once_and_after_the_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = folder / "work" / "out"
    out.mkdir(parents=True)
    (out / "a").write_text("1")
    (out / "leads_out").symlink_to("/etc/hostname")
    log: list[str] = []

    class Recorder:
        """A store that records its requests."""

        def put(self, key: str, fd: int, row: dict[str, Any], pace: object) -> None:
            log.append(f"{key} {os.pread(fd, 9, 0).decode()}")

        def commit(self, key: str, manifest: bytes) -> None:
            files = json.loads(manifest)["files"]
            log.append(f"{key} {[row['path'] for row in files]}")

    monkeypatch.setattr(uploader, "open_store", lambda *given: Recorder())
    where = {"scheme": "s3", "root": BUCKET, "path": "", "kind": "model"}
    order = {"keep": where, "outputs": ["out"], "token": "t", "prefix": "t/", "keys": {}}
    upload = uploader.ArtifactUploader(str(folder), order)
    assert upload.turn() and not log  # no checkpoint is sealed, and the job is running
    upload.final = True
    assert upload.turn() and upload.turn()
    assert log == ["t/out/a 1", "t/gpuwarden-manifest.json ['out/a']"]
    (out / "a").write_text("22")
    assert upload.turn()
    assert log[2:] == ["t/gpuwarden-versions/1/out/a 22", "t/gpuwarden-manifest.json ['out/a']"]


class Listing:
    """A store that keeps the manifests it receives. `refuses` lists the keys of files that change during the upload."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.lists: list[dict[str, Any]] = []
        self.refuses: set[str] = set()

    def put(self, key: str, fd: int, row: dict[str, Any], pace: object) -> None:
        if key in self.refuses:
            raise Changed
        self.sent.append(key)

    def commit(self, key: str, manifest: bytes) -> None:
        self.lists.append(json.loads(manifest))


def ended_uploader(
    folder: Path, shelf: Listing, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> uploader.ArtifactUploader:
    """Return an uploader in this process whose job has ended."""
    monkeypatch.setattr(uploader, "open_store", lambda *given: shelf)
    status = {"state": "succeeded", "attempt": 2, "exit_code": 0, "why": "", "outputs": ["out"], "started_at": 1.0}
    (folder / "status.json").write_text(json.dumps(status))
    where = {"scheme": "s3", "root": BUCKET, "path": "", "kind": "model"}
    order = {"keep": where, "outputs": ["out", "none"], "token": "t", "prefix": "t/", "keys": {}, "key": KEY}
    made = uploader.ArtifactUploader(str(folder), {**order, "marker": "NO_SUCH=1", **more})
    made.final = True
    return made


def test_the_signed_manifest_contains_the_end_once_every_file_is_stored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, shelf = folder / "work" / "out", Listing()
    out.mkdir(parents=True)
    for name in "ab":
        (out / name).write_text(name)
    (out / "leads_out").symlink_to("/etc/hostname")
    (folder / "work" / "extra.safetensors").write_text("undeclared")
    upload = ended_uploader(folder, shelf, monkeypatch)
    shelf.refuses = {"t/out/b"}
    assert not upload.turn() and "end" not in shelf.lists[-1], "a file is not there yet"
    shelf.refuses = set()
    assert upload.turn()
    body = shelf.lists[-1]
    assert body["mac"] == report_mac(body, KEY) != report_mac(body | {"taken_at": 0.0}, KEY)
    end = body["end"]
    assert (end["status"]["state"], end["status"]["attempt"], end["outputs"]) == ("succeeded", 2, ["out", "none"])
    assert end["missing"] == ["none"] and [row["path"] for row in end["skipped"]] == ["out/leads_out"]
    assert [row["path"] for row in end["disclosed"]["files"]] == ["extra.safetensors"] and end["look"] == ""
    assert StoreList.model_validate(body).end is not None, "both halves agree on its shape"
    (out / "a").unlink()
    (out / "b").write_text("more")
    assert upload.turn()
    assert {row["path"]: row.get("gone") for row in shelf.lists[-1]["files"]} == {"out/a": True, "out/b": None}


def test_a_forged_upload_record_hides_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner doesn't trust a job's claim that a file is already in the store: it uploads the file."""
    out, shelf = folder / "work" / "out", Listing()
    out.mkdir(parents=True)
    (out / "a").write_text("1")
    assert ended_uploader(folder, shelf, monkeypatch).turn() and shelf.sent == ["t/out/a"]
    assert ended_uploader(folder, shelf, monkeypatch).turn() and len(shelf.sent) == 1, "an own record is believed"
    record = json.loads((folder / "keep-sent.json").read_bytes())
    record["files"][0]["sha256"] = "0" * 64
    (folder / "keep-sent.json").write_text(json.dumps(record))
    assert ended_uploader(folder, shelf, monkeypatch).turn() and len(shelf.sent) == 2
    assert shelf.lists[-1]["files"][0]["sha256"] == hashlib.sha256(b"1").hexdigest()


def test_the_last_check_before_a_stop_uploads_late_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, shelf = folder / "work" / "out", Listing()
    out.mkdir(parents=True)
    (out / "a").write_text("1")
    upload = ended_uploader(folder, shelf, monkeypatch, attempt=2)
    assert upload.turn()
    looks = iter(["", "first", "", "-", "second"])

    def sleep(seconds: float) -> None:
        look = next(looks, None)
        if look is None:
            (folder / "status.json").write_text('{"state": "running", "attempt": 3}')  # another attempt has begun
        elif look == "-":  # the platform refused the stop, and the machine keeps running
            (folder / "keep.look").write_text("")
        elif look:
            (out / f"late-{look}").write_text(look)
            (folder / "keep.look").write_text(look)

    monkeypatch.setattr(uploader.time, "sleep", sleep)
    monkeypatch.setattr(uploader.time, "monotonic", lambda: 0.0)
    upload.await_self_stop(0.0)
    assert [body["end"]["look"] for body in shelf.lists] == ["", "first", "", "second"]
    assert [key.partition("/out/")[2] for key in shelf.sent] == ["a", "late-first", "late-second"]
    assert reported(folder)["look"] == "second" and reported(folder)["state"] == "done"


def test_a_final_manifest_is_revoked_despite_failing_commits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine keeps running while the store fails. Until then, the store's manifest wrongly claims to be final."""
    out, shelf, clock = folder / "work" / "out", Listing(), [0.0]
    out.mkdir(parents=True)
    (out / "a").write_text("1")
    upload = ended_uploader(folder, shelf, monkeypatch, attempt=2)
    assert upload.turn()
    commit, looks = shelf.commit, iter(["1", "-2", "", "", "", "", ""])

    def sleep(seconds: float) -> None:
        look = next(looks, None)
        clock[0] += uploader.GIVE_UP_S / 4
        if look is None:
            (folder / "status.json").write_text('{"state": "running", "attempt": 3}')
        elif look:
            (folder / "keep.look").write_text(look)
        if look == "-2":
            monkeypatch.setattr(shelf, "commit", fails)
        elif len(failures) >= 4:
            monkeypatch.setattr(shelf, "commit", commit)

    failures: list[str] = []

    def fails(key: str, manifest: bytes) -> None:
        failures.append(key)
        raise OSError("cut")

    monkeypatch.setattr(uploader.time, "sleep", sleep)
    monkeypatch.setattr(uploader.time, "monotonic", lambda: clock[0])
    upload.await_self_stop(0.0)
    assert len(failures) >= 4 and [body["end"]["look"] for body in shelf.lists] == ["", "1", ""]
    assert (reported(folder)["look"], reported(folder)["state"]) == ("-2", "done")


def test_an_outdated_end_is_revoked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that can't be uploaded appears after the final manifest. A commit whose reply is lost may be final."""
    out, shelf = folder / "work" / "out", Listing()
    out.mkdir(parents=True)
    (out / "a").write_text("1")
    upload = ended_uploader(folder, shelf, monkeypatch)
    commit = shelf.commit

    def lost(key: str, manifest: bytes) -> None:
        commit(key, manifest)
        raise OSError("the answer is lost")

    assert upload.turn() and "end" in shelf.lists[-1]
    shelf.refuses = {"t/out/b"}
    (out / "b").write_text("it keeps changing")
    assert not upload.turn() and "end" not in shelf.lists[-1]
    assert not upload.turn() and len(shelf.lists) == 2, "once is enough"
    (out / "b").unlink()
    monkeypatch.setattr(shelf, "commit", lost)
    with pytest.raises(OSError, match="lost"):
        upload.turn()
    assert "end" in shelf.lists[-1]
    monkeypatch.setattr(shelf, "commit", commit)
    (out / "b").write_text("it changes again")
    assert not upload.turn() and "end" not in shelf.lists[-1]


def test_files_saved_during_the_final_upload_are_included_in_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload takes hours. Meanwhile, a process that outlived the job may save files and end."""
    out, shelf = folder / "work" / "out", Listing()
    out.mkdir(parents=True)
    (out / "a").write_text("1")
    put = shelf.put

    def slowly(key: str, *given: Any) -> None:
        put(key, *given)
        if key == "t/out/a":
            (out / "late").write_text("late")

    monkeypatch.setattr(shelf, "put", slowly)
    upload = ended_uploader(folder, shelf, monkeypatch)
    assert not upload.turn() and "end" not in shelf.lists[-1]
    assert upload.turn() and "end" in shelf.lists[-1]
    assert [row["path"] for row in shelf.lists[-1]["files"]] == ["out/a", "out/late"]


@pytest.mark.parametrize("late", [True, False])
def test_files_are_listed_only_after_they_are_committed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    out = folder / "work" / "out"
    out.mkdir(parents=True)
    (out / "a").write_text("1")
    failures, held, log = [OSError("cut")], [], []

    class Collecting:
        """A store that has files only after a commit, like the Hub, or at once, like S3."""

        def __init__(self) -> None:
            self.late, self.collected = late, []

        def put(self, key: str, fd: int, row: dict[str, Any], pace: object) -> None:
            log.append(key)
            (self.collected if late else held).append(key)

        def commit(self, key: str, manifest: bytes) -> None:
            if failures:
                raise failures.pop()
            held.extend(self.collected)
            assert [f"t/{row['path']}" for row in json.loads(manifest)["files"]] == held

    monkeypatch.setattr(uploader, "open_store", lambda *given: Collecting())
    where = {"scheme": "hf", "root": "o/r", "path": "", "kind": "model"}
    upload = uploader.ArtifactUploader(
        str(folder), {"keep": where, "outputs": ["out"], "token": "t", "prefix": "t/", "keys": {}}
    )
    upload.final = True
    with pytest.raises(OSError, match="cut"):
        upload.turn()
    upload.store = None  # as after every failure
    assert upload.turn() and held == ["t/out/a"] and len(log) == (2 if late else 1)


def test_only_newly_stored_bytes_count_as_upload_progress(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each try, the store accepts the first file and refuses the second one at a part that it never accepts."""
    out, lock = folder / "work" / "out", folder / "keep.lock"
    out.mkdir(parents=True)
    for name in "ab":
        (out / name).write_bytes(b"12345678")
    lock.touch()
    counts = iter([4, 4, 8, 0])  # bytes of the second file that the store accepts in each try

    class Refusing:
        """A store that refuses the second file."""

        def put(self, key: str, fd: int, row: dict[str, Any], pace: Callable[[int], None]) -> None:
            pace(8 if key.endswith("a") else next(counts))
            if key.endswith("b"):
                raise ConnectionError

    monkeypatch.setattr(uploader, "open_store", lambda *given: Refusing())
    where = {"scheme": "s3", "root": BUCKET, "path": "", "kind": "model"}
    order = {"keep": where, "outputs": ["out"], "token": "t", "prefix": "t/", "keys": {}}
    upload = uploader.ArtifactUploader(str(folder), order)
    upload.final, touched = True, []
    for _ in range(4):
        os.utime(lock, (1, 1))
        with pytest.raises(ConnectionError):
            upload.turn()
        touched.append(lock.stat().st_mtime > 1)
    assert touched == [True, True, False, False]


@pytest.mark.parametrize("way", ["link", "file"])
def test_a_path_that_is_swapped_after_its_listing_is_not_followed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    out, other = folder / "work" / "out", folder.parent / "other"
    for path, text in ((out / "a" / "x", "first"), (out / "b" / "x", "harmless"), (other / "x", "PRIVATE")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    sent: list[bytes] = []

    class Swapping:
        """A store whose first upload takes long enough to replace the second file."""

        def put(self, key: str, fd: int, row: dict[str, Any], pace: object) -> None:
            sent.append(os.pread(fd, 99, 0))
            if key.endswith("a/x"):
                (out / "b").rename(folder.parent / "moved")
                if way == "link":
                    (out / "b").symlink_to(other)
                else:
                    other.rename(out / "b")

        def commit(self, key: str, manifest: bytes) -> None:
            assert b"out/b" not in manifest

    monkeypatch.setattr(uploader, "open_store", lambda *given: Swapping())
    where = {"scheme": "s3", "root": BUCKET, "path": "", "kind": "model"}
    order = {"keep": where, "outputs": ["out"], "token": "t", "prefix": "t/", "keys": {}}
    upload = uploader.ArtifactUploader(str(folder), order)
    upload.final = True
    before = len(os.listdir("/dev/fd"))
    assert not upload.turn() and sent == [b"first"]
    assert len(os.listdir("/dev/fd")) == before  # no descriptor stays open, whatever the number of files


# ---------------------------------------------------------------------------------------------------- overwritten files


class Dies(BaseException):
    """The machine is reclaimed."""


class Overwriting:
    """A store in which each upload replaces an object at once. The machine dies after `lives` more uploads."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.lives = 1000
        self.fails = ""

    def put(self, key: str, fd: int, row: dict[str, Any], pace: object) -> None:
        if not self.lives:
            raise Dies
        self.lives -= 1
        self.objects[key] = os.pread(fd, 99, 0)

    def commit(self, key: str, manifest: bytes) -> None:
        if self.fails != "refused":
            self.objects[key] = manifest
        if self.fails:
            raise OSError(self.fails)

    def usable(self) -> dict[str, str]:
        """Return the content of each listed file, as `StoreAddress` finds it; empty if it differs from the manifest."""
        address, content = StoreAddress.parse("s3://bucket"), {}
        for row in StoreList.model_validate_json(self.objects["j/gpuwarden-manifest.json"]).files:
            data = self.objects[address.key("j", row.path, row.version)]
            found = StoredFile(len(data), hashlib.sha256(data).hexdigest())
            content[row.path] = data.decode() if disagreement(row.artifact, row, found) is None else ""
        return content


class Saving:
    """A running job that saves each checkpoint as two sealed files with the same names."""

    def __init__(self, folder: Path, shelf: Overwriting, monkeypatch: pytest.MonkeyPatch, **order: Any) -> None:
        self.folder, self.out, self.shelf = folder, folder / "work" / "out" / "last", shelf
        self.out.mkdir(parents=True)
        self.order = {"keep": {"scheme": "s3", "root": "b"}, "keys": {}, "outputs": ["out"], "prefix": "j/"}
        self.order |= {"token": "j", "attempt": 1, "key": KEY, **order}
        monkeypatch.setattr(uploader, "open_store", lambda *given: shelf)
        self.restart()

    def restart(self) -> None:
        """Start or restart the uploader."""
        self.upload = uploader.ArtifactUploader(str(self.folder), self.order)

    def save(self, step: int) -> None:
        rows = []
        for name in ("model", "optimizer"):
            path = self.out / name
            path.with_suffix(".new").write_text(f"{name} {step}")
            path.with_suffix(".new").replace(path)
            at, digest = path.stat(), hashlib.sha256(path.read_bytes()).hexdigest()
            times = {"mtime_ns": at.st_mtime_ns, "ctime_ns": at.st_ctime_ns}
            rows.append({"path": str(path), "size": at.st_size, "sha256": digest, "sealed_at": float(step), **times})
        with (self.folder / "seals.jsonl").open("a") as seals:
            seals.write("".join(f"\n{json.dumps(row)}" for row in rows) + "\n")

    def uploads(self, step: int) -> None:
        self.save(step)
        assert self.upload.turn()
        assert self.shelf.usable() == both(step)


def both(step: int) -> dict[str, str]:
    return {f"out/last/{name}": f"{name} {step}" for name in ("model", "optimizer")}


@pytest.mark.parametrize("before", [1, 2, 3])
def test_a_crash_during_an_upload_keeps_the_listed_checkpoint_usable(
    folder: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    job = Saving(folder, Overwriting(), monkeypatch)
    for step in range(1, before + 1):
        job.uploads(step)
    job.save(99)
    job.shelf.lives = 1
    with pytest.raises(Dies):
        job.upload.turn()
    assert job.shelf.usable() == both(before)
    job.shelf.lives = 1000
    job.restart()
    assert job.upload.turn() and job.shelf.usable() == both(99)


def test_a_store_keeps_at_most_two_versions_of_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Saving(folder, Overwriting(), monkeypatch)
    for step in range(1, 8):
        job.uploads(step)
        if step % 2:
            job.restart()
    assert len(job.shelf.objects) == 1 + 2 * 2


@pytest.mark.parametrize("fails", ["refused", "the answer is lost"])
@pytest.mark.parametrize("restarts", [True, False])
def test_an_unanswered_commit_leaves_a_usable_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fails: str, restarts: bool
) -> None:
    job = Saving(folder, Overwriting(), monkeypatch)
    job.uploads(1)
    job.save(2)
    job.shelf.fails = fails
    with pytest.raises(OSError, match=fails):
        job.upload.turn()
    listed = both(1 if fails == "refused" else 2)
    assert job.shelf.usable() == listed
    if restarts:
        job.restart()
    job.save(3)
    job.shelf.lives = 1
    with pytest.raises(Dies):
        job.upload.turn()
    assert job.shelf.usable() == listed
    job.shelf.lives, job.shelf.fails = 1000, ""
    job.restart()
    assert job.upload.turn() and job.shelf.usable() == both(3)


def test_a_refused_manifest_is_resent_before_the_next_save(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Saving(folder, Overwriting(), monkeypatch)
    job.uploads(1)
    job.save(2)
    job.shelf.fails = "refused"
    with pytest.raises(OSError, match="refused"):
        job.upload.turn()
    job.shelf.fails = ""
    assert job.upload.turn() and job.shelf.usable() == both(2)


@pytest.mark.parametrize("way", ["relaunched", "recovered by the engine", "the record is spoilt"])
def test_an_uploader_without_the_stored_list_replaces_no_listed_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    shelf = Overwriting()
    job = Saving(folder, shelf, monkeypatch)
    job.uploads(1)
    job.uploads(2)
    if way == "the record is spoilt":
        (folder / "keep-sent.json").write_text("{}")
        job.restart()
    else:
        more = {"attempt": 2} if way == "relaunched" else {"recovers": True}
        job = Saving(tmp_path / "other", shelf, monkeypatch, **more)
    job.save(3)
    shelf.lives = 1
    with pytest.raises(Dies):
        job.upload.turn()
    assert shelf.usable() == both(2)
    shelf.lives = 1000
    assert job.upload.turn() and shelf.usable() == both(3)
    job.uploads(4)
    assert set(shelf.objects) >= {f"j/out/last/{name}" for name in ("model", "optimizer")}


def test_an_upload_record_in_an_older_format_is_continued(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Saving(folder, Overwriting(), monkeypatch, key="")
    job.uploads(1)
    record = json.loads((folder / "keep-sent.json").read_bytes())
    (folder / "keep-sent.json").write_text(json.dumps({key: record[key] for key in ("keep", "files", "uploads")}))
    job.restart()
    job.save(2)
    job.shelf.lives = 1
    with pytest.raises(Dies):
        job.upload.turn()
    assert job.shelf.usable() == both(1)


def test_a_repo_with_atomic_commits_keeps_plain_file_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Overwriting()
    monkeypatch.setattr(Overwriting, "atomic", HubStore.atomic, raising=False)
    job = Saving(folder, shelf, monkeypatch, attempt=2)
    for step in (1, 2):
        job.uploads(step)
    assert len(shelf.objects) == 3
    assert not hasattr(HubBucket, "atomic") and not hasattr(S3Store, "atomic")


@pytest.mark.parametrize("version", ["..", "../x", "a/b", "A", "0" * 41])
def test_a_version_in_a_list_never_leaves_its_folder(version: str) -> None:
    row = {"path": "out/a", "size": 1, "sha256": "a" * 64, "version": version}
    with pytest.raises(ValidationError):
        StoreList.model_validate({"job": "j", "files": [row]})


def test_a_sandboxed_jobs_python_is_not_run_outside_its_sandbox(folder: Path) -> None:
    own = folder / "work" / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    assert [str(own)] in uploader.pythons(str(folder), "boto3", False)
    assert uploader.pythons(str(folder), "boto3", True) == [[sys.executable]]
