"""The skills' scripts, run for real."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuwarden.data import data_dir
from waiting import eventually
from wording import Wording

SKILLS = data_dir("skills")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
posix = pytest.mark.skipif(os.name != "posix", reason="a POSIX shell script")


def run(*words: str | Path, cwd: Path | None = None, **env: str) -> tuple[int, str]:
    environ = {**os.environ, **env}
    done = subprocess.run(words, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    return done.returncode, done.stdout.decode()


def script(name: str) -> Path:
    [found] = SKILLS.glob(f"*/scripts/{name}")
    return found


def fake(folder: Path, name: str, body: str) -> dict[str, str]:
    """Put a fake program at the front of the PATH."""
    program = folder / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text("#!/bin/sh\n" + body)
    program.chmod(0o755)
    return {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}


# ------------------------------------------------------------------------------------------------ run_queue.sh

CELL = 'echo "$CELL_NAME $*" >>"$CELL_DIR/ran"; cat >>"$CELL_DIR/stdin"'
ANY_DISK = {"MIN_FREE_GB": "0"}


@pytest.fixture
def queue(tmp_path: Path) -> Path:
    file = tmp_path / "queue.txt"
    file.write_bytes(
        b"# a sweep\nconf/base.yaml recon 20\n\nconf/base.yaml det 50\r\n#conf/off.yaml det\nconf/aug.yaml seg"
    )
    return file


def cells(queue: Path, *more: str | Path, command: str = CELL, **env: str) -> tuple[int, str]:
    words = [script("run_queue.sh"), queue, queue.parent / "out", *more, "--", "sh", "-c", command, "cell"]
    return run(*words, **{**ANY_DISK, **env})


@posix
def test_each_cell_runs_once_in_its_own_folder_even_from_an_unterminated_last_line(queue: Path) -> None:
    code, output = cells(queue)
    assert code == 0, output
    out = queue.parent / "out"
    assert {p.name for p in out.iterdir()} == {"base-recon", "base-det", "aug-seg"}
    assert (out / "base-recon" / "ran").read_text() == "base-recon conf/base.yaml recon 20\n"
    assert (out / "base-det" / "ran").read_text() == "base-det conf/base.yaml det 50\n"
    assert (out / "aug-seg" / "stdin").read_bytes() == b""
    assert "3 of 3" in output
    assert cells(queue)[0] == 0
    assert (out / "base-det" / "ran").read_text().count("\n") == 1


@posix
def test_a_failed_cell_is_named_and_run_again(queue: Path) -> None:
    code, output = cells(queue, command='[ "$2" != det ]')
    assert (code, "MISSING base-det" in output, "2 of 3" in output) == (1, True, True)
    code, output = cells(queue)
    assert (code, output.count("START"), output.count("SKIP")) == (0, 1, 2)


@posix
def test_queue_resumes_from_a_line_of_the_file(queue: Path) -> None:
    code, output = cells(queue, "4")
    assert code == 1
    assert [line.split()[2] for line in output.splitlines() if line.startswith("START")] == ["base-det", "aug-seg"]


@posix
def test_two_cells_of_one_name_are_refused_before_anything_starts(queue: Path) -> None:
    queue.write_text("a/x.yaml det\nb/x.yaml det\n")
    code, output = cells(queue)
    assert code == 2
    assert "called x-det" in output
    assert not list((queue.parent / "out").iterdir())


@posix
@pytest.mark.parametrize(
    ("text", "code"), [("x.yaml\n", 2), ("", 1), ("# none\n", 1), ("x.yaml ../up\n", 2), ("x.yaml a;b\n", 2)]
)
def test_invalid_queue_is_refused(queue: Path, text: str, code: int) -> None:
    queue.write_text(text)
    assert cells(queue)[0] == code


@posix
def test_full_disk_stops_the_queue_before_a_cell_runs(queue: Path) -> None:
    code, output = cells(queue, MIN_FREE_GB="99999999")
    assert code == 3, output
    assert not list((queue.parent / "out").rglob("ran"))


@posix
def test_cell_running_in_another_queue_is_skipped(queue: Path) -> None:
    (queue.parent / "out" / "base-det" / ".running").mkdir(parents=True)
    code, output = cells(queue)
    assert code == 1
    assert "TAKEN 4 base-det" in output
    assert not (queue.parent / "out" / "base-det" / "ran").exists()


@posix
def test_replacing_the_script_while_it_runs_changes_nothing(queue: Path, tmp_path: Path) -> None:
    live = tmp_path / "run_queue.sh"
    live.write_bytes(script("run_queue.sh").read_bytes())
    poison = f'printf "echo POISON; exit 9\\n%.0s" 1 2 3 4 5 6 7 8 9 >{live}; {CELL}'
    code, output = run("sh", live, queue, tmp_path / "out", "--", "sh", "-c", poison, "cell", **ANY_DISK)
    assert code == 0, output
    assert "POISON" not in output
    assert "3 of 3" in output


@posix
def test_a_line_appended_while_it_runs_is_run(queue: Path) -> None:
    extra = f'[ "$2" != recon ] || printf "\\nconf/late.yaml det\\n" >>{queue}'
    code, output = cells(queue, command=extra)
    assert code == 0, output
    assert "late-det" in output


# -------------------------------------------------------------------------------------------- download_loop.sh

COUNT = 'n=$(cat n 2>/dev/null || echo 0); echo $((n + 1)) >n; [ "$n" -ge 2 ]'


@posix
def test_a_download_is_repeated_until_it_succeeds(tmp_path: Path) -> None:
    code, output = run(script("download_loop.sh"), "-p", "0", "--", "sh", "-c", COUNT, cwd=tmp_path)
    assert code == 0, output
    assert (tmp_path / "n").read_text() == "3\n"


@pytest.mark.slow
@posix
@pytest.mark.parametrize(
    ("words", "code", "tries"),
    [
        (("-n", "2", "-p", "0", "--", "sh", "-c", "exit 23"), 23, 2),
        (("-n", "2", "-p", "0", "-t", "1", "--", "sleep", "30"), 124, 2),
        (("-p", "0", "--", "a-program-nobody-has"), 127, 0),
        (("-n", "0", "--", "true"), 2, 0),
        (("-n", "x", "--", "true"), 2, 0),
        (("--",), 2, 0),
    ],
)
def test_download_that_cannot_succeed_exits_with_an_error(
    words: tuple[str, ...], code: int, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # with an unreadable folder, a missing program is reported as denied
    got, output = run(script("download_loop.sh"), *words)
    assert (got, output.count("try ")) == (code, tries), output


@pytest.fixture
def without_timeout(tmp_path: Path) -> str:
    """Return a PATH without timeout(1), as on macOS."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "sleep", "cat", "kill", "true"):
        if real := shutil.which(name):
            (programs / name).symlink_to(real)
    return str(programs)


@pytest.mark.slow
@posix
@pytest.mark.parametrize(
    ("seconds", "command", "code"),
    [("1", ["sleep", "30"], 124), ("20", ["sh", "-c", "exit 7"], 7), ("20", ["true"], 0)],
)
def test_download_loop_works_without_the_timeout_program(
    without_timeout: str, seconds: str, command: list[str], code: int
) -> None:
    words = [Path(without_timeout, "sh"), script("download_loop.sh"), "-n", "1", "-t", seconds, "--", *command]
    assert run(*words, PATH=without_timeout)[0] == code


@pytest.mark.slow
@posix
def test_time_limit_is_reported_even_if_the_watcher_ends_last(without_timeout: str) -> None:
    slow_kill = 'kill() { command kill "$@" || return 1; sleep 0.2; }; . "$LOOP"'
    words = [Path(without_timeout, "sh"), "-c", slow_kill, "sh", "-n", "1", "-t", "1", "--", "sleep", "30"]
    assert run(*words, PATH=without_timeout, LOOP=str(script("download_loop.sh")))[0] == 124


@posix
def test_download_loop_runs_a_real_rsync(tmp_path: Path, need_program: Callable[[str], str]) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "model.bin").write_bytes(os.urandom(300_000))
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "model.bin").write_bytes((tmp_path / "from" / "model.bin").read_bytes()[:100_000])
    words = [need_program("rsync"), "-a", "--partial", "--append-verify", "from/", "to/"]
    assert run(script("download_loop.sh"), "--", *words, cwd=tmp_path)[0] == 0
    assert (tmp_path / "to" / "model.bin").read_bytes() == (tmp_path / "from" / "model.bin").read_bytes()


# -------------------------------------------------------------------------------------------- setup_mirrors.sh


def sourced(tmp_path: Path, **env: str) -> dict[str, str]:
    clean = {"PATH": os.environ["PATH"], **env}
    words = ["sh", "-euc", f". {script('setup_mirrors.sh')}; env"]
    text = subprocess.run(
        words, env=clean, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300
    ).stdout
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


@posix
def test_mirrors_are_set_and_caches_move(tmp_path: Path) -> None:
    env = sourced(tmp_path, DATA_DIR=str(tmp_path / "data"))
    assert env["HF_ENDPOINT"] == "https://hf-mirror.com"
    assert env["HF_HUB_DISABLE_XET"] == "1"
    assert Path(env["HF_HOME"]).is_dir()
    assert "no_proxy" not in env


@posix
def test_existing_variables_are_kept_even_if_empty(tmp_path: Path) -> None:
    env = sourced(tmp_path, HF_ENDPOINT="", PIP_INDEX_URL="https://mirror.example/simple")
    assert (env["HF_ENDPOINT"], env["PIP_INDEX_URL"]) == ("", "https://mirror.example/simple")
    assert "HF_HOME" not in env


@posix
def test_a_proxy_leaves_domestic_hosts_alone(tmp_path: Path) -> None:
    env = sourced(tmp_path, https_proxy="http://127.0.0.1:7890", no_proxy="example.org")
    assert env["no_proxy"] == env["NO_PROXY"]
    parts = env["no_proxy"].split(",")
    assert parts[0] == "example.org"
    assert ".modelscope.cn" in parts
    assert not [part for part in parts if "*" in part]


# --------------------------------------------------------------------------------------------- check_columns.py

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
DATA = [
    ("sft", [{"messages": TALK}], 0, "FITS"),
    ("sft", [{"instruction": "a", "output": "b"}], 1, "rename instruction to prompt"),
    ("sft", [{"messages": TALK[:1]}], 1, "no assistant turn"),
    ("sft", [{"messages": [{"from": "human", "value": "a"}]}], 1, "role and content"),
    ("sft", [{"messages": [{"role": "bot", "content": "a"}]}], 1, "role 'bot'"),
    ("sft", [{"text": "a"}, {"text": ""}], 1, "1 rows, first at 2: text"),
    ("dpo", [{"prompt": "a", "chosen": "b", "rejected": "c"}], 0, "FITS"),
    ("dpo", [{"chosen": "b", "rejected": "b"}], 1, "are equal"),
    ("dpo", [{"prompt": TALK, "chosen": "b", "rejected": "c"}], 1, "the last turn is assistant"),
    ("kto", [{"prompt": "a", "completion": "b", "label": True}], 0, "FITS"),
    ("kto", [{"prompt": "a", "completion": "b", "label": "good"}], 1, "not true or false"),
    ("grpo", [{"prompt": "a", "answer": "4"}, {"prompt": "b"}], 1, "columns differ"),
]


@pytest.mark.parametrize(("method", "rows", "code", "words"), DATA)
def test_columns_are_checked(tmp_path: Path, method: str, rows: list[object], code: int, words: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    got, output = run(sys.executable, script("check_columns.py"), file, "--method", method)
    assert got == code, output
    assert words in output
    whole = tmp_path / "data.json"
    whole.write_text(json.dumps(rows), encoding="utf-8")
    assert run(sys.executable, script("check_columns.py"), whole, "--method", method)[0] == code


@pytest.mark.parametrize(
    ("name", "text", "code", "words"),
    [
        ("d.csv", "prompt,chosen,rejected\na,b,c\na,,c\n", 1, "first at 3: chosen"),
        ("d.csv", "prompt,completion,label\na,b,True\n", 1, "DON'T FIT"),
        ("d.jsonl", "", 1, "NO ROWS"),
        ("d.jsonl", "{broken\n", 2, "CAN'T READ"),
        ("d.jsonl", "[1]\n", 2, "an object"),
        ("d.json", "{}", 2, "a list of rows"),
        ("d.jsonl", "\ufeff" + json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}), 0, "FITS"),
    ],
)
def test_valid_and_broken_files_are_checked(tmp_path: Path, name: str, text: str, code: int, words: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    got, output = run(sys.executable, script("check_columns.py"), tmp_path / name, "--method", "dpo")
    assert (got, words in output) == (code, True), output


# ----------------------------------------------------------------------------------------------- gpu_health.py

SMI = """
case "$*" in
  *--query-gpu*remapped_rows.pending*)
     if [ -n "${OLD:-}" ]; then echo 'Field "remapped_rows.pending" is not a valid field to query.'; exit 2; fi
     echo "$CARD" ;;
  *--query-gpu*) echo "$CARD" ;;
  *--query-compute-apps*) echo "4121, 20310 MiB, python" ;;
esac
"""
SOUND = "0, GPU-1, NVIDIA H200, 580.65, 41, 20310, 143771, 97, 512.1, 1980, 1980, 0x0000000000000000, 0, No, No"


def health(tmp_path: Path, card: str = SOUND, dmesg: str = "", **more: str) -> tuple[int, str]:
    env = fake(tmp_path, "nvidia-smi", SMI) | fake(tmp_path, "dmesg", dmesg or "exit 0\n")
    return run(sys.executable, script("gpu_health.py"), CARD=card, **env, **more)


@posix
@pytest.mark.parametrize(
    ("card", "dmesg", "code", "words"),
    [
        (SOUND, "", 0, "PASS"),
        (SOUND.replace("0x0000000000000000", "0x0000000000000044"), "", 1, "hardware thermal"),
        (SOUND.replace("0x0000000000000000", "0x0000000000000001"), "", 0, "PASS"),
        (SOUND.replace(", 0, No, No", ", 3, No, No"), "", 2, "3 uncorrected"),
        (SOUND.replace("No, No", "[N/A], [N/A]"), "", 0, "PASS"),
        (SOUND.replace("No, No", "Yes, No"), "", 1, "will be remapped"),
        (SOUND.replace(", 41,", ", 91,"), "", 1, "91 degrees"),
        (SOUND.replace(", 97,", ", 0,"), "", 1, "utilization is 0"),
        (SOUND, "echo '[1.2] NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus.'", 2, "Xid 79"),
        (SOUND, "echo '[1.2] NVRM: Xid (PCI:0000:3b:00): 74, pid=1'", 1, "Xid 74"),
        (SOUND, "echo '[1.2] NVRM: Xid (PCI:0000:3b:00): 43, pid=1'", 0, "PASS"),
        (SOUND, "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1", 1, "Xids are unknown"),
    ],
)
def test_gpu_health_judges_a_card(tmp_path: Path, card: str, dmesg: str, code: int, words: str) -> None:
    got, output = health(tmp_path, card, dmesg + "\n" if dmesg else "")
    assert (got, words in output) == (code, True), output


@posix
def test_older_driver_without_a_field_is_supported(tmp_path: Path) -> None:
    card = SOUND.rsplit(", ", 2)[0] + ", No"
    assert health(tmp_path, card, OLD="1")[0] == 0


@posix
@pytest.mark.parametrize("output", ["exit 127", "echo 'No devices were found'; exit 6", "true"])
def test_machine_without_a_card_has_nothing_to_check(tmp_path: Path, output: str) -> None:
    env = fake(tmp_path, "nvidia-smi", f"{output}\n") if output != "exit 127" else {"PATH": str(tmp_path)}
    code, told = run(sys.executable, script("gpu_health.py"), **env)
    assert (code, told.splitlines()[-1]) == (3, "NO CARD: nothing to check"), told


def test_unresponsive_driver_fails_with_the_same_level_in_json(tmp_path: Path) -> None:
    env = fake(tmp_path, "nvidia-smi", "echo 'NVIDIA-SMI has failed because it could not communicate'; exit 9\n")
    code, output = run(sys.executable, script("gpu_health.py"), "--json", **env)
    assert code == 2
    assert json.loads(output)["level"] == 2


# ------------------------------------------------------------------------- vram_zombies.py, mem_monitor.py


@linux
def test_zombies_are_unknown_without_a_card_and_never_killed(tmp_path: Path) -> None:
    env = fake(tmp_path, "nvidia-smi", "exit 9\n")
    code, output = run(sys.executable, script("vram_zombies.py"), "--watch", "0.2", **env)
    assert code == 2
    assert "CAN'T TELL" in output
    assert "os.kill" not in script("vram_zombies.py").read_text()


@linux
def test_working_card_has_no_zombies(tmp_path: Path, wording: Wording) -> None:
    env = fake(tmp_path, "nvidia-smi", "echo 55\n")
    code, output = run(sys.executable, script("vram_zombies.py"), "--watch", "0.2", **env)
    assert code == 0, output
    wording(output.splitlines()[-1])


@linux
def test_process_tree_memory_is_monitored_until_the_tree_ends(tmp_path: Path) -> None:
    inner = "x = bytearray(80 << 20); import time; time.sleep(120)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    job = subprocess.Popen([sys.executable, "-c", outer], start_new_session=True)

    def large() -> dict[str, str]:
        """Return the row of a sample once the inner process has its memory."""
        _, text = run(sys.executable, script("mem_monitor.py"), "--pid", str(job.pid), "--samples", "1")
        head, line = (line.split("\t") for line in text.splitlines())
        row = dict(zip(head, line, strict=True))
        return row if int(row["tree_rss"]) > 80 << 20 else {}

    try:
        row = eventually(large)
        assert int(row["tree_processes"]) >= 2
        assert row["allowed"] in {"max", "-"} or int(row["allowed"]) > 0
    finally:
        os.killpg(job.pid, 9)
        job.wait()
    code, text = run(sys.executable, script("mem_monitor.py"), "--pid", str(job.pid), "--every", "0.1")
    assert code == 0
    assert text.splitlines()[1].split("\t")[4] == "-"


# ------------------------------------------------------------------------------------------ check_staleness.py


def test_old_stamps_are_listed_money_first(tmp_path: Path) -> None:
    (tmp_path / "p.md").write_text(
        textwrap.dedent("""\
            ---
            meter:
              stops_on: [terminate]
              verified: 2026-01
            ---
            ## ABC-001 · x
            ```yaml gotcha
            scope: [any]
            verified: 2026-02
            ```
            ## ABC-002 · x
            ```yaml gotcha
            verified: 2026-11
            ```
            """)
    )
    code, output = run(sys.executable, script("check_staleness.py"), tmp_path, "--today", "2026-11-21")
    assert code == 1
    first, second, last = output.splitlines()
    assert first.startswith("MONEY ")
    assert ":4:" in first
    assert "10" in first.rpartition(":4:")[2].split()
    assert ":9:" in second
    assert "9" in second.rpartition(":9:")[2].split()
    assert re.findall(r"\d+", last) == ["2", "3", "6"]
    assert run(sys.executable, script("check_staleness.py"), tmp_path, "--today", "2026-03-01")[0] == 0
    assert run(sys.executable, script("check_staleness.py"), tmp_path / "none")[0] == 2


def test_the_shipped_references_carry_stamps() -> None:
    code, output = run(sys.executable, script("check_staleness.py"), data_dir("references"), "--today", "2026-11-21")
    assert code == 0, output
    assert int(output.split()[2]) > 400


# ----------------------------------------------------------------------------------------------- the example


@pytest.mark.slow
def test_example_trains_as_shipped_and_resumes(tmp_path: Path) -> None:
    [example] = SKILLS.glob("*/examples/train_char_model.py")
    code, output = run(sys.executable, example, "40", "20", cwd=tmp_path)
    assert (code, output.splitlines()[-1]) == (0, "done"), output
    code, output = run(sys.executable, example, "60", cwd=tmp_path)
    assert (code, output.splitlines()[0].split()[-1]) == (0, "40"), output
