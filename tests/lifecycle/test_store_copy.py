"""Artifact stores in the teardown gate: matching files count as copies, all others are unknown with a reason."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from huggingface_hub import HfApi
from pydantic import ValidationError

from gpuwarden.checkpoints.sealing import seal_log
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import BadRequest, Refused
from gpuwarden.core.models import Artifact, Known, Manifest, SealLine, Unknown
from gpuwarden.core.policy import Approval, ArtifactStores, Caps, Policy
from gpuwarden.core.reasons import Code
from gpuwarden.core.rules import Severity
from gpuwarden.core.states import Teardown
from gpuwarden.core.store_address import MANIFEST, VERSIONS, StoreAddress, StoredFile
from gpuwarden.hub.store_bucket import BucketReader
from gpuwarden.interfaces.cli.approval import ask
from gpuwarden.lifecycle.artifacts import store_copy
from gpuwarden.lifecycle.artifacts.pull import declare, pull
from gpuwarden.lifecycle.artifacts.seal_keys import job_key
from gpuwarden.lifecycle.artifacts.store_contents import read_store, unsettled
from gpuwarden.lifecycle.artifacts.store_copy import StoreCopy, compare_with_store, machine_digests, reachable
from gpuwarden.lifecycle.artifacts.store_pull import receive_from_store
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.alert_conditions import UPLOAD
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.records import read_job, read_teardown
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.lifecycle.teardown.gate import TeardownView, approve, request
from gpuwarden.rehearsal.hub.server import HubServer
from hubserver import READER as HUB_READER
from hubserver import STRANGER, hub_server
from lifecycle_kit import launch, open_house, prove, rent_cloud, training, until
from store_kit import BUCKET, SAVE, WRITER, S3Server, s3_server
from terminal import Typed
from waiting import soon
from wording import Wording

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("machines_vanish")]
KEEP = f"s3://{BUCKET}/team"
JOB = SAVE + "\nsave(10)\nsave(20, floats=3_000_000)  # 12 MB: two parts\nopen('out/log.txt', 'w').write('done')\n"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


def house(tmp_path: Path, env: dict[str, str]) -> Context:
    ctx = open_house(tmp_path / "home", SystemClock())
    ctx = replace(ctx, env=env)
    rent_cloud(ctx)
    return ctx


async def ended(ctx: Context, tmp_path: Path, keep: str = KEEP, last: str = "") -> str:
    """Run a job that saves, until it has ended, whatever becomes of its upload."""
    spec = training(tmp_path / "said", command=(sys.executable, "-c", JOB + last), artifact_store=keep)
    job = await launch(ctx, spec)
    await until(ctx, job)
    return job


def run_dir(ctx: Context, job: str) -> Path:
    handle = read_job(ctx.ledger, job).handle
    assert handle is not None
    return Path(handle.run_dir)


async def uploaded(ctx: Context, job: str, state: str = "done") -> dict[str, Any]:
    """Wait until the upload reports this state."""

    def look() -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((run_dir(ctx, job) / "keep.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return found

    return await soon(look, good=lambda found: found.get("state") == state)


async def looked(ctx: Context, job: str) -> StoreCopy:
    record = read_job(ctx.ledger, job)
    assert record.handle is not None
    listed = await ctx.backend(record.handle.backend).list_files(record.handle, record.outputs)
    return await compare_with_store(ctx, record, record.handle, listed)


def findings(view: TeardownView) -> dict[str, str]:
    return {f.rule: f.message for f in view.findings}


# ---------------------------------------------------------------------------------------------------------------- S3


@pytest.mark.prove
async def test_a_store_that_matches_the_machine_counts_as_a_copy(tmp_path: Path, s3: S3Server) -> None:
    ctx = house(tmp_path, s3.environment())
    job = await ended(ctx, tmp_path)
    await uploaded(ctx, job)
    found = await looked(ctx, job)
    assert found.code is None and len(found.files) == 5
    view = await request(ctx, job, "terminate")
    # Nothing was pulled, so loading is unproven here: a warning, which a click in a client can't accept.
    assert {f.rule: f.severity for f in view.findings} == {"TD-LOAD-001": Severity.WARNING}
    assert KEEP in findings(view)["TD-LOAD-001"] and view.record.state is Teardown.AWAITING_HUMAN
    assert all(file.stored and not file.copied for file in view.dying) and not view.complete
    assert view.record.digest
    ctx.policy = ctx.policy.model_copy(update={"approval": Approval(channels=("terminal", "elicitation"))})
    with pytest.raises(Refused):
        await approve(ctx, view.record.id, view.record.digest, channel="elicitation", by="test")
    assert read_teardown(ctx.ledger, view.record.id).state is Teardown.AWAITING_HUMAN
    done = await approve(ctx, view.record.id, view.record.digest, channel="terminal", by="test")
    assert done.record.state in {Teardown.EXECUTING, Teardown.VERIFIED_STOPPED}


@pytest.mark.prove
async def test_a_proven_local_copy_needs_no_store(tmp_path: Path, s3: S3Server) -> None:
    ctx = house(tmp_path, s3.environment())
    job = await ended(ctx, tmp_path)
    await pull(ctx, job)
    await prove(ctx, job)
    ctx.env = ctx.env | {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}  # the store is not even contacted
    assert not (await request(ctx, job, "terminate")).findings


@pytest.mark.prove
async def test_store_faults_block_the_gate_with_a_reason(tmp_path: Path, s3: S3Server) -> None:
    ctx = house(tmp_path, s3.environment())
    job = await ended(ctx, tmp_path)
    await uploaded(ctx, job)
    admin, address = s3.client(), StoreAddress.parse(KEEP)
    good = dict(ctx.env)

    async def fault(*, gate: bool = False) -> Code | None:
        found = await looked(ctx, job)
        if gate:
            view = await request(ctx, job, "terminate")
            assert view.record.state is Teardown.BLOCKED and found.why in findings(view)["TD-COPY-001"]
        return found.code

    ctx.env = good | {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}
    assert await fault(gate=True) is Code.STORE_UNREACHABLE
    ctx.env = good | {"AWS_SECRET_ACCESS_KEY": "wrong" * 8}
    assert await fault() is Code.STORE_DENIED
    ctx.env = good | {"AWS_ACCESS_KEY_ID": WRITER[0], "AWS_SECRET_ACCESS_KEY": WRITER[1]}  # this key may not read
    assert await fault() is Code.STORE_DENIED
    ctx.env = good
    assert await fault() is None
    # Replace an object by other bytes of the same size, by fewer bytes, and a large one by a single-part upload.
    for path in ("out/log.txt", "out/checkpoint-20/model.safetensors"):
        key = address.key(job, path)
        kept = admin.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        for other in (bytes(len(kept)), kept[:-1]):
            admin.put_object(Bucket=BUCKET, Key=key, Body=other, ChecksumAlgorithm="SHA256")
            assert await fault() is Code.STORE_CHANGED
        assert await fault(gate=True) is Code.STORE_CHANGED
        admin.put_object(Bucket=BUCKET, Key=key, Body=kept, ChecksumAlgorithm="SHA256")
        assert await fault() is None  # a whole-object digest is as good as one of parts
        admin.delete_object(Bucket=BUCKET, Key=key)
        assert await fault(gate=True) is Code.STORE_INCOMPLETE
        admin.put_object(Bucket=BUCKET, Key=key, Body=kept, ChecksumAlgorithm="SHA256")
    # the manifest: absent, truncated, from another time
    key = address.key(job, MANIFEST)
    text = admin.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    admin.put_object(Bucket=BUCKET, Key=key, Body=text[: len(text) // 2])
    assert await fault() is Code.STORE_INVALID
    body = json.loads(text)
    body["files"] = body["files"][1:]
    admin.put_object(Bucket=BUCKET, Key=key, Body=json.dumps(body).encode())
    assert await fault() is Code.STORE_INCOMPLETE
    admin.delete_object(Bucket=BUCKET, Key=key)
    assert await fault() is Code.STORE_EMPTY
    admin.put_object(Bucket=BUCKET, Key=key, Body=text)
    assert await fault() is None
    # the machine's file changes after the upload
    (run_dir(ctx, job) / "work" / "out" / "log.txt").write_text("more")
    assert await fault(gate=True) is Code.STORE_STALE


@pytest.mark.prove
async def test_a_seal_forged_by_the_job_proves_nothing(tmp_path: Path, s3: S3Server) -> None:
    """A job that forges a seal for other bytes gains nothing: the machine's digest is computed again."""
    ctx = house(tmp_path, s3.environment())
    job = await ended(ctx, tmp_path)
    await uploaded(ctx, job)
    path = run_dir(ctx, job) / "work" / "out" / "log.txt"
    path.write_text("lost")
    info = path.stat()
    body = json.loads(
        s3.client().get_object(Bucket=BUCKET, Key=StoreAddress.parse(KEEP).key(job, MANIFEST))["Body"].read()
    )
    row = next(row for row in body["files"] if row["path"] == "out/log.txt")
    stamps = {"size": info.st_size, "mtime_ns": info.st_mtime_ns, "ctime_ns": info.st_ctime_ns}
    with (run_dir(ctx, job) / "seals.jsonl").open("a") as log:
        line = {
            **stamps,
            "path": str(path.resolve()),
            "sha256": row["sha256"],
            "sealed_at": info.st_mtime,
            "mac": "0" * 64,
        }
        log.write("\n" + json.dumps(line) + "\n")
    assert (await looked(ctx, job)).code is Code.STORE_STALE


async def test_an_authentic_seal_does_not_hide_a_replaced_file(tmp_path: Path) -> None:
    """A rename replaces the sealed file by one with the same size and times; the seal fits both."""
    good, other = "a" * 64, "b" * 64
    line = {"size": 4, "mtime_ns": 10**9, "ctime_ns": 10**9, "sha256": good, "sealed_at": 2.0}
    listed = Artifact(path="out/a", size=4, mtime_ns=10**9, ctime_ns=10**9)
    fresh = {"now": listed.model_copy(update={"sha256": other})}

    class Machine:
        """A backend that returns the given digests."""

        async def manifest(self, handle: object, paths: object) -> Manifest:
            return Manifest(taken_at=3.0, files=(fresh["now"],))

    ctx: Any = SimpleNamespace(home=tmp_path, backend=lambda name: Machine())
    handle: Any = SimpleNamespace(backend="local")
    job: Any = SimpleNamespace(id="j1", outputs=("out",))
    seal = SealLine(sha256=good, sealed_at=2.0, mac=seal_log.mac(job_key(ctx, "j1").encode(), line))
    listing = Manifest(taken_at=3.0, files=(listed.model_copy(update={"seal": seal}),))

    async def digest() -> str | None:
        return (await machine_digests(ctx, job, handle, listing)).files[0].sha256

    assert await digest() is None  # neither digest is believed
    fresh["now"] = listed.model_copy(update={"sha256": good})
    assert await digest() == good
    fresh["now"] = listed.model_copy(update={"sha256": good, "ctime_ns": 10**9 + 1})
    assert await digest() is None


async def test_the_gate_compares_the_version_that_the_store_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = "a" * 64
    rows = [{"path": path, "size": 4, "sha256": digest} for path in ("out/a", "out/b")]
    asked: list[str] = []

    async def content(key: str) -> bytes:
        return json.dumps({"job": "j1", "files": [{**rows[0], "version": "1"}, rows[1]]}).encode()

    async def files(keys: Sequence[str]) -> dict[str, StoredFile]:
        asked.extend(keys)
        return {key: StoredFile(4, digest) for key in keys}

    async def machine(*given: object) -> Manifest:
        return Manifest(taken_at=3.0, files=tuple(Artifact.model_validate(row) for row in rows))

    monkeypatch.setattr(store_copy, "machine_digests", machine)
    monkeypatch.setattr(store_copy, "open_store", lambda *given: SimpleNamespace(manifest=content, files=files))
    job: Any = SimpleNamespace(id="j1", spec=SimpleNamespace(artifact_store=KEEP))
    ctx: Any = SimpleNamespace(home=tmp_path)
    found = await compare_with_store(ctx, job, ctx, Manifest(taken_at=3.0, files=()))
    assert found.code is None and found.files == {"out/a", "out/b"}
    assert asked == [f"team/j1/{VERSIONS}/1/out/a", "team/j1/out/b"]


async def test_a_store_that_never_finishes_is_unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def forever(*given: object) -> None:
        await anyio.sleep_forever()

    async def nothing(*given: object) -> Manifest:
        return Manifest(taken_at=3.0, files=())

    monkeypatch.setattr(store_copy, "store_limit", lambda files: 0.0)
    monkeypatch.setattr(store_copy, "machine_digests", nothing)
    monkeypatch.setattr(store_copy, "open_store", lambda *given: SimpleNamespace(reach=forever, manifest=forever))
    ctx: Any = SimpleNamespace(home=tmp_path)
    job: Any = SimpleNamespace(id="j1", spec=SimpleNamespace(artifact_store=KEEP))
    found = await compare_with_store(ctx, job, ctx, Manifest(taken_at=3.0, files=()))
    assert found.code is Code.STORE_UNREACHABLE and not found.files
    assert isinstance(await reachable(ctx, KEEP), Unknown)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(['{"path":"","size":0,"sha256":""}'] * 200_001, marks=pytest.mark.slow, id="files"),
        pytest.param(['{"path":"' + "x" * 5000 + '","size":0,"sha256":""}'], id="letters"),
    ],
)
async def test_an_oversized_manifest_is_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[str]
) -> None:
    async def content(key: str) -> bytes:
        return f'{{"job":"j1","files":[{",".join(rows)}]}}'.encode()

    async def nothing(*given: object) -> Manifest:
        return Manifest(taken_at=3.0, files=())

    monkeypatch.setattr(store_copy, "machine_digests", nothing)
    monkeypatch.setattr(store_copy, "open_store", lambda *given: SimpleNamespace(manifest=content))
    ctx: Any = SimpleNamespace(home=tmp_path)
    job: Any = SimpleNamespace(id="j1", spec=SimpleNamespace(artifact_store=KEEP))
    assert (await compare_with_store(ctx, job, ctx, Manifest(taken_at=3.0, files=()))).code is Code.STORE_INVALID


@pytest.mark.parametrize("path", ["machine", "machine/opt/x", "./machine/x", VERSIONS, MANIFEST])
async def test_an_output_at_a_path_reserved_by_the_store_is_refused(
    tmp_path: Path, path: str, wording: Wording
) -> None:
    assert training(tmp_path, outputs=(path,)).outputs  # allowed without a store
    for outputs in ((f"out/{path}",), ("/machine/x",)):
        assert training(tmp_path, outputs=outputs, artifact_store=KEEP).outputs
    with pytest.raises(ValidationError) as invalid:
        training(tmp_path, outputs=("out", path), artifact_store=KEEP)
    wording(invalid.value.errors()[0]["ctx"]["error"], path.removeprefix("./"))
    ctx, job = SimpleNamespace(), SimpleNamespace(outputs=(), spec=SimpleNamespace(artifact_store=KEEP))
    with pytest.raises(BadRequest) as refused:
        declare(cast("Any", ctx), cast("Any", job), [path])
    wording(refused, path.removeprefix("./"))


@pytest.mark.prove
async def test_an_unusable_store_is_reported_before_a_machine_is_rented(tmp_path: Path, s3: S3Server) -> None:
    async def said(env: dict[str, str], keep: str = KEEP) -> tuple[set[Severity], str]:
        ctx = house(tmp_path / str(len(list(tmp_path.iterdir()))), env)
        try:
            await submit(ctx, training(tmp_path / "said", artifact_store=keep), dry_run=True)
        except Refused as refusal:
            found = [f for f in refusal.findings if f.rule == "PF-STORE-001"]
            return {f.severity for f in found}, " ".join(f.message for f in found)
        return set(), ""

    good = s3.environment()
    assert await said(good) == (set(), "")
    severities, text = await said(good, "s3://nobucket/x")
    assert severities == {Severity.ERROR} and "nobucket" in text
    severities, text = await said({k: v for k, v in good.items() if "GPUWARDEN_STORE" not in k})
    assert severities == {Severity.ERROR} and "GPUWARDEN_STORE_AWS_ACCESS_KEY_ID" in text
    assert (await said(good | {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}))[0] == {Severity.UNKNOWN}
    account = good | {"VAST_API_KEY": good["GPUWARDEN_STORE_AWS_SECRET_ACCESS_KEY"]}
    assert (await said(account))[0] == {Severity.ERROR}


async def test_a_store_outside_the_allowed_list_is_refused_uncontacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = house(tmp_path, {})
    ctx.policy = ctx.policy.model_copy(update={"artifact_stores": ArtifactStores(allowed=(KEEP,))})
    asked: list[str] = []

    class Listed:
        """A store that records each contact."""

        async def reach(self) -> None:
            asked.append("it")

    monkeypatch.setattr(store_copy, "open_store", lambda ctx, address: Listed())
    for keep, code in (("s3://stranger/x", "PF-STORE-002"), (f"{KEEP}-b", "PF-STORE-002"), (f"{KEEP}/llama", "")):
        before = len(asked)
        with pytest.raises(Refused) as refusal:
            await submit(ctx, training(tmp_path / "said", artifact_store=keep), dry_run=True)
        assert ("PF-STORE-002" in {f.rule for f in refusal.value.findings}) == bool(code)
        assert (len(asked) > before) == (not code)


async def test_the_spending_approval_shows_where_the_outputs_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    async def reach() -> None:
        return None

    env = {f"GPUWARDEN_STORE_AWS_{name}": "x" * 9 for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")}
    ctx = house(tmp_path, env)
    ctx.policy = Policy(rehearsal_caps=Caps())
    monkeypatch.setattr(store_copy, "open_store", lambda ctx, address: SimpleNamespace(reach=reach))
    checked = await submit(ctx, training(tmp_path / "said", artifact_store=KEEP))
    assert checked.receipt is not None
    person = Typed("yes")
    await ask(ctx, checked.receipt, person)
    wording("\n".join(line for line in person.shown.splitlines() if KEEP in line), KEEP)


@pytest.mark.prove
async def test_a_job_never_sees_the_uploaders_credentials(tmp_path: Path, s3: S3Server) -> None:
    ctx = house(tmp_path, s3.environment())
    job = await ended(ctx, tmp_path, last="import os; print(sorted(os.environ.items()))")
    await uploaded(ctx, job)
    secret = WRITER[1].encode()
    for path in [*run_dir(ctx, job).rglob("*"), *(tmp_path / "home").rglob("*.db*")]:
        assert not path.is_file() or secret not in path.read_bytes(), path


# --------------------------------------------------------------------------------------------------------------- Hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with hub_server(tmp_path / "hub") as server:
        server.store.create("model", "stranger/kept", private=True)
        yield server


def of_hub(hub: HubServer, reader: str = STRANGER, writer: str = STRANGER) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_TOKEN": reader, "GPUWARDEN_STORE_HF_TOKEN": writer}


@pytest.mark.prove
async def test_a_hub_repo_with_matching_digests_counts_as_a_copy(tmp_path: Path, hub: HubServer) -> None:
    ctx = house(tmp_path, of_hub(hub))
    job = await ended(ctx, tmp_path, "hf://stranger/kept/runs")
    await uploaded(ctx, job)
    found = await looked(ctx, job)
    assert (found.code, found.why, len(found.files)) == (None, "", 5)
    view = await request(ctx, job, "terminate")
    assert set(findings(view)) == {"TD-LOAD-001"} and view.record.state is Teardown.AWAITING_HUMAN
    ctx.env = of_hub(hub, reader=HUB_READER)
    assert (await looked(ctx, job)).code is Code.STORE_DENIED


@pytest.mark.prove
async def test_a_read_only_token_uploads_nothing_and_blocks_the_gate(tmp_path: Path, hub: HubServer) -> None:
    ctx = house(tmp_path, of_hub(hub, writer=HUB_READER))
    job = await ended(ctx, tmp_path, "hf://stranger/kept/runs")
    said = (await uploaded(ctx, job, "failed"))["error"]
    (alert,) = [a for a in (await Watcher(ctx).round()).news if a.kind == UPLOAD]
    assert (
        said[:100] in alert.text
        and "GPUWARDEN_STORE_HF_TOKEN" in alert.text
        and "hf://stranger/kept/runs" in alert.text
    )
    found = await looked(ctx, job)
    assert found.code is Code.STORE_EMPTY
    view = await request(ctx, job, "terminate")
    assert view.record.state is Teardown.BLOCKED and found.why in findings(view)["TD-COPY-001"]


@pytest.mark.prove
async def test_files_in_a_hub_bucket_are_proven_by_reading_them(
    tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket lists no SHA-256: the gate reads files small enough to read at once, and a pull reads the rest."""
    asked: list[str] = []
    read = BucketReader.read

    def counted(self: BucketReader, key: str, offset: int = 0) -> AsyncIterator[bytes]:
        asked.append(key)
        return read(self, key, offset)

    monkeypatch.setattr(BucketReader, "read", counted)
    hub.buckets.make("stranger/kept")
    ctx = house(tmp_path, of_hub(hub))
    job = await ended(ctx, tmp_path, "hf://buckets/stranger/kept/runs")
    await uploaded(ctx, job)
    found = await looked(ctx, job)
    large = "out/checkpoint-20/model.safetensors"
    assert found.code is Code.STORE_UNCHECKED and large in found.why and len(found.files) == 4
    view = await request(ctx, job, "terminate")
    assert view.record.state is Teardown.BLOCKED and large in findings(view)["TD-COPY-001"]
    record = read_job(ctx.ledger, job)
    kept = await read_store(ctx, record)
    assert kept is not None and kept.signed and unsettled(ctx, record, kept) is None
    asked.clear()
    pulled, received = await receive_from_store(ctx, record, kept, tmp_path / "copy")
    assert len(asked) == len({*asked}), "a pull reads no file twice, however many small ones there are"
    assert received.complete and len(received.files) == 5 and pulled.disclosure is not None
    work = run_dir(ctx, job) / "work"
    assert all(Path(f.local).read_bytes() == (work / f.path).read_bytes() for f in received.files)
    # other bytes of the same size, in place of the large file
    api = HfApi(endpoint=hub.url, token=STRANGER)
    size = (work / large).stat().st_size
    api.batch_bucket_files("stranger/kept", add=[(bytes(size), f"runs/{job}/{large}")])
    received = (await receive_from_store(ctx, record, kept, tmp_path / "other"))[1]
    assert [p.path for p in received.problems] == [large] and len(received.files) == 4
    api.batch_bucket_files("stranger/kept", delete=[f"runs/{job}/{MANIFEST}"])
    assert await read_store(ctx, record) is None
    ctx.env = of_hub(hub, reader=HUB_READER)
    assert (await looked(ctx, job)).code is Code.STORE_DENIED
    assert isinstance(await reachable(ctx, "hf://buckets/stranger/kept"), Known)
    ctx.env = of_hub(hub)
    assert await reachable(ctx, "hf://buckets/stranger/kept") == Known("")
    assert "stranger/none" in str(await reachable(ctx, "hf://buckets/stranger/none"))
