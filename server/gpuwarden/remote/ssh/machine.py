"""Run commands on one machine over SSH: stream their output, send their input, and cancel them.

Blocking calls run in worker threads. Each machine has one connection (`link`), with one session per command.
Commands are argument lists; secrets are sent on stdin. A command that is canceled or times out is killed on the machine
before the call returns.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path

import anyio
from anyio import to_thread

from gpuwarden.core.errors import BadReply, Unreachable
from gpuwarden.remote.ssh.config import Endpoint
from gpuwarden.remote.ssh.connect import Connection
from gpuwarden.remote.ssh.host_keys import HostKey
from gpuwarden.remote.ssh.link import Link
from gpuwarden.remote.ssh.outcomes import CommandResult
from gpuwarden.remote.ssh.session import KILL_S, Session, Take

COMMAND_S = 60.0
MAX_OUTPUT = 4 << 20


class Ssh:
    """One machine. Safe to use from many tasks, which share the connection."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        pin: str | None = None,
        config: Path | None = None,
        dial: Callable[[str | None], Connection] | None = None,
    ) -> None:
        self.link = Link(endpoint, pin, config, dial)

    @property
    def endpoint(self) -> Endpoint:
        """Return the machine's address and user."""
        return self.link.endpoint

    @property
    def pin(self) -> str | None:
        """Return the only accepted host key; None before the first connection."""
        return self.link.pin

    async def open(self) -> HostKey:
        """Connect if necessary, and return the host key. From then on, only this key is accepted."""
        return (await to_thread.run_sync(self.link.connection, abandon_on_cancel=True)).key

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = COMMAND_S, limit: int = MAX_OUTPUT
    ) -> CommandResult:
        """Run a command to completion and return its output.

        Raises `Unreachable` if the connection is lost or the command takes more than `timeout_s` (it is killed, but may
        already have taken effect), and `BadReply` if it prints more than `limit` bytes.
        """
        async with self._session(argv) as session:
            with _deadline(self.endpoint, timeout_s):
                return await to_thread.run_sync(session.exchange, stdin, limit, abandon_on_cancel=True)

    async def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> AsyncGenerator[bytes, None]:
        """Yield the command's output as it arrives. Raises `CommandFailed` at the end unless the exit code is 0.

        If the caller stops iterating early, the command is killed. The caller must limit the wait for each piece.
        """
        async with self._session(argv) as session:
            await to_thread.run_sync(session.start, stdin, abandon_on_cancel=True)
            while chunk := await to_thread.run_sync(session.read, abandon_on_cancel=True):
                yield chunk
            await to_thread.run_sync(session.finish, abandon_on_cancel=True)

    async def pour(self, argv: Sequence[str], take: Take, *, stdin: bytes = b"") -> None:
        """Pass a command's output to `take` in one worker thread. The buffer is reused after `take` returns.

        Raises the same errors as `stream`, and any error from `take`. `take` is not called after an error or
        cancellation.
        """
        await self.converse(argv, lambda session: session.pour(take, stdin))

    async def converse(self, argv: Sequence[str], work: Callable[[Session], None]) -> None:
        """Run `work`, which starts and controls a command, in a worker thread that ends before this method returns.

        After a cancellation, the session no longer reads or sends data.
        """
        begun, ended = threading.Event(), threading.Event()

        def run() -> None:
            begun.set()
            try:
                work(session)
            finally:
                ended.set()

        try:
            async with self._session(argv) as session:
                await to_thread.run_sync(run, abandon_on_cancel=True)
        finally:
            if begun.is_set():
                with anyio.CancelScope(shield=True):
                    await to_thread.run_sync(ended.wait)

    async def feed(
        self,
        argv: Sequence[str],
        chunks: AsyncGenerator[bytes, None],
        *,
        stall_s: float = 30.0,
        limit: int = MAX_OUTPUT,
    ) -> CommandResult:
        """Run a command with `chunks` as its stdin. Raises `Unreachable` if it reads no input for `stall_s` seconds."""
        async with aclosing(chunks), self._session(argv) as session:
            with _deadline(self.endpoint, stall_s):
                await to_thread.run_sync(session.start, None, abandon_on_cancel=True)
            async for chunk in chunks:
                with _deadline(self.endpoint, stall_s):
                    if not await to_thread.run_sync(session.send, chunk, abandon_on_cancel=True):
                        break
            with _deadline(self.endpoint, 2 * stall_s):
                return await to_thread.run_sync(session.drain, limit, abandon_on_cancel=True)

    async def repin(self, pin: str) -> None:
        """Accept only this key from now on."""
        await to_thread.run_sync(self.link.repin, pin)

    async def aclose(self) -> None:
        """Close the connection; the next call opens a new one."""
        await to_thread.run_sync(self.link.close)

    @asynccontextmanager
    async def _session(self, argv: Sequence[str]) -> AsyncIterator[Session]:
        """Open a session for a command. If the command is still running on exit, it is killed."""
        session = Session(self.link, argv)
        try:
            yield session
        finally:
            if session.running():
                with anyio.CancelScope(shield=True), anyio.move_on_after(KILL_S):
                    await to_thread.run_sync(session.kill, abandon_on_cancel=True)
            session.close()


class Dialogue:
    """A command that replies to each line with one line, and keeps running between requests.

    After a failure it is closed, and the next request restarts it. It handles one request at a time.
    """

    def __init__(self, machine: Ssh, argv: Sequence[str]) -> None:
        self.machine, self.argv = machine, tuple(argv)
        self._session: Session | None = None
        self._turn = threading.Lock()

    async def ask(self, line: bytes, *, timeout_s: float = COMMAND_S) -> bytes:
        """Send one line and return the reply. Raises `Unreachable`, `BadReply` or `CommandFailed`."""
        try:
            with _deadline(self.machine.endpoint, timeout_s):
                return await to_thread.run_sync(self._ask, line, abandon_on_cancel=True)
        except BaseException:
            self.close()  # a late reply must not be mistaken for the next one
            raise

    def _ask(self, line: bytes) -> bytes:
        with self._turn:
            session = self._session
            if session is None or session.channel is None or session.channel.exited():
                self.close()  # a session keeps its slot until it is closed
                session = self._session = Session(self.machine.link, self.argv)
                session.start(None)
            session.send(line + b"\n")
            answer = bytearray()
            while not answer.endswith(b"\n"):
                chunk = session.read()
                answer += chunk
                if not chunk:
                    session.finish()
                    raise BadReply(f"{self.argv[0]} on {self.machine.endpoint} exited without a reply", "Try again.")
                if len(answer) > MAX_OUTPUT:
                    raise BadReply(
                        f"{self.argv[0]} on {self.machine.endpoint} sent a line that is too long", "Try again."
                    )
            return bytes(answer)

    def close(self) -> None:
        """Close stdin and the channel, which makes the command exit."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


@contextmanager
def _deadline(endpoint: Endpoint, seconds: float) -> Iterator[None]:
    """Set a time limit for a block, like `anyio.fail_after`, but raise `Unreachable`."""
    try:
        with anyio.fail_after(seconds):
            yield
    except TimeoutError:
        raise Unreachable(
            f"{endpoint} did not answer within {seconds:g} s; gpuwarden tried to kill the command",
            "The command may have taken effect. Check before trying again.",
        ) from None
