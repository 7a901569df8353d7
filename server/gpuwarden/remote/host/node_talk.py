"""Communicate with the agent that examines a node in a multi-node job, over SSH or as a local process."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Protocol

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream

from gpuwarden.core import processes
from gpuwarden.core.errors import BadReply, Unreachable
from gpuwarden.core.sanitize import line
from gpuwarden.remote.host.any_python import ANY_PYTHON, python_command
from gpuwarden.remote.ssh.config import resolve
from gpuwarden.remote.ssh.machine import Dialogue, Ssh

LOCAL: Final = "local"
"""The name of the machine that gpuwarden runs on."""
ASK_S: Final = 60.0
MAX_ANSWER: Final = 4 << 20
# The first line of input is the agent's source code. The loader keeps it, because the ranks of an all-reduce are
# started from this code.
_LOADER: Final = (
    "import base64, sys; SOURCE = base64.b64decode(sys.stdin.buffer.readline()).decode(); "
    "exec(compile(SOURCE.replace('SOURCE = \"\"', '', 1), 'node_agent.py', 'exec'))"
)


@cache
def agent_source() -> str:
    """Return the agent's source code, which is sent to every node."""
    return files("gpuwarden.remote.host").joinpath("node_agent.py").read_text("utf-8")


class _Lines(Protocol):
    """A program that returns one reply line for each request line."""

    async def ask(self, line: bytes, *, timeout_s: float) -> bytes: ...

    async def aclose(self) -> None: ...


class NodeTalk:
    """The agent on one node. After a failure, every further request raises the same error."""

    def __init__(self, name: str, lines: _Lines, fingerprint: str = "", first_contact: bool = False) -> None:
        self.name, self._lines = name, lines
        self.fingerprint, self.first_contact = fingerprint, first_contact
        self._source: bytes | None = base64.b64encode(agent_source().encode())
        self._gone: Exception | None = None

    async def ask(self, verb: str, *, timeout_s: float = ASK_S, **request: Any) -> dict[str, Any]:
        """Return the agent's reply. Raises `Unreachable` or `BadReply` if the reply is missing or invalid."""
        if self._gone is not None:
            raise self._gone
        sent = json.dumps({"verb": verb, **request}).encode()
        whole = sent if self._source is None else self._source + b"\n" + sent
        self._source = None
        try:
            raw = await self._lines.ask(whole, timeout_s=timeout_s)
            reply = json.loads(raw)
            if not isinstance(reply, dict):
                raise TypeError
        except (ValueError, TypeError, RecursionError):
            self._gone = BadReply(f"the response from {self.name} can't be parsed", "Try again.")
            raise self._gone from None
        except Exception as error:
            self._gone = error
            raise
        if reply.get("ok") is not True:
            raise BadReply(f"the check of {self.name} failed: {line(reply.get('error') or 'no reason given', 300)}")
        return reply

    async def aclose(self) -> None:
        """Stop the agent and close the connection."""
        await self._lines.aclose()


@dataclass
class _OverSsh:
    """The agent on a remote node."""

    dialogue: Dialogue

    async def ask(self, line: bytes, *, timeout_s: float) -> bytes:
        return await self.dialogue.ask(line, timeout_s=timeout_s)

    async def aclose(self) -> None:
        self.dialogue.close()
        await self.dialogue.machine.aclose()


@dataclass
class _Here:
    """The agent on this machine, as a process."""

    process: anyio.abc.Process
    out: BufferedByteReceiveStream

    async def ask(self, line: bytes, *, timeout_s: float) -> bytes:
        assert self.process.stdin is not None
        try:
            with anyio.fail_after(timeout_s):
                await self.process.stdin.send(line + b"\n")
                return await self.out.receive_until(b"\n", MAX_ANSWER)
        except (TimeoutError, OSError, anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError) as error:
            raise Unreachable("the agent on this machine did not answer", "Try again.") from error

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            if self.process.returncode is None:
                self.process.terminate()
            await self.process.aclose()


async def open_talk(name: str, config: Path | None = None) -> NodeTalk:
    """Start the agent on a node: a host in the user's SSH configuration, or `local`. Raises WardenError on failure."""
    if name == LOCAL:
        argv = [sys.executable, "-I", "-S", "-c", _LOADER]
        process = await processes.start(argv, stderr=None)
        assert process.stdout is not None
        return NodeTalk(name, _Here(process, BufferedByteReceiveStream(process.stdout)))
    machine = Ssh(await anyio.to_thread.run_sync(lambda: resolve(name, config=config)), config=config)
    try:
        key = await machine.open()
    except BaseException:
        await machine.aclose()
        raise
    lines = _OverSsh(Dialogue(machine, python_command(ANY_PYTHON, _LOADER)))
    return NodeTalk(name, lines, key.fingerprint, key.first_contact)
