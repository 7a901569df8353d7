"""Run an agent that is a program, in a separate folder, with few environment variables and a time limit.

The program's output is the transcript.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from evals.harness.recorder import AgentDied, Recorder
from evals.harness.setup import Setup

_MAX_OUTPUT: Final = 64 << 20
_TAIL: Final = 2_000
_NOTES: Final = 50


@dataclass(frozen=True)
class Place:
    """A program's folders: the working folder `work` contains only the skill pack, and `own` the configuration."""

    own: Path
    work: Path


@contextmanager
def place() -> Iterator[Place]:
    """Create a temporary folder outside any checkout, so that the program can't read the files of the evals."""
    with tempfile.TemporaryDirectory(prefix="evals-", ignore_cleanup_errors=True) as name:
        work = Path(name) / "work"
        work.mkdir()
        yield Place(Path(name), work)


def drive(
    command: list[str], recorder: Recorder, setup: Setup, env: dict[str, str], work: Path, ends: tuple[str, ...]
) -> None:
    """Run the program with the prompt on its standard input, and record its output. Raises AgentDied.

    `ends` are the types of lines that end a transcript: if a program fails after such a line, its output is scored.
    """
    try:
        process = subprocess.Popen(
            command, cwd=work, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise AgentDied(f"{command[0]} can't be started: {error}") from error
    output, faults = _Reader(process, process.stdout, _MAX_OUTPUT), _Reader(process, process.stderr, _MAX_OUTPUT)
    assert process.stdin is not None
    why = ""
    try:
        with suppress(OSError):  # the program ended without reading its input; its exit status gives the reason
            process.stdin.write(recorder.prompt.encode())
            process.stdin.close()
        process.wait(setup.timeout_s)
    except subprocess.TimeoutExpired:
        why = f"the session took longer than {setup.timeout_s:g} s and was stopped"
    finally:
        _kill(process)
    out, err = setup.redacted(output.data()), setup.redacted(faults.data())
    if out.strip():
        recorder.hand_over(out)
    tail = err[-_TAIL:].decode("utf-8", "replace").strip()
    if output.full:
        why = "the output exceeds the maximum size of a session"
    elif not why and not is_closed(out, ends):
        why = "the transcript is incomplete"
    if why:
        raise AgentDied(f"{Path(command[0]).name}: {why} (exit code {process.returncode}): {tail}")


def is_closed(output: bytes, ends: tuple[str, ...]) -> bool:
    """Return true if one of the last lines ends the transcript; notes about background tasks may follow that line."""
    for line in output.strip().rsplit(b"\n", _NOTES)[-_NOTES:]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and row.get("type") in ends:
            return True
    return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the program and its remaining processes, so that nothing is written while the trial is scored."""
    if os.name == "posix":
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # the process group is gone (macOS: PermissionError)
            pass
    process.kill()
    process.wait()


class _Reader:
    """Reads a stream to its end in a thread. Kills the program if its output exceeds the limit."""

    def __init__(self, process: subprocess.Popen[bytes], stream: IO[bytes] | None, most: int) -> None:
        assert stream is not None
        self.full = False
        self._process, self._stream, self._most = process, stream, most
        self._blocks: list[bytes] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        size = 0
        while block := os.read(self._stream.fileno(), 1 << 16):
            size += len(block)
            if size > self._most:
                self.full = True
                self._process.kill()
                return
            self._blocks.append(block)

    def data(self) -> bytes:
        """Return the data that was read. Call this after the program has ended."""
        self._thread.join(10)
        if not self._thread.is_alive():
            self._stream.close()
        return b"".join(self._blocks)
