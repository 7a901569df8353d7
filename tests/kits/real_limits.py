"""Real limits, by any means that this machine permits: small disks, and control groups with little memory.

A container's root may lack the right to mount. Then the job mounts in a user namespace; if that is refused too, a
seccomp filter refuses to create files for the job, with the error of a full disk.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuwarden.remote.runner.memory import cgroup_folders

ENOSPC = 28
MKNOD_WAYS = {"x86_64": (0xC000003E, 257), "aarch64": (0xC00000B7, 56)}  # audit architecture, number of openat
O_CREAT = 0o100


@contextmanager
def mounted(folder: Path, size: str, inodes: int) -> Iterator[Path | None]:
    """Mount a tmpfs of this size over a folder; yield None if mounting is refused."""
    folder.mkdir(parents=True)
    if shutil.which("mount") is None or subprocess.run(_mount(folder, size, inodes), capture_output=True).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def _mount(folder: Path, size: str, inodes: int) -> list[str]:
    return ["mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes={inodes}", "small", str(folder)]


def in_namespace(folder: Path, size: str, inodes: int) -> list[str] | None:
    """Return a prefix that mounts a tmpfs over `folder` for a command, or None if user namespaces are refused."""
    folder.mkdir(parents=True, exist_ok=True)
    line = " ".join(_mount(folder, size, inodes)) + ' && exec "$@"'
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", line, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], capture_output=True).returncode:
        return None
    return words


def refuse_new_files() -> None:
    """Make the kernel refuse to create files for this process from now on, as on a disk without free inodes.

    The seccomp filter requires no privilege. Linux on x86-64 and arm64 only.
    """
    architecture, openat = MKNOD_WAYS[platform.machine()]
    load, equal, has, give = 0x20, 0x15, 0x45, 0x06
    program = [
        (load, 0, 0, 4), (equal, 0, 5, architecture),
        (load, 0, 0, 0), (equal, 0, 3, openat),
        (load, 0, 0, 32), (has, 0, 1, O_CREAT),
        (give, 0, 0, 0x00050000 | ENOSPC),
        (give, 0, 0, 0x7FFF0000),
    ]  # fmt: skip
    code = b"".join(struct.pack("HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    for words in ((38, 1, 0, 0, 0), (22, 2, header)):  # PR_SET_NO_NEW_PRIVS; PR_SET_SECCOMP, a filter
        if libc.prctl(*words):
            raise OSError(ctypes.get_errno(), "seccomp is refused here")


@contextmanager
def memory_group(limit: int) -> Iterator[Path | None]:
    """Create a control group with a memory limit in bytes; yield None if groups can't be created."""
    for parent in map(Path, cgroup_folders()):
        group = parent / f"gpuwarden-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            names = ("memory.max", "memory.limit_in_bytes")
            next(file for name in names if (file := group / name).exists()).write_text(str(limit))
            yield group
            return
        except (OSError, StopIteration):
            continue
        finally:
            group.rmdir()
    yield None
