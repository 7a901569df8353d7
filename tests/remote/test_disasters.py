"""Failures on real machines during a transfer: full disks, files that change, and shells that print."""

from __future__ import annotations

import getpass
import hashlib
import os
import random
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from contract_backend import ended, shell
from gpuwarden.backends.base import SealingSource, list_artifacts, source
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.checkpoints.sealing import seal_log
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import BadReply, BadRequest
from gpuwarden.core.models import Artifact, Handle, Place
from gpuwarden.core.safe_names import STAGING
from gpuwarden.core.states import Job
from gpuwarden.lifecycle.artifacts.seal_keys import job_key, with_authentic_seals
from gpuwarden.lifecycle.context import Context
from gpuwarden.remote.ssh.config import resolve
from gpuwarden.remote.ssh.machine import Ssh
from gpuwarden.remote.transfer.partial_file import part_name
from gpuwarden.remote.transfer.receive import receive
from gpuwarden.remote.transfer.upload import push
from real_parts import need
from sshd import PATH, Sshd
from wording import Wording

pytestmark = pytest.mark.anyio


@pytest.fixture
def backend(sshd: Sshd) -> Iterator[SshBackend]:
    ssh = SshBackend(SystemClock(), config=sshd.config)
    yield ssh
    anyio.run(ssh.aclose)


@pytest.fixture
async def box(sshd: Sshd) -> AsyncIterator[Ssh]:
    ssh = Ssh(resolve("box", config=sshd.config), config=sshd.config)
    yield ssh
    await ssh.aclose()


async def job(backend: SshBackend, tmp_path: Path, text: str) -> Handle:
    """Return a finished job with outputs in `o`."""
    place = Place(platform="ssh", host="box", run_root=str(tmp_path / "runs"))
    handle = await backend.submit(shell(f"mkdir o; {text}", outputs=["o"]), place, "t-job", secrets={})
    assert (await ended(backend, handle)).state is Job.SUCCEEDED
    return handle


@dataclass(frozen=True)
class Meddling(SealingSource):
    """A real source that calls `meddle`, which changes one of the two machines, before the bytes arrive."""

    meddle: Callable[[], object]

    def bundle(self, artifacts: Sequence[Artifact]) -> AsyncIterator[bytes]:
        self.meddle()
        return super().bundle(artifacts)

    async def pour(self, artifact: Artifact, offset: int, take: Callable[[memoryview], object]) -> str | None:
        self.meddle()
        return await super().pour(artifact, offset, take)


# ------------------------------------------------------------------------------------------------------ full disks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "text", "fill"),
    [
        ("size=40m", "head -c 9000000 /dev/urandom > o/large", lambda d: (d / "other").write_bytes(bytes(34 << 20))),
        ("size=40m", "for i in 1 2 3 4 5 6 7 8 9; do head -c 900000 /dev/urandom > o/$i; done",
         lambda d: (d / "other").write_bytes(bytes(34 << 20))),
        ("size=40m,nr_inodes=400", "for i in $(seq 250); do echo $i > o/$i; done",
         lambda d: [(d / f"other{n}").touch() for n in range(200)]),
    ],
    ids=["one large file", "small files", "inodes"],
)  # fmt: skip
async def test_a_disk_full_during_a_pull_is_reported_and_the_next_pull_resumes(
    backend: SshBackend,
    tmp_path: Path,
    disk: Callable[[str], Path],
    options: str,
    text: str,
    fill: Callable[[Path], object],
    wording: Wording,
) -> None:
    handle = await job(backend, tmp_path, text)
    listed = await list_artifacts(backend, handle, ["o"])
    folder = disk(options)
    here = folder / "here"
    full = Meddling(backend, handle, lambda: fill(folder))
    with pytest.raises(BadRequest) as refused:
        await receive(full, listed, here)
    wording(refused)
    for other in folder.glob("other*"):
        other.unlink()
    got = await receive(source(backend, handle), listed, here)
    assert got.complete
    assert got.bytes_sent < listed.bytes
    for file in listed.files:
        assert (here / file.path).read_bytes() == (Path(handle.run_dir) / "work" / file.path).read_bytes()
    assert [p.name for p in (here / STAGING).iterdir()] == ["lock"]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "files", "size"), [("size=24m", 1, 30_000_000), ("nr_inodes=30", 60, 10)])
async def test_a_disk_full_during_a_push_is_reported_and_the_next_push_resumes(
    box: Ssh, tmp_path: Path, disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch,
    options: str, files: int, size: int, wording: Wording,
) -> None:  # fmt: skip
    """The free space check is disabled, because another process may use the free space a moment later."""
    monkeypatch.setattr("gpuwarden.remote.transfer.upload._Push._check_room", lambda *numbers, files: None)
    far = disk(options)
    names: dict[str, Path] = {}
    for n in range(files):
        names[f"f{n}"] = tmp_path / f"f{n}"
        names[f"f{n}"].write_bytes(random.Random(n).randbytes(size))
    with pytest.raises(BadRequest) as refused:
        await push(box, names, str(far / "in"))
    wording(str(refused.value).partition(":")[0])
    subprocess.run(["mount", "-o", "remount,size=64m,nr_inodes=400", str(far)], check=True, timeout=300)
    again = await push(box, names, str(far / "in"))
    assert again.bytes_resumed + again.bytes_skipped > 0
    for name, path in names.items():
        assert (far / "in" / name).read_bytes() == path.read_bytes()


@pytest.mark.slow
async def test_too_few_inodes_are_refused_before_sending(
    box: Ssh, tmp_path: Path, disk: Callable[[str], Path], wording: Wording
) -> None:
    (tmp_path / "f").write_bytes(b"x")
    far = disk("nr_inodes=30")
    with pytest.raises(BadRequest) as refused:
        await push(box, {f"n{n}": tmp_path / "f" for n in range(60)}, str(far / "in"))
    wording(refused)
    assert not list((far / "in").iterdir())


# ----------------------------------------------------------------------------------------------- files that change


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"other")


SMALL, MIDDLE, LARGE = 5000, 3 << 20, (32 << 20) + 5


@pytest.mark.prove
@pytest.mark.parametrize(
    ("change", "size"),
    [(grow, SMALL), (grow, LARGE), (shrink, SMALL), (shrink, MIDDLE), (shrink, LARGE), (rewrite, SMALL),
     (rewrite, LARGE), (Path.unlink, SMALL), (Path.unlink, MIDDLE), (Path.unlink, LARGE)],
)  # fmt: skip
async def test_a_file_changing_during_a_pull_is_a_problem_and_the_rest_arrives(
    backend: SshBackend, tmp_path: Path, change: Callable[[Path], None], size: int
) -> None:
    handle = await job(backend, tmp_path, f"head -c {size} /dev/zero > o/a; echo fine > o/b")
    listed = await list_artifacts(backend, handle, ["o"])
    change(Path(handle.run_dir) / "work/o/a")
    got = await receive(source(backend, handle), listed, tmp_path / "here")
    assert [p.path for p in got.problems] == ["o/a"]
    assert [f.path for f in got.files] == ["o/b"] and got.files[0].verified
    assert not (tmp_path / "here/o/a").exists()
    assert [f.sha256 is None for f in got.sealed(listed).files] == [True, False]


@pytest.mark.slow
async def test_a_file_that_grows_while_it_is_sent_is_a_problem(backend: SshBackend, tmp_path: Path) -> None:
    handle = await job(backend, tmp_path, f"head -c {2 * LARGE} /dev/zero > o/a")
    listed = await list_artifacts(backend, handle, ["o"])
    path, done = Path(handle.run_dir) / "work/o/a", []

    class Growing(SealingSource):
        async def pour(self, artifact: Artifact, offset: int, take: Callable[[memoryview], object]) -> str | None:
            def meddle(view: memoryview) -> None:
                if not done:
                    grow(path)
                    done.append(True)
                take(view)

            return await super().pour(artifact, offset, meddle)

    got = await receive(Growing(backend, handle), listed, tmp_path / "here")
    assert done and [p.path for p in got.problems] == ["o/a"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [9, 2 * LARGE])
@pytest.mark.parametrize("written", [False, True])
async def test_a_broken_seal_blames_the_machine_only_if_the_file_was_not_rewritten(
    backend: SshBackend, tmp_path: Path, size: int, written: bool, wording: Wording
) -> None:
    handle = await job(backend, tmp_path, f"head -c {size} /dev/zero > o/a")
    path = Path(handle.run_dir) / "work/o/a"
    stamp = dict(zip(("size", "mtime_ns", "ctime_ns"), seal_log.stamp_of(str(path)) or (), strict=True))
    house = cast("Context", SimpleNamespace(home=tmp_path))
    row: dict[str, Any] = {"path": os.path.realpath(path), **stamp, "sha256": hashlib.sha256(b"as saved").hexdigest()}
    row["sealed_at"] = path.stat().st_mtime
    row["mac"] = seal_log.mac(job_key(house, "job").encode(), row)
    seal_log.add(Path(handle.run_dir) / "seals.jsonl", [row])
    listed = with_authentic_seals(house, "job", await list_artifacts(backend, handle, ["o"]))
    assert listed.files[0].sealed_at
    if written:
        path.write_bytes(b"1" * size)
    got = await receive(source(backend, handle), listed, tmp_path / "here")
    assert [p.path for p in got.problems] == ["o/a"]
    wording(got.problems[0].why)


@pytest.mark.slow
async def test_after_a_killed_pull_only_correct_files_are_kept(backend: SshBackend, tmp_path: Path) -> None:
    handle = await job(backend, tmp_path, "for i in 1 2 3 4; do echo file $i > o/$i; done")
    listed = await list_artifacts(backend, handle, ["o"])
    here = tmp_path / "here"
    left = here / STAGING / "tree/o"
    left.mkdir(parents=True)
    (left / "1").write_text("file 1\n")
    (left / "2").write_text("torn??\n")
    (left / "3").write_text("fi")
    (left / "stranger").write_text("of another listing")
    (left / "4").symlink_to("/etc/passwd")
    got = await receive(source(backend, handle), listed, here)
    assert got.complete and got.bytes_skipped == 7
    assert sorted(p.name for p in here.rglob("*") if p.is_file() and p.name != "lock") == ["1", "2", "3", "4"]
    assert [(here / f"o/{n}").read_text() for n in (1, 2, 3, 4)] == [f"file {n}\n" for n in (1, 2, 3, 4)]


@pytest.mark.slow
async def test_a_linked_staging_tree_is_refused(backend: SshBackend, tmp_path: Path, wording: Wording) -> None:
    handle = await job(backend, tmp_path, "for i in 1 2; do echo file $i > o/$i; done")
    listed = await list_artifacts(backend, handle, ["o"])
    here, outside = tmp_path / "here", tmp_path / "outside"
    (here / STAGING).mkdir(parents=True)
    outside.mkdir()
    (here / STAGING / "tree").symlink_to(outside)
    with pytest.raises(BadRequest) as refused:
        await receive(source(backend, handle), listed, here)
    wording(refused)
    assert not list(outside.iterdir())


@pytest.mark.slow
async def test_small_files_never_go_through_a_link_of_the_destination(backend: SshBackend, tmp_path: Path) -> None:
    handle = await job(backend, tmp_path, "mkdir o/sub; for i in 1 2; do echo $i > o/$i; echo $i > o/sub/$i; done")
    listed = await list_artifacts(backend, handle, ["o"])
    here, outside = tmp_path / "here", tmp_path / "outside"
    (here / "o").mkdir(parents=True)
    outside.mkdir()
    (here / "o/sub").symlink_to(outside)
    got = await receive(source(backend, handle), listed, here)
    assert sorted(f.path for f in got.files) == ["o/1", "o/2"]
    assert sorted(p.path for p in got.problems) == ["o/sub/1", "o/sub/2"]
    assert not list(outside.iterdir())


# ----------------------------------------------------------------------------------------------- shells that print


@pytest.mark.slow
async def test_a_printing_shell_rc_does_not_corrupt_transfers(tmp_path: Path) -> None:
    """bash reads BASH_ENV before each command, as other shells read their rc files. This one prints a greeting."""
    rc = tmp_path / "rc"
    rc.write_bytes(b"printf '{\"ok\":true}\\n\\377\\200 Welcome to GPU-land\\n'; echo 'quota: 9 GB' >&2\n")
    noisy = Sshd(tmp_path / "noisy", path=f"{PATH} BASH_ENV={rc}").start()
    backend = SshBackend(SystemClock(), config=noisy.config)
    try:
        ran = await (await backend._at(Place(platform="ssh", host="box", run_root="/tmp"))).ssh.run(["echo", "hi"])
        need("bash as this user's shell", b"quota" in ran.err)
        handle = await job(backend, tmp_path, f"head -c {LARGE} /dev/urandom > o/large; echo s > o/small")
        listed = await list_artifacts(backend, handle, ["o"])
        got = await receive(source(backend, handle), listed, tmp_path / "here")
        assert got.complete and len(got.files) == 2
        pushed = await push((await backend._at(handle.place)).ssh, {"a": rc}, str(tmp_path / "far"))
        assert pushed.bytes_sent == rc.stat().st_size
    finally:
        await backend.aclose()
        noisy.stop()


async def test_a_gigabyte_of_output_is_cut_off(box: Ssh, wording: Wording) -> None:
    with pytest.raises(BadReply) as refused:
        await box.run(["head", "-c", str(1 << 30), "/dev/zero"])
    wording(refused, f"{getpass.getuser()}@127.0.0.1")
    assert (await box.run(["echo", "fine"])).out == b"fine\n"


@pytest.mark.slow
async def test_binary_output_does_not_break_the_log(backend: SshBackend, tmp_path: Path) -> None:
    handle = await job(backend, tmp_path, r"printf 'a\377\376b\000c\n'; printf '\303\274\n'")
    log = (await backend.logs(handle)).text
    assert log.startswith("a") and log.endswith("ü\n") and "\ufffd" in log


# ----------------------------------------------------------------------------------------------------- sparse files


@pytest.mark.slow
@pytest.mark.parametrize("begun", [0, 1_000_003])
async def test_a_pull_preserves_holes(backend: SshBackend, tmp_path: Path, begun: int) -> None:
    some = "head -c 70000 /dev/urandom >> o/a"
    text = f"{some}; truncate -s 9000001 o/a; {some}; truncate -s 19M o/a"
    handle = await job(backend, tmp_path, text)
    path = Path(handle.run_dir) / "work/o/a"
    listed = await list_artifacts(backend, handle, ["o"])
    here = tmp_path / "here"
    if begun:
        (here / STAGING).mkdir(parents=True)
        (here / STAGING / part_name(listed.files[0])).write_bytes(path.read_bytes()[:begun])
    got = await receive(source(backend, handle), listed, here)
    assert got.complete and got.bytes_resumed == begun
    assert (here / "o/a").read_bytes() == path.read_bytes()
    assert (here / "o/a").stat().st_blocks * 512 < (1 << 20) + begun
