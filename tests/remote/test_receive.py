"""Receive files: resumed, verified, bounded, and never outside the destination."""

from __future__ import annotations

import errno
import hashlib
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import anyio
import pytest

from gpuwarden.core.errors import BadRequest, Conflict, NotFound, Unreachable
from gpuwarden.core.models import Artifact, Manifest
from gpuwarden.core.safe_names import STAGING
from gpuwarden.remote.transfer import destination
from gpuwarden.remote.transfer.file_bundle import COUNT, ROW
from gpuwarden.remote.transfer.receive import Progress, receive
from wording import Wording

pytestmark = pytest.mark.anyio


class NoWait:
    """A clock that only counts the seconds slept."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now(self) -> float:
        return sum(self.slept)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


class Far:
    """Files in memory, over a connection that can be cut after given numbers of bytes."""

    def __init__(self, files: dict[str, bytes], cuts: list[int] | None = None) -> None:
        self.files = files
        self.cuts = cuts or []
        self.sent = 0
        self.reads: list[tuple[str, int]] = []
        self.chunk = 1000

    async def read(self, artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        self.reads.append((artifact.path, offset))
        if artifact.path not in self.files:
            raise NotFound(f"{artifact.path} is gone")
        data = self.files[artifact.path]
        for at in range(offset, len(data), self.chunk):
            chunk = data[at : at + self.chunk]
            if self.cuts and self.sent + len(chunk) > self.cuts[0]:
                self.cuts.pop(0)
                raise Unreachable("the line was cut")
            self.sent += len(chunk)
            yield chunk

    def manifest(self) -> Manifest:
        rows = [
            Artifact(path=p, size=len(d), mtime_ns=10**18, sha256=hashlib.sha256(d).hexdigest())
            for p, d in self.files.items()
        ]
        return Manifest(taken_at=0, files=tuple(rows))


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


async def test_every_file_arrives_with_its_digest_and_time(tmp_path: Path) -> None:
    far = Far({"out/a.bin": noise(1, 5000), "out/empty": b"", "/data/b.bin": noise(2, 10)})
    seen: list[Progress] = []
    got = await receive(far, far.manifest(), tmp_path / "here", progress=seen.append)
    assert got.complete
    assert got.bytes_sent == 5010
    assert (tmp_path / "here/out/a.bin").read_bytes() == far.files["out/a.bin"]
    assert (tmp_path / "here/machine/data/b.bin").read_bytes() == far.files["/data/b.bin"]
    assert (tmp_path / "here/out/a.bin").stat().st_mtime_ns == 10**18
    assert seen[-1].bytes_done == seen[-1].bytes_total == 5010
    assert seen[-1].files_done == 3
    assert not list((tmp_path / "here" / STAGING).glob("*.part"))


async def test_a_second_pull_sends_nothing(tmp_path: Path) -> None:
    far = Far({"a": noise(1, 5000)})
    await receive(far, far.manifest(), tmp_path)
    again = await receive(far, far.manifest(), tmp_path)
    assert (again.bytes_sent, again.bytes_skipped, again.complete) == (0, 5000, True)


async def test_a_local_change_is_noticed_and_replaced(tmp_path: Path) -> None:
    far = Far({"a": noise(1, 5000)})
    await receive(far, far.manifest(), tmp_path)
    (tmp_path / "a").write_bytes(noise(3, 5000))
    again = await receive(far, far.manifest(), tmp_path)
    assert again.bytes_sent == 5000
    assert (tmp_path / "a").read_bytes() == far.files["a"]


async def test_a_cut_transfer_resumes_where_it_stopped(tmp_path: Path) -> None:
    far = Far({"a": noise(1, 100_000)}, cuts=[10_500, 40_500, 41_000, 99_900])
    clock = NoWait()
    got = await receive(far, far.manifest(), tmp_path, clock=clock)
    assert got.complete
    assert got.retries == 4
    assert far.sent == 100_000
    assert len(clock.slept) == 4


async def test_a_pull_without_progress_gives_up_and_the_next_pull_resumes(tmp_path: Path, wording: Wording) -> None:
    far = Far({"a": noise(1, 100_000)}, cuts=[50_000] * 6)
    with pytest.raises(Unreachable) as refused:
        await receive(far, far.manifest(), tmp_path, clock=NoWait(), tries=3)
    wording(refused, "50,000", "100,000")
    assert not (tmp_path / "a").exists()
    far.cuts.clear()
    got = await receive(far, far.manifest(), tmp_path)
    assert (got.bytes_resumed, got.bytes_sent, got.complete) == (50_000, 50_000, True)


async def test_a_stalled_transfer_is_retried(tmp_path: Path) -> None:
    far = Far({"a": noise(1, 3000)})
    plain = far.read

    async def stalls_once(artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        async for chunk in plain(artifact, offset):
            yield chunk
            if offset == 0:
                await anyio.sleep_forever()

    far.read = stalls_once  # type: ignore[method-assign]
    got = await receive(far, far.manifest(), tmp_path, stall_s=0.05, clock=NoWait())
    assert got.complete
    assert got.retries == 1


async def test_a_corrupt_part_is_fetched_again(tmp_path: Path) -> None:
    far = Far({"a": noise(1, 50_000)}, cuts=[20_000] * 3)
    with pytest.raises(Unreachable):
        await receive(far, far.manifest(), tmp_path, clock=NoWait(), tries=1)
    (part,) = (tmp_path / STAGING).glob("*.part")
    part.write_bytes(b"\0" * part.stat().st_size)
    far.cuts.clear()
    got = await receive(far, far.manifest(), tmp_path)
    assert got.complete
    assert got.bytes_resumed == 0
    assert (tmp_path / "a").read_bytes() == far.files["a"]


@pytest.mark.parametrize("change", ["grew", "shrank", "rewritten", "vanished"])
async def test_a_file_that_changed_since_the_manifest_is_a_problem_and_the_rest_arrives(
    tmp_path: Path, change: str
) -> None:
    far = Far({"a": noise(1, 5000), "b": noise(2, 5000)})
    manifest = far.manifest()
    match change:
        case "grew":
            far.files["a"] = noise(9, 6000)
        case "shrank":
            far.files["a"] = far.files["a"][:4000]
        case "rewritten":
            far.files["a"] = noise(9, 5000)
        case "vanished":
            del far.files["a"]
    got = await receive(far, manifest, tmp_path, clock=NoWait())
    assert not got.complete
    assert [p.path for p in got.problems] == ["a"]
    assert [f.path for f in got.files] == ["b"]
    assert not (tmp_path / "a").exists()


async def test_a_newer_version_never_continues_an_older_part(tmp_path: Path) -> None:
    far = Far({"a": noise(1, 50_000)}, cuts=[20_000])
    with pytest.raises(Unreachable):
        await receive(far, far.manifest(), tmp_path, clock=NoWait(), tries=1)
    far.files["a"] = noise(2, 50_000)
    got = await receive(far, far.manifest(), tmp_path)
    assert (got.bytes_sent, got.complete) == (50_000, True)


HOSTILE = [
    "../up",
    "a/../../up",
    "/../up",
    "a\nb",
    "a\x00b",
    "a//b",
    ".",
    "a/",
    f"{STAGING}/lock",
    "machine/x",
    "x" * 300,
]


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_name_is_refused_and_the_rest_arrives(tmp_path: Path, name: str) -> None:
    far = Far({name: b"evil", "ok": b"fine"})
    got = await receive(far, far.manifest(), tmp_path / "in" / "here")
    assert [p.path for p in got.problems] == [name]
    assert [f.path for f in got.files] == ["ok"]
    assert not list(tmp_path.rglob("up"))


async def test_a_link_in_the_destination_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    dest = tmp_path / "dest"
    dest.mkdir()
    (dest / "sub").symlink_to(outside)
    (outside / "file").write_bytes(b"mine")
    (dest / "leaf").symlink_to(outside / "file")
    far = Far({"sub/x": b"evil", "leaf": b"new"})
    got = await receive(far, far.manifest(), dest)
    assert [p.path for p in got.problems] == ["sub/x"]
    assert (outside / "file").read_bytes() == b"mine"
    assert not (dest / "leaf").is_symlink()
    assert [p.name for p in outside.iterdir()] == ["file"]


async def test_a_linked_staging_tree_is_refused_and_linked_files_are_not_used(tmp_path: Path, wording: Wording) -> None:
    outside, far = tmp_path / "outside", Far({"a": b"four", "sub/b": b"five"})
    (outside / "sub").mkdir(parents=True)
    (outside / "a").write_bytes(b"MINE")
    (outside / "sub/b").write_bytes(b"MINE")
    staging = tmp_path / "dest" / STAGING
    staging.mkdir(parents=True)
    (staging / "tree").symlink_to(outside)
    with pytest.raises(BadRequest) as refused:
        await receive(far, far.manifest(), tmp_path / "dest")
    wording(refused)
    (staging / "tree").unlink()
    (staging / "tree").mkdir()
    (staging / "tree/sub").symlink_to(outside / "sub")
    got = await receive(far, far.manifest(), tmp_path / "dest")
    assert got.complete
    assert (outside / "a").read_bytes() == (outside / "sub/b").read_bytes() == b"MINE"


async def test_names_that_collide_on_this_disk_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destination, "folds_names", lambda _: True)
    far = Far({"Model.pt": b"one", "model.pt": b"two", "caf\u00e9": b"3", "cafe\u0301": b"4"})
    got = await receive(far, far.manifest(), tmp_path)
    assert [f.path for f in got.files] == ["Model.pt", "caf\u00e9"]
    assert len(got.problems) == 2


async def test_a_file_and_a_folder_of_the_same_name(tmp_path: Path) -> None:
    far = Far({"a": b"file", "a/b": b"below"})
    got = await receive(far, far.manifest(), tmp_path, parallel=1)
    assert len(got.files) == len(got.problems) == 1


async def test_a_disk_too_small_is_refused_before_sending(tmp_path: Path, wording: Wording) -> None:
    huge = Manifest(taken_at=0, files=(Artifact(path="a", size=1 << 60, sha256="0" * 64),))
    far = Far({})
    with pytest.raises(BadRequest) as refused:
        await receive(far, huge, tmp_path)
    wording(refused)
    assert not far.reads


async def test_a_second_receiver_is_a_conflict(tmp_path: Path, wording: Wording) -> None:
    far = Far({"a": noise(1, 5000)})
    started = anyio.Event()
    go = anyio.Event()
    plain = far.read

    async def slow(artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        started.set()
        await go.wait()
        async for chunk in plain(artifact, offset):
            yield chunk

    far.read = slow  # type: ignore[method-assign]
    async with anyio.create_task_group() as group:
        group.start_soon(receive, far, far.manifest(), tmp_path)
        await started.wait()
        with pytest.raises(Conflict) as refused:
            await receive(far, far.manifest(), tmp_path)
        wording(refused)
        go.set()
    assert (tmp_path / "a").read_bytes() == far.files["a"]


# ------------------------------------------------------------------------------------------------------- small files


def together(packed: Sequence[tuple[int, bytes]]) -> bytes:
    """Pack some files of a bundle as the machine sends them. No files mark the end of the bundle."""
    rows = [ROW.pack(number, len(data), 0, 0, hashlib.sha256(data).digest()) for number, data in packed]
    return b"".join([COUNT.pack(len(rows)), *rows, *(data for _, data in packed)])


class Packing(Far):
    """A machine that can also send bundles. `extra` files are added, and `spoil` changes the stream."""

    def __init__(self, files: dict[str, bytes], cuts: list[int] | None = None) -> None:
        super().__init__(files, cuts)
        self.bundles = 0
        self.extra: list[tuple[int, bytes]] = []
        self.spoil: Callable[[bytes], bytes] = lambda data: data

    async def bundle(self, artifacts: Sequence[Artifact]) -> AsyncIterator[bytes]:
        self.bundles += 1
        there = [(n, self.files[a.path]) for n, a in enumerate(artifacts) if a.path in self.files]
        packed = [*self.extra, *there]
        some = [packed[at : at + 7] for at in range(0, len(packed), 7)]
        data = self.spoil(b"".join(map(together, some)) + together([]))
        for at in range(0, len(data), self.chunk):
            chunk = data[at : at + self.chunk]
            if self.cuts and self.sent + len(chunk) > self.cuts[0]:
                self.cuts.pop(0)
                raise Unreachable("the line was cut")
            self.sent += len(chunk)
            yield chunk


def many(count: int = 300) -> dict[str, bytes]:
    return {f"d{n % 7}/f{n}": noise(n, n * 7 % 3000) for n in range(count)}


async def test_small_files_come_as_one_stream(tmp_path: Path) -> None:
    far = Packing(many() | {"large": noise(1, 2 << 20)})
    far.chunk = 70_000
    got = await receive(far, far.manifest(), tmp_path)
    assert got.complete
    assert got.bytes_sent == sum(map(len, far.files.values()))
    assert far.bundles == 1
    assert {p for p, _ in far.reads} == {"large"}
    for path, data in far.files.items():
        assert (tmp_path / path).read_bytes() == data
    assert (tmp_path / "d1/f1").stat().st_mtime_ns == 10**18
    assert not list((tmp_path / STAGING).glob("*.part"))
    again = await receive(far, far.manifest(), tmp_path)
    assert (again.bytes_sent, far.bundles) == (0, 1)


async def test_a_cut_bundle_keeps_the_received_files(tmp_path: Path) -> None:
    far = Packing(many(), cuts=[50_000, 120_000, 250_000])
    got = await receive(far, far.manifest(), tmp_path, clock=NoWait())
    assert got.complete
    assert got.retries == 3
    assert got.bytes_sent == sum(map(len, far.files.values()))
    assert not far.reads


async def test_a_bundle_that_stays_cut_gives_up(tmp_path: Path) -> None:
    far = Packing(many(20), cuts=[0] * 99)
    with pytest.raises(Unreachable):
        await receive(far, far.manifest(), tmp_path, clock=NoWait(), tries=2)


async def test_unrequested_members_are_dropped(tmp_path: Path) -> None:
    far = Packing({f"f{n}": noise(n, 100) for n in range(10)})
    far.extra = [(99, b"evil"), (2**32 - 1, b"evil"), (0, bytes(100)), (1, b"wrong size"), (2, b"")]
    got = await receive(far, far.manifest(), tmp_path / "in")
    assert got.complete
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file() and p.name != "lock") == sorted(far.files)


class Endless(Packing):
    """A machine whose bundle never ends."""

    async def bundle(self, artifacts: Sequence[Artifact]) -> AsyncIterator[bytes]:
        while True:
            yield together([(99, bytes(1 << 20))])
            await anyio.sleep(0)


async def test_an_endless_bundle_is_abandoned(tmp_path: Path) -> None:
    far = Endless({f"f{n}": noise(n, 100) for n in range(10)})
    got = await receive(far, far.manifest(), tmp_path)
    assert got.complete
    assert len(far.reads) == 10


async def test_missing_and_changed_bundle_members_are_explained(tmp_path: Path, wording: Wording) -> None:
    far = Packing({f"f{n}": noise(n, 100) for n in range(10)})
    manifest = far.manifest()
    del far.files["f3"]
    far.files["f4"] = b"other"
    got = await receive(far, manifest, tmp_path)
    f3, f4 = got.problems
    assert (f3.path, f4.path) == ("f3", "f4")
    wording(f3.why, "f3")
    wording(f4.why)
    assert len(got.files) == 8


@pytest.mark.parametrize(
    "spoil", [lambda d: b"<html>" * 500, lambda d: d[:700] + b"\xff" * 600 + d[1300:], lambda d: d[:5000]]
)
async def test_a_corrupt_bundle_loses_no_file(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    far = Packing({f"f{n}": noise(n, 1000) for n in range(10)})
    far.spoil = spoil
    got = await receive(far, far.manifest(), tmp_path, clock=NoWait())
    assert got.complete
    assert far.reads


async def test_a_small_file_that_cannot_be_stored_is_a_problem_and_the_rest_arrives(tmp_path: Path) -> None:
    """If a file name could fail a pull, a machine could keep its proof incomplete and continue to bill."""
    endless = "/".join(["d" * 250] * 17)
    far = Packing({"a/b": b"below", "a": b"file", endless: b"long", "good": b"fine", "good2": b"fine"})
    got = await receive(far, far.manifest(), tmp_path)
    problems = {p.path for p in got.problems}
    assert problems > {endless} and problems <= {endless, "a", "a/b"}
    assert {"good", "good2"} <= {f.path for f in got.files}
    assert all(Path(f.local).read_bytes() == far.files[f.path] for f in got.files)


@pytest.mark.parametrize("reason", [errno.EIO, errno.ENOSPC])
async def test_a_partly_written_small_file_gets_no_final_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int, wording: Wording
) -> None:
    far = Packing({"a": noise(1, 500), "b": noise(2, 500), "c": noise(3, 500)})
    plain, sizes = os.write, iter([250, 0])

    def fails(fd: int, data: bytes) -> int:
        size = next(sizes, None)
        if size == 0:
            raise OSError(reason, os.strerror(reason))
        return plain(fd, data[:size])

    monkeypatch.setattr(os, "write", fails)
    if reason == errno.ENOSPC:
        with pytest.raises(BadRequest) as refused:
            await receive(far, far.manifest(), tmp_path)
        wording(refused)
        assert not (tmp_path / "a").exists()
    else:
        got = await receive(far, far.manifest(), tmp_path)
        assert got.complete and got.bytes_sent == 1500
