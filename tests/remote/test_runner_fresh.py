"""The disclosure of undeclared files is bounded, but never hides a checkpoint behind samples."""

from __future__ import annotations

from pathlib import Path

from gpuwarden.remote.runner.inventory import MAX_FRESH, fresh_files


def test_thousands_of_samples_hide_no_checkpoint(tmp_path: Path) -> None:
    work = tmp_path / "run" / "work"
    (work / "aaa").mkdir(parents=True)
    for number in range(2 * MAX_FRESH):
        (work / "aaa" / f"{number:05}.png").write_bytes(b"p")
    (work / "final.safetensors").write_bytes(b"w" * 4096)
    found, complete = fresh_files(str(tmp_path / "run"), {"outputs": []}, "", 0.0, [])
    assert len(found) == MAX_FRESH and not complete
    assert "final.safetensors" in {row["path"] for row in found}


def test_a_short_list_of_fresh_files_is_complete_and_sorted(tmp_path: Path) -> None:
    work = tmp_path / "run" / "work"
    (work / "out").mkdir(parents=True)
    for name in ("b", "a", "out/declared"):
        (work / name).write_bytes(b"x")
    found, complete = fresh_files(str(tmp_path / "run"), {"outputs": ["out"]}, "", 0.0, [])
    assert [row["path"] for row in found] == ["a", "b"] and complete
