"""The data folders are found in a checkout and in a wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gpuwarden import data
from gpuwarden.core.errors import NotFound
from paths import ROOT

READ = """
import gpuwarden, pathlib
from gpuwarden.data import data_dir
from gpuwarden.profiles import load_profile, profile_names
from gpuwarden.static_analysis.shipped_trainers import trainer, trainer_names
assert len([trainer(name).options for name in trainer_names()]) >= 13
for name in profile_names():
    load_profile(name)
print(pathlib.Path(gpuwarden.__file__).parent, data_dir("profiles"), *profile_names())
"""


def test_a_checkout_reads_the_folders_beside_server():
    assert data.data_dir("profiles") == ROOT / "profiles"


def test_a_missing_folder_raises_not_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(data, "PACKAGE", tmp_path / "a" / "b")
    with pytest.raises(NotFound, match="'skills'"):
        data.data_dir.__wrapped__("skills")


def build(kind: str, source: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=300)
    (built,) = target.iterdir()
    return built


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkout", "sdist"])
def test_a_wheel_brings_its_profiles(tmp_path: Path, kind: str):
    source = ROOT
    if kind == "sdist":
        archive = build("sdist", ROOT, tmp_path / "sdist")
        subprocess.run(["tar", "-xf", archive, "-C", tmp_path], check=True)
        source = tmp_path / archive.name.removesuffix(".tar.gz")
        assert not [*source.rglob("*.png")]
    wheel = build("wheel", source, tmp_path / "wheel")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", READ], cwd=tmp_path, env=env, check=True, capture_output=True, text=True, timeout=300
    )
    package, folder, *names = done.stdout.split()
    assert Path(package) == site / "gpuwarden"
    assert Path(folder) == site / "gpuwarden" / "_data" / "profiles"
    assert names == sorted(p.stem for p in (ROOT / "profiles").glob("*.md"))
