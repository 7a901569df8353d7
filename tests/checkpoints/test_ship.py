"""The archive sent to machines: one file, standard library only, old Pythons, and the manifests that it writes."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gpuwarden.checkpoints import archive
from gpuwarden.checkpoints.sealing import manifest, save_helper
from gpuwarden.checkpoints.sealing.seal import Sealer
from gpuwarden.checkpoints.verify import WHO, verify
from gpuwarden.core.evidence import Cause
from gpuwarden.core.models import Level, Manifest, Verdict
from wording import Wording


def outputs(root: Path, step: int = 10) -> Path:
    folder = root / "out" / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    weights = np.random.default_rng(step).normal(size=(64, 64)).astype("f4")
    save_file({"w": weights, "h": weights.astype("f2")}, folder / "model.safetensors")
    np.savez_compressed(folder / "state.npz", w=weights)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return root / "out"


@cache
def pythons() -> list[str]:
    """Return this interpreter and the oldest one found, since rented machines still have old ones."""
    for minor in range(8, sys.version_info.minor):
        name = f"python3.{minor}"
        found = [shutil.which(name), *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}")]
        for python in (str(path) for path in found if path):
            if subprocess.run([python, "-V"], capture_output=True).returncode == 0:
                return [sys.executable, python]
    return [sys.executable]


def shipped(python: str, pyz: Path, *args: str) -> Any:
    """Run the archive with nothing but the standard library (-S leaves out site-packages)."""
    done = subprocess.run(
        [python, "-S", "-I", str(pyz), *args], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def pyz(tmp_path: Path) -> Path:
    data = archive.build()
    assert data == archive.build()
    path = tmp_path / archive.name(data)
    path.write_bytes(data)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("python", pythons(), ids=("own", "oldest")[: len(pythons())])
def test_the_archive_needs_only_the_standard_library(tmp_path: Path, pyz: Path, python: str) -> None:
    root = outputs(tmp_path)
    answer = shipped(python, pyz, "examine", str(root))
    assert {f["verdict"] for f in answer[0]["files"]} == {"proven"}
    assert [f["step"] for f in answer[0]["folders"] if f["checkpoint"]] == [10]
    listing = Manifest.model_validate(shipped(python, pyz, "manifest", str(root))[0])
    assert verify(root, Level.CONTENT, manifest=listing).verdict is Verdict.PROVEN


def test_the_archive_finds_non_finite_values_without_numpy(tmp_path: Path, pyz: Path, wording: Wording) -> None:
    bad = np.ones((300, 300), "f4")
    bad[200, 7] = np.nan
    save_file({"w": bad}, tmp_path / "a.safetensors")
    answer = shipped(sys.executable, pyz, "examine", str(tmp_path / "a.safetensors"))
    (found,) = answer[0]["files"]
    assert found["causes"] == [Cause.NOT_FINITE]
    wording("\n".join(found["problems"]))


def test_shipped_modules_import_only_the_standard_library() -> None:
    home = Path(str(archive.__file__)).parent
    allowed = {"gguf", "h5py", "numpy", "isal", "xxhash", "safetensors"}  # optional: used if installed
    for path in [p for p in home.rglob("*.py") if p.name not in archive._HOME] + [Path(str(save_helper.__file__))]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                root = name.partition(".")[0]
                assert root in sys.stdlib_module_names | allowed | {"gpuwarden", "torch"}, f"{path.name}: {name}"
                assert not name.startswith("gpuwarden.core.models"), path.name
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
                tables = [side for side in (node.left, node.right) if isinstance(side, (ast.Dict, ast.DictComp))]
                assert not tables, f"{path.name}:{node.lineno}: Python 3.8 has no union of dictionaries"


# ---------------------------------------------------------------------------------------------------------- sealing


def test_a_checkpoint_is_sealed_once_it_is_quiet(tmp_path: Path) -> None:
    root, clock = outputs(tmp_path), [100.0]
    sealer = Sealer(root, quiet_s=30, now=lambda: clock[0])
    assert sealer.look() == []
    clock[0] += 20
    (root / "checkpoint-10/extra.json").write_text("{}")
    assert sealer.look() == []
    clock[0] += 29
    assert sealer.look() == []
    clock[0] += 1
    assert sealer.look() == ["checkpoint-10"]
    assert sealer.look() == []
    report = verify(root, Level.CONTENT)
    assert report.verdict is Verdict.PROVEN
    assert all(f.sealed for f in report.files if not f.path.endswith(manifest.FILE))


def test_torn_and_temporary_checkpoints_are_not_sealed(tmp_path: Path) -> None:
    root = outputs(tmp_path)
    outputs(tmp_path, 20)
    shutil.copytree(root / "checkpoint-10", root / "tmp-checkpoint-30")
    os.truncate(root / "checkpoint-20/model.safetensors", 1000)
    assert Sealer(root, quiet_s=0).look() == ["checkpoint-10"]
    assert not (root / "tmp-checkpoint-30" / manifest.FILE).exists()


def test_a_lone_file_gets_its_manifest_beside_it(tmp_path: Path) -> None:
    root = tmp_path / "out"
    root.mkdir()
    save_file({"w": np.arange(4000, dtype="f4")}, root / "last.safetensors")
    assert Sealer(root, quiet_s=0).look() == ["last.safetensors"]
    assert verify(root / "last.safetensors").files[0].sealed
    data = bytearray((root / "last.safetensors").read_bytes())
    data[9000] ^= 1
    (root / "last.safetensors").write_bytes(data)
    assert verify(root / "last.safetensors").verdict is Verdict.REFUTED
    assert verify(root).verdict is Verdict.REFUTED


LYING: list[str] = [
    '{"files": [{"path": "model.safetensors", "size": 1e400}]}',
    '{"files": [{"path": "model.safetensors", "size": -1}]}',
    '{"files": [{"path": "model.safetensors", "size": "x"}]}',
    '{"files": [{"path": "../../secret", "size": 1}]}',
    '{"files": {"path": 1}}',
    '{"files": [{"size": 1}]}',
    '{"files": [' + "[]," * 3_000_000 + "1]}",
    '{"files": [' + '{"path": "x", "size": 1},' * 500_000 + "1]}",
    "[" * 300_000,
    "\xff\xfe",
    "",
]


@pytest.mark.parametrize("text", LYING, ids=range(len(LYING)))
@pytest.mark.parametrize("beside", [False, True])
def test_a_false_manifest_refutes_with_little_memory(tmp_path: Path, text: str, beside: bool) -> None:
    folder = outputs(tmp_path) / "checkpoint-10"
    what = folder / "model.safetensors" if beside else folder
    manifest.beside(what).write_text(text, encoding="latin-1")
    tracemalloc.start()
    report = verify(what, Level.CONTENT)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.verdict is Verdict.REFUTED
    assert most < 200 << 20


def test_an_adjacent_manifests_author_is_reported_as_not_checked(tmp_path: Path) -> None:
    root = outputs(tmp_path)
    assert Sealer(root, quiet_s=0).look() == ["checkpoint-10"]
    for what in (root, root / "checkpoint-10"):
        assert WHO in verify(what, Level.CONTENT).not_checked
    model = root / "checkpoint-10/model.safetensors"
    manifest.write(model, manifest.take(model))
    assert WHO in verify(model, Level.CONTENT).not_checked
    model.with_name(f"{model.name}.{manifest.FILE}").unlink()
    assert WHO not in verify(model, Level.CONTENT).not_checked
    place = root / "checkpoint-10" / manifest.FILE
    place.rename(tmp_path / "elsewhere.json")
    place.symlink_to(tmp_path / "elsewhere.json")
    report = verify(root, Level.CONTENT)
    assert report.verdict is Verdict.UNKNOWN and not any(f.sealed for f in report.files), "a link is not followed"
