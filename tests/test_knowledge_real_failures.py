"""Failures made here for real, and what the diagnosis says to their output."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden.knowledge import Diagnosis, diagnose, shipped

PYTHON = sys.executable
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits")


def run(tmp_path: Path, *command: str, env: dict[str, str] | None = None) -> tuple[str, int]:
    """Run a command as a job would be run: output and errors in one log, and an exit code as a shell reports it."""
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
    )
    code = done.returncode if done.returncode >= 0 else 128 - done.returncode
    return done.stdout.decode(errors="replace"), code


def verdict(tmp_path: Path, code: str, env: dict[str, str] | None = None) -> Diagnosis:
    """Run Python code that must fail, and return the first diagnosis."""
    script = tmp_path / "train.py"
    script.write_text(code)
    log, status = run(tmp_path, PYTHON, str(script), env=env)
    assert status != 0, log
    found = diagnose(shipped(), log, exit_code=status)
    assert found, log
    return found[0]


SPAWNED = """
import multiprocessing as mp
def main():
    def work(): pass
    mp.get_context("spawn").Process(target=work).start()
if __name__ == "__main__": main()
"""
ONE_ARGUMENT = """
import argparse
parser = argparse.ArgumentParser(prog="train.py")
parser.add_argument("--greater_is_better")
parser.parse_args(["--greater_is_better"])
"""
CUT_SHORT = """
import pickle
open("c.pkl", "wb").write(pickle.dumps(list(range(9999)))[:500])
pickle.load(open("c.pkl", "rb"))
"""
POINTER = """
from safetensors import safe_open
open("m.safetensors", "w").write("version https://git-lfs.github.com/spec/v1\\noid sha256:00\\nsize 1\\n" * 4)
safe_open("m.safetensors", "np").__enter__()
"""
CASES: dict[str, tuple[str, str]] = {
    "missing module": ("HUB-040", "import a_package_nobody_has"),
    "columns renamed": ("FMT-005", "row = {'instruction': 'x', 'output': 'y'}\nprint(row['prompt'])"),
    "local object to a worker": ("DATA-010", SPAWNED),
    "start method twice": (
        "DATA-011",
        "import multiprocessing as m\nfor x in ('spawn', 'fork'): m.set_start_method(x)",
    ),
    "argument without value": ("HUB-012", ONE_ARGUMENT),
    "pickle cut short": ("CKPT-002", CUT_SHORT),
    "empty checkpoint": ("CKPT-002", "import pickle\nopen('c.pkl', 'wb').close()\npickle.load(open('c.pkl', 'rb'))\n"),
    "safetensors is a pointer": ("CKPT-003", POINTER),
    "no such host": ("UNI-049", "import socket\nsocket.getaddrinfo('nowhere.invalid', 443)\n"),
    "nan loss": ("PREC-011", "print({'loss': float('nan'), 'step': 7})\nraise SystemExit(1)\n"),
}


@pytest.mark.parametrize(("want", "code"), CASES.values(), ids=CASES.keys())
def test_a_failing_script_is_diagnosed(tmp_path: Path, want: str, code: str) -> None:
    assert verdict(tmp_path, code).id == want


@linux
def test_a_full_device(tmp_path: Path) -> None:
    found = verdict(tmp_path, "with open('/dev/full', 'wb', buffering=0) as f: f.write(b'x' * 4096)\n")
    assert (found.id, found.certainty) == ("CKPT-004", "possible")


@linux
def test_address_space_runs_out(tmp_path: Path) -> None:
    code = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))\nx = bytearray(1 << 30)\n"
    assert verdict(tmp_path, code).id == "OOM-030"


@linux
def test_numpy_can_not_allocate(tmp_path: Path) -> None:
    code = "import numpy, resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))\nnumpy.ones(1 << 40)\n"
    assert verdict(tmp_path, code, env={"OPENBLAS_NUM_THREADS": "1"}).id == "OOM-030"


@linux
def test_file_descriptors_run_out(tmp_path: Path) -> None:
    code = "from resource import *\nsetrlimit(RLIMIT_NOFILE, (32, 32))\nx = [open('train.py') for _ in range(99)]"
    assert verdict(tmp_path, code).id == "DATA-016"


@linux
def test_a_killed_process_leaves_only_its_code(tmp_path: Path) -> None:
    found = verdict(tmp_path, "import os, signal\nprint('step 1', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert (found.id, found.lines[0].number) == ("OOM-004", 0)


@linux
def test_bash_reports_a_killed_child(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(f"{PYTHON} -c 'import os; os.kill(os.getpid(), 9)'\n")
    log, code = run(tmp_path, "bash", "train.sh")
    assert diagnose(shipped(), log, exit_code=code)[0].id == "OOM-004", log


@linux
def test_a_segmentation_fault(tmp_path: Path) -> None:
    code = "import faulthandler, os, signal\nfaulthandler.enable()\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    assert verdict(tmp_path, code).id == "UNI-058"


def test_the_port_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code = f"import socket\nsocket.socket().bind(('127.0.0.1', {taken.getsockname()[1]}))\n"
        assert verdict(tmp_path, code).id == "DIST-004"


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_a_script_with_windows_line_ends(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    (tmp_path / "train.sh").write_bytes(b"set -e\r\nfor i in 1 2; do\r\n  echo $i\r\ndone\r\n")
    log, code = run(tmp_path, shell, "train.sh")
    assert code != 0
    found = diagnose(shipped(), log, exit_code=code)
    assert "UNI-026" in [d.id for d in found], log


@linux
def test_a_script_whose_interpreter_line_ends_in_a_carriage_return(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_bytes(b"#!/bin/bash\r\necho hello\r\n")
    script.chmod(0o755)
    log, code = run(tmp_path, "bash", "-c", "./train.sh")
    assert code != 0
    assert diagnose(shipped(), log, exit_code=code)[0].id == "UNI-026", log


def test_a_command_that_is_not_in_the_path(tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed here")
    log, code = run(tmp_path, "bash", "-c", "accelerate launch train.py", env={"PATH": "/nonexistent:/bin:/usr/bin"})
    assert code == 127
    assert diagnose(shipped(), log, exit_code=code)[0].id == "UNI-053", log


@linux
def test_a_job_ended_by_timeout(tmp_path: Path) -> None:
    log, code = run(tmp_path, "timeout", "0.2", PYTHON, "-c", "import time; time.sleep(9)")
    assert diagnose(shipped(), log, exit_code=code)[0].id == "UNI-073"


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "out"
    folder.mkdir()
    folder.chmod(0o500)
    yield folder
    folder.chmod(0o700)


def test_an_output_folder_that_may_not_be_written(tmp_path: Path, read_only: Path) -> None:
    if os.geteuid() == 0:
        read_only = Path("/sys/kernel")  # root may write anywhere but here
        if not read_only.is_dir():
            pytest.skip("root may write everywhere here")
    log, code = run(tmp_path, PYTHON, "-c", f"open({str(read_only / 'x.pt')!r}, 'wb')")
    assert code != 0
    assert diagnose(shipped(), log, exit_code=code)[0].id == "UNI-047", log


def test_a_run_that_was_asked_to_end_is_not_a_failure_of_memory(tmp_path: Path) -> None:
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"
    (tmp_path / "train.py").write_text(code)
    log, status = run(tmp_path, PYTHON, "train.py")
    assert status == 128 + signal.SIGTERM
    assert "OOM-004" not in [d.id for d in diagnose(shipped(), log, exit_code=status)]


FAILING = sorted((Path(__file__).parent / "corpus" / "logs" / "failing").glob("*.log"))


def test_every_recorded_failure_has_its_program() -> None:
    programs = {path.stem for path in (Path(__file__).parent / "corpus" / "failures").glob("*--*.py")}
    assert programs == {path.stem for path in FAILING}
    assert len(programs) >= 50


@pytest.mark.parametrize("path", FAILING, ids=lambda p: p.stem)
def test_a_recorded_failure_of_torch_or_a_trainer_is_diagnosed(path: Path) -> None:
    found = diagnose(shipped(), path.read_text(encoding="utf-8"))
    assert found[0].id == path.stem.split("--")[0], [(d.id, d.lines[0].text) for d in found]
