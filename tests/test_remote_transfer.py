"""Pushing to a real OpenSSH server: complete or not there, whatever the names are and wherever it was cut."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cutting import CuttingProxy, NoWait, proxy_fixture  # noqa: F401
from gpuwarden.core.errors import BadRequest, WardenError
from gpuwarden.remote.ssh import Ssh
from gpuwarden.remote.ssh_config import resolve
from gpuwarden.remote.transfer import push, put
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
