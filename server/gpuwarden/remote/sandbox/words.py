"""Build the argument list that starts a command in a sandbox, from a box and facts about this machine, without I/O."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

GRACE_S: Final = 10.0
KERNEL: Final = tuple(
    f"/proc/{n}" for n in ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "mtrr", "driver")
)
"""Kernel settings. Root can change them even without capabilities, and bubblewrap does not prevent that."""
OWN_TEMPORARY: Final = ("/tmp", "/var/tmp")  # noqa: S108 - in memory, and private to the job


class Kind(StrEnum):
    """The mechanism that confines a job."""

    BUBBLEWRAP = "bubblewrap"
    LANDLOCK = "landlock"
    SANDBOX_EXEC = "sandbox-exec"
    NONE = "none"


@dataclass(frozen=True)
class Sandbox:
    """A sandbox. `program` starts it; `flags` are options that depend on the program's version."""

    kind: Kind
    program: str = ""
    flags: tuple[str, ...] = ()
    why: str = ""
    """The reason why no sandbox works."""


@dataclass(frozen=True)
class Box:
    """The absolute paths that one job may access. Paths in `read` and `write` are the same inside the sandbox.

    `hidden` paths are never visible, even inside `read` or `write`. `machine` lists folders of a simulated machine in
    a rehearsal, which may be inside `hidden`.
    """

    run_dir: str
    home: str
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    machine: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    network: bool = False
    mounts: tuple[tuple[str, str, bool], ...] = ()
    """Each entry is a folder, its path in the sandbox, and whether the job may write to it. Used only by bubblewrap."""

    def __post_init__(self) -> None:
        paths = [self.run_dir, self.home, *self.read, *self.write, *self.hidden, *self.machine, *self.devices]
        paths += [path for folder, target, _ in self.mounts for path in (folder, target)]
        for path in paths:
            if not path.startswith("/") or "\0" in path or ".." in path.split("/"):
                raise ValueError(f"{path!r} is not an absolute path")

    @property
    def work(self) -> str:
        """Return the job's working folder."""
        return f"{self.run_dir}/work"

    @property
    def metrics(self) -> str:
        """Return the file to which the job appends its metrics."""
        return f"{self.run_dir}/metrics.jsonl"

    @property
    def own_home(self) -> str:
        """Return the folder that replaces the user's home. It is kept for the next attempt."""
        return f"{self.run_dir}/home"


@dataclass(frozen=True)
class System:
    """The paths on this machine that every job can read: symbolic links in `/`, and read-only paths."""

    links: tuple[tuple[str, str], ...]
    read: tuple[str, ...]


def sandbox_arguments(sandbox: Sandbox, box: Box, machine: System, init: str, grace: float = GRACE_S) -> list[str]:
    """Return the arguments before the two descriptors (for the job's environment and the report) and the command."""
    python = [sys.executable, "-I", "-S", init]
    if sandbox.kind is Kind.BUBBLEWRAP:
        return [*bubblewrap(sandbox, box, machine), "--", *python, "init", f"{grace:g}"]
    if sandbox.kind is Kind.LANDLOCK:
        return [*python, json.dumps(landlock(box, machine)), f"{grace:g}"]
    if sandbox.kind is Kind.SANDBOX_EXEC:
        return [sandbox.program, "-p", seatbelt(box), *python, "plain", f"{grace:g}"]
    raise ValueError("no sandbox works on this machine")


def bubblewrap(sandbox: Sandbox, box: Box, machine: System) -> list[str]:
    """Return the arguments of `bwrap`. Later mounts cover earlier ones, so hidden paths come after the visible ones."""
    given = [sandbox.program, "--unshare-all", "--unshare-user", *sandbox.flags, "--as-pid-1", "--cap-drop", "ALL"]
    given += ["--share-net"] if box.network else []
    for target, link in machine.links:
        given += ["--symlink", target, link]
    for path in machine.read:
        given += ["--ro-bind-try", path, path]
    given += ["--proc", "/proc", "--dev", "/dev"]
    for path in KERNEL:
        given += ["--ro-bind-try", path, path]
    for path in OWN_TEMPORARY:
        given += ["--tmpfs", path]
    for path in box.devices:
        given += ["--dev-bind-try", path, path]
    given += ["--bind", box.own_home, box.home]
    for option, paths in (("--ro-bind-try", box.read), ("--bind-try", box.write)):
        for path in paths:
            given += [option, path, path]
    for path in sorted(box.hidden):
        if below(path, (*box.read, *box.write)):
            given += ["--tmpfs", path]
    for path in box.machine:
        given += ["--bind", path, path]
    given += ["--ro-bind", box.run_dir, box.run_dir]
    own = [(path, path, True) for path in (box.work, box.metrics, box.own_home)]
    for folder, target, writable in (*own, *box.mounts):
        given += ["--bind" if writable else "--ro-bind", folder, target]
    return [*given, "--chdir", box.work]


def landlock(box: Box, machine: System) -> dict[str, object]:
    """Return the Landlock rules. They can't hide part of a folder, so folders with hidden paths are omitted."""

    def open_to(paths: Sequence[str]) -> list[str]:
        return [p for p in paths if not any(below(h, (p,)) or below(p, (h,)) for h in box.hidden)]

    devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "shm")]
    read = [*machine.read, *(link for _, link in machine.links), "/proc", *open_to(box.read), box.run_dir]
    write = [*devices, *box.devices, *open_to(box.write), *box.machine, box.work, box.metrics, box.own_home]
    return {"read": read, "write": write, "network": box.network}


def seatbelt(box: Box) -> str:
    """Return the profile for macOS's sandbox-exec. The last matching rule applies."""
    read = ["/usr", "/bin", "/sbin", "/System", "/Library/Apple", "/Library/Frameworks", "/private/etc/ssl"]
    read += ["/private/var/db/timezone", "/opt/homebrew", "/dev", *box.read, box.run_dir]
    write = [*box.write, box.work, box.metrics, box.own_home]
    lines = [
        "(version 1)",
        "(deny default)",
        "(allow process-exec) (allow process-fork) (allow sysctl-read) (allow ipc-posix-sem) (allow ipc-posix-shm)",
        "(allow signal (target same-sandbox)) (allow process-info* (target same-sandbox))",
        "(allow file-read-metadata)",
        f"(allow file-read* {_subpaths(read)})",
        f"(allow file-read* file-write* {_subpaths(write)})",
        '(allow file-write* (literal "/dev/null") (literal "/dev/zero"))',
    ]
    lines += [f"(deny file-read* file-write* {_subpaths(box.hidden)})"] if box.hidden else []
    again = [*box.machine, box.work, box.metrics, box.own_home]
    lines += [f"(allow file-read* file-write* {_subpaths(again)})", f"(allow file-read* {_subpaths([box.run_dir])})"]
    lines += ["(allow network*)", "(deny network* (remote unix-socket))"] if box.network else []
    return "\n".join(lines)


def _subpaths(paths: Sequence[str]) -> str:
    return " ".join('(subpath "{}")'.format(p.replace("\\", "\\\\").replace('"', '\\"')) for p in paths)


def below(path: str, tops: Sequence[str]) -> bool:
    """Return whether a path equals or is inside one of these folders."""
    return any(path == top or path.startswith(top.rstrip("/") + "/") for top in tops)
