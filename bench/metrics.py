"""Measure the metrics API: many trainers post ten times a second to a real `gpuwarden serve`.

    python bench/metrics.py [--clients 200] [--rate 10] [--seconds 20] [--streams 100]

Each post has one point of three metrics and is answered after its commit. Afterwards every value must be in the store.
The clients run in this process and share the machine with the server, so latencies are unreliable on a busy machine.
The server's processor time is compared with that of a bare Starlette server, which gets the same posts and neither
checks, stores nor streams them. The aims for 200 clients are for an idle machine with two cores. The last figures are
the times to store many points and to read them as a downsampled curve.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kits"))

from bench._figures import arguments, figure

from gpuwarden.metrics.points import PostedPoints, Row
from gpuwarden.metrics.store import Batch, MetricStore
from load_kit import Load, answers, post_all, run_load


class Measured(Load):
    """Latencies of posts and of another process in ms; processor time of the server and wall time in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.latencies: list[float] = []
        self.pings: list[float] = []
        self.wall_s = self.server_cpu_s = 0.0

    @contextmanager
    def post(self) -> Iterator[None]:
        """Time one post."""
        sent = time.perf_counter()
        with super().post():
            yield
        self.latencies.append(1000 * (time.perf_counter() - sent))

    @asynccontextmanager
    async def posting(self, server: psutil.Process) -> AsyncIterator[None]:
        """Measure the server, and the response time of another process on the machine, such as the watch."""
        before, begun = server.cpu_times(), time.monotonic()
        pinging = asyncio.create_task(self.ping())
        yield
        pinging.cancel()
        await asyncio.gather(pinging, return_exceptions=True)
        after = server.cpu_times()
        self.wall_s = time.monotonic() - begun
        self.server_cpu_s = after.user + after.system - before.user - before.system

    async def ping(self) -> None:
        """Ping a process ten times a second."""
        argv = [sys.executable, "-c", "while input():\n    print(flush=True)"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)
        assert process.stdin is not None and process.stdout is not None
        try:
            while True:
                sent = time.perf_counter()
                process.stdin.write(b"x\n")
                await process.stdout.readline()
                self.pings.append(1000 * (time.perf_counter() - sent))
                await asyncio.sleep(0.1)
        finally:
            process.kill()
            process.stdin.close()
            await process.wait()

    @property
    def cpu_ms_per_post(self) -> float:
        """Return the server's processor time for one post."""
        return 1000 * self.server_cpu_s / self.posts


def p99(values: list[float]) -> float:
    """Return the 99th percentile."""
    return sorted(values)[int(0.99 * len(values))]


def bare_load(home: Path, *, clients: int, rate: float, seconds: float) -> Measured:
    """Post with `clients` clients to a bare Starlette server."""
    load = Measured()
    argv = [sys.executable, str(Path(__file__).with_name("_bare_server.py"))]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            answers(port)
            jobs = [f"jbare{number}" for number in range(clients)]
            asyncio.run(post_all(psutil.Process(process.pid), port, home, jobs, rate, int(rate * seconds), load))
        finally:
            process.terminate()
    return load


def curve(home: Path, points: int) -> None:
    """Measure the time to store many points, and to read them as a curve."""
    store = MetricStore(home)
    begun = time.monotonic()
    for begin in range(0, points, 10_000):
        rows = tuple(Row("loss", n, n + 1, float(n % 977)) for n in range(begin, begin + 10_000))
        store.write(Batch([PostedPoints("jmany", rows)]))
    stored = time.monotonic()
    drawn = store.downsampled("jmany", "loss", 4_000)
    read = time.monotonic()
    store.close()
    figure(f"store {points:,} points", f"{stored - begun:.1f} s")
    figure(f"read them as a curve of {len(drawn.x):,}", f"{1000 * (read - stored):.0f} ms")


def main() -> None:
    """Measure the load, then the curve."""
    sizes = {"clients": (200, 5), "rate": (10.0, 10.0), "seconds": (20.0, 1.0), "streams": (100, 2)}
    asked = arguments(__doc__, {**sizes, "points": (1_000_000, 10_000)})
    with tempfile.TemporaryDirectory(prefix="gpuwarden-bench-") as folder:
        home, load = Path(folder) / "home", Measured()
        run_load(home, load, clients=asked.clients, rate=asked.rate, seconds=asked.seconds, streams=asked.streams)
        bare = bare_load(home, clients=asked.clients, rate=asked.rate, seconds=min(asked.seconds, 10.0))
        ours, peer = load.cpu_ms_per_post, bare.cpu_ms_per_post
        figure("processor time of a post", f"{ours:.3f} ms", f"bare Starlette {peer:.3f} ms", ours / peer)
        latency = p99(bare.latencies)
        figure(f"a post of {asked.clients} clients, p99", f"{p99(load.latencies):.0f} ms", "aim 250 ms")
        figure("  the same, against the peer", f"{p99(load.latencies):.0f} ms", f"bare Starlette {latency:.0f} ms",
               p99(load.latencies) / latency)  # fmt: skip
        figure("cores that the server uses", f"{load.server_cpu_s / load.wall_s:.2f}", "aim 0.6")
        figure("an answer of a process beside the server, p99", f"{p99(load.pings):.1f} ms", "aim 50 ms")
        if asked.streams:
            rate = load.events / asked.streams / load.wall_s
            figure("events a viewer gets in a second", f"{rate:.1f}", "4 at most")
        curve(home, asked.points)


if __name__ == "__main__":
    main()
