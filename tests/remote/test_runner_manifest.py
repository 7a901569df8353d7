"""The files in declared outputs: no link to the outside, no name that breaks a reply, no digest of a changing file."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.remote.runner.manifest import Problem
from gpuwarden.remote.runner.manifest import list_files as listed
from runner_kit import linux, runner_file


def listing(
    folder: Path, *paths: str, verb: str = "manifest", root: str = ""
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    argv = [sys.executable, "-I", "-S", runner_file(), verb, str(folder)]
    request = json.dumps({"paths": paths, "root": root}).encode()
    done = subprocess.run(argv, input=request, capture_output=True, timeout=300, check=True)
    *rows, last = (json.loads(line) for line in done.stdout.splitlines())
    return rows, last


def test_the_manifest_follows_no_link_out(folder: Path) -> None:
    out = folder / "work" / "out"
    (out / "sub").mkdir(parents=True)
    (out / "sub" / "model").write_bytes(b"weights")
    (out / "latest").symlink_to("sub")
    (out / "best").symlink_to("sub/model")
    (out / "passwd").symlink_to("/etc/passwd")
    (out / "up").symlink_to("../..")
    (out / "dangling").symlink_to("nowhere")
    (folder / "work" / "away").symlink_to("/etc")
    rows, last = listing(folder, "out", "away", "../status.json", "gone")
    sha = hashlib.sha256(b"weights").hexdigest()
    assert {r["path"]: r["sha256"] for r in rows} == {"out/best": sha, "out/sub/model": sha}
    assert last["missing"] == ["../status.json", "gone"]
    assert {s["path"] for s in last["skipped"]} == {"out/latest", "out/passwd", "out/up", "out/dangling", "away"}


def test_a_folder_that_disappears_reports_no_missing_output(folder: Path) -> None:
    """An unmounted disk or a machine that shuts down doesn't prove that an output was never written."""
    (folder / "work").mkdir()
    (folder / "work" / "a").write_text("x")

    def goes_away(row: dict[str, Any]) -> None:
        folder.rename(folder.with_name("off"))

    with pytest.raises(Problem) as gone:
        listed(str(folder), {"paths": ["a", "b"]}, False, goes_away)
    assert gone.value.code == "not_found"


def test_a_work_folder_swapped_for_a_link_opens_nothing(folder: Path) -> None:
    (folder / "work").symlink_to("/etc")
    rows, last = listing(folder, "passwd")
    assert rows == [] and last["skipped"][0]["path"] == "passwd"


def test_absolute_outputs_are_listed_under_the_root(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "inst" / "workspace" / "ckpt").mkdir(parents=True)
    (tmp_path / "inst" / "workspace" / "ckpt" / "a").write_text("x")
    (tmp_path / "inst" / "workspace" / "etc").symlink_to("/etc")
    rows, last = listing(folder, "/workspace/ckpt", "/workspace/etc", root=str(tmp_path / "inst"))
    assert [r["path"] for r in rows] == ["/workspace/ckpt/a"]
    assert [s["path"] for s in last["skipped"]] == ["/workspace/etc"]


@linux
def test_unusual_entries_are_skipped_and_reported(folder: Path) -> None:
    work = os.fsencode(folder / "work")
    os.mkdir(work)
    for name in (b"bad\xff", b"new\nline", "ü".encode()):
        Path(os.fsdecode(work + b"/" + name)).write_bytes(b"x")
    os.mkdir(work + b"/dir\xfe")
    Path(os.fsdecode(work + b"/dir\xfe/in")).write_bytes(b"x")
    os.mkfifo(work + b"/pipe")
    rows, last = listing(folder, ".")
    assert sorted(r["path"] for r in rows) == ["./new\nline", "./ü"]
    assert {s["path"] for s in last["skipped"]} == {"./bad\\xff", "./dir\\xfe/in", "./pipe"}


@pytest.mark.slow
def test_a_growing_file_gets_no_digest(folder: Path) -> None:
    (folder / "work").mkdir()
    grown = folder / "work" / "grown"
    grown.write_bytes(b"\0" * (32 << 20))
    done = threading.Event()

    def grow() -> None:
        with grown.open("ab", buffering=0) as file:
            while not done.is_set():
                file.write(b"x")
                time.sleep(0.0005)

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        rows, last = listing(folder, "grown")
    finally:
        done.set()
        writer.join()
    assert rows[0]["sha256"] is None
    assert last["skipped"][0]["path"] == "grown"
    rows, last = listing(folder, "grown")
    assert rows[0]["sha256"] == hashlib.sha256(grown.read_bytes()).hexdigest() and not last["skipped"]
