"""The `verify` function on folders with a run's outputs, on manifests, and on invalid paths."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gpuwarden.checkpoints.sealing import manifest
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.errors import BadRequest, NotFound
from gpuwarden.core.evidence import Cause
from gpuwarden.core.models import Level, Manifest, Report, Verdict
from wording import Wording


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's outputs: two checkpoints, metrics, and a log."""
    root = tmp_path / "outputs"
    rng = np.random.default_rng(0)
    for step in (10, 20):
        folder = root / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"w": rng.normal(size=(64, 64)).astype("f4"), "b": np.ones(64, "f2")}, folder / "model.safetensors")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (root / "metrics.jsonl").write_text('{"loss": 1.5}\n{"loss": 1.2}\n')
    (root / "train.log").write_text("step 1\nstep 2\n")
    return root


def taken(root: Path) -> Manifest:
    return Manifest.model_validate(manifest.take(root))


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def lines(report: Report) -> str:
    """Return all problems and doubts in a report as one text."""
    found = [*report.problems, *report.doubts]
    for part in (*report.files, *report.checkpoints):
        found += [f"{part.path}: {line}" for line in (*part.problems, *part.doubts)]
    return "\n".join(found)


@pytest.mark.parametrize("level", [Level.STRUCTURE, Level.CONTENT])
def test_a_whole_run_is_proven_with_a_list_of_unchecked_points(run: Path, level: Level) -> None:
    report = verify(run, level)
    assert report.verdict is Verdict.PROVEN, lines(report)
    assert (report.newest, report.step) == ("checkpoint-20", 20)
    assert report.not_checked


def test_a_flipped_bit_is_invisible_without_a_manifest_and_refuted_with_one(run: Path, wording: Wording) -> None:
    listing = taken(run)
    flip(run / "checkpoint-10/model.safetensors", 4000)
    blind = verify(run, Level.CONTENT)
    assert blind.verdict is Verdict.PROVEN
    wording(blind.not_checked[0])
    seeing = verify(run, Level.CONTENT, manifest=listing)
    assert seeing.verdict is Verdict.REFUTED
    wording(lines(seeing), "checkpoint-10/model.safetensors", "sha256")


def test_a_manifest_written_beside_a_checkpoint_is_found(run: Path) -> None:
    folder = run / "checkpoint-20"
    manifest.write(folder, manifest.take(folder))
    assert all(f.sealed for f in verify(folder, Level.CONTENT).files if not f.path.endswith(manifest.FILE))
    flip(folder / "model.safetensors", 4000)
    assert verify(run, Level.CONTENT).verdict is Verdict.REFUTED
    assert verify(run, Level.CONTENT).newest == "checkpoint-10"


def test_a_file_gone_since_the_manifest_is_a_problem(run: Path) -> None:
    listing = taken(run)
    (run / "train.log").unlink()
    report = verify(run, Level.STRUCTURE, manifest=listing)
    assert report.verdict is Verdict.REFUTED
    assert "train.log" in lines(report)


def test_files_missing_from_the_manifest_do_not_count(run: Path) -> None:
    listing = taken(run)
    (run / "old.safetensors").write_bytes(b"torn")
    report = verify(run, Level.CONTENT, manifest=listing)
    assert report.verdict is Verdict.PROVEN
    assert "old.safetensors" in " ".join(report.not_checked)


def test_a_manifest_without_digests_leaves_it_unknown(run: Path) -> None:
    listing = taken(run)
    bare = listing.model_copy(
        update={
            "files": tuple(
                f.model_copy(update={"sha256": None, "xxh3_128": None, "crc32": None}) for f in listing.files
            )
        }
    )
    assert verify(run, Level.CONTENT, manifest=bare).verdict is Verdict.UNKNOWN


def test_a_part_of_a_run_is_compared_with_its_part_of_the_manifest(run: Path) -> None:
    listing = taken(run.parent)
    part = run / "checkpoint-10"
    report = verify(part, Level.CONTENT, manifest=listing, under="outputs/checkpoint-10")
    assert report.verdict is Verdict.PROVEN, lines(report)
    assert {f.path for f in report.files} == {"model.safetensors", "trainer_state.json"}


def test_an_unknown_format_is_never_proven(run: Path, wording: Wording) -> None:
    (run / "weights.xyz").write_bytes(os.urandom(100))
    report = verify(run, Level.CONTENT, manifest=taken(run))
    assert report.verdict is Verdict.UNKNOWN and report.causes == (Cause.UNREAD,)
    wording(lines(report), "weights.xyz")


def test_a_state_with_another_step_than_its_folder_is_refuted(run: Path) -> None:
    (run / "checkpoint-20/trainer_state.json").write_text(json.dumps({"global_step": 10}))
    report = verify(run, Level.STRUCTURE)
    assert report.verdict is Verdict.REFUTED
    assert report.newest == "checkpoint-10"


def test_an_empty_newer_checkpoint_is_named_and_the_older_one_offered(run: Path, wording: Wording) -> None:
    (run / "checkpoint-29").mkdir()
    report = verify(run, Level.STRUCTURE)
    assert report.verdict is Verdict.REFUTED
    wording(lines(report), "checkpoint-29")
    assert report.newest == "checkpoint-20"


def test_the_leftover_of_an_unfinished_save_is_named(run: Path, wording: Wording) -> None:
    (run / "checkpoint-20/model.safetensors.tmp").write_bytes(b"half")
    report = verify(run, Level.STRUCTURE)
    assert report.verdict is Verdict.UNKNOWN
    wording(lines(report), "model.safetensors.tmp")


def test_a_folder_without_files_proves_nothing(tmp_path: Path) -> None:
    assert verify(tmp_path, Level.STRUCTURE).verdict is Verdict.UNKNOWN


def test_invalid_paths_raise(tmp_path: Path) -> None:
    for bad in (tmp_path / "nothing", Path("a\0b"), tmp_path / ("x" * 5000), tmp_path / "a" / ".." / "b"):
        with pytest.raises((NotFound, BadRequest)):
            verify(bad)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are a POSIX thing")
def test_odd_entries_are_named_and_never_opened(run: Path, wording: Wording) -> None:
    os.mkfifo(run / "pipe.safetensors")
    (run / "loop").symlink_to(run)
    (run / "out.txt").symlink_to("/etc/passwd")
    (run / "latest").symlink_to("checkpoint-20")
    (run / "gone.pt").symlink_to("nowhere")
    report = verify(run, Level.CONTENT)
    assert report.verdict is Verdict.UNKNOWN
    found = lines(report)
    wording(found, "pipe.safetensors", "out.txt", "gone.pt")
    assert "latest" not in found
    assert "loop" not in found


@pytest.mark.slow
def test_hub_cache_files_are_compared_with_digests_in_their_names(tmp_path: Path, wording: Wording) -> None:
    repo = tmp_path / "models--org--name"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / "0a1b2c"
    snapshot.mkdir(parents=True)
    save_file({"w": np.arange(4000, dtype="f4")}, tmp_path / "w")
    digest = hashlib.sha256((tmp_path / "w").read_bytes()).hexdigest()
    (tmp_path / "w").rename(repo / "blobs" / digest)
    (repo / "blobs" / "c0ffee").write_text("{}")
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{digest}")
    (snapshot / "config.json").symlink_to("../../blobs/c0ffee")
    report = verify(snapshot, Level.LOAD)
    assert report.verdict is Verdict.PROVEN, lines(report)
    assert {f.path: f.sealed for f in report.files} == {"config.json": False, "model.safetensors": True}
    assert verify(snapshot / "model.safetensors", Level.LOAD).verdict is Verdict.PROVEN
    flip(repo / "blobs" / digest, 9000)
    wording(lines(verify(snapshot, Level.CONTENT)), "model.safetensors")
    (snapshot / "evil.json").symlink_to("/etc/hostname")
    wording(lines(verify(snapshot, Level.STRUCTURE)), "evil.json")


@pytest.mark.parametrize("text", ["", "{", '{"files": 3}', '{"files": [{"path": "a"}]}', "[" * 100_000, "[]"])
def test_a_manifest_that_cannot_be_read_is_a_problem(run: Path, text: str) -> None:
    (run / "checkpoint-10" / manifest.FILE).write_text(text)
    assert verify(run, Level.STRUCTURE).verdict is Verdict.REFUTED
    (run / f"train.log.{manifest.FILE}").write_text(text)
    assert verify(run / "train.log", Level.STRUCTURE).verdict is Verdict.REFUTED


@pytest.mark.parametrize("beside", [True, False])
def test_an_unfinished_trainer_save_is_not_proven(run: Path, beside: bool, wording: Wording) -> None:
    (run / "checkpoint-20/trainer_state.json").rename(run / "checkpoint-20/config.json")
    if not beside:
        shutil.rmtree(run / "checkpoint-10")
    report = verify(run, Level.STRUCTURE)
    wording(lines(report), "checkpoint-20")
    assert report.verdict is (Verdict.REFUTED if beside else Verdict.UNKNOWN)
    assert report.newest == ("checkpoint-10" if beside else "")


@pytest.mark.slow
def test_checkpoints_without_trainer_state_are_proven_below_resume(run: Path, wording: Wording) -> None:
    for step in (10, 20):
        (run / f"checkpoint-{step}/trainer_state.json").rename(run / f"checkpoint-{step}/config.json")
    assert verify(run, Level.STRUCTURE).verdict is Verdict.PROVEN
    assert verify(run / "checkpoint-10", Level.STRUCTURE).verdict is Verdict.PROVEN
    wording(lines(verify(run, Level.RESUME)))


def test_a_checkpoint_without_weights_is_reported(run: Path, wording: Wording) -> None:
    (run / "checkpoint-20/model.safetensors").unlink()
    (run / "checkpoint-20/optimizer.pt").write_bytes(b"PK")
    wording(lines(verify(run, Level.STRUCTURE)), "checkpoint-20")


@pytest.mark.slow
def test_a_checkpoint_rotated_away_on_the_machine_does_not_count(run: Path) -> None:
    listing = taken(run)
    kept = listing.model_copy(update={"files": tuple(f for f in listing.files if "checkpoint-10" not in f.path)})
    (run / "checkpoint-10/trainer_state.json").unlink()
    os.truncate(run / "checkpoint-10/model.safetensors", 100)
    (run / "checkpoint-5").mkdir()
    report = verify(run, Level.LOAD, manifest=kept)
    assert report.verdict is Verdict.PROVEN, lines(report)
    assert [c.path for c in report.checkpoints] == ["checkpoint-20"]
