"""Exchange JSON lines with the server over stdio and with the console of a rehearsal cloud."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 90.0
_KEPT_ERRORS = 20_000


SHOWS_S = 90.0
"""The timeout of `wait_for` in seconds."""


class JsonProcessError(Exception):
    """The program exited, did not respond in time, or sent something other than JSON."""


class JsonProcess:
    """A program that reads and writes JSON lines. The end of its standard error is kept for error messages."""

    def __init__(self, argv: list[str], env: dict[str, str], cwd: Path) -> None:
        self._process = subprocess.Popen(
            argv,
            env=env,
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        output, errors = self._process.stdout, self._process.stderr
        assert output is not None
        assert errors is not None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors = ""

        def read() -> None:
            for line in output:
                self._lines.put(line)
            self._lines.put(None)

        def read_errors() -> None:
            for line in errors:
                self._errors = (self._errors + line)[-_KEPT_ERRORS:]

        self._threads = [threading.Thread(target=target, daemon=True) for target in (read, read_errors)]
        for thread in self._threads:
            thread.start()

    def send(self, message: dict[str, Any]) -> None:
        """Write one line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise JsonProcessError(f"the program has exited: {self._errors[-500:]}") from error

    def receive(self, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """Return the next message, one line of JSON."""
        try:
            line = self._lines.get(timeout=patience_s)
        except queue.Empty:
            raise JsonProcessError(f"no answer within {patience_s:g} s") from None
        if line is None:
            self._threads[1].join(5)  # the last error output may arrive after the last reply
            raise JsonProcessError(f"the program ended: {self._errors[-500:]}")
        try:
            value = json.loads(line)
        except ValueError as error:
            raise JsonProcessError(f"not JSON: {line[:200]!r}") from error
        if not isinstance(value, dict):
            raise JsonProcessError(f"not a JSON object: {line[:200]!r}")
        return value

    def close(self) -> None:
        """Close the program's input, and kill the program if it does not exit."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(5)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


def wait_for(shown: Callable[[], bool], why: str | Callable[[], str]) -> None:
    """Wait until a condition holds. Raises JsonProcessError with `why` after SHOWS_S seconds."""
    until = time.monotonic() + SHOWS_S
    while not shown():
        if time.monotonic() > until:
            raise JsonProcessError(why if isinstance(why, str) else why())
        time.sleep(0.02)
