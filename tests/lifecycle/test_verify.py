"""Verifying every kind of target: a local path, a Hub repo, a job's copy, its files on the machine."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from gpuwarden.checkpoints.budget import Budget
from gpuwarden.checkpoints.sealing import seal_log
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import BadReply, BadRequest, Conflict, NotFound, Refused, Unreachable
from gpuwarden.core.evidence import Cause
from gpuwarden.core.guidance import Action
from gpuwarden.core.models import Level, Report, Verdict
from gpuwarden.hub.files import BLOCK, Address
from gpuwarden.interfaces import results
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.artifacts.seal_keys import job_key
from gpuwarden.lifecycle.artifacts.verify import verify
from gpuwarden.lifecycle.artifacts.verify_remote import CLAIM
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.records import read_job
from gpuwarden.lifecycle.teardown.gate import request
from gpuwarden.rehearsal.hub.seed import TOKEN, USER
from gpuwarden.rehearsal.hub.server import HubServer
from hubserver import STRANGER, hub_server
from lifecycle_kit import TRAIN, launch, open_house, rent_cloud, training, until
from real_parts import need
from wording import Wording

pytestmark = pytest.mark.anyio


def said(report: Report) -> str:
    return "\n".join(report.reasons)


def tensors(seed: int, rows: int = 64) -> dict[str, Any]:
    dice = np.random.default_rng(seed)
    return {"model.a.weight": dice.normal(size=(rows, 32)).astype("f4"), "model.b.weight": np.ones((32, 32), "f2")}


# --------------------------------------------------------------------------------------------------------- the Hub


@pytest.fixture(scope="module")
def one_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with hub_server(tmp_path_factory.mktemp("hub"), check=False) as server:
        yield server


@pytest.fixture
def hub(one_hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return one_hub


@pytest.fixture
def ctx(hub: HubServer, tmp_path: Path) -> Context:
    warden = open_house(tmp_path / "home", SystemClock())
    warden.env = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
    return warden


def put(hub: HubServer, name: str, files: dict[str, bytes | str], **fields: Any) -> str:
    hub.store.put("model", f"{USER}/{name}", files, **fields)
    return f"hf://{USER}/{name}"


def shards() -> dict[str, bytes | str]:
    whole = tensors(1, 20_000)
    table = {name: f"model-{i:05}-of-00002.safetensors" for i, name in enumerate(whole, 1)}
    files: dict[str, bytes | str] = {file: save({name: whole[name]}) for name, file in table.items()}
    total = sum(a.nbytes for a in whole.values())
    index = {"metadata": {"total_size": total}, "weight_map": table}
    return {**files, "model.safetensors.index.json": json.dumps(index), "README.md": "# a model\n"}


async def test_a_repos_headers_are_read_with_range_requests(ctx: Context, hub: HubServer, wording: Wording) -> None:
    address = put(hub, "sharded", shards())
    read = 0

    def count(more: int) -> None:
        nonlocal read
        read += more

    report = await verify(ctx, address, progress=count)
    assert (report.verdict, report.level) == (Verdict.PROVEN, Level.STRUCTURE), said(report)
    wording(report.proved[0])
    wording(report.not_checked[0], "sha256", f"{report.bytes:,}")
    assert read <= 2 * BLOCK + 10_000 < report.bytes


@pytest.mark.slow
async def test_a_downloaded_repo_is_compared_with_the_hubs_digests(
    ctx: Context, hub: HubServer, wording: Wording
) -> None:
    address = put(hub, "full", shards())
    report = await verify(ctx, address, Level.LOAD)
    assert report.verdict is Verdict.PROVEN, said(report)
    assert sum(f.sealed for f in report.files) == 2
    wording(report.proved[1].rpartition(" ")[0], "sha256")
    cached = next((ctx.home.parent / "cache").rglob("blobs"))
    blob = max(cached.iterdir(), key=lambda p: p.stat().st_size)
    data = bytearray(blob.read_bytes())
    data[-5] ^= 1
    blob.write_bytes(data)
    report = await verify(ctx, address, Level.CONTENT)
    assert report.verdict is Verdict.REFUTED
    wording(said(report))


async def test_a_large_repo_is_not_downloaded_for_an_agent(
    ctx: Context, hub: HubServer, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setattr("gpuwarden.lifecycle.artifacts.verify_hub.MOST_UNASKED", 1000)
    with pytest.raises(Refused) as refused:
        await verify(ctx, put(hub, "large", shards()), Level.LOAD, budget=Budget(60, 1 << 40))
    wording(refused)


@pytest.mark.slow
async def test_a_file_or_folder_in_a_repo_can_be_verified(ctx: Context, hub: HubServer, wording: Wording) -> None:
    inside = {"checkpoint-10/model.safetensors": save(tensors(1)), "checkpoint-10/config.json": "{}", "x.json": "{"}
    address = put(hub, "parts", inside)
    assert (await verify(ctx, f"{address}/checkpoint-10")).verdict is Verdict.UNKNOWN  # no trainer state confirms it
    for level in (Level.STRUCTURE, Level.LOAD):
        report = await verify(ctx, f"{address}@main/checkpoint-10/model.safetensors", level)
        assert report.verdict is Verdict.PROVEN, said(report)
        assert [f.path for f in report.files] == ["model.safetensors"]
    with pytest.raises(json.JSONDecodeError) as theirs:
        json.loads("{")
    wording(said(await verify(ctx, address)), "x.json", theirs.value)
    with pytest.raises(NotFound) as refused:
        await verify(ctx, f"{address}/nowhere")
    wording(refused, "nowhere")


async def test_a_repos_defects_are_found_from_its_headers(ctx: Context, hub: HubServer, wording: Wording) -> None:
    files = shards()
    files["model-00002-of-00002.safetensors"] = files["model-00002-of-00002.safetensors"][:-4]
    assert (await verify(ctx, put(hub, "cut", files))).verdict is Verdict.REFUTED
    del files["model-00002-of-00002.safetensors"]
    wording(said(await verify(ctx, put(hub, "gone", files) + "@main")))
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 5\n"
    wording(said(await verify(ctx, put(hub, "pointer", {"model.safetensors": pointer}))), "model.safetensors")


async def test_a_file_shorter_than_the_hub_lists_is_refuted(ctx: Context, hub: HubServer, wording: Wording) -> None:
    address = put(hub, "short", {"model.safetensors": save(tensors(99))})
    repo = hub.store.get("model", f"{USER}/short")
    assert repo is not None
    ref = repo.commits[-1].files["model.safetensors"]
    os.truncate(hub.store.blob(ref), ref.size - 100)
    report = await verify(ctx, address)
    assert report.verdict is Verdict.REFUTED
    wording(said(report), f"{ref.size:,}", f"{ref.size - 100:,}")


async def test_an_adapter_is_compared_with_its_base_on_the_hub(
    ctx: Context, hub: HubServer, tmp_path: Path, wording: Wording
) -> None:
    base = put(hub, "base", {"model.safetensors": save(tensors(1)), "config.json": "{}"})
    adapter = {
        "base_model.model.model.a.lora_A.weight": np.ones((4, 32), "f4"),
        "base_model.model.model.a.lora_B.weight": np.ones((64, 4), "f4"),
    }
    (tmp_path / "adapter_model.safetensors").write_bytes(save(adapter))
    config = {"peft_type": "LORA", "r": 4, "target_modules": ["a"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    report = await verify(ctx, str(tmp_path), Level.STRUCTURE, against=base)
    wording("\n".join(report.proved))
    other = put(hub, "other", {"model.safetensors": save(tensors(1, 32))})
    report = await verify(ctx, str(tmp_path), Level.STRUCTURE, against=other)
    assert report.verdict is Verdict.REFUTED
    wording(report.problems[0])


async def test_two_checkpoints_on_the_hub_are_compared_by_their_bytes(
    ctx: Context, hub: HubServer, wording: Wording
) -> None:
    files: dict[str, bytes | str] = {}
    for step, seed in ((10, 1), (20, 2)):
        files[f"checkpoint-{step}/model.safetensors"] = save(tensors(seed))
        files[f"checkpoint-{step}/trainer_state.json"] = json.dumps({"global_step": step})
    address = put(hub, "steps", files)
    report = await verify(ctx, f"{address}/checkpoint-20", against=f"{address}/checkpoint-10")
    assert report.verdict is Verdict.PROVEN, said(report)
    wording("\n".join(report.proved[:2]))
    report = await verify(ctx, f"{address}/checkpoint-10", against=f"{address}/checkpoint-20")
    assert report.verdict is Verdict.REFUTED


async def test_missing_private_and_unreachable_repos_raise(ctx: Context, hub: HubServer, wording: Wording) -> None:
    with pytest.raises(NotFound) as refused:
        await verify(ctx, f"hf://{USER}/nothing")
    wording(refused, f"{USER}/nothing")
    put(hub, "mine", {"a.json": "{}"}, private=True)
    ctx.env = {**ctx.env, "HF_TOKEN": STRANGER}
    with pytest.raises(NotFound):
        await verify(ctx, f"hf://{USER}/mine")
    ctx.env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": TOKEN}
    with pytest.raises(Unreachable):
        await verify(ctx, f"hf://{USER}/sharded")


@pytest.mark.parametrize("text", ["hf://", "hf://a", "hf://a/b/../c", "hf:///b", "hf://a/b\n", "hf://a b/c", "x/y"])
def test_an_invalid_hub_address_is_rejected(text: str) -> None:
    with pytest.raises(BadRequest):
        Address.parse(text)


def test_hub_addresses_are_parsed() -> None:
    assert Address.parse("hf://a/b@refs%2Fpr%2F1/c/d") == Address("model", "a/b", "refs/pr/1", "c/d")
    assert Address.parse("hf://datasets/a/b") == Address("dataset", "a/b")


async def test_a_gguf_is_compared_with_its_source_on_the_hub(
    ctx: Context, hub: HubServer, tmp_path: Path, wording: Wording
) -> None:
    need("gguf", importlib.util.find_spec("gguf") is not None)
    import gguf

    def write(path: Path, layers: int, vocab: int) -> Path:
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(layers)
        writer.add_embedding_length(32)
        writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(vocab)])
        writer.add_tensor("token_embd.weight", np.ones((vocab, 32), "f4"))
        for i in range(layers):
            writer.add_tensor(f"blk.{i}.attn_q.weight", np.ones((32, 32), "f2"))
            writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(32, "f4"))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    source = {"embed.weight": np.ones((64, 32), "f4")}
    for i in range(2):
        source |= {f"layers.{i}.q.weight": np.ones((32, 32), "f4"), f"layers.{i}.norm.weight": np.ones(32, "f4")}
    config = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 64}
    base = put(hub, "source", {"model.safetensors": save(source), "config.json": json.dumps(config)})
    report = await verify(ctx, str(write(tmp_path / "good.gguf", 2, 64)), Level.STRUCTURE, against=base)
    assert report.verdict is Verdict.PROVEN, said(report)
    wording("\n".join(report.proved))
    for layers, vocab, here, there in ((1, 64, 1, 2), (2, 63, 63, 64)):
        bad = await verify(ctx, str(write(tmp_path / "bad.gguf", layers, vocab)), Level.STRUCTURE, against=base)
        assert bad.verdict is Verdict.REFUTED
        wording(bad.problems[0], here, there)


# --------------------------------------------------------------------------------------------------- on the instance


@pytest.fixture
def house(tmp_path: Path) -> Context:
    warden = open_house(tmp_path / "home", SystemClock())
    rent_cloud(warden)
    return warden


async def done(ctx: Context, tmp_path: Path, **changes: object) -> str:
    job = await launch(ctx, training(tmp_path / "said", 0.0, **changes))
    await until(ctx, job)
    return job


@pytest.mark.prove
async def test_verifying_on_the_machine_does_not_count_as_a_copy(house: Context, tmp_path: Path) -> None:
    job = await done(house, tmp_path)
    report = await verify(house, job)
    assert (report.verdict, report.level, report.not_checked[0]) == (Verdict.PROVEN, Level.CONTENT, CLAIM), said(report)
    assert [f.path for f in report.files] == ["out/model.safetensors"]
    reply = results.verified(report)
    assert (reply.code, reply.verdict) == ("claimed", "proven") and reply.next[0].action is Action.PULL
    rules = {f.rule for f in (await request(house, job, "terminate")).findings}
    assert "TD-COPY-001" in rules
    await pull(house, job)
    assert CLAIM not in (await verify(house, job)).not_checked, "now there is a copy to look at"
    assert CLAIM in (await verify(house, job, where="instance")).not_checked
    assert "TD-COPY-001" not in {f.rule for f in (await request(house, job, "terminate")).findings}


@pytest.mark.slow
@pytest.mark.parametrize("level", [Level.STRUCTURE, Level.CONTENT, Level.LOAD])
async def test_a_pulled_folder_and_its_job_have_the_same_verdict(house: Context, tmp_path: Path, level: Level) -> None:
    job = await done(house, tmp_path)
    dest = (await pull(house, job, tmp_path / "copy")).dest
    assert (dest / ".gpuwarden/owner").is_file()
    by_job, by_path = await verify(house, job, level), await verify(house, str(dest), level)
    assert by_job == by_path and by_path.verdict is Verdict.PROVEN, said(by_path)
    below = await verify(house, str(dest / "out/model.safetensors"), level)
    assert below.verdict is Verdict.PROVEN and below.files[0].sealed == (level is not Level.STRUCTURE), said(below)

    stranger = open_house(tmp_path / "other", SystemClock())
    alone = await verify(stranger, str(dest), level)
    assert [f.path for f in alone.files] == ["out/model.safetensors"], "a pull's own files do not belong to it"
    assert alone.verdict is Verdict.PROVEN, said(alone)

    with (dest / "out/model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    by_job, by_path = await verify(house, job, level), await verify(house, str(dest), level)
    assert by_job == by_path
    assert by_path.verdict is (Verdict.PROVEN if level is Level.STRUCTURE else Verdict.REFUTED)


@pytest.mark.slow
async def test_unsupported_instance_verifications_are_refused(house: Context, tmp_path: Path, wording: Wording) -> None:
    job = await done(house, tmp_path)
    with pytest.raises(Conflict):
        await verify(house, job, where="here")
    with pytest.raises(BadRequest) as refused:
        await verify(house, str(tmp_path), where="instance")
    wording(refused)
    with pytest.raises(BadRequest) as refused:
        await verify(house, job, against="hf://owner/base", where="instance")
    wording(refused)
    for climbs in ("../other", "out/../..", "/", "a\nb"):
        with pytest.raises(BadRequest, match="against"):
            await verify(house, job, against=climbs, where="instance")


LIES: list[Any] = [
    {},
    {"out": {"files": "all fine"}},
    {"out": {"files": [{"path": "a" * 9000, "format": "x", "size": 1}]}},
    {"out": {"files": [{"path": "a", "format": "x", "size": -1}]}},
    {"out": {"files": [{"path": "a", "format": "x", "size": 1, "problems": ["p"] * 5000}]}},
    {"out": {"files": [{"path": "a", "format": "x", "size": 1}] * 5000}},
    {"out": {"files": [{"path": "a", "format": "x", "size": 10**400}]}},
    {"out": {"folders": [{"path": "a", "layout": "x", "step": 10**400, "checkpoint": True}]}},
    {"out": {"compared": {"proved": ["moved"] * 500}}},
    {"out": {"compared": ["moved"]}},
]


@pytest.mark.slow
async def test_a_malformed_reply_proves_nothing_and_its_text_is_bounded(
    house: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await done(house, tmp_path)
    reply: dict[str, Any] = {}

    async def examine(*_: object, **__: object) -> dict[str, Any]:
        return reply

    monkeypatch.setattr(house.backend("local"), "examine", examine)
    for lie in LIES:
        reply = lie
        try:
            verdict = (await verify(house, job, where="instance")).verdict
        except BadReply:
            continue
        assert verdict is Verdict.UNKNOWN, str(lie)[:200]

    row = {"path": "a\n\x1b[31mb", "format": "x", "size": 1, "problems": ["first\nsecond " + "x" * 5000]}
    reply = {"out": {"files": [row], "folders": [], "doubts": []}}
    report = await verify(house, job, where="instance")
    assert all("\n" not in f.path and "\x1b" not in f.path for f in report.files)
    assert all(len(p) <= 400 and "\n" not in p for f in report.files for p in f.problems)


@pytest.mark.prove
async def test_absolute_outputs_on_a_durable_volume_are_pulled(tmp_path: Path) -> None:
    house = open_house(tmp_path / "home", SystemClock())
    rent_cloud(house, platform="rehearsal/runpod")
    job = await done(house, tmp_path, platform="rehearsal/runpod", outputs=("/workspace/kept",), durable_storage=True)
    (volume,) = house.home.glob("providers/rehearsal/runpod/volumes/*")
    (volume / "kept").mkdir()
    (volume / "kept/a.json").write_text("{}")
    (volume / "kept/out").symlink_to("/etc/hostname")
    got = await pull(house, job)
    assert [f.path for f in got.received.files] == ["/workspace/kept/a.json"], got.manifest
    assert got.manifest.skipped == ("/workspace/kept/out: a link that points outside its folder",)
    assert (await verify(house, job)).verdict is Verdict.PROVEN
    (volume / "kept/out").unlink()
    assert (await verify(house, job, where="instance")).verdict is Verdict.PROVEN


# ----------------------------------------------------------------------------------------------------------- limits


async def test_verifying_a_whole_disk_stops_at_the_budget(tmp_path: Path) -> None:
    ctx = open_house(tmp_path / "home", SystemClock())
    report = await verify(ctx, "/", Level.STRUCTURE, budget=Budget(3.0, 1 << 30, 3_000))
    assert report.verdict is not Verdict.PROVEN
    assert Cause.LIMIT in report.causes


async def test_files_beyond_the_byte_budget_are_reported_as_unchecked(tmp_path: Path, wording: Wording) -> None:
    ctx = open_house(tmp_path / "home", SystemClock())
    for i in range(20):
        folder = tmp_path / f"run/checkpoint-{i}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(save(tensors(i, 3000)))
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": i}))
    report = await verify(ctx, str(tmp_path / "run"), Level.CONTENT, budget=Budget(60.0, 1_000_000))
    assert report.verdict is Verdict.UNKNOWN
    assert not report.checkpoints, "a folder is not blamed for files that were not looked at"
    assert Cause.LIMIT in report.causes
    wording(report.doubts[0].partition(": ")[0], "1,000,000")
    (cut,) = {doubt for file in report.files for doubt in file.doubts}
    wording(cut)
    over = await verify(ctx, str(tmp_path / "run"), Level.LOAD, budget=Budget(0.0, 1 << 40))
    assert over.verdict is Verdict.UNKNOWN and not over.files


# ----------------------------------------------------------------------------------------- digests taken at save time


def write_seal(ctx: Context, job: str, sha256: str = "", *, key: str | None = None, after_s: float = 1.0) -> None:
    """Add a row to the seal file on a job's machine, by the sealer's own key or by one that a job made up."""
    handle = read_job(ctx.ledger, job).handle
    assert handle is not None
    place = os.path.realpath(Path(handle.run_dir) / "work/out/model.safetensors")
    size, mtime, ctime = seal_log.stamp_of(place) or (0, 0, 0)
    row: dict[str, Any] = {"path": place, "size": size, "mtime_ns": mtime, "ctime_ns": ctime}
    row["sha256"] = sha256 or hashlib.sha256(Path(place).read_bytes()).hexdigest()
    row["sealed_at"] = ctime / 1e9 + after_s
    row["mac"] = seal_log.mac((job_key(ctx, job) if key is None else key).encode(), row) if key != "" else ""
    seal_log.add(Path(handle.run_dir) / "seals.jsonl", [row])


@pytest.mark.prove
@pytest.mark.parametrize("rotten", [False, True])
async def test_a_copy_is_compared_with_the_seals_digest(
    house: Context, tmp_path: Path, rotten: bool, wording: Wording
) -> None:
    job = await done(house, tmp_path)
    write_seal(house, job, "0" * 64 if rotten else "")
    got = await pull(house, job)
    if rotten:
        wording(got.received.problems[0].why)
        assert not got.received.files
    else:
        report = await verify(house, job, Level.LOAD)
        assert report.verdict is Verdict.PROVEN, said(report)
        wording(report.proved[-1])
    there = await verify(house, job, where="instance")
    assert there.verdict is (Verdict.REFUTED if rotten else Verdict.PROVEN)


@pytest.mark.slow
@pytest.mark.parametrize(("key", "lies"), [("", True), ("made up", False)])
async def test_a_seal_written_by_the_job_is_reported_and_ignored(
    house: Context, tmp_path: Path, key: str, lies: bool, wording: Wording
) -> None:
    job = await done(house, tmp_path)
    write_seal(house, job, "0" * 64 if lies else "", key=key)
    got = await pull(house, job)
    assert got.received.complete, "the bytes that are there now are taken, whatever the book says"
    report = await verify(house, job, Level.LOAD)
    assert report.verdict is Verdict.PROVEN, said(report)
    assert not report.proved
    wording("\n".join(report.warnings))


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [86400.0, -86400.0])
async def test_a_seal_with_an_implausible_time_is_reported(
    house: Context, tmp_path: Path, after_s: float, wording: Wording
) -> None:
    job = await done(house, tmp_path)
    write_seal(house, job, after_s=after_s)
    await pull(house, job)
    wording("\n".join((await verify(house, job)).warnings))


@pytest.mark.slow
async def test_a_real_job_is_sealed_with_a_key_that_it_never_sees(
    house: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    from gpuwarden.remote import launch as launching

    prepare = launching.prepare

    def soon(*given: Any) -> Any:
        made = prepare(*given)
        made.spec.update(seal_after_s=0.01, seal_quiet_s=0.05, seal_every_s=0.05)
        return made

    monkeypatch.setattr(launching, "prepare", soon)
    text = (
        TRAIN
        + """
print(dict(os.environ), flush=True)
while not os.path.exists("../seals.jsonl") or "model" not in open("../seals.jsonl").read():
    time.sleep(0.05)
"""
    )
    command = (sys.executable, "-I", "-S", "-c", text, str(tmp_path / "said"), "0.3")
    job = await done(house, tmp_path, command=command)
    handle = read_job(house.ledger, job).handle
    assert handle is not None
    await pull(house, job)
    report = await verify(house, job)
    assert not report.warnings
    wording(report.proved[-1])
    key = job_key(house, job)
    assert key == job_key(open_house(house.home, SystemClock()), job) != job_key(house, "another")
    kept = [p for p in [*Path(handle.run_dir).rglob("*"), *house.home.rglob("*")] if p.is_file()]
    assert not [p for p in kept if key.encode() in p.read_bytes()]
    assert (house.home / "seal.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("what", "against"), [("", None), (" ", None), (".", "")])
async def test_an_empty_path_is_not_taken_as_the_working_folder(
    house: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, against: str | None, wording: Wording
) -> None:
    (tmp_path / "model.safetensors").write_bytes(save(tensors(1)))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadRequest) as refused:
        await verify(house, what, against=against)
    wording(refused)
