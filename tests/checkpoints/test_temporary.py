"""Only names that savers give to unfinished saves count as temporary, and temporary weights alone prove nothing."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from gpuwarden.checkpoints.findings import temporary
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.models import Artifact, Level, Manifest, Report, Verdict

WHOLE = save({"w": np.arange(64, dtype="f4")})


def sealed(root: Path, files: dict[str, bytes]) -> Report:
    """Write the files and verify them against a manifest with their digests."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    listed = (Artifact(path=n, size=len(d), sha256=hashlib.sha256(d).hexdigest()) for n, d in files.items())
    return verify(root, Level.CONTENT, manifest=Manifest(taken_at=1.0, files=tuple(listed)))


@pytest.mark.parametrize("folder", ["tmp_trainer", "tmp_run", "tmp-run", "out/tmp_best"])
@pytest.mark.parametrize("data", [WHOLE[:-8], save({"w": np.full(4, np.nan, "f4")}), b""], ids=["cut", "nan", "empty"])
def test_a_folder_whose_name_begins_with_tmp_is_examined(tmp_path: Path, folder: str, data: bytes) -> None:
    assert sealed(tmp_path, {f"{folder}/model.safetensors": data}).verdict is Verdict.REFUTED
    assert sealed(tmp_path, {f"{folder}/model.safetensors": WHOLE}).verdict is Verdict.PROVEN


@pytest.mark.parametrize(
    "name",
    [
        "out/tmp-checkpoint-500/model.safetensors",
        "out/.tmp-checkpoint-500-17/model.safetensors",
        "out/model.safetensors.part",
        "out/model.safetensors.tmp.1234.part",
        "out/5.orbax-checkpoint-tmp-7/default/d/3f",
    ],
)
def test_outputs_with_only_temporary_weights_are_unknown(tmp_path: Path, name: str) -> None:
    report = sealed(tmp_path, {name: WHOLE[:-8]})
    assert report.verdict is Verdict.UNKNOWN
    assert name in report.doubts[0]
    assert sealed(tmp_path, {name: WHOLE[:-8], "out/checkpoint.safetensors": WHOLE}).verdict is Verdict.PROVEN


def test_a_lone_temporary_file_is_doubted(tmp_path: Path) -> None:
    assert sealed(tmp_path, {"out/run.lock": b"", "out/log.csv": b"a,b\n1,2\n"}).verdict is Verdict.PROVEN
    (tmp_path / "model.safetensors.part").write_bytes(WHOLE)
    assert verify(tmp_path / "model.safetensors.part").verdict is Verdict.UNKNOWN


def test_unfinished_saves_are_recognized_by_name() -> None:
    assert temporary("out/tmp-checkpoint-pe8ry7n_/model.safetensors")
    assert temporary(".tmp-checkpoint-5-17") and temporary("a/.tmp5x/b")
    assert not temporary("tmp_trainer/checkpoint-10/model.safetensors") and not temporary("tmp-model.bin")
