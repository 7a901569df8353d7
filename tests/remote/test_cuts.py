"""Transfers over cut connections: a loopback proxy cuts each connection at random points, again and again."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import pytest

from contract_backend import ended, shell
from cutting import CuttingProxy, NoWait
from gpuwarden.backends.base import list_artifacts, source
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.errors import Unreachable
from gpuwarden.core.models import Handle, Known, Place
from gpuwarden.core.states import Job
from gpuwarden.remote.ssh.config import resolve
from gpuwarden.remote.ssh.machine import Ssh
from gpuwarden.remote.transfer.receive import Received, receive
from gpuwarden.remote.transfer.upload import push
from gpuwarden.remote.transfer.upload_stream import TRUSTING_SHARE
from real_parts import amount
from sshd import Sshd
from waiting import soon

pytestmark = pytest.mark.anyio
T = TypeVar("T")


@pytest.fixture
def backend(sshd: Sshd) -> Iterator[SshBackend]:
    ssh = SshBackend(NoWait(), config=sshd.config)
    yield ssh
    anyio.run(ssh.aclose)


def far(proxy: CuttingProxy, tmp_path: Path) -> Place:
    return Place(platform="ssh", host="127.0.0.1", port=proxy.port, run_root=str(tmp_path / "runs"))


async def outputs(backend: SshBackend, place: Place, large: int, small: int) -> Handle:
    """Return a finished job with one large file and many small ones."""
    text = f"mkdir o; head -c {large} /dev/urandom > o/large; "
    text += f"for i in $(seq {small}); do head -c 2000 /dev/urandom > o/$i; done"
    handle = await backend.submit(shell(text, outputs=["o"]), place, "t-cuts", secrets={})
    assert (await ended(backend, handle)).state is Job.SUCCEEDED
    return handle


async def cut_pull(
    backend: SshBackend, proxy: CuttingProxy, tmp_path: Path, *, cuts: int, large: int, small: int
) -> None:
    handle = await outputs(backend, far(proxy, tmp_path), large, small)
    listed = await list_artifacts(backend, handle, ["o"])
    rng = random.Random(7)
    points = iter([rng.randrange(20_000, 2 * listed.bytes // cuts) for _ in range(cuts)])
    before = proxy.down
    proxy.arm(lambda: next(points, None))
    got = await receive(source(backend, handle), listed, tmp_path / "here", clock=NoWait(), tries=50, parallel=2)
    crossed = proxy.down - before
    assert got.complete
    assert proxy.cuts >= cuts * 3 // 4
    assert got.bytes_sent <= listed.bytes * 1.05
    same(got, handle)
    print(f"{proxy.cuts} cuts; {listed.bytes:,} bytes of files, {got.bytes_sent:,} taken, {crossed:,} on the wire")


def same(got: Received, handle: Handle) -> None:
    """Assert that each received file equals the one on the machine and that its digest was compared."""
    assert got.complete
    for file in got.files:
        data = (Path(handle.run_dir) / "work" / file.path).read_bytes()
        assert Path(file.local).read_bytes() == data
        assert file.sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.slow
async def test_a_pull_resumes_after_every_cut(backend: SshBackend, proxy: CuttingProxy, tmp_path: Path) -> None:
    await cut_pull(backend, proxy, tmp_path, cuts=6, large=12_000_000, small=60)


@pytest.mark.prove
@pytest.mark.endurance
async def test_a_pull_cut_a_hundred_times(backend: SshBackend, proxy: CuttingProxy, tmp_path: Path) -> None:
    cuts = amount(20, 100)
    await cut_pull(backend, proxy, tmp_path, cuts=cuts, large=cuts * 2_000_000, small=cuts * 15)


async def succeeded(backend: SshBackend, handle: Handle) -> bool:
    """Poll once. Return whether the job has succeeded; False if the connection is lost."""
    try:
        state = (await backend.poll([handle]))[handle.token].state
    except Unreachable:
        return False
    assert state in {Job.RUNNING, Job.SUCCEEDED}
    return state is Job.SUCCEEDED


async def launch_through_cuts(backend: SshBackend, proxy: CuttingProxy, tmp_path: Path, cuts: int) -> None:
    """Push, launch, and poll while the connection is cut at random. The job runs once, whichever reply is lost."""
    place = far(proxy, tmp_path)
    rng = random.Random(11)
    proxy.arm(lambda: int(10 ** rng.uniform(2.5, 5.2)) if proxy.cuts < cuts else None)  # a job transfers few bytes
    spec = shell("echo run >> ../count; sleep 0.2; cat ../count")
    job, handle, asked = 0, None, 0
    while proxy.cuts < cuts:  # a connection that ended before its cut doesn't count
        handle = None
        while handle is None:
            asked += 1
            try:
                handle = await backend.submit(spec, place, f"t-{job}", secrets={"KEY": "k" * 20})
            except Unreachable:
                found = await backend.find(place, f"t-{job}")
                handle = found.value if isinstance(found, Known) else None
        await soon(partial(succeeded, backend, handle))
        assert (Path(handle.run_dir) / "count").read_text() == "run\n"
        job += 1
    print(f"{proxy.cuts} cuts, {job} jobs, {asked} submits")


@pytest.mark.slow
async def test_a_job_is_launched_once_despite_cuts(backend: SshBackend, proxy: CuttingProxy, tmp_path: Path) -> None:
    await launch_through_cuts(backend, proxy, tmp_path, 8)


@pytest.mark.prove
@pytest.mark.endurance
async def test_jobs_are_launched_once_despite_a_hundred_cuts(
    backend: SshBackend, proxy: CuttingProxy, tmp_path: Path
) -> None:
    await launch_through_cuts(backend, proxy, tmp_path, amount(25, 100))


# ---------------------------------------------------------------------------------------------- the whole lifecycle


@dataclass
class Course:
    """A job over a connection that is cut again and again: push its input, launch, poll, and pull its outputs."""

    backend: SshBackend
    proxy: CuttingProxy
    place: Place
    here: Path
    cuts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("push", "launch", "poll", "pull"), 0))
    clean: int = 0
    crossed: int = 0

    async def stage(self, name: str, points: list[int], work: Callable[[], Awaitable[T]], again: bool = False) -> T:
        """Run a stage while the connection is cut after each of `points` bytes; `again` retries until all are used."""
        before = self.proxy.cuts
        self.proxy.arm(lambda: points.pop() if points else None)
        try:
            while True:
                try:
                    done = await work()
                except Unreachable:
                    if not again:
                        raise
                else:
                    if not points or not again:
                        return done
        finally:
            self.proxy.arm(lambda: None)
            self.cuts[name] += self.proxy.cuts - before

    async def run(self, number: int, size: int, cuts: int, rng: random.Random) -> None:
        def points(most: int) -> list[int]:
            return [int(10 ** rng.uniform(2.5, math.log10(most))) for _ in range(cuts)]

        machine = Ssh(
            resolve("127.0.0.1", port=self.proxy.port, config=self.backend._config), config=self.backend._config
        )
        try:
            model = self.here / f"model-{number}"
            model.write_bytes(rng.randbytes(size))
            folder = f"{self.place.run_root}/inputs-{number}"
            even = [rng.randrange(20_000, 2 * size // cuts) for _ in range(cuts)]
            pushed = await self.stage(
                "push", even, lambda: push(machine, {"model": model}, folder, clock=NoWait(), tries=50)
            )
        finally:
            await machine.aclose()
        text = f"echo run >> ../count; mkdir o; cp {folder}/model o/large; for i in $(seq 40); do echo $i > o/$i; done"
        spec = shell(text, outputs=["o"])

        async def launch() -> Handle:
            return await self.backend.submit(spec, self.place, f"t-{number}", secrets={"KEY": "k" * 20})

        handle = await self.stage("launch", points(400_000), launch, again=True)

        async def poll() -> Job:
            return (await self.backend.poll([handle]))[handle.token].state

        state = await self.stage("poll", points(20_000), poll, again=True)
        assert state in {Job.RUNNING, Job.SUCCEEDED}
        await soon(partial(succeeded, self.backend, handle))
        assert (Path(handle.run_dir) / "count").read_text() == "run\n"
        listed = await list_artifacts(self.backend, handle, ["o"])
        even = [rng.randrange(20_000, 2 * size // cuts) for _ in range(cuts)]
        got = await self.stage(
            "pull",
            even,
            lambda: receive(
                source(self.backend, handle), listed, self.here / f"out-{number}", clock=NoWait(), tries=50, parallel=2
            ),
        )
        same(got, handle)
        assert (self.here / f"out-{number}/o/large").read_bytes() == model.read_bytes()
        self.clean += size + listed.bytes
        self.crossed += pushed.bytes_sent + got.bytes_sent
        # Until the first cut, up to an eighth of the pushed bytes may be in flight, and is lost with the connection.
        assert pushed.bytes_sent <= size * (1 + 1 / TRUSTING_SHARE) and got.bytes_sent <= listed.bytes * 1.05


async def whole_course(
    backend: SshBackend, proxy: CuttingProxy, tmp_path: Path, jobs: int, cuts: int, size: int
) -> None:
    course = Course(backend, proxy, far(proxy, tmp_path), tmp_path)
    for number in range(jobs):
        await course.run(number, size, cuts, random.Random(f"course {number}"))
    again = course.crossed / course.clean - 1
    print(f"cuts {course.cuts}; {course.clean:,} bytes pushed and pulled, {again:.2%} of them again")
    assert sum(course.cuts.values()) >= jobs * cuts * 4 * 3 // 4
    assert min(course.cuts.values()) >= jobs * cuts // 2


@pytest.mark.slow
async def test_a_job_completes_despite_cuts(backend: SshBackend, proxy: CuttingProxy, tmp_path: Path) -> None:
    await whole_course(backend, proxy, tmp_path, jobs=1, cuts=2, size=8_000_000)


@pytest.mark.long
@pytest.mark.prove
@pytest.mark.endurance
async def test_jobs_complete_despite_a_hundred_cuts(backend: SshBackend, proxy: CuttingProxy, tmp_path: Path) -> None:
    """The full version makes at least 100 cuts, spread over push, launch, poll, and pull."""
    await whole_course(backend, proxy, tmp_path, jobs=amount(2, 7), cuts=5, size=20_000_000)
