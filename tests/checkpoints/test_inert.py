"""Outputs other than weights: pictures, tables, logs, files without a reader, and weights in disguise."""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import struct
import subprocess
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from gpuwarden.checkpoints.sealing import manifest
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.models import Level, Manifest, Report, Verdict
from gpuwarden.core.states import TERMINAL_JOBS
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.artifacts.verify import verify_job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.check import cancel, check
from gpuwarden.lifecycle.records import read_job
from gpuwarden.lifecycle.teardown.gate import request
from lifecycle_kit import launch, open_house, rent_cloud, training
from real_parts import need
from waiting import soon
from wording import Wording

WEIGHTS = save({"w": np.random.default_rng(0).normal(size=(64, 64)).astype("f4")})


def png(width: int = 8) -> bytes:
    """Return a gray picture that follows the PNG specification."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, width, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"".join(b"\0" + bytes(range(width)) for _ in range(width)))
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", rows) + part(b"IEND", b"")


def reasons(report: Report) -> str:
    return "\n".join(report.reasons)


def sealed(folder: Path, level: Level = Level.LOAD) -> Report:
    return verify(folder, level, manifest=Manifest.model_validate(manifest.take(folder)))


def test_pictures_are_proven_by_their_structure(tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "loss.png").write_bytes(png())
    (tmp_path / "table.csv").write_text("step,loss\n1,2.5\n")
    report = verify(tmp_path, Level.LOAD)
    assert report.verdict is Verdict.PROVEN, reasons(report)
    wording("\n".join(report.files[0].proved), "CRC", 3)


def test_pictures_written_by_pillow_are_proven_until_damaged(tmp_path: Path) -> None:
    need("PIL", importlib.util.find_spec("PIL") is not None)
    from PIL import Image

    dice = np.random.default_rng(0).integers(0, 255, (61, 47, 3), dtype="u1")
    for name, more in (("a.png", {}), ("b.jpg", {}), ("c.jpeg", {"progressive": True}), ("d.jpg", {"quality": 100})):
        Image.fromarray(dice).save(tmp_path / name, **more)
    report = verify(tmp_path, Level.LOAD)
    assert report.verdict is Verdict.PROVEN, reasons(report)
    for path in tmp_path.iterdir():
        data = path.read_bytes()
        for bad in (data[:-1], data[: len(data) // 2], data[2:]):
            path.write_bytes(bad)
            assert verify(path, Level.STRUCTURE).verdict is Verdict.REFUTED, path
        path.write_bytes(data + b"more")
        assert verify(path, Level.STRUCTURE).verdict is not Verdict.PROVEN
        path.write_bytes(data)


@pytest.mark.parametrize("at", range(8, 60, 5))
def test_a_changed_png_byte_is_detected(tmp_path: Path, at: int) -> None:
    data = bytearray(png())
    data[at] ^= 1
    (tmp_path / "a.png").write_bytes(data)
    assert verify(tmp_path / "a.png", Level.STRUCTURE).verdict is Verdict.REFUTED


def torch_file() -> bytes:
    need("torch", importlib.util.find_spec("torch") is not None)
    import torch

    out = io.BytesIO()
    torch.save({"w": torch.ones(64)}, out)
    return out.getvalue()


def archive(how: int = zipfile.ZIP_DEFLATED, /, **members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", how) as made:
        for name, content in members.items():
            made.writestr(name, content)
    return out.getvalue()


DISGUISES: dict[str, Callable[[], bytes]] = {
    "loss.png": lambda: WEIGHTS,
    "loss.jpg": lambda: WEIGHTS,
    "a.png": lambda: png() + WEIGHTS,
    "notes.txt": lambda: WEIGHTS,
    "run.log": torch_file,
    "data.dat": lambda: WEIGHTS,
    "x.unknown": torch_file,
    "model.h5": lambda: b"\x89HDF\r\n\x1a\n" + os.urandom(100),
    "all.zip": lambda: b"PK\3\4" + os.urandom(100),
}
NO_READER: dict[str, Callable[[], bytes]] = {
    "blob": lambda: b"?" + os.urandom(17 << 20),
    "model.weights": lambda: b"?" + os.urandom(100),
    "model.ckpt-10.data-00000-of-00001": lambda: b"?" + os.urandom(100),
    "model.bin.bak": lambda: b"?" + os.urandom(100),
    "out.tar.gz": lambda: b"\x1f\x8b" + os.urandom(100),
    "deep/model.pkl.old": lambda: b"?" + os.urandom(50),
    "model.pdparams": lambda: b"?" + os.urandom(50),
}


@pytest.mark.parametrize("name", DISGUISES)
def test_weights_in_disguise_are_not_proven(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(DISGUISES[name]())
    report = sealed(tmp_path)
    assert report.verdict is not Verdict.PROVEN and report.readable is not Verdict.PROVEN
    assert not report.unread


@pytest.mark.parametrize("name", NO_READER)
def test_a_file_without_a_reader_is_copied_and_not_proven(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(NO_READER[name]())
    report = sealed(tmp_path)
    assert (report.verdict, report.readable, report.unread) == (Verdict.UNKNOWN, Verdict.PROVEN, (name,))
    assert not verify(tmp_path, Level.LOAD).unread, "without a recorded digest it is just unknown"


@pytest.mark.slow
def test_small_unread_files_are_reported_separately(tmp_path: Path) -> None:
    (tmp_path / "state.dat").write_bytes(bytes([7, *range(200)]) * 5)  # 1,000 random bytes can look like weights
    (tmp_path / "latin.csv").write_bytes("größe;1\n".encode("latin-1"))
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    report = sealed(tmp_path)
    assert (report.verdict, report.readable) == (Verdict.UNKNOWN, Verdict.PROVEN), reasons(report)
    assert report.unread == ("latin.csv", "state.dat")
    assert not verify(tmp_path, Level.LOAD).unread, "without a recorded digest it is just unknown"
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS[:-1])
    assert sealed(tmp_path).readable is Verdict.REFUTED


@pytest.mark.slow
def test_an_unread_file_leaves_its_checkpoint_readable(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    (folder / "sampler.dat").write_bytes(b"\1\2\3")
    report = sealed(tmp_path)
    assert (report.verdict, report.readable) == (Verdict.UNKNOWN, Verdict.PROVEN), reasons(report)


# ------------------------------------------------------------------------------------------------------- archives


@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_plain_archive_proves_only_that_it_is_whole(tmp_path: Path, how: int, wording: Wording) -> None:
    data = archive(how, **{"a.csv": b"1,2\n" * 5000, "sub/b.png": png(), "sub/": b"", "empty.txt": b""})
    place = tmp_path / "plots.zip"
    place.write_bytes(data)
    report = verify(place, Level.LOAD)
    assert report.verdict is Verdict.PROVEN, reasons(report)
    wording("\n".join(report.files[0].unproved))
    assert not report.checkpoints
    for at in (data.index(b"sub/b.png") + 40, 60):
        place.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert verify(place, Level.CONTENT).verdict is Verdict.REFUTED
    for cut in (1, 30, len(data) // 2, len(data) - 10):
        place.write_bytes(data[:-cut])
        assert verify(place, Level.STRUCTURE).verdict is Verdict.REFUTED


def test_folders_packed_by_zipfile_or_zip_are_proven(tmp_path: Path) -> None:
    (tmp_path / "plots/deep").mkdir(parents=True)
    (tmp_path / "plots/deep/ü.csv").write_text("a\n" * 1000)
    shutil.make_archive(str(tmp_path / "std"), "zip", tmp_path / "plots")
    made = [tmp_path / "std.zip"]
    program = shutil.which("zip")
    if program:
        subprocess.run([program, "-qr", str(tmp_path / "cli.zip"), "plots"], cwd=tmp_path, check=True)
        made.append(tmp_path / "cli.zip")
    for place in made:
        assert verify(place, Level.LOAD).verdict is Verdict.PROVEN, reasons(verify(place, Level.LOAD))


ODD: dict[str, Callable[[], bytes]] = {
    "a comment": lambda: archive(a=b"1")[:-2] + b"\2\0hi",
    "bytes before": lambda: b"#!/bin/sh\n" + archive(a=b"1"),
    "two members of one name": lambda: twice(),
    "an absolute name": lambda: archive(**{"/etc/passwd": b"1"}),
    "weights": lambda: archive(**{"policy.pth": WEIGHTS}),
    "a nested archive": lambda: archive(**{"in.zip": archive(a=b"1")}),
    "bulk without a name": lambda: archive(blob=bytes(17 << 20)),
}


def twice() -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w") as made:
        warnings.simplefilter("ignore")
        made.writestr("a", b"1")
        made.writestr("a", b"2")
    return out.getvalue()


@pytest.mark.parametrize("what", ODD)
def test_a_whole_but_odd_archive_is_unknown(tmp_path: Path, what: str) -> None:
    (tmp_path / "odd.zip").write_bytes(ODD[what]())
    report = sealed(tmp_path)
    assert report.verdict is Verdict.UNKNOWN and report.readable is Verdict.UNKNOWN, reasons(report)


def test_archives_claiming_false_sizes_are_not_proven(tmp_path: Path) -> None:
    data = bytearray(archive(a=bytes(1 << 20)))
    entry = data.index(b"PK\1\2")
    for name, claimed in (("bomb.zip", 15 << 20), ("bulk.zip", 0xF0000000)):
        data[entry + 24 : entry + 28] = claimed.to_bytes(4, "little")
        (tmp_path / name).write_bytes(data)
    many = archive(**{f"m{i}": bytes(1 << 20) for i in range(20)})
    (tmp_path / "many.zip").write_bytes(many)
    found = {f.path: f.verdict for f in verify(tmp_path, Level.CONTENT).files}
    assert found == {"bomb.zip": Verdict.REFUTED, "bulk.zip": Verdict.UNKNOWN, "many.zip": Verdict.PROVEN}


# -------------------------------------------------------------------------------------------------------- the gate


async def over(ctx: Context, job: str) -> bool:
    return (await check(ctx, job)).job.state in TERMINAL_JOBS


@pytest.fixture(scope="module")
async def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Context, str]:
    """A job that has ended; each test replaces its outputs."""
    home = tmp_path_factory.mktemp("gate")
    ctx = open_house(home / "home", SystemClock())
    rent_cloud(ctx)
    job = await launch(ctx, training(home / "said", 0.0))
    await soon(lambda: over(ctx, job), every=0.1)
    return ctx, job


async def gate_findings(ctx: Context, job: str, shown: dict[str, bytes], dest: Path) -> dict[str, str]:
    """Pull and verify a job with these outputs; return the findings about its copy."""
    handle = read_job(ctx.ledger, job).handle
    assert handle is not None
    out = Path(handle.run_dir) / "work/out"
    shutil.rmtree(out)
    out.mkdir()
    for name, content in shown.items():
        (out / name).write_bytes(content)
    await pull(ctx, job, dest)
    await verify_job(ctx, job)
    view = await request(ctx, job, "terminate")
    return {f.rule: str(f.severity) for f in view.findings if f.rule.startswith(("TD-LOAD", "TD-COPY"))}


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("shown", "severity"),
    [
        ({"loss.png": png(), "t.csv": b"a,b\n", "m.md": b"# x\n", "c.yaml": b"a: 1\n"}, None),
        ({"state.dat": b"\1\2\3"}, "warning"),
        ({"model.pdparams": b"\1\2\3" * 100}, "warning"),
        ({"plots.zip": archive(plots=png())}, None),
        ({"plots.zip": archive(plots=png())[:-9]}, "error"),
        ({"model.zip": archive(**{"policy.pth": WEIGHTS})}, "error"),
        ({"loss.png": png()[:-9]}, "warning"),
        ({"train.log": b"step 1\n" + bytes(4096)}, "warning"),
        ({"train.log": b"step 1\n" + bytes(4096), "state.dat": b"\1\2\3"}, "warning"),
        ({"loss.png": png()[:-9], "bad.safetensors": WEIGHTS[:-1]}, "error"),
        ({"loss.png": png() + WEIGHTS}, "error"),
        ({"merges.txt": b"a b\n" + bytes(64)}, "error"),
        ({"loss.png": WEIGHTS}, "error"),
        ({"model.pkl": b"\1\2\3"}, "error"),
        ({"state.dat": b"\1\2\3", "bad.safetensors": WEIGHTS[:-1]}, "error"),
    ],
)
async def test_gate_severity_depends_on_the_output_files(
    ended: tuple[Context, str], tmp_path: Path, shown: dict[str, bytes], severity: str | None
) -> None:
    found = await gate_findings(*ended, shown, tmp_path / "copy")
    assert found == ({"TD-LOAD-001": severity} if severity else {})


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_rotted_local_copy_blocks_even_after_a_cancel(tmp_path: Path) -> None:
    """A canceled job's torn file is already lost; a good file whose copy changed isn't, until the machine is gone."""
    ctx = open_house(tmp_path / "home", SystemClock())
    rent_cloud(ctx)
    job = await launch(ctx, training(tmp_path / "said", 600.0))

    async def begun() -> bool:
        return (await check(ctx, job)).job.handle is not None and (tmp_path / "said").exists()

    await soon(begun, every=0.1)
    handle = read_job(ctx.ledger, job).handle
    assert handle is not None
    out = Path(handle.run_dir) / "work/out"
    out.mkdir()
    (out / "good.safetensors").write_bytes(WEIGHTS)
    (out / "torn.safetensors").write_bytes(WEIGHTS[:-1])
    await cancel(ctx, job)
    await soon(lambda: over(ctx, job), every=0.1)
    copy = (await pull(ctx, job)).dest / "out/good.safetensors"
    for change, severity in ((0, "warning"), (1, "error")):
        copy.write_bytes(WEIGHTS[:-1] + bytes([WEIGHTS[-1] ^ change]))
        await verify_job(ctx, job)
        view = await request(ctx, job, "terminate")
        assert {str(f.severity) for f in view.findings if f.rule == "TD-LOAD-001"} == {severity}
