"""The proof of the cut line: a proxy on loopback cuts every connection, again and again, at random points."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from contract_backend import ended, shell
from cutting import CuttingProxy, NoWait, proxy_fixture  # noqa: F401
from gpuwarden.backends.base import source
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.errors import Unreachable
from gpuwarden.core.models import Handle, Known, Place
from gpuwarden.core.states import Job
from gpuwarden.remote.receive import receive
from sshd import Sshd, sshd_fixture  # noqa: F401

pytestmark = pytest.mark.anyio


@pytest.fixture
def backend(sshd: Sshd) -> Iterator[SshBackend]:
    ssh = SshBackend(NoWait(), config=sshd.config)
    yield ssh
    anyio.run(ssh.aclose)


def far(proxy: CuttingProxy, tmp_path: Path) -> Place:
    return Place(platform="ssh", host="127.0.0.1", port=proxy.port, run_root=str(tmp_path / "runs"))


async def outputs(backend: SshBackend, place: Place, large: int, small: int) -> Handle:
    """A finished job with one large file and many small ones."""
    text = f"mkdir o; head -c {large} /dev/urandom > o/large; "
    text += f"for i in $(seq {small}); do head -c 2000 /dev/urandom > o/$i; done"
    handle = await backend.submit(shell(text, outputs=["o"]), place, "t-cuts", secrets={})
    assert (await ended(backend, handle)).state is Job.SUCCEEDED
    return handle


async def cut_pull(
    backend: SshBackend, proxy: CuttingProxy, tmp_path: Path, *, cuts: int, large: int, small: int
) -> None:
    handle = await outputs(backend, far(proxy, tmp_path), large, small)
    manifest = await backend.manifest(handle, ["o"])
    rng = random.Random(7)
    points = iter([rng.randrange(20_000, 2 * manifest.bytes // cuts) for _ in range(cuts)])
    before = proxy.down
    proxy.arm(lambda: next(points, None))
    got = await receive(source(backend, handle), manifest, tmp_path / "here", clock=NoWait(), tries=50, parallel=2)
    crossed = proxy.down - before
    assert got.complete
    assert proxy.cuts >= cuts * 3 // 4
    assert got.bytes_sent <= manifest.bytes * 1.05
    for file in got.files:
        assert Path(file.local).read_bytes() == (Path(handle.run_dir) / "work" / file.path).read_bytes()
    print(f"{proxy.cuts} cuts; {manifest.bytes:,} bytes of files, {got.bytes_sent:,} taken, {crossed:,} on the wire")


async def test_a_pull_goes_on_after_every_cut(backend: SshBackend, proxy: CuttingProxy, tmp_path: Path) -> None:
    await cut_pull(backend, proxy, tmp_path, cuts=6, large=12_000_000, small=60)


@pytest.mark.prove
async def test_a_pull_cut_a_hundred_times(backend: SshBackend, proxy: CuttingProxy, tmp_path: Path) -> None:
    await cut_pull(backend, proxy, tmp_path, cuts=100, large=200_000_000, small=1500)


async def launch_through_cuts(backend: SshBackend, proxy: CuttingProxy, tmp_path: Path, cuts: int) -> None:
    """Push, launch and poll with the line cut at random: the job runs once, whatever reply was lost."""
    place = far(proxy, tmp_path)
    rng = random.Random(11)
    left = [int(10 ** rng.uniform(2.5, 5.7)) for _ in range(cuts)]
    proxy.arm(lambda: left.pop() if left else None)
    spec = shell("echo run >> ../count; sleep 0.2; cat ../count")
    job, handle, asked = 0, None, 0
    while left or job == 0:
        handle = None
        while handle is None:
            asked += 1
            try:
                handle = await backend.submit(spec, place, f"t-{job}", secrets={"KEY": "k" * 20})
            except Unreachable:
                found = await backend.find(place, f"t-{job}")
                handle = found.value if isinstance(found, Known) else None
        end = time.monotonic() + 30
        state = Job.UNKNOWN
        while state is not Job.SUCCEEDED and time.monotonic() < end:
            try:
                state = (await backend.poll([handle]))[handle.token].state
                assert state in {Job.RUNNING, Job.SUCCEEDED}
            except Unreachable:
                continue
        assert state is Job.SUCCEEDED
        assert (Path(handle.run_dir) / "count").read_text() == "run\n"
        job += 1
    print(f"{proxy.cuts} cuts, {job} jobs, {asked} submits")
    assert proxy.cuts >= cuts


async def test_a_job_is_launched_once_through_cuts(backend: SshBackend, proxy: CuttingProxy, tmp_path: Path) -> None:
    await launch_through_cuts(backend, proxy, tmp_path, 8)


@pytest.mark.prove
async def test_jobs_are_launched_once_through_a_hundred_cuts(
    backend: SshBackend, proxy: CuttingProxy, tmp_path: Path
) -> None:
    await launch_through_cuts(backend, proxy, tmp_path, 100)
