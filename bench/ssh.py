"""Measure the SSH backend against the system's own tools, on this machine, in one run.

    python bench/ssh.py [--gib 1] [--files 10000] [--rounds 3]

Prints ratios: at most 1.0 for a status check of ten jobs against one `ssh` exec over a ControlMaster, at most 1.1 for
pulls against the better of `rsync -a` and `scp -r`. A pull of ours includes the manifest made on the machine, the
comparison of digests and fsync. Needs sshd, ssh, scp and rsync; everything listens on loopback.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from contract_backend import ended, shell, until
from gpuwarden.backends.base import roster, source
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.models import Handle, Place
from gpuwarden.remote.receive import receive
from sshd import Sshd


def timed(argv: list[str]) -> float:
    """Seconds that a command takes."""
    start = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


async def atimed(work: Callable[[], Awaitable[object]]) -> float:
    """Seconds that a coroutine takes."""
    start = time.perf_counter()
    await work()
    return time.perf_counter() - start


def show(what: str, ours: float, theirs: dict[str, float], aim: float, unit: float = 1.0) -> None:
    """One line: ours, theirs and the ratio to the better of them."""
    best = min(theirs.values())
    others = ", ".join(f"{name} {value * unit:.2f}" for name, value in theirs.items())
    print(f"{what:<34} ours {ours * unit:8.2f}   {others:<34} ratio {ours / best:.2f}  (aim {aim:.1f})", flush=True)


class Bench:
    """One server, one backend, and the words for the system's clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = Sshd(folder / "sshd").start()
        self.backend = SshBackend(SystemClock(), config=self.server.config)
        self.place = Place(platform="ssh", host="box", run_root=str(folder / "runs"))
        self.ssh = ["ssh", "-F", str(self.server.config), "-o", "StrictHostKeyChecking=no"]

    async def status(self, rounds: int) -> None:
        """Ten finished jobs in one poll, against one exec of `true` over a ControlMaster."""
        handles = [await self.backend.submit(shell("true"), self.place, f"s-{n}", secrets={}) for n in range(10)]
        for handle in handles:
            await ended(self.backend, handle)
        control = f"ControlPath={self.folder}/control"
        timed([*self.ssh, "-fMN", "-o", control, "box"])
        try:
            ours, theirs = [], []
            for _ in range(10 * rounds):
                theirs.append(timed([*self.ssh, "-o", control, "box", "true"]))
                ours.append(await atimed(lambda: self.backend.poll(handles)))
        finally:
            timed([*self.ssh, "-O", "exit", "-o", control, "box"])
        medians = {"ssh ControlMaster": statistics.median(theirs)}
        show("status of 10 jobs (ms)", statistics.median(ours), medians, 1.0, 1000)

    async def pull(self, what: str, text: str, token: str, rounds: int) -> None:
        """One job's output by our pull, rsync and scp, interleaved."""
        handle = await self.backend.submit(shell(text, outputs=["o"], timeout_s=900), self.place, token, secrets={})
        await until(self.backend, handle, lambda o: o.ended_at is not None, 600)
        far, rsh = f"box:{handle.run_dir}/work/o", " ".join(self.ssh)
        commands = {"rsync -a": ["rsync", "-a", "-e", rsh, far], "scp -r": ["scp", "-q", "-r", *self.ssh[1:], far]}
        times: dict[str, list[float]] = {"ours": [], **{name: [] for name in commands}}
        for n in range(rounds):
            for name, argv in commands.items():
                target = self.folder / f"{token}-{n}-{name[:2]}"
                target.mkdir()
                times[name].append(timed([*argv, str(target)]))
                shutil.rmtree(target)
            target = self.folder / f"{token}-{n}-ours"
            times["ours"].append(await atimed(lambda to=target: self._ours(handle, to)))  # type: ignore[misc]
            shutil.rmtree(target)
        shutil.rmtree(Path(handle.run_dir))
        ours = statistics.median(times.pop("ours"))
        show(what, ours, {name: statistics.median(values) for name, values in times.items()}, 1.1)

    async def _ours(self, handle: Handle, target: Path) -> None:
        listed = await roster(self.backend, handle, ["o"])
        got = await receive(source(self.backend, handle), listed, target)
        assert got.complete


async def main(gib: float, files: int, rounds: int, folder: Path) -> None:
    """All three."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        bench = Bench(Path(name))
        try:
            await bench.status(rounds)
            large = f"mkdir o; head -c {int(gib * (1 << 30))} /dev/urandom > o/large"
            await bench.pull(f"pull of {gib:g} GiB in one file (s)", large, "large", rounds)
            small = f"mkdir o; for i in $(seq {files}); do echo $i > o/$i; done"
            await bench.pull(f"pull of {files:,} small files (s)", small, "small", rounds)
        finally:
            await bench.backend.aclose()
            bench.server.stop()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--gib", type=float, default=1.0)
    options.add_argument("--files", type=int, default=10_000)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--folder", type=Path, help="where to work; a RAM disk measures the tools, not the disk")
    asked = options.parse_args()
    anyio.run(main, asked.gib, asked.files, asked.rounds, asked.folder)
