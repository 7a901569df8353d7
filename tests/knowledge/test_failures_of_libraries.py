"""Failures of torch, transformers, TRL, PEFT, datasets, and accelerate: programs in the corpus, each run as a job."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.corpus.failures.record import command_of

from failing_jobs import QUIET, Jobs, jobs_here, told
from gpuwarden.knowledge import shipped
from gpuwarden.knowledge.signatures import compiled_signature
from paths import CORPUS, KITS
from real_limits import in_namespace, memory_group
from real_parts import need

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.prove,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits, signals and file systems"),
]
PYTHON = sys.executable
PROGRAMS = sorted((CORPUS / "failures").glob("*--*.py"))
ALONE: set[str] = set()  # programs whose failure depends on how Python starts
POSSIBLE = {"DIST-025", "DIST-029"}  # lines that follow other failures


@pytest.fixture(scope="module")
async def jobs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Jobs]:
    for name in ("torch", "transformers", "trl", "peft", "datasets", "accelerate"):
        need(name, importlib.util.find_spec(name) is not None)
    async with jobs_here(tmp_path_factory.mktemp("failing") / "home") as here:
        yield here


@pytest.fixture(scope="module")
def forks(jobs: Jobs) -> Iterator[list[str]]:
    """Start the process whose forks run the programs; yield the command to which a program is appended."""
    assert jobs
    program = str(KITS / "forked_program.py")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "socket")
        serving = subprocess.Popen([PYTHON, program, "serve", path], env=os.environ | QUIET, stdout=subprocess.PIPE)
        assert serving.stdout is not None and serving.stdout.readline() == b"ready\n"
        yield [PYTHON, "-S", program, "run", path]
        serving.terminate()
        serving.communicate()


def test_there_are_enough_failing_programs() -> None:
    assert len(PROGRAMS) >= 70


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
async def test_a_library_failure_is_diagnosed(jobs: Jobs, forks: list[str], program: Path) -> None:
    want = program.stem.partition("--")[0]
    plain = command_of(program)
    command = plain if len(plain) > 2 or program.stem in ALONE else [*forks, str(program)]
    reply = await jobs.ended(command=command, seconds=300)
    assert reply["state"] == "failed"
    told(reply, want, sure=want not in POSSIBLE)
    shown = reply["diagnoses"][0]["lines"].splitlines()[1:-1]
    signatures = [compiled_signature(s) for s in shipped().gotcha(want).signatures]
    lines = [line.removeprefix("log: ") for line in shown if line.startswith("log: ")]
    assert lines and all(any(s.search(line) for s in signatures) for line in lines), shown


GREEDY = """
import os, sys, time
with open(sys.argv[1] + "/cgroup.procs", "w") as file: file.write(str(os.getpid()))
import torch
class Greedy(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i):
        time.sleep(0.6)
        self.kept = [b"x" * (1 << 20) for _ in range(4096)]
        return torch.zeros(2)
if __name__ == "__main__":
    for batch in torch.utils.data.DataLoader(Greedy(), num_workers=1): pass
"""
BUS = """
import torch
class Large(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return torch.zeros(1 << 20)
if __name__ == "__main__":
    for batch in torch.utils.data.DataLoader(Large(), num_workers=1): pass
"""


async def test_the_kernel_kills_a_loader_worker_for_memory(jobs: Jobs) -> None:
    with memory_group(1 << 30) as group:
        if group is None:
            pytest.skip("groups can't be made here; the killed worker of the corpus stands for it")
        reply = await jobs.ended(command=[PYTHON, "-c", GREEDY, str(group)])
    told(reply, "DATA-014", "killed by signal: Killed")
    assert "OOM-004" in {d["id"] for d in reply["diagnoses"]}, "what the kernel did was observed"


async def test_too_little_shared_memory_is_diagnosed(jobs: Jobs) -> None:
    inside = in_namespace(Path("/dev/shm"), "64k", 100)
    if inside is None:
        pytest.skip("this machine refuses a small /dev/shm of a job's own; the recorded line stands for it")
    told(
        await jobs.ended(command=[*inside, PYTHON, "-c", BUS]), "DATA-015", "Bus error|unable to allocate shared memory"
    )
