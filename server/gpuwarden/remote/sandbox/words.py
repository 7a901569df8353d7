"""The words that start a command in a sandbox. Pure: a box and a look at this machine in, an argument list out."""

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
"""The kernel's settings: root may write them without any capability, and bubblewrap leaves them open to it."""
OWN_TEMPORARY: Final = ("/tmp", "/var/tmp")  # noqa: S108 - in memory, and the job's alone


class Kind(StrEnum):
    """What keeps a job in."""

    BUBBLEWRAP = "bubblewrap"
    LANDLOCK = "landlock"
    SANDBOX_EXEC = "sandbox-exec"
    NONE = "none"


@dataclass(frozen=True)
class Sandbox:
    """What works on this machine. `program` is what starts it, `flags` what this version of it lacks or needs."""

    kind: Kind
    program: str = ""
    flags: tuple[str, ...] = ()
    why: str = ""
    """Why there is none."""


@dataclass(frozen=True)
class Box:
    """What one job may see. Paths are absolute and real; `read` and `write` are seen where they are.

    `hidden` is never seen, not even inside of `read` and `write`. `machine` are folders of a rehearsal's machine, which
    may be inside of what is hidden.
    """

    run_dir: str
    home: str
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    machine: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    network: bool = False

    def __post_init__(self) -> None:
        paths = (self.run_dir, self.home, *self.read, *self.write, *self.hidden, *self.machine, *self.devices)
        for path in paths:
            if not path.startswith("/") or "\0" in path or ".." in path.split("/"):
                raise ValueError(f"{path!r} is not an absolute path")

    @property
    def work(self) -> str:
        """The job's working folder."""
        return f"{self.run_dir}/work"

    @property
    def metrics(self) -> str:
        """The file that the job appends its metrics to."""
        return f"{self.run_dir}/metrics.jsonl"

    @property
    def own_home(self) -> str:
        """The folder that the job has in place of the user's home. It stays for the next attempt."""
        return f"{self.run_dir}/home"


@dataclass(frozen=True)
class System:
    """The parts of this machine that every job sees: links and folders of `/`, and what is read only."""

    links: tuple[tuple[str, str], ...]
    read: tuple[str, ...]


def words(sandbox: Sandbox, box: Box, machine: System, init: str, grace: float = GRACE_S) -> list[str]:
    """The words before two descriptors (the job's environment, the report) and the command. Pure."""
    python = [sys.executable, "-I", "-S", init]
    if sandbox.kind is Kind.BUBBLEWRAP:
        return [*bubblewrap(sandbox, box, machine), "--", *python, "init", f"{grace:g}"]
    if sandbox.kind is Kind.LANDLOCK:
        return [*python, json.dumps(landlock(box, machine)), f"{grace:g}"]
    if sandbox.kind is Kind.SANDBOX_EXEC:
        return [sandbox.program, "-p", seatbelt(box), *python, "plain", f"{grace:g}"]
    raise ValueError("there is no sandbox")


def bubblewrap(sandbox: Sandbox, box: Box, machine: System) -> list[str]:
    """The words of `bwrap`. Later mounts cover earlier ones, so what is hidden comes after what might show it."""
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
    for path in (box.work, box.metrics, box.own_home):
        given += ["--bind", path, path]
    return [*given, "--chdir", box.work]


def landlock(box: Box, machine: System) -> dict[str, object]:
    """The rules of Landlock. It hides no part of what it shows: a folder with something hidden in it is left out."""

    def open_to(paths: Sequence[str]) -> list[str]:
        return [p for p in paths if not any(below(h, (p,)) or below(p, (h,)) for h in box.hidden)]

    devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "shm")]
    read = [*machine.read, *(link for _, link in machine.links), "/proc", *open_to(box.read), box.run_dir]
    write = [*devices, *box.devices, *open_to(box.write), *box.machine, box.work, box.metrics, box.own_home]
    return {"read": read, "write": write, "network": box.network}


def seatbelt(box: Box) -> str:
    """The profile for macOS's sandbox-exec. The last rule that matches decides."""
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
    """Return whether a path is one of these folders or is in one."""
    return any(path == top or path.startswith(top.rstrip("/") + "/") for top in tops)
