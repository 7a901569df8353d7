"""Commands over SSH on a real OpenSSH server: how they run, their output, and their end."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import pytest

from gpuwarden.core.errors import BadReply, Unreachable
from gpuwarden.remote.ssh import link
from gpuwarden.remote.ssh.config import Endpoint
from gpuwarden.remote.ssh.connect import Connection
from gpuwarden.remote.ssh.host_keys import HostKeyChanged
from gpuwarden.remote.ssh.machine import Ssh
from gpuwarden.remote.ssh.outcomes import CommandFailed
from ssh_kit import cut
from sshd import keygen
from waiting import eventually, soon

pytestmark = pytest.mark.anyio


def gone(pid: int) -> bool:
    """Return whether a process has ended. A zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def test_runs_a_command_with_stdin_and_separate_outputs(box: Ssh) -> None:
    ran = await box.run(["sh", "-c", "cat; echo oops >&2; exit 7"], stdin=b"hello\n")
    assert (ran.code, ran.out, ran.err) == (7, b"hello\n", b"oops\n")


async def test_reuses_one_transport(box: Ssh) -> None:
    first = box.link.connection()
    for _ in range(3):
        await box.run(["true"])
    assert box.link.connection() is first


async def test_a_dead_transport_is_opened_again(box: Ssh) -> None:
    await box.run(["true"])
    cut(box)
    assert (await box.run(["echo", "back"])).out == b"back\n"


class SlowLogin:
    """A login that completes when the test allows it, and the connection that it opens."""

    def __init__(self, box: Ssh, monkeypatch: pytest.MonkeyPatch) -> None:
        self.link, self.logged_in = box.link, list[Connection]()
        self.begun, self.go_on, self.plain = threading.Event(), threading.Event(), link.connect
        monkeypatch.setattr(link, "connect", self.connect)

    def connect(self, endpoint: Endpoint, *, pin: str | None = None, config: Path | None = None) -> Connection:
        self.begun.set()
        assert self.go_on.wait(60)
        self.logged_in.append(self.plain(endpoint, pin=pin, config=config))
        return self.logged_in[-1]

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Run the block during the login, then let the login complete."""
        self.begun.clear()
        self.go_on.clear()
        login = threading.Thread(target=self._login)
        login.start()
        assert self.begun.wait(60)
        yield
        self.go_on.set()
        login.join()

    def _login(self) -> None:
        with suppress(Unreachable):  # the login was closed
            self.link.connection()


async def test_a_close_during_a_login_leaves_no_connection(box: Ssh, monkeypatch: pytest.MonkeyPatch) -> None:
    login = SlowLogin(box, monkeypatch)
    with login.under_way():
        await box.aclose()
    assert box.link.opened is None and not login.logged_in[0].alive
    assert (await box.run(["echo", "back"])).out == b"back\n"


async def test_a_pin_set_during_a_login_is_kept(box: Ssh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    login = SlowLogin(box, monkeypatch)
    keygen(tmp_path / "other")
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    with login.under_way():
        await box.repin(other)
    assert box.pin == other and box.link.opened is None and not login.logged_in[0].alive
    with pytest.raises(HostKeyChanged):
        await box.run(["true"])
    assert box.pin == other


async def test_a_repeated_pin_keeps_the_connection(box: Ssh) -> None:
    key = await box.open()
    opened = box.link.opened
    await box.repin(key.line)
    assert box.link.opened is opened is not None and opened.alive


@pytest.mark.slow
async def test_many_concurrent_commands_all_run(box: Ssh) -> None:
    results: list[bytes] = []

    async def one(n: int) -> None:
        results.append((await box.run(["sh", "-c", f"sleep 0.1; echo {n}"])).out)

    async with anyio.create_task_group() as group:
        for n in range(25):
            group.start_soon(one, n)
    assert sorted(int(r) for r in results) == list(range(25))


async def test_a_signal_gives_no_exit_code(box: Ssh) -> None:
    assert (await box.run(["sh", "-c", "kill -9 $$"])).code is None


async def test_binary_output_is_returned_unchanged(box: Ssh) -> None:
    ran = await box.run(["sh", "-c", r"printf '\377\000\n\200'"])
    assert ran.out == b"\xff\x00\n\x80"


async def test_an_output_flood_is_cut_and_its_process_ended(box: Ssh, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(BadReply, match="1,000,000"):
        await box.run(["sh", "-c", f"echo $$ > {pid_file}; exec yes"], limit=1_000_000)
    eventually(lambda: gone(int(pid_file.read_text())))


@pytest.mark.slow
async def test_a_flood_on_stderr_neither_blocks_nor_grows(box: Ssh) -> None:
    ran = await box.run(["sh", "-c", "yes | head -c 9000000 >&2; echo done"])
    assert ran.out == b"done\n"
    assert len(ran.err) <= 1 << 16


async def test_unread_stdin_does_not_block(box: Ssh) -> None:
    ran = await box.run(["true"], stdin=b"x" * (6 << 20))
    assert ran.code == 0


@pytest.mark.slow
async def test_a_timeout_ends_the_remote_process_group(box: Ssh, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"trap '' HUP; sleep 1000 & echo $$ $! > {pids}; wait"
    with pytest.raises(Unreachable, match=r"\b1 s\b"):
        await box.run(["sh", "-c", script], timeout_s=1)
    eventually(lambda: all(gone(int(p)) for p in pids.read_text().split()))


@pytest.mark.slow
async def test_a_timeout_ends_a_process_that_ignores_TERM(box: Ssh, tmp_path: Path) -> None:  # noqa: N802
    pids = tmp_path / "pids"
    script = f"trap '' TERM HUP; echo $$ > {pids}; while :; do sleep 0.2; done"
    with pytest.raises(Unreachable):
        await box.run(["sh", "-c", script], timeout_s=1)
    eventually(lambda: gone(int(pids.read_text())))


@pytest.mark.slow
async def test_a_cancel_ends_the_remote_process(box: Ssh, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    async with anyio.create_task_group() as group:
        group.start_soon(box.run, ["sh", "-c", f"echo $$ > {pid_file}; exec sleep 1000"])
        await soon(lambda: pid_file.exists() and pid_file.read_text().strip())
        group.cancel_scope.cancel()
    eventually(lambda: gone(int(pid_file.read_text())))
    assert (await box.run(["echo", "fine"])).out == b"fine\n"


async def test_closing_a_stream_ends_the_remote_process(box: Ssh, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    stream = box.stream(["sh", "-c", f"echo $$ > {pid_file}; exec yes"])
    assert (await anext(stream)).startswith(b"y\n")
    await stream.aclose()  # type: ignore[attr-defined]
    eventually(lambda: gone(int(pid_file.read_text())))


async def test_a_failed_stream_raises_with_its_exit_code(box: Ssh) -> None:
    got = b""
    with pytest.raises(CommandFailed, match="broken") as failed:
        async for chunk in box.stream(["sh", "-c", "echo part; echo broken >&2; exit 3"]):
            got += chunk
    assert got == b"part\n"
    assert failed.value.exit_code == 3


async def test_a_stream_brings_every_byte(box: Ssh, tmp_path: Path) -> None:
    data = bytes(range(256)) * 20_000
    (tmp_path / "data").write_bytes(data)
    assert b"".join([chunk async for chunk in box.stream(["cat", str(tmp_path / "data")])]) == data


async def test_feed_sends_pieces(box: Ssh) -> None:
    async def pieces() -> AsyncGenerator[bytes, None]:
        for _ in range(40):
            yield b"z" * 100_000

    ran = await box.feed(["wc", "-c"], pieces())
    assert int(ran.out) == 4_000_000
