"""Measure the SSH backend against the system's own tools, on this machine, in one run.

    python bench/ssh.py [--gib 1] [--files 10000] [--rounds 5] [--folder DIR] [--only status,large,small]

Prints ratios: at most 1.0 for a status check of ten jobs against one `ssh` exec over a ControlMaster, at most 1.1 for
pulls against the better of `rsync -a` and `scp -r`, which are measured twice: as they are, and with the cipher that
our own transfers ask for (aes128-gcm). Each ratio is of the fastest runs and of the medians; every round runs all of
them, one after the other. A pull of ours includes the roster, a sha256 of every file on both sides, and fsync; its
peers do neither. Both ends share this machine's processors, so hashing on both sides costs here what it would hide
between two machines. Needs sshd, ssh, scp and rsync; everything listens on loopback.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from contract_backend import ended, shell, until
from gpuwarden.backends.base import roster, source
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.models import Handle, Place
from gpuwarden.remote.transfer.receive import receive
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


def show(what: str, times: dict[str, list[float]], peers: list[str], aim: float, unit: float = 1.0) -> None:
    """One line: ours, and the ratio to the better of some peers, of the fastest runs and of the medians."""
    told = []
    for pick in (min, statistics.median):
        best = min(pick(times[name]) for name in peers)
        told.append(pick(times["ours"]) / best)
    figures = ", ".join(f"{name} {min(times[name]) * unit:.2f}" for name in ["ours", *peers])
    print(f"{what:<32} ratio {told[0]:.2f} fastest, {told[1]:.2f} median (aim {aim:.1f})   {figures}", flush=True)


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
            times: dict[str, list[float]] = {"ours": [], "ssh ControlMaster": []}
            for _ in range(10 * rounds):
                times["ssh ControlMaster"].append(timed([*self.ssh, "-o", control, "box", "true"]))
                times["ours"].append(await atimed(lambda: self.backend.poll(handles)))
        finally:
            timed([*self.ssh, "-O", "exit", "-o", control, "box"])
        show("status of 10 jobs (ms)", times, ["ssh ControlMaster"], 1.0, 1000)

    async def pull(self, what: str, text: str, token: str, rounds: int) -> None:
        """One job's output by our pull, rsync and scp, interleaved."""
        handle = await self.backend.submit(shell(text, outputs=["o"], timeout_s=900), self.place, token, secrets={})
        await until(self.backend, handle, lambda o: o.ended_at is not None, 600)
        commands = self.peers("/".join(("box:" + handle.run_dir, "work", "o")))
        times: dict[str, list[float]] = {"ours": [], **{name: [] for name in commands}}
        for n in range(rounds):
            for name, argv in commands.items():
                with self.target(f"{token}-{n}-{len(name)}") as target:
                    target.mkdir()
                    times[name].append(timed([*argv, str(target)]))
            with self.target(f"{token}-{n}-ours") as target:
                times["ours"].append(await atimed(lambda to=target: self._ours(handle, to)))  # type: ignore[misc]
        shutil.rmtree(Path(handle.run_dir))
        show(what, times, ["rsync -a", "scp -r"], 1.1)
        show("  the same, peers with our cipher", times, ["rsync -a, gcm", "scp -r, gcm"], 1.1)

    def peers(self, far: str) -> dict[str, list[str]]:
        """The system's own tools, as they are and with our cipher."""
        rsh, gcm = " ".join(self.ssh), "-c aes128-gcm@openssh.com"
        return {
            "rsync -a": ["rsync", "-a", "-e", rsh, far],
            "rsync -a, gcm": ["rsync", "-a", "-e", f"{rsh} {gcm}", far],
            "scp -r": ["scp", "-q", "-r", *self.ssh[1:], far],
            "scp -r, gcm": ["scp", "-q", "-r", *gcm.split(), *self.ssh[1:], far],
        }

    @contextmanager
    def target(self, name: str) -> Iterator[Path]:
        """A new folder's path. Many small files are left lying: ext4 is slow to make files where many just went."""
        target = self.folder / name
        yield target
        for large in target.rglob("large"):
            large.unlink()

    async def _ours(self, handle: Handle, target: Path) -> None:
        listed = await roster(self.backend, handle, ["o"])
        got = await receive(source(self.backend, handle), listed, target)
        assert got.complete


async def main(gib: float, files: int, rounds: int, only: str, folder: Path) -> None:
    """The lines that are asked for."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        bench = Bench(Path(name))
        try:
            if "status" in only:
                await bench.status(rounds)
            if "large" in only:
                text = f"mkdir o; head -c {int(gib * (1 << 30))} /dev/urandom > o/large"
                await bench.pull(f"pull of {gib:g} GiB in one file (s)", text, "large", rounds)
            if "small" in only:
                text = f"mkdir o; for i in $(seq {files}); do echo $i > o/$i; done"
                await bench.pull(f"pull of {files:,} small files (s)", text, "small", rounds)
        finally:
            await bench.backend.aclose()
            bench.server.stop()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--gib", type=float, default=1.0)
    options.add_argument("--files", type=int, default=10_000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--only", default="status,large,small")
    options.add_argument("--folder", type=Path, help="where to work; a RAM disk measures the tools, not the disk")
    asked = options.parse_args()
    anyio.run(main, asked.gib, asked.files, asked.rounds, asked.only, asked.folder)
