"""Jobs that try to be unstoppable or to blind gpuwarden, and calls that fail; scripts stand in for Slurm's commands.

A job on a cluster runs as the user without a sandbox, so it can write to its own run folder and hold its locks.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.backends._slurm_rows import accounting_rows, queue_rows
from gpuwarden.backends.slurm import SlurmBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.models import Known, Place, Unknown
from gpuwarden.remote.host import slurm_agent
from wording import Wording

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Slurm's login nodes are POSIX")
STOP = {"name": "gw-j1", "token": "j1", "grace_s": 0.2, "wait_s": 60.0, "ended": ["COMPLETED", "CANCELLED"]}


class Played:
    """A simulated cluster with one job, which runs until `scancel` is called without `--batch`."""

    def __init__(self, folder: Path, **row: Any) -> None:
        self.run_dir, self.bin, self.log = folder / "runs/gw-j1", folder / "bin", folder / "asked"
        self.run_dir.mkdir(parents=True)
        self.bin.mkdir()
        self.row = {
            "job_id": 7, "name": "gw-j1-a1", "job_state": "RUNNING", "restart_cnt": 0, "user_name": None,
            "current_working_directory": str(self.run_dir), **row,
        }  # fmt: skip
        self.play("squeue", f"cat {folder}/rows")
        ended = json.dumps({"jobs": [{**self.row, "job_state": "CANCELLED"}]})
        (folder / "rows").write_text(json.dumps({"jobs": [self.row]}))
        (folder / "ended").write_text(ended)
        self.play(
            "scancel", f'echo "$@" >> {self.log}; case "$1" in --batch) ;; *) cp {folder}/ended {folder}/rows;; esac'
        )
        self.play("sacct", "exit 1")
        self.play("scontrol", "echo 'AccountingStorageType = accounting_storage/none'")
        self.env = {"PATH": f"{self.bin}:/usr/bin:/bin"}

    def play(self, name: str, text: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.bin / name).chmod(0o755)

    def stop(self) -> dict[str, Any]:
        return slurm_agent.stop({**STOP, "folder": str(self.run_dir)}, slurm_agent.environment(self.env))

    def hears(self) -> None:
        """Write the status of a running runner, which will ignore every request."""
        status = {"state": "running", "engine_id": "7", "requeues": 0}
        (self.run_dir / "status.json").write_text(json.dumps(status))


@pytest.fixture
def played(tmp_path: Path) -> Played:
    return Played(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "written", ['{"asked_at": "soon"}', '{"asked_at": 1e300}', '{"asked_at": -5}', "[" * 50_000, "7"]
)
@pytest.mark.attack("ending", "writes its own stop.json, so that its grace never ends")
def test_a_forged_stop_file_never_makes_a_job_unstoppable(played: Played, written: str) -> None:
    played.hears()
    (played.run_dir / "stop.json").write_text(written)
    assert played.stop() == {"ok": True, "result": "stopped"}
    assert played.log.read_text().splitlines()[-1] == "7", "ended for good after its grace"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["folder", "pipe", "link"])
@pytest.mark.attack("ending", "puts something else where its stop is written down")
def test_a_blocked_stop_path_never_makes_a_job_unstoppable(played: Played, what: str) -> None:
    played.hears()
    path = played.run_dir / "stop.json"
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("/etc/passwd")}[what]()
    if what == "folder":
        (path / "full").touch()
    assert played.stop() == {"ok": True, "result": "stopped"}
    assert played.log.read_text().splitlines()[-1] == "7"


@pytest.mark.attack("ending", "puts pipes where its log and its status were, so that reading them never ends")
def test_a_pipe_in_a_run_folder_never_blocks_the_job_list(played: Played) -> None:
    for name in ("status.json.x", "engine.log", "gw-j1-a1.array", "gw-j1-a1.submitted"):
        os.mkfifo(played.run_dir / name)
    request = {"folders": {"gw-j1": str(played.run_dir)}}
    found = slurm_agent.jobs(request, slurm_agent.environment(played.env))
    assert found["queue"]["rows"][0]["name"] == "gw-j1-a1" and found["messages"] == {"gw-j1": ""}


@pytest.mark.parametrize("forged", ["gw-j1-a0", "gw-j1-a01", "gw-j1-a", "gw-j1-a99999", "gw-j1-a\u0661"])
@pytest.mark.attack("ending", "starts a job of its own under a name that breaks the reading of the list of all jobs")
def test_a_forged_job_name_never_breaks_the_job_list(played: Played, forged: str) -> None:
    (played.run_dir / f"{forged}.submitted").write_text("{}")
    (played.run_dir / f"{forged}.array").write_text("{}")
    rows = [played.row, {**played.row, "job_id": 8, "name": forged}]
    played.play("squeue", f"echo '{json.dumps({'jobs': rows})}'")
    found = slurm_agent.jobs({"folders": {"gw-j1": str(played.run_dir)}}, slurm_agent.environment(played.env))
    assert [row.attempt for row in queue_rows(found["queue"])] == [1]


@pytest.mark.parametrize(
    "forged",
    [
        {"folder": "{own}", "name": "gw-all-a1"},
        {"folder": "{own}"},
        {"name": ["gw-all-a1"]},
        {"folder": 7, "name": "x"},
    ],
)
@pytest.mark.attack("ending", "names another job's array in its own folder, so that the other job is not found")
def test_a_job_cannot_hide_another_jobs_array(played: Played, forged: dict[str, Any]) -> None:
    runs = played.run_dir.parent
    home, task = runs / "gw-all", runs / "gw-k1"
    home.mkdir(), task.mkdir()
    (home / "gw-all-a1.table").write_text(json.dumps({"gw-k1-a1": 0}))
    (task / "gw-k1-a1.array").write_text(json.dumps({"folder": str(home), "name": "gw-all-a1"}))
    (played.run_dir / "gw-all-a1.table").write_text(json.dumps({"gw-j1-a1": 0}))
    own = {k: v.format(own=played.run_dir) if isinstance(v, str) else v for k, v in forged.items()}
    (played.run_dir / "gw-j1-a1.array").write_text(json.dumps(own))
    array = {**played.row, "name": "gw-all-a1", "job_id": 12, "array_job_id": 12, "array_task_id": 0}
    array["current_working_directory"] = str(home)
    played.play("squeue", f"echo '{json.dumps({'jobs': [array]})}'")
    folders = {"gw-k1": str(task), "gw-j1": str(played.run_dir)}  # the forger comes last
    found = slurm_agent.jobs({"folders": folders}, slurm_agent.environment(played.env))
    assert [row["name"] for row in found["queue"]["rows"]] == ["gw-k1-a1"]


@pytest.mark.parametrize(
    "folder", ["/tmp/a\u2028b", "/tmp/a\x0bb", "/tmp/a\x85b", "/tmp/a\nb", "/tmp/a\nx|gw-j1-a1|", "/a|b"]
)
@pytest.mark.attack("ending", "starts a job in a folder whose name breaks the lines of the accounting")
def test_a_forged_folder_never_breaks_the_accounting_list(played: Played, folder: str) -> None:
    other = played.run_dir.parent / "gw-j2"
    other.mkdir()
    rest = "COMPLETED|0:0|1700000000|1700000001|1700000002|1|p|x|n"
    lines = [f"8|gw-j2-a1|{rest}|{other}", f"9|gw-j1-a1|{rest}|{folder}"]
    (played.run_dir.parent / "lines").write_text("\n".join([*lines, ""]))
    played.play("squeue", """echo '{"jobs": []}'""")
    played.play("sacct", f"cat {played.run_dir.parent}/lines")
    folders = {"gw-j1": str(played.run_dir), "gw-j2": str(other)}
    found = slurm_agent.jobs({"folders": folders}, slurm_agent.environment(played.env))
    assert [row.stem for row in accounting_rows(found["accounting"]["out"], folders)] == ["gw-j2"]


@pytest.mark.parametrize("name", ["a|b|c|d|e|f|g|h|i-j", "a\u2028b", "a\nb", "x|x|x|x|x|x|x|x|x|x|x|1-2-x"])
@pytest.mark.attack("ending", "starts a job under a name that breaks the list of a Slurm without JSON")
def test_a_forged_name_never_breaks_the_text_list(played: Played, name: str) -> None:
    row = f"7|7|N/A|gw-j1-a1|RUNNING|None|p|n|1|2|3|1:00|{slurm_agent.getpass_user()}|{played.run_dir}"
    lines = played.run_dir.parent / "lines"
    lines.write_text(f"8|8|N/A|{name}|RUNNING|None|p|n|1|2|3|1:00|me|/tmp\n{row}\n")
    played.play("squeue", f'case "$1" in --json) exit 1;; *) cat {lines};; esac')
    found = slurm_agent.jobs({"folders": {"gw-j1": str(played.run_dir)}}, slurm_agent.environment(played.env))
    assert [row.id for row in queue_rows(found["queue"])] == [7]


@pytest.mark.parametrize("folder", [{"set": True}, ["/x"], 7])
def test_a_row_with_an_invalid_folder_is_ignored(played: Played, folder: object) -> None:
    rows = [played.row, {**played.row, "job_id": 8, "current_working_directory": folder}]
    played.play("squeue", f"echo '{json.dumps({'jobs': rows})}'")
    found = slurm_agent.jobs({"folders": {"gw-j1": str(played.run_dir)}}, slurm_agent.environment(played.env))
    assert [row["job_id"] for row in found["queue"]["rows"]] == [7]


@pytest.mark.attack("ending", "names thousands of arrays, so that looking for its tasks takes minutes")
def test_a_job_is_looked_up_in_its_last_arrays_only(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(1, 300):
        forged = {"folder": f"{played.run_dir}{'/.' * n}", "name": "gw-all-a1"}
        (played.run_dir / f"gw-j1-a{n}.array").write_text(json.dumps(forged))
    opened: list[str] = []
    read_end = slurm_agent.read_end
    monkeypatch.setattr(slurm_agent, "read_end", lambda path, most: opened.append(path) or read_end(path, most))
    assert slurm_agent.tasks_of({"gw-j1": str(played.run_dir)}) == {}
    assert sorted({Path(path).name for path in opened if path.endswith(".array")}) == [
        f"gw-j1-a{n}.array" for n in range(295, 300)
    ]


def test_the_table_of_an_array_is_read_once(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = played.run_dir.parent
    home, names = runs / "gw-all", [f"gw-k{n}-a1" for n in range(20)]
    home.mkdir()
    (home / "gw-all-a1.table").write_text(json.dumps({name: n for n, name in enumerate(names)}))
    for name in names:
        (runs / name[:-3]).mkdir()
        (runs / name[:-3] / f"{name}.array").write_text(json.dumps({"folder": str(home), "name": "gw-all-a1"}))
    opened: list[str] = []
    read_end = slurm_agent.read_end
    monkeypatch.setattr(slurm_agent, "read_end", lambda path, most: opened.append(path) or read_end(path, most))
    found = slurm_agent.tasks_of({name[:-3]: str(runs / name[:-3]) for name in names})
    assert {name: task["index"] for name, task in found.items()} == {name: n for n, name in enumerate(names)}
    assert [Path(path).suffix for path in opened].count(".table") == 1


@pytest.mark.slow
def test_a_grace_still_ends_after_the_clock_was_set_back(played: Played) -> None:
    played.hears()
    (played.run_dir / "stop.json").write_text(json.dumps({"grace_s": 0.2, "asked_at": 4e9}))
    assert played.stop()["result"] == "stopped"
    kept = json.loads((played.run_dir / "stop.json").read_text())
    assert kept["asked_at"] < 4e9, "the next call goes on from here"


def test_sbatch_variables_never_turn_one_job_into_many() -> None:
    dropped = {"SBATCH_ARRAY_INX": "0-9", "SBATCH_WAIT": "1", "SBATCH_CLUSTERS": "other"}
    env = slurm_agent.environment({**dropped, "SBATCH_ACCOUNT": "nlp"})
    assert env.get("SBATCH_ACCOUNT") == "nlp" and not dropped.keys() & env.keys()


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.attack("ending", "dies while its submit is on its way, so that the job starts after it was called off")
async def test_a_submit_still_running_is_unknown_not_missing(tmp_path: Path, wording: Wording) -> None:
    played = Played(tmp_path, name="another")
    place = Place(platform="slurm/local", run_root=str(tmp_path / "runs"), env=played.env)
    backend = SlurmBackend(SystemClock())
    assert await backend.find(place, "j1") == Known(None)
    with (played.run_dir / "submit.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = await backend.find(place, "j1")
        assert isinstance(found, Unknown)
        wording(found.why)
    assert await backend.find(place, "j1") == Known(None)


@pytest.mark.slow
@pytest.mark.parametrize("array", [False, True])
@pytest.mark.attack("ending", "dies while its submit is on its way, so that the job starts after it was stopped")
def test_a_job_that_is_being_submitted_is_not_gone(tmp_path: Path, array: bool) -> None:
    played = Played(tmp_path, name="another")
    home = tmp_path / "runs/gw-all" if array else played.run_dir
    if array:
        home.mkdir()
        (home / "gw-all-a1.table").write_text(json.dumps({"gw-j1-a1": 0}))
        (played.run_dir / "gw-j1-a1.array").write_text(json.dumps({"folder": str(home), "name": "gw-all-a1"}))
    request = {**STOP, "folder": str(played.run_dir), "wait_s": 1.0}
    with (home / "submit.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert slurm_agent.stop(request, slurm_agent.environment(played.env))["result"] == "pending"
    assert not (played.run_dir / "status.json").exists(), "its end is not written down before its start"
    assert slurm_agent.stop(request, slurm_agent.environment(played.env))["result"] == "gone"


def test_accounting_is_asked_for_the_users_own_jobs(tmp_path: Path) -> None:
    """By default, root and operators see every user's jobs, and another user's job may have this name and folder."""
    played = Played(tmp_path, name="another")
    played.play("sacct", f'printf "%s\\n" "$@" > {tmp_path}/given')
    slurm_agent.jobs({"folders": {"gw-j1": str(played.run_dir)}}, slurm_agent.environment(played.env))
    assert f"--user={slurm_agent.getpass_user()}" in (tmp_path / "given").read_text().splitlines()


@pytest.mark.parametrize(
    ("end", "listed", "kept"),
    [
        ("Unknown", "echo 6 8_0", False),
        ("Unknown", "echo 6 7", True),
        ("Unknown", "echo 'Unable to contact slurm controller' >&2; exit 1", True),
        ("300", "echo 6 8_0", True),
    ],
)
def test_a_job_without_an_end_counts_only_while_the_controller_has_it(
    played: Played, end: str, listed: str, kept: bool
) -> None:
    played.play("squeue", f"""case "$1" in --json) echo '{{"jobs": []}}';; *) {listed};; esac""")
    played.play("sacct", f"echo '7|gw-j1-a1|RUNNING|0:0|100|200|{end}|100|p|x|n|{played.run_dir}'")
    folders = {"gw-j1": str(played.run_dir)}
    found = slurm_agent.jobs({"folders": folders}, slurm_agent.environment(played.env))
    assert [row.id for row in accounting_rows(found["accounting"]["out"], folders)] == [7] * kept


# ------------------------------------------------------------------------------------------------------------- arrays


@given(st.sets(st.integers(0, 4_000), min_size=1, max_size=60), st.integers(1, 99))
def test_indices_round_trip(numbers: set[int], at_once: int) -> None:
    text = slurm_agent.ranges(sorted(numbers))
    assert slurm_agent.indices(text) == numbers
    assert slurm_agent.indices(f"[{text}%{at_once}]") == numbers


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("7", {7}), ("[5-9%2]", {5, 6, 7, 8, 9}), ("4,6%2", {4, 6}), ("[8-14:2%1]", {8, 10, 12, 14}), ("0-0", {0})],
)
def test_every_slurm_index_format_is_read(text: str, numbers: set[int]) -> None:
    assert slurm_agent.indices(text) == numbers


@given(st.text(alphabet="0123456789-,:%[]. x", max_size=20))
def test_an_unknown_index_format_is_never_an_empty_set(text: str) -> None:
    try:
        assert slurm_agent.indices(text)
    except ValueError:
        return


@pytest.mark.parametrize("text", ["", "0-5,...", "0-99999999", "1-5:0", "0x7FF", "-3", "%2", "5-3"])
def test_an_invalid_index_list_raises(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text) + "$"):
        slurm_agent.indices(text)


@given(
    st.dictionaries(st.integers(0, 30), st.sampled_from(["PENDING", "RUNNING", "COMPLETED"]), min_size=1),
    st.booleans(),
)
def test_each_task_gets_its_own_row(states: dict[int, str], objects: bool) -> None:
    tasks = {
        f"gw-j{n}-a1": {"name": "gw-r-a1", "stem": "gw-r", "folder": "/r", "index": n, "at": f"/j{n}"}
        for n in range(31)
    }
    rows: list[dict[str, Any]] = []
    for n, state in states.items():
        if state != "PENDING":
            number: Any = {"set": True, "infinite": False, "number": n} if objects else n
            rows.append({"name": "gw-r-a1", "array_job_id": 12, "array_task_id": number, "job_state": state})
    if waiting := sorted(n for n, state in states.items() if state == "PENDING"):
        text = slurm_agent.ranges(waiting) + "%2"
        unset: Any = {"set": False, "infinite": False, "number": 0} if objects else None
        rows.append({"name": "gw-r-a1", "array_job_id": 12, "array_task_id": unset, "array_task_string": text,
                     "job_state": "PENDING"})  # fmt: skip
    found = [row for each in rows for row in slurm_agent.split(each, tasks, slurm_agent.by_array(tasks))]
    assert {row["name"]: row["job_state"] for row in found} == {f"gw-j{n}-a1": state for n, state in states.items()}
    assert {row["task"] for row in found} == {f"12_{n}" for n in states}
    assert {row["current_working_directory"] for row in found} == {f"/j{n}" for n in states}


def test_array_accounting_lines_are_split_by_task() -> None:
    tasks = {
        f"gw-j{n}-a1": {"name": "gw-r-a1", "stem": "gw-r", "folder": "/r", "index": n, "at": f"/j{n}"} for n in range(4)
    }
    rest = "COMPLETED|0:0|1|2|3|1|low|cpu=1|n0"
    text = f"12_0|gw-r-a1|{rest}|/r\n12_[2-3%2]|gw-r-a1|{rest}|/r\n13_1|gw-r-a1|{rest}|/other\n14|foreign|{rest}|/r\n"
    found = slurm_agent.accounted(text + f"15|gw-k-a1|{rest}|/k\n", tasks, {"gw-r-a1", "gw-k-a1"})
    assert [line.split("|")[:2] + line.split("|")[-1:] for line in found] == [
        ["12_0", "gw-j0-a1", "/j0"], ["12_2", "gw-j2-a1", "/j2"], ["12_3", "gw-j3-a1", "/j3"], ["15", "gw-k-a1", "/k"],
    ]  # fmt: skip
