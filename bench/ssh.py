"""Measure the SSH backend against the system's ssh, rsync and scp, on this machine, in one run.

    python bench/ssh.py [--gib 0.25] [--files 1000] [--rounds 3] [--folder DIR] [--only status,push,pull]

Prints ratios. The aim is at most 1.0 for a status check of ten jobs against one `ssh` exec over a ControlMaster, and at
most 1.1 for pushes and pulls, of one large file and of many small ones, against the better of `rsync -a` and `scp -r`.
The peers are measured twice: with their defaults, and with the cipher of our transfers (aes128-gcm).

Every round runs all commands, one after the other. Each has a separate connection and starts after a sync of the disk.
A ratio is the median over the rounds of our time divided by the better peer's time in the same round. Our time includes
the search for a Python on the machine, the listing (for a pull), a sha256 of every file on both sides, and an fsync at
the end; the peers do none of these. So a third line compares with `rsync --fsync`. Both ends share this machine's
processors, so hashing on both sides costs time that two machines would hide. "Again" reuses the existing connection.

Load on the machine increases all of these times, but hardly the processor time, which is also shown on Linux, as the
sum of both sides. Needs sshd, ssh, scp and rsync; all servers listen on loopback.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Final

import anyio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kits"))

from bench._figures import arguments, figure

from contract_backend import ended, shell, until
from gpuwarden.backends.base import artifacts
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.models import Handle, Place
from gpuwarden.remote.ssh.config import resolve
from gpuwarden.remote.ssh.machine import Ssh
from gpuwarden.remote.transfer.receive import receive
from gpuwarden.remote.transfer.upload import push
from sshd import Sshd

PR_SET_CHILD_SUBREAPER: Final = 36


def timed(argv: list[str]) -> float:
    """Return the seconds that a command takes after a sync of the disk."""
    os.sync()
    start = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


async def atimed(work: Callable[[], Awaitable[object]]) -> float:
    """Return the seconds that a coroutine takes after a sync of the disk."""
    os.sync()
    start = time.perf_counter()
    await work()
    return time.perf_counter() - start


def show(what: str, times: dict[str, list[float]], peers: list[str], aim: float, unit: float = 1.0) -> None:
    """Print for each of our variants the median of its ratios to the better peer of the same round."""
    best = [min(round_) for round_ in zip(*(times[name] for name in peers), strict=True)]
    fastest = min(peers, key=lambda name: statistics.median(times[name]))
    peer = f"{fastest} {statistics.median(times[fastest]) * unit:.2f}"
    for name in [n for n in times if n.startswith("ours")]:
        ratio = statistics.median(mine / other for mine, other in zip(times[name], best, strict=True))
        mine = statistics.median(times[name]) * unit
        figure(f"{what}{name.removeprefix('ours')} (aim {aim:.1f})", f"{mine:.2f}", peer, ratio)


class Processors:
    """Seconds of processor time of this process, of its client processes, and of the server's side."""

    def __init__(self, server: int) -> None:
        self.server = server
        self.spent: dict[str, list[list[float]]] = {}
        # A background client becomes a child of this process, so it is counted when it has ended.
        self.known = sys.platform == "linux" and ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count the processor time of a block. All its connections must end in it."""
        before = self.read()
        yield
        if self.known:
            self.settle()
            spent = [after - was for was, after in zip(before, self.read(), strict=True)]
            self.spent.setdefault(name, []).append(spent)

    def read(self) -> list[float]:
        """Return the processor time so far of this process, of the clients and of the server's side."""
        if not self.known:
            return []
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        fields = Path(f"/proc/{self.server}/stat").read_text().rpartition(")")[2].split()
        far = sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")
        return [time.process_time(), ended.ru_utime + ended.ru_stime, far]

    def settle(self) -> None:
        """Wait until the server is the only process of both sides."""
        for parent in (self.server, os.getpid()) if self.known else ():
            self.wait(parent)

    def wait(self, parent: int) -> None:
        """Wait until a process has no children but the server."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with suppress(ChildProcessError):
                while parent == os.getpid() and os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
            if not set(map(int, found)) - {self.server}:
                return
            time.sleep(0.01)
        words = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid in found]
        raise AssertionError(f"process {parent} still has children: {words}")

    def show(self) -> None:
        """Print the processor time of both sides: ours against the peer with the least."""
        totals = {name: statistics.median(map(sum, spent)) * 1000 for name, spent in self.spent.items()}
        peers = [name for name in totals if not name.startswith("ours")]
        for name in [n for n in totals if n.startswith("ours")]:
            least = min(peers, key=totals.__getitem__)
            what = f"  processors of both sides, ms{name.removeprefix('ours')}"
            figure(what, f"{totals[name]:.0f}", f"{least} {totals[least]:.0f}", totals[name] / totals[least])
        self.spent.clear()


class Bench:
    """One server, one backend, and the command lines of the system's clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = Sshd(folder / "sshd").start()
        self.backend = SshBackend(SystemClock(), config=self.server.config)
        self.place = Place(platform="ssh", host="box", run_root=str(folder / "runs"))
        assert self.server.process
        self.processors = Processors(self.server.process.pid)
        self.ssh = ["ssh", "-F", str(self.server.config), "-o", "StrictHostKeyChecking=no"]

    async def status(self, rounds: int) -> None:
        """Measure one poll of ten finished jobs against one exec of `true` over a ControlMaster."""
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
            await self.backend.aclose()
        self.processors.settle()  # else the time of these connections is counted for the first client

        show("status of 10 jobs (ms)", times, ["ssh ControlMaster"], 1.0, 1000)

    async def pull(self, what: str, text: str, token: str, rounds: int) -> None:
        """Measure the pull of one job's output by ours, rsync and scp, interleaved."""
        handle = await self.backend.submit(shell(text, outputs=["o"], timeout_s=900), self.place, token, secrets={})
        await until(self.backend, handle, lambda o: o.ended_at is not None)
        await self.backend.aclose()
        made = PurePosixPath(handle.run_dir, "work", "o")
        commands = self.peers()
        times: dict[str, list[float]] = {name: [] for name in ["ours", "ours, again", *commands]}
        for n in range(rounds):
            for name, argv in commands.items():
                with self.target(f"{token}-{n}-{name.replace(' ', '')}") as target, self.processors.of(name):
                    target.mkdir()
                    times[name].append(timed([*argv, f"box:{made}", str(target)]))
            backend = SshBackend(SystemClock(), config=self.server.config)
            for name in ("ours", "ours, again"):
                if name != "ours":
                    await backend.host_key(handle.place)
                with self.target(f"{token}-{n}-{name}") as target, self.processors.of(name):
                    times[name].append(await atimed(lambda to=target: self._receive(backend, handle, to)))  # type: ignore[misc]  # noqa: B023
                    await backend.aclose()
        shutil.rmtree(Path(handle.run_dir))
        self.both(what, times)

    async def push(self, what: str, text: str, token: str, rounds: int) -> None:
        """Measure the push of a folder by ours, rsync and scp, interleaved."""
        here = self.folder / token
        here.mkdir()
        timed(["sh", "-c", f"cd {here} && {text}"])
        files = {entry.name: Path(entry.path) for entry in os.scandir(here / "o")}
        commands = self.peers()
        times: dict[str, list[float]] = {name: [] for name in ["ours", "ours, again", *commands]}
        for n in range(rounds):
            for name, argv in commands.items():
                with self.target(f"{token}-{n}-{name.replace(' ', '')}") as target, self.processors.of(name):
                    target.mkdir()
                    times[name].append(timed([*argv, str(here / "o"), f"box:{target}"]))
            machine = Ssh(resolve("box", config=self.server.config), config=self.server.config)
            for name in ("ours", "ours, again"):
                if name != "ours":
                    await machine.open()
                with self.target(f"{token}-{n}-{name[5:]}") as target, self.processors.of(name):
                    times[name].append(await atimed(lambda to=target: self._send(machine, files, to)))  # type: ignore[misc]  # noqa: B023
                    await machine.aclose()
        shutil.rmtree(here)
        self.both(what, times)

    def both(self, what: str, times: dict[str, list[float]]) -> None:
        """Print the ratios to the peers with their defaults, with our cipher, and with fsync."""
        show(what, times, ["rsync -a", "scp -r"], 1.1)
        show("  peers with our cipher", times, ["rsync -a, gcm", "scp -r, gcm"], 1.1)
        show("  a peer whose files are durable too", times, ["rsync -a --fsync"], 1.1)
        self.processors.show()

    def peers(self) -> dict[str, list[str]]:
        """Return the command lines of the peers, with their defaults and with our cipher."""
        rsh, gcm = " ".join(self.ssh), "-c aes128-gcm@openssh.com"
        return {
            "rsync -a": ["rsync", "-a", "-e", rsh],
            "rsync -a --fsync": ["rsync", "-a", "--fsync", "-e", rsh],
            "rsync -a, gcm": ["rsync", "-a", "-e", f"{rsh} {gcm}"],
            "scp -r": ["scp", "-q", "-r", *self.ssh[1:]],
            "scp -r, gcm": ["scp", "-q", "-r", *gcm.split(), *self.ssh[1:]],
        }

    @contextmanager
    def target(self, name: str) -> Iterator[Path]:
        """Yield a new folder's path. Small files are not deleted: ext4 creates files slowly after many deletions."""
        target = self.folder / name
        yield target
        for large in target.rglob("large"):
            large.unlink()

    async def _receive(self, backend: SshBackend, handle: Handle, target: Path) -> None:
        async with artifacts(backend, handle, ["o"], target) as (listed, source):
            got = await receive(source, listed, target)
        assert got.complete

    async def _send(self, machine: Ssh, files: dict[str, Path], target: Path) -> None:
        await push(machine, files, str(target))


async def main(gib: float, files: int, rounds: int, only: str, folder: Path) -> None:
    """Run the selected measurements."""
    gc.freeze()  # as a server does, so that the collector skips the objects that the test kits loaded

    with tempfile.TemporaryDirectory(dir=folder) as name:
        bench = Bench(Path(name))
        try:
            if "status" in only:
                await bench.status(rounds)
            large = f"mkdir o; head -c {int(gib * (1 << 30))} /dev/urandom > o/large"
            small = f"mkdir o; for i in $(seq {files}); do echo $i > o/$i; done"
            for word, text in ((f"{gib:g} GiB in one file (s)", large), (f"{files:,} small files (s)", small)):
                if "push" in only:
                    await bench.push(f"push of {word}", text, f"push-{len(text)}", rounds)
                if "pull" in only:
                    await bench.pull(f"pull of {word}", text, f"t-{len(text)}", rounds)
        finally:
            await bench.backend.aclose()
            bench.server.stop()


if __name__ == "__main__":
    everything, folder = "status,push,pull", tempfile.gettempdir()  # a RAM disk measures the tools, not the disk
    sizes = {"gib": (0.25, 0.01), "files": (1_000, 20), "rounds": (3, 1)}
    asked = arguments(__doc__, {**sizes, "only": (everything, everything), "folder": (folder, folder)})
    anyio.run(main, asked.gib, asked.files, asked.rounds, asked.only, Path(asked.folder))
