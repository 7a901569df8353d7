"""Pushing to a real OpenSSH server: complete or not there, whatever the names are and wherever it was cut."""

from __future__ import annotations

import ast
import hashlib
import os
import random
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from cutting import CuttingProxy, NoWait, proxy_fixture  # noqa: F401
from gpuwarden.core.errors import BadReply, BadRequest, WardenError
from gpuwarden.remote.ssh.config import resolve
from gpuwarden.remote.ssh.session import Ssh
from gpuwarden.remote.transfer import upload_agent
from gpuwarden.remote.transfer.small_file_upload import Row, UploadSession
from gpuwarden.remote.transfer.upload import push, put
from sshd import Sshd, sshd_fixture  # noqa: F401

pytestmark = pytest.mark.anyio


@pytest.fixture
async def box(sshd: Sshd) -> AsyncIterator[Ssh]:
    ssh = Ssh(resolve("box", config=sshd.config), config=sshd.config)
    yield ssh
    await ssh.aclose()


def some(folder: Path, **sizes: int) -> dict[str, Path]:
    folder.mkdir()
    for name, size in sizes.items():
        (folder / name).write_bytes(random.Random(name).randbytes(size))
    return {name: folder / name for name in sizes}


HOSTILE = ["a b", "-rf", "$(touch canary)", "`touch canary`", "quote'\"s", "back\\slash", "*", "~", "ü", "deep/er/x"]


async def test_files_arrive_as_they_are_whatever_their_names(box: Ssh, tmp_path: Path) -> None:
    files = some(tmp_path / "here", a=100_000, empty=0)
    roster = {"a": files["a"], "empty": files["empty"], **dict.fromkeys(HOSTILE, files["a"])}
    far = tmp_path / "far folder"
    got = await push(box, roster, str(far))
    assert got.bytes_sent == 100_000 * (len(HOSTILE) + 1)
    for name, path in roster.items():
        assert (far / name).read_bytes() == path.read_bytes()
    assert not [p for p in far.rglob("*") if p.name.endswith(".part")]
    assert not list(tmp_path.rglob("canary"))
    again = await push(box, roster, str(far))
    assert (again.bytes_sent, again.bytes_skipped) == (0, got.bytes_sent)


async def test_a_changed_file_replaces_the_old_one(box: Ssh, tmp_path: Path) -> None:
    files = some(tmp_path / "here", a=1000)
    await push(box, files, str(tmp_path / "far"))
    files["a"].write_bytes(b"x" * 1000)
    assert (await push(box, files, str(tmp_path / "far"))).bytes_sent == 1000
    assert (tmp_path / "far/a").read_bytes() == b"x" * 1000


@pytest.mark.parametrize("name", ["../up", "/abs", "a/../../up", "nul\0", "new\nline", ""])
async def test_a_name_that_leaves_is_refused(box: Ssh, tmp_path: Path, name: str) -> None:
    files = some(tmp_path / "here", a=10)
    with pytest.raises(WardenError):
        await push(box, {name: files["a"]}, str(tmp_path / "in" / "far"))
    assert not (tmp_path / "in").exists()


async def test_links_pipes_and_devices_are_never_sent(box: Ssh, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "link", tmp_path / "pipe", Path("/dev/zero"), tmp_path, tmp_path / "none"):
        with pytest.raises(BadRequest):
            await push(box, {"x": path}, str(tmp_path / "far"))


async def test_a_part_that_lies_is_sent_anew(box: Ssh, tmp_path: Path) -> None:
    files = some(tmp_path / "here", a=50_000)
    await push(box, files, str(tmp_path / "far"))
    digest = hashlib.sha256(files["a"].read_bytes()).hexdigest()
    (tmp_path / "far/a").unlink()
    (tmp_path / f"far/.a.{digest[:16]}.part").write_bytes(b"\0" * 20_000)
    got = await push(box, files, str(tmp_path / "far"))
    assert (tmp_path / "far/a").read_bytes() == files["a"].read_bytes()
    assert got.bytes_sent == 80_000


async def test_a_full_folder_is_said(box: Ssh, tmp_path: Path) -> None:
    files = some(tmp_path / "here", a=10)
    with pytest.raises(BadRequest, match="can't be written"):
        await push(box, files, "/proc/nowhere")
    with pytest.raises(BadRequest, match="can't be written"):
        await put(box, "/proc/nowhere/x", b"x")


async def cut_push(sshd: Sshd, proxy: CuttingProxy, tmp_path: Path, cuts: int, size: int) -> None:
    ssh = Ssh(resolve("127.0.0.1", port=proxy.port, config=sshd.config), config=sshd.config)
    files = some(tmp_path / "here", large=size, small=5000)
    await ssh.run(["true"])
    rng = random.Random(5)
    points = iter([rng.randrange(20_000, 2 * size // cuts) for _ in range(cuts)])
    proxy.arm(lambda: next(points, None))
    got = await push(ssh, files, str(tmp_path / "far"), clock=NoWait(), tries=50)
    await ssh.aclose()
    for name, path in files.items():
        assert (tmp_path / "far" / name).read_bytes() == path.read_bytes()
    assert proxy.cuts >= cuts * 3 // 4
    print(f"{proxy.cuts} cuts, {got.bytes_sent:,} bytes sent for {size + 5000:,}")
    assert got.bytes_sent <= (size + 5000) * 1.05


async def test_a_push_goes_on_after_every_cut(sshd: Sshd, proxy: CuttingProxy, tmp_path: Path) -> None:
    await cut_push(sshd, proxy, tmp_path, 4, 20_000_000)


@pytest.mark.prove
async def test_a_push_cut_a_hundred_times(sshd: Sshd, proxy: CuttingProxy, tmp_path: Path) -> None:
    await cut_push(sshd, proxy, tmp_path, 100, 200_000_000)


# ------------------------------------------------------------------------------------------------------- small files


def test_what_takes_them_runs_where_the_runner_runs() -> None:
    ast.parse(Path(upload_agent.__file__).read_text(), feature_version=(3, 8))


def many(folder: Path, count: int) -> dict[str, Path]:
    folder.mkdir()
    files = {}
    for n in range(count):
        files[f"d{n % 7}/f {n}"] = folder / str(n)
        (folder / str(n)).write_bytes(random.Random(n).randbytes(n * 7 % 3000))
    return files


def same(files: dict[str, Path], far: Path) -> None:
    for name, path in files.items():
        assert (far / name).read_bytes() == path.read_bytes()
    assert {str(p.relative_to(far)) for p in far.rglob("*") if p.is_file()} == set(files)


async def test_small_files_go_by_the_handful(box: Ssh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = many(tmp_path / "here", 700) | some(tmp_path / "large", large=300_000)
    said: list[int] = []
    plain = UploadSession.send

    async def counted(self: UploadSession, rows: Sequence[Row]) -> set[str]:
        said.append(len(rows))
        return await plain(self, rows)

    monkeypatch.setattr(UploadSession, "send", counted)
    got = await push(box, files, str(tmp_path / "far"), python=sys.executable)
    same(files, tmp_path / "far")
    assert sum(said) == 700 and len(said) < 30
    assert got.bytes_sent == sum(p.stat().st_size for p in files.values())
    (tmp_path / "far/d0/f 0").write_bytes(b"changed")
    (tmp_path / "far/d1/f 1").unlink()
    again = await push(box, files, str(tmp_path / "far"), python=sys.executable)
    same(files, tmp_path / "far")
    assert sum(said) == 702
    assert again.bytes_skipped == got.bytes_sent - files["d1/f 1"].stat().st_size - files["d0/f 0"].stat().st_size


async def test_a_link_on_the_machine_is_not_written_through(box: Ssh, tmp_path: Path) -> None:
    files = many(tmp_path / "here", 20)
    far, outside = tmp_path / "far", tmp_path / "outside"
    far.mkdir()
    outside.mkdir()
    (far / "d3").symlink_to(outside)
    with pytest.raises(BadRequest, match="is a link"):
        await push(box, files, str(far), python=sys.executable)
    assert not list(outside.iterdir())


@pytest.mark.parametrize(
    ("lie", "why"), [('["x"]', "invalid reply"), ("[99]", "not sent"), ("[-1]", "not sent"), ("{", "invalid reply"),
                      ("[1e999]", "invalid reply"), ("[" * 60_000, "invalid reply")],
)  # fmt: skip
async def test_a_machine_that_lies_is_not_believed(box: Ssh, tmp_path: Path, lie: str, why: str) -> None:
    files = many(tmp_path / "here", 20)
    liar = tmp_path / "python"
    answer = 'case $line in {*) echo \'{"here": ' + lie + "}';; esac"
    liar.write_text(f"#!/bin/sh\nwhile read -r line; do {answer}; done\n")
    liar.chmod(0o755)
    with pytest.raises(BadReply, match=why):
        await push(box, files, str(tmp_path / "far"), python=str(liar))


async def cut_small(sshd: Sshd, proxy: CuttingProxy, tmp_path: Path, cuts: int, count: int) -> None:
    ssh = Ssh(resolve("127.0.0.1", port=proxy.port, config=sshd.config), config=sshd.config)
    files = many(tmp_path / "here", count)
    total = sum(p.stat().st_size for p in files.values())
    await ssh.run(["true"])
    rng = random.Random(6)
    points = iter([rng.randrange(20_000, 3 * total // cuts) for _ in range(cuts)])
    proxy.arm(lambda: next(points, None))
    got = await push(ssh, files, str(tmp_path / "far"), python=sys.executable, clock=NoWait(), tries=50)
    await ssh.aclose()
    same(files, tmp_path / "far")
    print(f"{proxy.cuts} cuts, {got.bytes_sent:,} bytes sent for {total:,}")
    assert proxy.cuts >= cuts // 2
    assert got.bytes_sent <= total + proxy.cuts * (64 << 10)


async def test_a_push_of_small_files_goes_on_after_every_cut(sshd: Sshd, proxy: CuttingProxy, tmp_path: Path) -> None:
    await cut_small(sshd, proxy, tmp_path, 6, 1500)
