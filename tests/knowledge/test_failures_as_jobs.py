"""Real failures, each run as a job through submit_job and the local backend, and the diagnosis from check_job.

These need no training library; `test_failures_of_libraries.py` has the others.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from failing_jobs import Jobs, jobs_here, script, told
from gpuwarden.remote import launch
from paths import KITS
from real_limits import MKNOD_WAYS, in_namespace, memory_group, mounted
from real_parts import need

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits, signals and file systems"),
]
PYTHON = sys.executable


@pytest.fixture(scope="module")
async def jobs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Jobs]:
    async with jobs_here(tmp_path_factory.mktemp("failing") / "home") as here:
        yield here


@dataclass(frozen=True)
class Case:
    """A program, the entry that explains its failure, and part of the line that shows it."""

    want: str
    shown: str
    code: str = ""
    needs: tuple[str, ...] = ()
    sure: bool = True
    env: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()

    @property
    def spec(self) -> dict[str, Any]:
        if self.command:
            return {"command": list(self.command), "env": self.env}
        return {"script": script(self.code, *self.needs), "env": self.env}


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
EMPTY = "import pickle\nopen('c.pkl', 'wb').close()\npickle.load(open('c.pkl', 'rb'))\n"
POINTER = """
from safetensors import safe_open
open("m.safetensors", "w").write("version https://git-lfs.github.com/spec/v1\\noid sha256:00\\nsize 1\\n" * 4)
safe_open("m.safetensors", "np").__enter__()
"""
NO_ROOM = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))\nx = bytearray(1 << 30)\n"
NO_ARRAY = "import numpy, resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))\nnumpy.ones(1 << 40)\n"
NO_FILES = "from resource import *\nsetrlimit(RLIMIT_NOFILE, (32, 32))\nx = [open(__file__) for _ in range(99)]\n"
FILE_LIMIT = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
with open("model.bin", "wb") as file: file.write(bytes(1 << 20))
"""
FAULT = "import faulthandler, os, signal\nfaulthandler.enable()\nos.kill(os.getpid(), signal.SIGSEGV)\n"
DEVICE = "with open('/dev/full', 'wb', buffering=0) as f: f.write(b'x' * 4096)\n"
CASES = {
    "missing module": Case(
        "HUB-040", "No module named 'a_package", "import importlib\nimportlib.import_module('a_package_nobody_has')\n"
    ),
    "columns renamed": Case(
        "FMT-005", "KeyError: 'prompt'", "row = {'instruction': 'x', 'output': 'y'}\nprint(row['prompt'])"
    ),
    "local object to a worker": Case("DATA-010", "local object", SPAWNED),
    "start method twice": Case(
        "DATA-011",
        "context has already been set",
        "import multiprocessing as m\nfor x in ('spawn', 'fork'): m.set_start_method(x)\n",
    ),
    "argument without value": Case("HUB-012", "expected one argument", ONE_ARGUMENT),
    "pickle cut short": Case("CKPT-002", "truncated", CUT_SHORT),
    "empty checkpoint": Case("CKPT-002", "Ran out of input", EMPTY),
    "safetensors is a pointer": Case("CKPT-003", "HeaderTooLarge|header too large", POINTER, ("safetensors", "numpy")),
    "no such host": Case(
        "UNI-049", "getaddrinfo|resolution|not known", "import socket\nsocket.getaddrinfo('nowhere.invalid', 443)\n"
    ),
    "nan in the log": Case(
        "PREC-011", "'loss': nan", "print({'loss': float('nan'), 'step': 7})\nraise SystemExit(1)\n"
    ),
    "a full device": Case("CKPT-004", "No space left on device", DEVICE, sure=False),
    "a limit on the size of files": Case("CKPT-004", "File too large", FILE_LIMIT),
    "address space runs out": Case("OOM-030", "MemoryError", NO_ROOM),
    "numpy can't allocate": Case(
        "OOM-030", "Unable to allocate", NO_ARRAY, ("numpy",), env={"OPENBLAS_NUM_THREADS": "1"}
    ),
    "file descriptors run out": Case("DATA-016", "Too many open files", NO_FILES),
    "killed without a word": Case(
        "OOM-004", "observed: exit code 137", "import os\nos.kill(os.getpid(), 9)\n", sure=False
    ),
    "segmentation fault": Case("UNI-058", "Fatal Python error: Segmentation fault", FAULT),
    "segmentation fault without a word": Case(
        "UNI-058", "observed: exit code 139", "import os\nos.kill(os.getpid(), 11)\n", sure=False
    ),
    "a command that isn't there": Case(
        "UNI-053", "command not found", command=("bash", "-c", "acelerate-launch train.py")
    ),
    "ended by timeout(1)": Case(
        "UNI-073", "exit code 124", command=("timeout", "0.2", "sleep", "9"), sure=False
    ),
    "read-only outputs": Case("UNI-047", "model.pt", "open('/sys/kernel/model.pt', 'wb')\n"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_a_failed_job_is_diagnosed(jobs: Jobs, case: Case) -> None:
    reply = await jobs.ended(**case.spec)
    told(reply, case.want, case.shown, sure=case.sure)


async def test_a_shell_reports_its_killed_child(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(f"{PYTHON} -c 'import os; os.kill(os.getpid(), 9)'\necho after; exit 1\n")
    told(await jobs.ended(command=["bash", str(tmp_path / "train.sh")]), "OOM-004", "Killed")


@pytest.mark.parametrize("shell", ["bash", "sh"])
async def test_a_script_with_windows_line_ends(jobs: Jobs, tmp_path: Path, shell: str) -> None:
    (tmp_path / "train.sh").write_bytes(b"set -e\r\nfor i in 1 2; do\r\n  echo $i\r\ndone\r\n")
    told(await jobs.ended(command=[shell, str(tmp_path / "train.sh")]), "UNI-026", "\\r|set: -|do|unexpected")


async def test_a_shebang_ending_in_a_carriage_return_is_diagnosed(jobs: Jobs, tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_bytes(b"#!/bin/bash\r\necho hello\r\n")
    file.chmod(0o755)
    told(await jobs.ended(command=["bash", "-c", str(file)]), "UNI-026", "interpreter|required file not found")


async def test_a_taken_port_is_diagnosed(jobs: Jobs) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code = f"import socket\nsocket.socket().bind(('127.0.0.1', {taken.getsockname()[1]}))\n"
        told(await jobs.ended(script=script(code)), "DIST-004", "Address already in use")


# ------------------------------------------------------------------------------------------------- a full disk

FILL = "import sys\nwith open(sys.argv[1] + '/model.bin', 'wb') as file: file.write(bytes(1 << 22))\n"
LITTER = """
import sys
for n in range(9999):
    with open(f"{sys.argv[1]}/{n}.png", "wb"): pass
"""


async def test_a_full_disk_is_diagnosed(jobs: Jobs, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "1m", 4096) as disk:
        if disk:
            reply = await jobs.ended(script=script(FILL), args=[str(disk)], outputs=[str(disk)])
            told(reply, "CKPT-004", "observed: heartbeat: 0 bytes free of 1,048,576", "No space left on device")
            return
    inside = in_namespace(tmp_path / "disk", "1m", 4096)
    need("a way to a small file system (mount or a user namespace)", inside is not None or Path("/dev/full").exists())
    command = [PYTHON, "-c", DEVICE] if inside is None else [*inside, PYTHON, "-c", FILL, str(tmp_path / "disk")]
    told(await jobs.ended(command=command), "CKPT-004", "No space left on device", sure=False)


async def test_exhausted_inodes_are_diagnosed(jobs: Jobs, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "8m", 40) as disk:
        need("permission to mount a small file system, or another way", disk is not None or bool(inode_ways(tmp_path)))
        if disk:
            reply = await jobs.ended(script=script(LITTER), args=[str(disk)], outputs=[str(disk)])
            told(reply, "UNI-007", "observed: heartbeat: 0 inodes free of 40", "No space left on device")
            assert {d["id"]: d["certainty"] for d in reply["diagnoses"]}["CKPT-004"] == "possible"


def inode_ways(folder: Path) -> dict[str, list[str]]:
    """Return commands that run out of inodes without a mount that is visible to other processes."""
    ways = {}
    if inside := in_namespace(folder / "own", "8m", 40):
        ways["namespace"] = [*inside, PYTHON, "-c", LITTER, str(folder / "own")]
    if os.uname().machine in MKNOD_WAYS:
        begin = f"import sys\nsys.path.insert(0, {str(KITS)!r})\nfrom real_limits import refuse_new_files\n"
        ways["seccomp"] = [PYTHON, "-c", f"{begin}refuse_new_files()\n{LITTER}", str(folder)]
    return ways


@pytest.mark.parametrize("way", ["namespace", "seccomp"])
async def test_uncountable_inodes_leave_two_possible_causes(jobs: Jobs, tmp_path: Path, way: str) -> None:
    ways = inode_ways(tmp_path)
    need("any way to run out of inodes", bool(ways))
    if way not in ways:
        pytest.skip(f"this machine refuses {way}; the other way was taken")
    reply = await jobs.ended(command=ways[way])
    told(reply, None, "No space left on device", sure=False)
    assert {d["id"] for d in reply["diagnoses"]} == {"CKPT-004", "UNI-007"}


# -------------------------------------------------------------------------------------------------- ends by signals


GROW = """
import os, sys, time
if len(sys.argv) > 1:
    with open(sys.argv[1] + "/cgroup.procs", "w") as file: file.write(str(os.getpid()))
time.sleep(0.6)
kept = []
while True:
    kept.append(b"x" * (1 << 20))
    if len(sys.argv) < 2 and len(kept) > 64: os.kill(os.getpid(), 9)
"""


async def test_a_kernel_out_of_memory_kill_is_diagnosed(jobs: Jobs) -> None:
    with memory_group(48 << 20) as group:
        reply = await jobs.ended(script=script(GROW), args=[str(group)] if group else [])
        if group:
            told(reply, "OOM-004", "observed: the kernel killed a process to free memory")
        else:  # the kill is real, but its sender stays unknown
            told(reply, "OOM-004", "observed: exit code 137", sure=False)


async def test_a_job_ended_by_sigterm_gets_no_diagnosis(jobs: Jobs) -> None:
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"
    reply = await jobs.ended(script=script(code), max_restarts=0)
    assert reply["state"] == "failed" and not reply.get("diagnoses"), reply


async def test_reaching_our_time_limit_is_diagnosed(jobs: Jobs) -> None:
    reply = await jobs.ended(script=script("import time\ntime.sleep(60)\n"), timeout_s=1)
    told(reply, "UNI-073", "observed: the job ended: the time limit of 1 s was reached")


async def test_killed_in_the_middle_of_a_save_and_resumed(jobs: Jobs, tmp_path: Path) -> None:
    save = """
import os, pickle, sys
data = pickle.dumps(list(range(100_000)))
with open(sys.argv[1] + "/checkpoint.pkl", "wb", buffering=0) as file:
    file.write(data[: len(data) // 2])
    os.kill(os.getpid(), 9)
"""
    told(await jobs.ended(script=script(save), args=[str(tmp_path)]), "OOM-004", "exit code 137", sure=False)
    resume = "import pickle, sys\npickle.load(open(sys.argv[1] + '/checkpoint.pkl', 'rb'))\n"
    told(await jobs.ended(script=script(resume), args=[str(tmp_path)]), "CKPT-002", "truncated|Ran out of input")


async def test_a_silent_loss_of_job_and_supervisor_is_diagnosed(jobs: Jobs) -> None:
    job_id = await jobs.start(script=script("import time\nprint('step 1', flush=True)\ntime.sleep(60)\n"))
    status = json.loads((jobs.folder(job_id) / "status.json").read_text())
    for pid in (status["pid"], status["child_pid"]):
        os.kill(pid, signal.SIGKILL)
    reply = await jobs.until(job_id)
    told(reply, "UNI-003", "observed: the job ended: its process is gone", sure=False)


# ------------------------------------------------------------------------------------------------- only the metrics

METRICS = """
import json, os, sys, time
out = open(os.environ["GPUWARDEN_METRICS"], "a", buffering=1)
def put(step, **values): out.write(json.dumps({"step": step, **values}) + "\\n")
for step in range(30): put(step, loss=2.0 - step / 100, grad_norm=1.0)
"""


async def test_a_nan_loss_seen_only_in_the_metrics_is_diagnosed(jobs: Jobs) -> None:
    job_id = await jobs.start(script=script(METRICS + "put(30, loss=float('nan'))\ntime.sleep(60)\n"))
    reply = await jobs.until(job_id, step=30)
    assert reply["state"] == "running" and "nan" not in reply["log"].lower()
    told(reply, "PREC-011", "observed: the job's metrics: loss is not finite at step 30", sure=False)
    await jobs.call("cancel_job", job_id=job_id)
    assert not (await jobs.until(job_id)).get("diagnoses")


async def test_a_successful_run_with_a_nonfinite_loss_gets_only_that_diagnosis(jobs: Jobs) -> None:
    code = METRICS + "put(30, loss=float('inf'))\nprint('CUDA out of memory. Tried to allocate 2.00 GiB')\n"
    reply = await jobs.ended(script=script(code))
    assert reply["state"] == "succeeded"
    told(reply, "PREC-011", "loss is not finite at step 30", sure=False)
    assert len(reply["diagnoses"]) == 1


async def test_a_hidden_nan_shows_in_the_gradient_norm(jobs: Jobs) -> None:
    reply = await jobs.ended(script=script(METRICS + "put(30, loss=0.0, grad_norm=float('nan'))\nsys.exit(3)\n"))
    told(reply, "PREC-012", "grad_norm is not finite at step 30", sure=False)


async def test_a_lasting_loss_jump_is_diagnosed(jobs: Jobs) -> None:
    code = METRICS + "for step in range(30, 60): put(step, loss=40.0 + step)\ntime.sleep(60)\n"
    job_id = await jobs.start(script=script(code))
    reply = await jobs.until(job_id, step=59)
    told(reply, "PREC-015", "loss is 74 at step 34, the 5th value in a row above", sure=False)
    await jobs.call("cancel_job", job_id=job_id)


async def test_a_hanging_run_is_diagnosed(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    def impatient(*args: Any) -> launch.Launch:
        ready = prepare(*args)
        ready.spec["stall_s"] = 0.3
        return ready

    prepare = launch.prepare
    monkeypatch.setattr(launch, "prepare", impatient)
    job_id = await jobs.start(script=script(METRICS + "time.sleep(60)\n"))
    reply = await jobs.until(job_id, good=lambda body: bool(body["alerts"]))
    told(reply, "PERF-019", "observed: the runner: no progress for ", sure=False)
    await jobs.call("cancel_job", job_id=job_id)


async def test_a_healthy_run_with_noise_and_recoveries_has_no_diagnosis(jobs: Jobs) -> None:
    noise = """
print("WARNING retrying in 1 s: HTTPSConnectionPool: Read timed out; Connection reset by peer", flush=True)
put(30, loss=1.4, grad_norm=float("inf"))
for step in range(31, 90): put(step, loss=1.4 if step != 50 else 30.0, grad_norm=1.0)
print("Traceback (most recent call last):\\n  OSError: [Errno 28] No space left on device (recovered)", flush=True)
time.sleep(60)
"""
    job_id = await jobs.start(script=script(METRICS + noise))
    reply = await jobs.until(job_id, step=89)
    assert reply["state"] == "running" and not reply.get("diagnoses"), reply
    await jobs.call("cancel_job", job_id=job_id)
