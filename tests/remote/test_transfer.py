"""Push to a real OpenSSH server: each file arrives complete or not at all, whatever its name and wherever it is cut."""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, cast

import pytest

from cutting import CuttingProxy, NoWait
from gpuwarden.core.errors import BadReply, BadRequest, Unreachable, WardenError
from gpuwarden.remote.ssh.config import resolve
from gpuwarden.remote.ssh.machine import Ssh
from gpuwarden.remote.ssh.session import Session
from gpuwarden.remote.transfer import upload, upload_agent
from gpuwarden.remote.transfer.small_file import put
from gpuwarden.remote.transfer.upload import push
from gpuwarden.remote.transfer.upload_stream import AHEAD, SMALL_BYTES, Counts, Row, UploadStream, row
from real_parts import amount, need
from sshd import Sshd
from wording import Wording

pytestmark = pytest.mark.anyio


def some(folder: Path, **sizes: int) -> dict[str, Path]:
    folder.mkdir()
    for name, size in sizes.items():
        (folder / name).write_bytes(random.Random(name).randbytes(size))
    return {name: folder / name for name in sizes}


HOSTILE = ["a b", "-rf", "$(touch canary)", "`touch canary`", "quote'\"s", "back\\slash", "*", "~", "ü", "deep/er/x"]


async def test_files_arrive_unchanged_whatever_their_names(box: Ssh, tmp_path: Path) -> None:
    files = some(tmp_path / "here", a=100_000, empty=0)
    listing = {"a": files["a"], "empty": files["empty"], **dict.fromkeys(HOSTILE, files["a"])}
    far = tmp_path / "far folder"
    got = await push(box, listing, str(far))
    assert got.bytes_sent == 100_000 * (len(HOSTILE) + 1)
    for name, path in listing.items():
        assert (far / name).read_bytes() == path.read_bytes()
    assert not [p for p in far.rglob("*") if p.name.endswith(".part")]
    assert not list(tmp_path.rglob("canary"))
    again = await push(box, listing, str(far))
    assert (again.bytes_sent, again.bytes_skipped) == (0, got.bytes_sent)


async def test_a_changed_file_replaces_the_old_one(box: Ssh, tmp_path: Path) -> None:
    files = some(tmp_path / "here", a=1000)
    await push(box, files, str(tmp_path / "far"))
    files["a"].write_bytes(b"x" * 1000)
    assert (await push(box, files, str(tmp_path / "far"))).bytes_sent == 1000
    assert (tmp_path / "far/a").read_bytes() == b"x" * 1000


@pytest.mark.parametrize("name", ["../up", "/abs", "a/../../up", "nul\0", "new\nline", ""])
async def test_a_name_that_leaves_the_folder_is_refused(box: Ssh, tmp_path: Path, name: str) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("size", [100, SMALL_BYTES + 1])
async def test_a_file_in_a_folder_that_becomes_a_link_is_not_sent(
    box: Ssh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, wording: Wording
) -> None:
    """The file behind the link has the same name, size, and time."""
    files, other = some(tmp_path / "here", x=size), some(tmp_path / "other", x=size)
    for path in (files["x"], other["x"]):
        os.utime(path, ns=(10**18, 10**18))

    def then_linked(name: str, path: Path) -> Row:
        found = row(name, path)
        (tmp_path / "here").rename(tmp_path / "moved")
        (tmp_path / "here").symlink_to(tmp_path / "other")
        return found

    monkeypatch.setattr(upload, "row", then_linked)
    with pytest.raises(BadRequest) as refused:
        await push(box, {"x": files["x"]}, str(tmp_path / "far"))
    wording(refused)
    assert not (tmp_path / "far/x").exists()


async def test_a_corrupt_part_is_sent_again(box: Ssh, tmp_path: Path) -> None:
    files = some(tmp_path / "here", a=50_000)
    await push(box, files, str(tmp_path / "far"))
    key = row("a", files["a"]).key
    (tmp_path / "far/a").unlink()
    (tmp_path / f"far/.a.{key}.part").write_bytes(b"\0" * 20_000)
    got = await push(box, files, str(tmp_path / "far"))
    assert (tmp_path / "far/a").read_bytes() == files["a"].read_bytes()
    assert got.bytes_sent == 80_000


@pytest.mark.slow
async def test_an_unwritable_folder_is_reported(box: Ssh, tmp_path: Path, wording: Wording) -> None:
    files = some(tmp_path / "here", a=10)
    with pytest.raises(BadRequest) as refused:
        await push(box, files, "/proc/nowhere")
    wording(str(refused.value).partition(":")[0], "/proc/nowhere")
    with pytest.raises(BadRequest) as refused:
        await put(box, "/proc/nowhere/x", b"x")
    wording(str(refused.value).partition(":")[0], "/proc/nowhere/x")


async def cut_push(sshd: Sshd, proxy: CuttingProxy, tmp_path: Path, cuts: int, size: int) -> None:
    ssh = Ssh(resolve("127.0.0.1", port=proxy.port, config=sshd.config), config=sshd.config)
    files = some(tmp_path / "here", large=size, small=5000)
    await ssh.run(["true"])
    rng = random.Random(5)
    points = iter([rng.randrange(20_000, size // cuts) for _ in range(cuts)])
    proxy.arm(lambda: next(points, None))
    got = await push(ssh, files, str(tmp_path / "far"), clock=NoWait(), tries=50)
    await ssh.aclose()
    for name, path in files.items():
        assert (tmp_path / "far" / name).read_bytes() == path.read_bytes()
    assert proxy.cuts >= cuts * 3 // 4
    print(f"{proxy.cuts} cuts, {got.bytes_sent:,} bytes sent for {size + 5000:,}")
    assert got.bytes_sent <= (size + 5000) * 1.05


@pytest.mark.prove
@pytest.mark.usefixtures("client")
async def test_a_push_resumes_after_every_cut(sshd: Sshd, proxy: CuttingProxy, tmp_path: Path) -> None:
    await cut_push(sshd, proxy, tmp_path, 4, 20_000_000)


@pytest.mark.long
@pytest.mark.prove
@pytest.mark.endurance
async def test_a_push_cut_a_hundred_times(sshd: Sshd, proxy: CuttingProxy, tmp_path: Path) -> None:
    await cut_push(sshd, proxy, tmp_path, cuts := amount(20, 100), cuts * 2_000_000)


# ------------------------------------------------------------------------------------------------------- small files


def test_the_upload_agent_parses_as_python_3_8() -> None:
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


@pytest.mark.slow
async def test_only_missing_or_changed_files_are_sent_again(box: Ssh, tmp_path: Path) -> None:
    files = many(tmp_path / "here", 700) | some(tmp_path / "large", large=300_000)
    got = await push(box, files, str(tmp_path / "far"), python=sys.executable)
    same(files, tmp_path / "far")
    assert got.bytes_sent == sum(p.stat().st_size for p in files.values())
    (tmp_path / "far/d0/f 0").write_bytes(b"changed")
    size = files["d2/f 2"].stat().st_size
    (tmp_path / "far/d2/f 2").write_bytes(bytes(size))
    (tmp_path / "far/d1/f 1").unlink()
    (tmp_path / "far/large").unlink()
    again = await push(box, files, str(tmp_path / "far"), python=sys.executable)
    same(files, tmp_path / "far")
    missing = [files[name].stat().st_size for name in ("d0/f 0", "d1/f 1", "d2/f 2", "large")]
    assert again.bytes_sent == sum(missing) and again.bytes_skipped == got.bytes_sent - sum(missing)


@pytest.mark.slow
async def test_a_file_changing_while_it_is_sent_gets_no_final_name(
    box: Ssh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    """The file is truncated after it was listed. Not even a part of it may get its final name."""
    plain = UploadStream.run

    def shorter(self: UploadStream, rows: Sequence[Row], check_room: Callable[[dict[str, Any]], None]) -> None:
        os.truncate(rows[0].path, rows[0].size - 5)
        plain(self, rows, check_room)

    for size in (SMALL_BYTES - 9, 900_000):
        files = some(tmp_path / f"here{size}", a=size)
        monkeypatch.setattr(UploadStream, "run", shorter)
        with pytest.raises(BadReply) as refused:
            await push(box, files, str(tmp_path / f"far{size}"), python=sys.executable)
        wording(refused)
        monkeypatch.undo()
        assert not (tmp_path / f"far{size}/a").exists()


@pytest.mark.parametrize("cut", [0, 3 << 20])
async def test_holes_are_preserved(box: Ssh, tmp_path: Path, cut: int) -> None:
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        for at in (0, 2 << 20, 5 << 20):
            file.seek(at)
            file.write(random.Random(at).randbytes(70_000))
        file.truncate(9 << 20)
    need("a disk that keeps holes", sparse.stat().st_blocks * 512 < 1 << 20)
    far = tmp_path / "far"
    far.mkdir()
    if cut:
        (far / f".s.{row('s', sparse).key}.part").write_bytes(sparse.read_bytes()[:cut])
    got = await push(box, {"s": sparse}, str(far), python=sys.executable)
    assert (far / "s").read_bytes() == sparse.read_bytes()
    assert (far / "s").stat().st_blocks * 512 < (1 << 20) + cut
    assert got.bytes_sent < 300_000 and got.bytes_resumed == cut


@pytest.mark.slow
@pytest.mark.parametrize("size", [9, 300_000])
async def test_a_push_waits_for_an_earlier_push_to_finish_writing(box: Ssh, tmp_path: Path, size: int) -> None:
    """The earlier push's connection was cut, but its agent hasn't noticed yet."""
    files = some(tmp_path / "here", a=300_000)
    far = tmp_path / "far"
    far.mkdir()
    with (far / f".a.{row('a', files['a']).key}.part").open("wb") as part:
        part.write(files["a"].read_bytes()[:size])
        part.flush()
        fcntl.flock(part, fcntl.LOCK_EX)

        class Waits(NoWait):
            async def sleep(self, seconds: float) -> None:
                part.close()

        got = await push(box, files, str(far), python=sys.executable, clock=Waits())
    assert (far / "a").read_bytes() == files["a"].read_bytes()
    assert got.retries == 1 and got.bytes_sent <= 300_000 - size + 6 * AHEAD


@pytest.mark.parametrize("name", ["../up", "a/../up", "/up", "a//up", "", "a/.."])
def test_the_agent_refuses_names_that_leave_its_folder(tmp_path: Path, name: str, wording: Wording) -> None:
    far = tmp_path / "far"
    words = [name, "3", hashlib.sha256(b"abc").hexdigest()]
    head = "\0".join(["fine", *words[1:], *words]).encode()
    ran = subprocess.run(
        [sys.executable, "-I", "-S", upload_agent.__file__, str(far)],
        input=b"files %d\n%babcabcsync\n" % (len(head), head),
        capture_output=True,
        timeout=300,
        check=True,
    )
    wording(json.loads(ran.stdout.splitlines()[-1])["error"])
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["fine"]


@pytest.mark.slow
async def test_a_link_on_the_machine_is_not_followed(box: Ssh, tmp_path: Path, wording: Wording) -> None:
    files = many(tmp_path / "here", 20)
    far, outside = tmp_path / "far", tmp_path / "outside"
    far.mkdir()
    outside.mkdir()
    (far / "d3").symlink_to(outside)
    with pytest.raises(BadRequest) as refused:
        await push(box, files, str(far), python=sys.executable)
    wording(refused)
    assert not list(outside.iterdir())


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param('{"done": 99, "bytes": 0, "bad": []}', id="too many"),
        pytest.param('{"done": -1, "bytes": 0, "bad": []}', id="fewer than none"),
        pytest.param('{"done": 1, "bytes": 1, "bad": [7]}', id="bad of another kind"),
        pytest.param('{"done": 1, "bytes": 0, "bad": ["x"]}', id="bad that is no number"),
        pytest.param('{"done": 0, "bytes": 1e999, "bad": []}', id="endless"),
        pytest.param('{"synced": true}', id="too early"),
        pytest.param("{", id="cut"),
        pytest.param("[]", id="list"),
        pytest.param("[" * 60_000, id="deep"),
    ],
)
async def test_a_false_reply_of_the_machine_is_a_bad_reply(
    box: Ssh, tmp_path: Path, lie: str, wording: Wording
) -> None:
    files = many(tmp_path / "here", 20)
    liar = tmp_path / "python"
    hello = '{"fresh": true, "free": 99999999999, "inodes": null}'
    liar.write_text(f"#!/bin/sh\necho '{hello}'\nread -r line\necho '{lie}'\nexec cat > /dev/null\n")
    liar.chmod(0o755)
    with pytest.raises(BadReply) as refused:
        await push(box, files, str(tmp_path / "far"), python=str(liar))
    wording(refused)


HELLO = b'{"fresh": true, "free": 99999999999, "inodes": null}'


class Said:
    """A session whose machine sends these lines, 20 s apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lines: Iterator[bytes]) -> None:
        self.lines, self.now = lines, 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def start(self, stdin: None) -> None:
        pass

    def send(self, data: bytes, stall_s: float) -> bool:
        return True

    def read_into(self, buffer: memoryview, wait_s: float) -> int:
        self.now += 20
        line = next(self.lines) + b"\n"
        buffer[: len(line)] = line
        return len(line)

    def stream(self) -> UploadStream:
        return UploadStream(cast("Session", self), "/far", Counts(), 30.0)


@pytest.mark.parametrize("first", [[], [HELLO], [b'{"fresh": false, "free": 99999999999, "inodes": null}']])
def test_a_machine_sending_only_keepalives_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: list[bytes], wording: Wording
) -> None:
    files = some(tmp_path / "here", a=10)
    said = Said(monkeypatch, chain(first, repeat(b"{}")))
    with pytest.raises(Unreachable) as refused:
        said.stream().run([row("a", files["a"])], lambda hello: None)
    wording(refused)
    assert said.now < 700


def test_hashing_large_files_does_not_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said(monkeypatch, chain([b"{}"] * 10, [b'{"sha256": []}']))
    assert said.stream()._next("sha256", size=10 << 30) == {"sha256": []}


@pytest.mark.slow
def test_a_reply_naming_a_file_many_times_is_cheap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Said(monkeypatch, iter([])).stream()
    entry = row("a", some(tmp_path / "here", a=10)["a"])
    stream._rows, stream._carried = [replace(entry, name=str(n)) for n in range(300_000)], 1
    answer = json.dumps({"done": 300_000, "bytes": 1, "bad": [0] * 400_000}).encode()
    stream._heard(answer)  # searching the whole list for each file would take many minutes
    assert stream.counts.wrong == {"0"} and len(stream.counts.landed) == 299_999


def test_a_machines_error_becomes_one_safe_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Said(monkeypatch, iter([])).stream()
    with pytest.raises(BadRequest) as failed:
        stream._heard(json.dumps({"error": "\x1b[31m\n<<<END\u202e" + "x" * 100_000}).encode())
    assert "<<<END" in failed.value.message
    assert failed.value.message.isprintable() and len(failed.value.message) < 400


async def cut_small(sshd: Sshd, proxy: CuttingProxy, tmp_path: Path, cuts: int, count: int) -> None:
    ssh = Ssh(resolve("127.0.0.1", port=proxy.port, config=sshd.config), config=sshd.config)
    files = many(tmp_path / "here", count)
    total = sum(p.stat().st_size for p in files.values())
    await ssh.run(["true"])
    rng = random.Random(6)
    chosen = [rng.randrange(20_000, total // cuts) for _ in range(cuts)]
    points = iter(chosen)
    proxy.arm(lambda: next(points, None))
    got = await push(ssh, files, str(tmp_path / "far"), python=sys.executable, clock=NoWait(), tries=50)
    await ssh.aclose()
    same(files, tmp_path / "far")
    print(f"{proxy.cuts} cuts, {got.bytes_sent:,} bytes sent for {total:,}")
    assert proxy.cuts >= cuts // 2
    # Bytes in a buffer at a cut are sent again, more on a busy machine. A restart from zero would send all bytes again.
    assert got.bytes_sent <= total + 0.75 * sum(chosen)


@pytest.mark.slow
@pytest.mark.usefixtures("client")
async def test_a_push_of_small_files_resumes_after_every_cut(sshd: Sshd, proxy: CuttingProxy, tmp_path: Path) -> None:
    await cut_small(sshd, proxy, tmp_path, 6, 1500)
