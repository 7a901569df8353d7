"""Environments made from headers by the real uv, and limits on the environments that rehearsals leave behind."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from gpuwarden.remote.first_step import pruning
from gpuwarden.remote.first_step.environment import environment_for
from gpuwarden.remote.first_step.pruning import RUN, mark_ready, mark_used, prune_environments, prune_runs
from gpuwarden.remote.first_step.start import Limits, Order, rehearse
from gpuwarden.remote.sandbox import detect
from gpuwarden.remote.sandbox.words import Kind
from gpuwarden.static_analysis.script import Header
from real_parts import need

NOW, DAY = 1_800_000_000.0, 86_400.0


def made(folder: Path, name: str, days: float, size: int = 10) -> Path:
    """Make an environment of the given size that was last used `days` days ago."""
    path = folder / name
    (path / "lib").mkdir(parents=True)
    mark_ready(path)
    (path / "ready").write_text(str(size))
    os.utime(path / "ready", (NOW - days * DAY,) * 2)
    return path


@pytest.mark.parametrize(
    ("days", "sizes", "removed"),
    [
        ([1, 2, 3], [10, 10, 10], []),
        ([29.9, 30.1], [10, 10], ["1"]),
        ([1, 2, 3, 4, 5, 6, 7, 8], [10] * 8, ["6", "7"]),
        ([1, 2, 3], [pruning.MOST_BYTES - 5, 5, 1], ["2"]),
        ([0.01, 0.02], [pruning.MOST_BYTES + 1, 1], []),  # a rehearsal may run in them
    ],
)
def test_environments_are_pruned_by_number_size_and_age(
    tmp_path: Path, days: list[float], sizes: list[int], removed: list[str]
) -> None:
    for number, (unused, size) in enumerate(zip(days, sizes, strict=True)):
        made(tmp_path, str(number), unused, size)
    assert prune_environments(tmp_path, NOW) == removed
    assert sorted(p.name for p in tmp_path.iterdir()) == [str(n) for n in range(len(days)) if str(n) not in removed]


def test_a_reused_environment_is_kept(tmp_path: Path) -> None:
    old = made(tmp_path, "old", 40)
    assert mark_used(old) and not mark_used(tmp_path / "none")
    assert prune_environments(tmp_path, old.joinpath("ready").stat().st_mtime) == []


def test_an_unfinished_environment_is_removed_by_its_folder_time(tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    os.utime(tmp_path / "half", (NOW - 31 * DAY,) * 2)
    assert prune_environments(tmp_path, NOW) == ["half"]


def test_only_folders_of_killed_runs_are_removed_after_a_day(tmp_path: Path) -> None:
    for name, days in ((f"{RUN}old", 2), (f"{RUN}new", 0.5), ("other", 9)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (NOW - days * DAY,) * 2)
    (tmp_path / f"{RUN}link").symlink_to(tmp_path / "other")
    assert prune_runs(NOW, str(tmp_path)) == [f"{RUN}old"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{RUN}link", f"{RUN}new", "other"]


def test_a_folder_deeper_than_pythons_stack_and_any_path_is_removed(tmp_path: Path) -> None:
    top = tmp_path / f"{RUN}deep"
    here = os.open(tmp_path, os.O_RDONLY)
    for name in (top.name, *["d" * 9] * 1_500):
        os.mkdir(name, dir_fd=here)
        inner = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    (top / "locked/inner").mkdir(parents=True)
    (tmp_path / "other").touch()
    (top / "locked/inner/out").symlink_to(tmp_path)
    for name in ("locked/inner", "locked"):
        (top / name).chmod(0)
    os.utime(top, (NOW - 2 * DAY,) * 2)
    assert prune_runs(NOW, str(tmp_path)) == [top.name]
    assert [p.name for p in tmp_path.iterdir()] == ["other"]


def test_a_run_folder_removed_during_the_listing_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{RUN}one").mkdir()
    entries = list(os.scandir(tmp_path))
    (tmp_path / f"{RUN}one").rmdir()
    monkeypatch.setattr(os, "scandir", lambda folder: entries)
    assert prune_runs(NOW, str(tmp_path)) == []


def wheel(folder: Path, name: str, files: dict[str, str]) -> None:
    """Write a wheel."""
    about = f"{name}-1.0.dist-info"
    files = {
        **files,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{path},sha256={_digest(text)},{len(text)}" for path, text in files.items()]
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        for path, text in {**files, f"{about}/RECORD": "\n".join([*rows, f"{about}/RECORD,,"])}.items():
            file.writestr(path, text)


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@pytest.mark.slow
@pytest.mark.real
def test_a_rehearsal_runs_in_the_environment_made_by_uv(tmp_path: Path) -> None:
    uv = shutil.which("uv") or shutil.which("uv", path=os.path.dirname(sys.executable))
    need("uv", uv is not None)
    need("bubblewrap", detect.detect().kind is Kind.BUBBLEWRAP)
    mark = tmp_path / "ran"
    wheel(tmp_path, "tiny_net", {
        "tiny_net/__init__.py": "def layer(width):\n    return width\n",
        "loud.pth": f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n",
    })  # fmt: skip
    here = {"PATH": os.environ["PATH"], "UV_NO_INDEX": "1", "UV_FIND_LINKS": str(tmp_path), "UV_OFFLINE": "1",
            "XDG_CACHE_HOME": str(tmp_path / "cache")}  # fmt: skip
    header = Header(("tiny-net==1.0",))
    place = environment_for(header, tmp_path / "environments", here)
    assert place.own and place.python.startswith(str(tmp_path)), place
    assert not mark.exists() and list(Path(place.python).parent.parent.glob("lib/**/tiny_net/__pycache__/*.pyc"))
    script = "from tiny_net import layer\nlayer(widht=1)\n"
    found = rehearse(Order(script, own_environment=True), place.python, (), Limits(seconds=60))
    assert (found.outcome, found.certain, found.line) == ("fault", True, 2) and "widht" in found.message, found
    script = "import tiny_net, transformers\n"
    found = rehearse(Order(script, own_environment=True), place.python, (), Limits(seconds=60))
    assert (found.outcome, found.line) == ("fault", 1) and "transformers" in found.message, found
    missing = environment_for(Header(("tiny-net==2.0",)), tmp_path / "environments", here)
    assert "No solution found" in missing.fault and not mark.exists()
