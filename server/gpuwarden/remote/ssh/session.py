"""One machine over SSH: run a command, stream its output, feed its input, cancel it for good.

Blocking calls run in worker threads. Each machine has one connection, which is opened when it is first needed, reused,
and opened again when it died. Commands are argument lists; secrets go to stdin. What a login shell's rc file
prints before the command is cut off at a random mark, so it can't be mistaken for output.

Closing a channel does not stop the remote process. A command that is canceled or runs out of time is ended by its
process group, over a second channel, before the caller goes on.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio import to_thread

from gpuwarden.core.errors import BadReply, Unreachable
from gpuwarden.remote.ssh.config import Endpoint
from gpuwarden.remote.ssh.connect import Channel, Connection, connect
from gpuwarden.remote.ssh.host_keys import HostKey
from gpuwarden.remote.ssh.mux import TICK_S
from gpuwarden.remote.ssh.shell_quote import command_line

COMMAND_S = 60.0
OPEN_S = 15.0
KILL_S = 8.0
MAX_OUTPUT = 4 << 20
MAX_STDERR = 64 << 10
MAX_NOISE = 256 << 10
READ_BYTES = 1 << 20
PIECE_BYTES = 1 << 18
SFTP_S = 3.0
_SFTP_INIT = b"\0\0\0\x05\x01\0\0\0\x03"
_SFTP_VERSION = 2
# sshd allows ten sessions on one connection by default, and counts those that just ended for a moment longer.
SESSIONS = 5

# TERM to the group, two seconds, KILL. A shell without its own group is signalled alone.
_END = """
kill -s TERM -- "-$1" 2>/dev/null || { kill -s TERM "$1" 2>/dev/null; sleep 1; kill -s KILL "$1" 2>/dev/null; exit 0; }
i=0
while [ "$i" -lt 20 ] && kill -s 0 -- "-$1" 2>/dev/null; do sleep 0.1; i=$((i + 1)); done
kill -s KILL -- "-$1" 2>/dev/null
exit 0
""".strip()


Take = Callable[[memoryview], object]


class NoShell(BadReply):
    """The account runs no commands: a forced command, a restricted shell, or file transfer only."""

    def __init__(self, endpoint: Endpoint, said: str, *, only_files: bool) -> None:
        if only_files:
            super().__init__(
                f"the account {endpoint} allows file transfer only (SFTP) and starts no command, so no job can run",
                "Use an account with a shell, or remove `ForceCommand internal-sftp` for this one.",
            )
        else:
            super().__init__(
                f"{endpoint} did not start the command; its shell said: {said or 'nothing'}",
                "Is the login shell a real shell? A forced command, a restricted shell (rbash, git-shell, nologin) or "
                "a printing rc file may be in the way.",
            )


class CommandFailed(BadReply):
    """A remote command ended with another code than 0. `code` is None when a signal ended it."""

    def __init__(self, argv: Sequence[str], code: int | None, err: bytes) -> None:
        self.exit_code = code
        self.err = err
        how = f"exit code {code}" if code is not None else "a signal"
        tail = err.decode("utf-8", "replace").strip()[-500:]
        super().__init__(f"{argv[0]} on the machine ended with {how}: {tail or 'no output'}")


@dataclass(frozen=True)
class Ran:
    """The result of a command. `code` is None when a signal ended it; `err` is the beginning of stderr."""

    code: int | None
    out: bytes
    err: bytes


class Ssh:
    """One machine. Safe to use from many tasks; the connection is shared."""

    def __init__(self, endpoint: Endpoint, *, pin: str | None = None, config: Path | None = None) -> None:
        self.endpoint = endpoint
        self.pin = pin
        self.config = config
        self.opened: Connection | None = None
        self._opening = threading.Lock()
        self.sessions = threading.BoundedSemaphore(SESSIONS)

    async def open(self) -> HostKey:
        """Connect unless connected, and return the host key. From then on only this key is accepted."""
        return (await to_thread.run_sync(self.connection, abandon_on_cancel=True)).key

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = COMMAND_S, limit: int = MAX_OUTPUT
    ) -> Ran:
        """Run a command to its end and return its bounded output.

        Raises `Unreachable` when the connection or the time is lost (the command was ended, or may have been carried
        out), and `BadReply` when it printed more than `limit` bytes.
        """
        async with self._session(argv) as session:
            with _deadline(self.endpoint, timeout_s):
                return await to_thread.run_sync(session.exchange, stdin, limit, abandon_on_cancel=True)

    async def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> AsyncGenerator[bytes, None]:
        """Return the command's output as it comes. Raises `CommandFailed` at the end unless the exit code is 0.

        Leaving the iteration early ends the command. The caller bounds the wait for each piece.
        """
        async with self._session(argv) as session:
            await to_thread.run_sync(session.start, stdin, abandon_on_cancel=True)
            while chunk := await to_thread.run_sync(session.read, abandon_on_cancel=True):
                yield chunk
            await to_thread.run_sync(session.finish, abandon_on_cancel=True)

    async def pour(self, argv: Sequence[str], take: Take, *, stdin: bytes = b"") -> None:
        """Hand a command's output to `take`, which runs in one worker thread; a view is overwritten after its return.

        Raises as `stream` does, and what `take` raises. `take` is never called after that, nor after a cancel.
        """
        await self.converse(argv, lambda session: session.pour(take, stdin))

    async def converse(self, argv: Sequence[str], work: Callable[[Session], None]) -> None:
        """Let `work` start a command and talk with it, in one worker thread, which has ended when this returns.

        After a cancel the session reads and takes nothing any more.
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
    ) -> Ran:
        """Run a command with `chunks` as its stdin. Raises `Unreachable` when it takes no byte for `stall_s`."""
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
        await self.aclose()
        self.pin = pin

    async def aclose(self) -> None:
        """Close the transport; the next call opens a new one."""
        opened, self.opened = self.opened, None
        if opened is not None:
            await to_thread.run_sync(opened.close)

    @asynccontextmanager
    async def _session(self, argv: Sequence[str]) -> AsyncIterator[Session]:
        """A command on the machine that is not left behind: unless it ended, it is killed on the way out."""
        session = Session(self, argv)
        try:
            yield session
        finally:
            if session.running():
                with anyio.CancelScope(shield=True), anyio.move_on_after(KILL_S):
                    await to_thread.run_sync(session.kill, abandon_on_cancel=True)
            session.close()

    def connection(self) -> Connection:
        """Return the connection, opened unless it is. Blocking."""
        with self._opening:
            if self.opened is not None and self.opened.alive:
                return self.opened
            if self.opened is not None:
                self.opened.close()
                self.opened = None
            self.opened = connect(self.endpoint, pin=self.pin, config=self.config)
            self.pin = self.opened.key.line
            return self.opened

    def channel(self, command: bytes, wanted: Callable[[], bool]) -> Channel | None:
        """Return the channel of a command, None once it is not wanted any more.

        Nothing has run yet, so a dead connection is opened again, once. A session that just ended still counts on the
        far side for a moment, so a refused one is asked for again.
        """
        end, reopened, wait = time.monotonic() + OPEN_S, False, 0.02
        while True:
            opened = self.connection()
            try:
                return opened.open_channel(command) if wanted() else None
            except OSError as problem:
                alive = opened.alive
                if time.monotonic() + wait > end or (reopened and not alive):
                    raise Unreachable(f"{self.endpoint} opens no session: {problem}", "Try again.") from problem
                reopened = reopened or not alive
                time.sleep(wait)
                wait = min(2 * wait, 1.0)


class Dialogue:
    """A command that answers one line for every line it is given, kept running between requests.

    After a failure it is gone; the next request starts it again. One request at a time.
    """

    def __init__(self, machine: Ssh, argv: Sequence[str]) -> None:
        self.machine, self.argv = machine, tuple(argv)
        self._session: Session | None = None
        self._turn = threading.Lock()

    async def ask(self, line: bytes, *, timeout_s: float = COMMAND_S) -> bytes:
        """Send one line and return the line that answers it. Raises `Unreachable`, or `CommandFailed` when it ended."""
        try:
            with _deadline(self.machine.endpoint, timeout_s):
                return await to_thread.run_sync(self._ask, line, abandon_on_cancel=True)
        except BaseException:
            self.close()  # a late answer must not be mistaken for the next one
            raise

    def _ask(self, line: bytes) -> bytes:
        with self._turn:
            session = self._session
            if session is None or session.channel is None or session.channel.exited():
                self.close()  # a dead one keeps its slot until then
                session = self._session = Session(self.machine, self.argv)
                session.start(None)
            session.send(line + b"\n")
            answer = bytearray()
            while not answer.endswith(b"\n"):
                chunk = session.read()
                answer += chunk
                if not chunk:
                    session.finish()
                    raise BadReply(f"{self.argv[0]} on {self.machine.endpoint} ended without an answer", "Try again.")
                if len(answer) > MAX_OUTPUT:
                    raise BadReply(f"{self.argv[0]} on {self.machine.endpoint} gave an endless line", "Try again.")
            return bytes(answer)

    def close(self) -> None:
        """Close its stdin and its channel, on which it ends."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


@contextmanager
def _deadline(endpoint: Endpoint, seconds: float) -> Iterator[None]:
    """Limit the time of a block: `anyio.fail_after` that raises `Unreachable`."""
    try:
        with anyio.fail_after(seconds):
            yield
    except TimeoutError:
        raise Unreachable(
            f"{endpoint} gave no answer in {seconds:g} s; the command was ended there if it could be",
            "It may have been carried out. Check before trying again.",
        ) from None


class Session:
    """One command on one channel. Blocking; each method runs in a worker thread, one at a time except `kill`."""

    def __init__(self, machine: Ssh, argv: Sequence[str]) -> None:
        self.machine, self.argv = machine, argv
        self.mark = secrets.token_hex(12)
        self.line = command_line(argv, self.mark)
        self.channel: Channel | None = None
        self.pid: int | None = None
        self.err = bytearray()
        self._buffer = bytearray()
        self._piece: memoryview | None = None
        self._gate = threading.Lock()
        self._holds = self._begun = self._over = self._closed = False

    # -------------------------------------------------------------------------------------------------- the phases

    def start(self, stdin: bytes | None) -> None:
        """Start the command and wait for its pid; None leaves its stdin open for `send`."""
        if not self.machine.sessions.acquire(timeout=OPEN_S):
            raise Unreachable(f"{self.machine.endpoint} is busy with {SESSIONS} other commands", "Try again.")
        with self._gate:
            self._begun, left = not self._closed, self._closed
        channel = None
        try:
            channel = None if left else self.machine.channel(self.line, lambda: not self._closed)
        finally:
            with self._gate:
                self.channel, self._holds = channel, not self._closed and channel is not None
                self._over = channel is None
                if not self._holds:
                    self.machine.sessions.release()
        if not self._holds:
            if channel is not None:
                channel.close()
            raise Unreachable("canceled before it began")
        if stdin is not None:
            self.send(stdin)
            self._end_input()
        self._skip_noise()

    def running(self) -> bool:
        """Return whether something may run on the machine. If not, nothing will be started any more."""
        with self._gate:
            self._closed = self._closed or not self._begun
            return self._begun and not self._over

    def exchange(self, stdin: bytes, limit: int) -> Ran:
        """Run a short command from start to end."""
        self.start(stdin)
        return self.drain(limit, shut=False)

    def pour(self, take: Take, stdin: bytes) -> None:
        """Hand all output to `take`, through one buffer that stays in the processor's cache."""
        self.start(stdin)
        piece = memoryview(bytearray(PIECE_BYTES))
        while count := self.read_into(piece):
            take(piece[:count])
        self.finish()

    def drain(self, limit: int, *, shut: bool = True) -> Ran:
        """Close stdin and read to the end."""
        if shut:
            self._end_input()
        out = bytearray()
        while chunk := self.read():
            out += chunk
            if len(out) > limit:
                raise BadReply(f"{self.argv[0]} on {self.machine.endpoint} printed more than {limit:,} bytes")
        return Ran(self._code(), bytes(out), bytes(self.err))

    def finish(self) -> None:
        """Raise `CommandFailed` unless it ended well."""
        code = self._code()
        if code != 0:
            raise CommandFailed(self.argv, code, bytes(self.err))

    def send(self, data: bytes | bytearray | memoryview, stall_s: float | None = None) -> bool:
        """Send to stdin; False when the command takes no more. Raises `Unreachable` when none went for `stall_s`."""
        view, since = memoryview(data), time.monotonic()
        with self._translated() as channel:
            while view and not self._closed:
                try:
                    view = view[channel.send(view) :]
                    since = time.monotonic()
                except TimeoutError:
                    self._drain_stderr(channel)
                    if stall_s is not None and time.monotonic() - since > stall_s:
                        raise ConnectionError(f"it took no byte for {stall_s:g} s") from None
                except BrokenPipeError:
                    return False
        return not self._closed

    def read(self) -> bytes:
        """Return the next piece of stdout after the mark; empty at the end."""
        return self._recv()

    # ------------------------------------------------------------------------------------------------------ pieces

    def _end_input(self) -> None:
        """Close stdin. Errors are detected and classified when the output is read."""
        with suppress(Unreachable), self._translated() as channel:
            channel.end_input()

    def _skip_noise(self) -> None:
        """Read up to the mark; keep what follows it."""
        token = f"\n{self.mark} ".encode()
        while self.pid is None:
            chunk = self._recv()
            self._buffer += chunk
            at = self._buffer.find(token)
            end = self._buffer.find(b"\n", at + len(token)) if at >= 0 else -1
            if end >= 0:
                said = bytes(self._buffer[at + len(token) : end])
                if not re.fullmatch(rb"[1-9][0-9]{0,9}", said):
                    named = f"{self.machine.endpoint} names {said[:40]!r} as a process"
                    raise BadReply(named, "Is its shell a real shell?")
                self.pid = int(said)
                del self._buffer[: end + 1]
            elif not chunk or len(self._buffer) > MAX_NOISE:
                self._over = not chunk
                if not chunk:
                    self._code()  # by then its last words are here
                shown = (bytes(self._buffer) + bytes(self.err)).decode("utf-8", "replace").strip()[:300]
                raise NoShell(self.machine.endpoint, shown, only_files=not chunk and self._speaks_sftp())

    def _speaks_sftp(self) -> bool:
        """Return whether any command line starts an SFTP server there, as `ForceCommand internal-sftp` does."""
        opened, answer = self.machine.opened, memoryview(bytearray(64))
        try:
            channel = opened.open_channel(command_line(["true"], self.mark)) if opened else None
        except OSError:
            return False
        if channel is None:
            return False
        try:
            channel.send(memoryview(_SFTP_INIT))
            return channel.receive_into(answer, wait_s=SFTP_S) >= 5 and answer[4] == _SFTP_VERSION
        except OSError:
            return False
        finally:
            channel.close()

    def _recv(self) -> bytes:
        """Return at least one byte of stdout, more if it is there; empty at the end. stderr is drained meanwhile."""
        if self._piece is None:
            self._piece = memoryview(bytearray(READ_BYTES))
        return bytes(self._piece[: self.read_into(self._piece)])

    def read_into(self, piece: memoryview, wait_s: float | None = None) -> int:
        """Read what stdout has; 0 at its end. After `wait_s` without a byte it raises `TimeoutError`."""
        if self._buffer and self.pid is not None:
            count = min(len(piece), len(self._buffer))
            piece[:count] = self._buffer[:count]
            del self._buffer[:count]
            return count
        with self._translated() as channel:
            while not self._closed:
                self._drain_stderr(channel)
                try:
                    return channel.receive_into(piece, TICK_S if wait_s is None else wait_s)
                except TimeoutError:
                    if wait_s is not None:
                        raise
        return 0

    def _drain_stderr(self, channel: Channel) -> None:
        self.err += channel.errors()[: MAX_STDERR - len(self.err)]

    def _code(self) -> int | None:
        """Return the exit code; None for a signal. Raises `Unreachable` when the connection was lost before it came."""
        end = time.monotonic() + OPEN_S
        with self._translated() as channel:
            while True:
                try:
                    code = channel.code()
                    break
                except TimeoutError:
                    if self._closed or time.monotonic() > end:
                        raise ConnectionError("the connection ended before the command did") from None
            self._over = True
            self._drain_stderr(channel)
        return code

    @contextmanager
    def _translated(self) -> Iterator[Channel]:
        """Turn the errors of a lost connection into `Unreachable`."""
        try:
            if self.channel is None:
                raise ConnectionError("it has not begun")
            yield self.channel
        except TimeoutError:
            raise
        except OSError as lost:
            raise self._lost(lost) from lost

    def _lost(self, why: object) -> Unreachable:
        return Unreachable(
            f"the connection to {self.machine.endpoint} was lost: {why or 'no reason given'}",
            "The command may have been carried out. Check before trying again.",
        )

    # --------------------------------------------------------------------------------------------------------- end

    def kill(self) -> None:
        """End the remote command by its process group, only before its exit is known, so that the pid is valid."""
        end = time.monotonic() + KILL_S / 2
        channel, opened = self.channel, self.machine.opened
        while self.pid is None and time.monotonic() < end and opened and opened.alive:
            time.sleep(0.02)  # another thread is reading it
        if self.pid is None or channel is None or channel.exited() or not (opened and opened.alive):
            return
        killer = Session(self.machine, ["/bin/sh", "-c", _END, "sh", str(self.pid)])
        with suppress(Exception):  # the caller sees a lost connection anyway
            killer.channel = opened.open_channel(killer.line)
            killer.drain(MAX_NOISE)
        killer.close()

    def close(self) -> None:
        """Close the channel and free its slot."""
        with self._gate:
            self._closed = True
            held, self._holds = self._holds, False
        if self.channel is not None:
            with suppress(Exception):
                self.channel.close()
        if held:
            self.machine.sessions.release()
