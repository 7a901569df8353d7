"""Load from many trainers: a real `gpuwarden serve` in another process, and clients that post as trainers do."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import psutil

from doors import environment
from gpuwarden.app import open_context
from gpuwarden.core.models import JobSpec
from gpuwarden.interfaces.http.contract.live import MAX_EACH
from gpuwarden.interfaces.http.tokens import TokenStore
from gpuwarden.job_tokens import job_token
from gpuwarden.ledger.events import JobAccepted
from gpuwarden.lifecycle.context import Context
from waiting import eventually


@dataclass
class Load:
    """Counts of a run. `bench/metrics.py` overrides `post` and `posting` to measure."""

    posts: int = 0
    refused: int = 0
    events: int = 0

    @contextmanager
    def post(self) -> Iterator[None]:
        """Wrap one post, from its first byte to its answer."""
        yield
        self.posts += 1

    @asynccontextmanager
    async def posting(self, server: psutil.Process) -> AsyncIterator[None]:
        """Wrap all posts to a server."""
        yield


@contextmanager
def served(home: Path, port: int = 0, more: tuple[str, ...] = ()) -> Iterator[tuple[psutil.Process, int]]:
    """Run the command until the block ends; yield its process and its port."""
    argv = [sys.executable, "-m", "gpuwarden", "serve", "--no-watch", "--port", str(port), *more]
    process = subprocess.Popen(argv, env=environment(home), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stderr is not None
    draining: Thread | None = None
    try:
        line = process.stderr.readline().decode()
        assert "http://localhost:" in line, line
        found = int(line.partition("localhost:")[2].partition(" ")[0])
        draining = Thread(target=process.stderr.read)  # a full pipe would block the server
        draining.start()
        answers(found)
        yield psutil.Process(process.pid), found
    finally:
        process.terminate()
        process.wait()
        if draining is not None:
            draining.join()
        process.stderr.close()


def answers(port: int) -> None:
    """Wait until a server answers on a port."""

    def look() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as one:
            one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return one.recv(12).startswith(b"HTTP/1.1")
        return False

    eventually(look, 60)  # a server's imports take seconds


def ready(home: Path, jobs: int) -> tuple[Context, list[str]]:
    """Create a state folder with jobs that may report."""
    ctx = open_context("test", env=environment(home))
    names = [f"jload{number}" for number in range(jobs)]
    for name in names:
        ctx.ledger.add(f"job/{name}", JobAccepted(spec=JobSpec(platform="local", command=("true",))))
    return ctx, names


async def _client(port: int, home: Path, job: str, rate: float, count: int, load: Load, offset: float) -> None:
    """Post as a trainer does: one point at a time on a persistent connection, retrying unanswered posts."""
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
        with load.post():
            writer.write(f"{head}{len(body)}\r\n\r\n{body}".encode())
            answer = await reader.readuntil(b"\r\n\r\n")
            size = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(size)
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


async def post_all(
    process: psutil.Process, port: int, home: Path, jobs: list[str], rate: float, count: int, load: Load
) -> None:
    """Post `count` points per job to a server, with one client per job."""
    tasks = (_client(port, home, job, rate, count, load, n / len(jobs) / rate) for n, job in enumerate(jobs))
    async with load.posting(process):
        await asyncio.gather(*tasks)


def run_load(home: Path, load: Load, *, clients: int, rate: float, seconds: float, streams: int = 0) -> None:
    """Post at `rate` points per second from each client, then check that every value was stored."""
    ctx, jobs = ready(home, clients)
    count = int(rate * seconds)
    store = TokenStore(ctx.home, ctx.clock)
    tokens = [store.create(f"load{n}", ["read"], 1)[1] for n in range(1 + streams // MAX_EACH)]

    async def life(process: psutil.Process, port: int) -> None:
        others = [
            asyncio.create_task(_stream(port, tokens[n // MAX_EACH], jobs[n % len(jobs)], load)) for n in range(streams)
        ]
        await asyncio.sleep(0.5 if streams else 0)
        await post_all(process, port, home, jobs, rate, count, load)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    with served(home) as (process, port):
        asyncio.run(life(process, port))
    stored = sum(series.total for job in jobs for series in ctx.metrics.series(job))
    assert load.posts == clients * count, "a client gave up"
    assert stored == 3 * load.posts, f"{3 * load.posts - stored} of {3 * load.posts} values were lost"
