"""Many trainers at once: a real `gpuwarden serve` in another process, and clients that post as trainers do."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import bare_server
from doors import environment
from gpuwarden.app import open_context
from gpuwarden.core.models import JobSpec
from gpuwarden.interfaces.http.tokens import TokenStore
from gpuwarden.job_tokens import job_token
from gpuwarden.ledger.events import JobAccepted
from gpuwarden.lifecycle.context import Context

PATIENCE_S = 300.0


@dataclass
class Load:
    """What a run measured: latencies in ms, and the server's processor time in seconds."""

    posts: int = 0
    refused: int = 0
    events: int = 0
    wall_s: float = 0.0
    server_cpu_s: float = 0.0
    latencies: list[float] = field(default_factory=list)
    pings: list[float] = field(default_factory=list)

    @property
    def cpu_ms_per_post(self) -> float:
        return 1000 * self.server_cpu_s / max(self.posts, 1)

    def quantile(self, share: float, of: list[float] | None = None) -> float:
        values = sorted(self.latencies if of is None else of)
        return values[min(int(share * len(values)), len(values) - 1)] if values else math.nan

    def __str__(self) -> str:
        return (
            f"{self.posts} posts in {self.wall_s:.1f} s ({self.posts / self.wall_s:.0f}/s), {self.refused} refused, "
            f"p50 {statistics.median(self.latencies):.0f} ms, p99 {self.quantile(0.99):.0f} ms; "
            f"server {self.server_cpu_s:.1f} s of processor time = {self.cpu_ms_per_post:.3f} ms a post, "
            f"{self.server_cpu_s / self.wall_s:.2f} of a core; {self.events} events streamed; "
            f"a ping of another process: p99 {self.quantile(0.99, self.pings):.1f} ms"
        )


@contextmanager
def served(home: Path, port: int = 0, more: tuple[str, ...] = ()) -> Iterator[tuple[psutil.Process, int]]:
    """Run the command until the block is left; its process and its port."""
    argv = [sys.executable, "-m", "gpuwarden", "serve", "--no-watch", "--port", str(port), *more]
    process = subprocess.Popen(argv, env=environment(home), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        assert process.stderr is not None
        line = process.stderr.readline().decode()
        assert "serves on http://localhost:" in line, line
        found = int(line.partition("localhost:")[2].partition(" ")[0])
        answers(found)
        yield psutil.Process(process.pid), found
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        process.stderr.close()


def answers(port: int) -> None:
    """Wait until somebody answers at a port."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), 5) as one:
                one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                assert one.recv(12).startswith(b"HTTP/1.1")
            return
        except (OSError, AssertionError):
            assert time.monotonic() < end
            time.sleep(0.05)


def ready(home: Path, jobs: int) -> tuple[Context, list[str]]:
    """Make a state folder with jobs that may report."""
    ctx = open_context("test", env=environment(home))
    names = [f"jload{number}" for number in range(jobs)]
    for name in names:
        ctx.ledger.add(f"job/{name}", JobAccepted(spec=JobSpec(platform="local", command=("true",))))
    return ctx, names


async def _client(port: int, home: Path, job: str, rate: float, count: int, load: Load, offset: float) -> None:
    """Post as a trainer does: one point at a time on a connection that stays open, and again what was not answered."""
    head = (
        "POST /api/training/local/metrics HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {job_token(home, job, 'metrics')}\r\nContent-Length: "
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    loop = asyncio.get_running_loop()
    begun = loop.time() + offset
    for step in range(count):
        await asyncio.sleep(max(0.0, begun + step / rate - loop.time()))
        point = {"step": step, "train_loss": 1 / (step + 1), "grad_norm": 0.5, "learning_rate": 1e-5}
        body = json.dumps({"job_id": job, "metrics": [{**point, "timestamp": 1_700_000_000 + step / rate}]})
        sent = loop.time()
        writer.write(f"{head}{len(body)}\r\n\r\n{body}".encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        size = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(size)
        load.latencies.append(1000 * (loop.time() - sent))
        load.posts += 1
        load.refused += not answer.startswith(b"HTTP/1.1 200")
    writer.close()


async def _stream(port: int, token: str, job: str, load: Load) -> None:
    """Follow one job as the page does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"GET /api/jobs/{job}/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    )
    try:
        while line := await reader.readline():
            load.events += line.startswith(b"event: metrics")
    finally:
        writer.close()


async def _ping(load: Load) -> None:
    """Measure how long a process beside the server, such as the watch, takes to answer."""
    argv = [sys.executable, "-c", "import time\nwhile input():\n    print(flush=True)"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None
    try:
        while True:
            sent = time.perf_counter()
            process.stdin.write(b"x\n")
            await process.stdout.readline()
            load.pings.append(1000 * (time.perf_counter() - sent))
            await asyncio.sleep(0.1)
    finally:
        process.kill()
        process.stdin.close()
        await process.wait()


async def _posts(
    process: psutil.Process, port: int, home: Path, jobs: list[str], rate: float, count: int, load: Load
) -> None:
    """Let a client of each job post, and measure what that costs the server."""
    before, begun = process.cpu_times(), time.monotonic()
    tasks = (_client(port, home, job, rate, count, load, n / len(jobs) / rate) for n, job in enumerate(jobs))
    await asyncio.gather(*tasks)
    after = process.cpu_times()
    load.wall_s = time.monotonic() - begun
    load.server_cpu_s = after.user + after.system - before.user - before.system


def bare_load(home: Path, *, clients: int, rate: float, seconds: float) -> Load:
    """Let so many clients post to `bare_server.py`, the peer: what the same posts cost without storing anything."""
    load = Load()
    process = subprocess.Popen([sys.executable, str(Path(bare_server.__file__))], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        answers(port)
        jobs = [f"jbare{number}" for number in range(clients)]
        asyncio.run(_posts(psutil.Process(process.pid), port, home, jobs, rate, int(rate * seconds), load))
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        process.stdout.close()
    return load


def run_load(home: Path, *, clients: int, rate: float, seconds: float, streams: int = 0) -> Load:
    """Let so many clients post at a rate for some seconds, and count what is in the store afterwards."""
    ctx, jobs = ready(home, clients)
    load, count = Load(), int(rate * seconds)
    token = TokenStore(ctx.home, ctx.clock).create("load", ["read"], 1)[1]

    async def life(process: psutil.Process, port: int) -> None:
        others = [asyncio.create_task(_stream(port, token, jobs[n % len(jobs)], load)) for n in range(streams)]
        others.append(asyncio.create_task(_ping(load)))
        await asyncio.sleep(0.5 if streams else 0)
        await _posts(process, port, home, jobs, rate, count, load)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    with served(home) as (process, port):
        asyncio.run(life(process, port))
    stored = sum(series.total for job in jobs for series in ctx.metrics.series(job))
    assert load.posts == clients * count, "a client gave up"
    assert stored == 3 * load.posts, f"{3 * load.posts - stored} of {3 * load.posts} values were lost"
    return load
