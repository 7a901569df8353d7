"""The program that runs cells in turn on one machine, as a separate process that is killed and restarted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.core.fan_out import FanOutPlan, cells_of, grid, queue_spec
from gpuwarden.core.models import JobSpec, Place
from gpuwarden.remote import cell_queue, launch

CELL = """
import os, signal, sys
from pathlib import Path
said, seed = Path(sys.argv[1]), sys.argv[2].partition("=")[2]
with said.open("a") as file:
    print(seed, os.environ["GPUWARDEN_CELL"], os.environ.get("CUDA_VISIBLE_DEVICES", "-"), os.getcwd(), file=file)
Path("out").write_text(Path("data.txt").read_text() + seed)
once = Path("once")
if seed == "1" and not once.exists():
    once.touch()
    os.kill(os.getpid(), signal.SIGKILL)
if seed == "2":
    sys.exit(3)
if seed == "3":
    (said.parent / "waits").touch()
    signal.pause()
"""


def _prepared(folder: Path, seeds: list[str], **changes: Any) -> tuple[list[str], Path]:
    """Write the queue's files. Return the command that a backend would start, and its working folder."""
    base = JobSpec.model_validate(
        {"platform": "local", "script": CELL, "args": (str(folder / "said"),), "timeout_s": 60, "outputs": ("out",)}
        | changes
    )
    plan = FanOutPlan(base=base, cells=cells_of(base, grid({"seed": seeds})))
    place = Place(platform="local", run_root=str(folder))
    ready = launch.prepare(queue_spec(plan, plan.cells, "q"), place, str(folder), (sys.executable,))
    for name, content in ready.files.items():
        (folder / name).write_bytes(content)
    (folder / "work").mkdir()
    (folder / "work/data.txt").write_text("d")
    return ready.spec["argv"], folder / "work"


def _told(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "said").read_text().splitlines()]


def _reports(work: Path) -> dict[int, dict[str, Any]]:
    return {r["index"]: r for r in (json.loads(p.read_text()) for p in work.glob("cells/*/cell.json"))}


def test_each_cell_runs_once_in_its_own_folder_and_a_killed_cell_again(tmp_path: Path) -> None:
    argv, work = _prepared(tmp_path, ["0", "1", "2"])
    assert subprocess.run(argv, cwd=work, check=False).returncode == 1  # one cell failed, and so does the queue
    assert Counter(seed for seed, *_ in _told(tmp_path)) == {"0": 1, "1": 2, "2": 1}
    assert {i: r["state"] for i, r in _reports(work).items()} == {0: "done", 1: "done", 2: "failed"}
    assert [(work / f"cells/0000{n}/out").read_text() for n in range(3)] == ["d0", "d1", "d2"]
    assert not [p for p in work.rglob("*") if p.is_symlink()]  # the inputs are not among the outputs
    assert subprocess.run(argv, cwd=work, check=False).returncode == 1  # a second run repeats only unfinished cells
    assert Counter(seed for seed, *_ in _told(tmp_path)) == {"0": 1, "1": 2, "2": 2}


def test_a_terminated_queue_resumes_where_it_stopped(tmp_path: Path) -> None:
    argv, work = _prepared(tmp_path, ["0", "3", "4"])
    with subprocess.Popen(argv, cwd=work, stdout=subprocess.PIPE, text=True) as queue:
        assert queue.stdout is not None
        while "cell 1: started" not in queue.stdout.readline():
            pass
        queue.send_signal(signal.SIGTERM)
        queue.stdout.read()
    assert queue.returncode == cell_queue.TERMINATED
    assert set(_reports(work)) == {0}
    (order,) = tmp_path.glob("order-*")
    whole = json.loads(order.read_text())
    whole["cells"] = [c for c in whole["cells"] if c["index"] != 1]  # this cell waits forever
    order.write_text(json.dumps(whole))
    assert subprocess.run(argv, cwd=work, check=False).returncode == 0
    assert [seed for seed, *_ in _told(tmp_path)].count("0") == 1 and set(_reports(work)) == {0, 2}


@pytest.mark.slow
def test_a_timed_out_cell_is_ended_and_the_next_cell_runs(tmp_path: Path) -> None:
    argv, work = _prepared(tmp_path, ["3", "4"], timeout_s=1)
    assert subprocess.run(argv, cwd=work, check=False).returncode == 1
    states = {i: r["state"] for i, r in _reports(work).items()}
    assert states[0] == "timeout" and 1 in states  # a busy machine may need more than a second for the other cell


def test_cells_share_a_machine_gpu_by_gpu(tmp_path: Path) -> None:
    argv, work = _prepared(tmp_path, ["0", "4", "5", "6"], gpu_count=2)
    assert subprocess.run(argv, cwd=work, env={**os.environ}, check=False).returncode == 0
    assert {gpu for _, _, gpu, _ in _told(tmp_path)} == {"0", "1"}
    assert len({folder for *_, folder in _told(tmp_path)}) == 4


def test_a_failing_queue_leaves_no_cell_running(tmp_path: Path) -> None:
    """Cell 1 is running when creating cell 2's folder fails. Both slots end with the queue."""
    argv, work = _prepared(tmp_path, ["0", "3", "4"], gpu_count=2)
    (work / "cells").mkdir()
    (work / "cells/00002").write_text("a file where its folder should be")
    done = subprocess.run(argv, cwd=work, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and "FileExistsError" in done.stderr
    assert not _running_below(work)


def test_background_processes_end_with_their_cell(tmp_path: Path) -> None:
    script = 'import subprocess, sys\nsubprocess.Popen(["sleep", "600"])\nopen("out", "w").close()\n'
    argv, work = _prepared(tmp_path, ["0"], script=script)
    assert subprocess.run(argv, cwd=work, timeout=300, check=False).returncode == 0
    assert not _running_below(work)


@pytest.mark.slow
def test_changing_the_clock_ends_no_cell(tmp_path: Path) -> None:
    script = "import time\ntime.sleep(0.5)\nopen('out', 'w').close()\n"
    argv, work = _prepared(tmp_path, ["0"], script=script, timeout_s=60)
    queue = next(Path(word) for word in argv if word.endswith(".py"))
    skewed = "import time as _t\n_at = _t.time\n_t.time = lambda n=iter(range(10**9)): _at() + 3600 * next(n)\n"
    queue.write_text(skewed + queue.read_text())
    assert subprocess.run(argv, cwd=work, timeout=300, check=False).returncode == 0
    assert _reports(work)[0]["state"] == "done"


def _running_below(folder: Path) -> list[str]:
    """Return the command lines of the processes, except zombies, whose working folder is in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve(strict=True).is_relative_to(folder.resolve()):
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found
