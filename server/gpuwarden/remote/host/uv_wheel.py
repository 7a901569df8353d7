"""Get uv for a machine that lacks it. pip downloads uv to this machine from PyPI as a wheel with a pinned digest.

Each musllinux wheel contains one static program, which runs on any Linux system.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuwarden.core.errors import NotSupported, Unreachable
from gpuwarden.core.sanitize import line
from gpuwarden.private import private_folder, write_private

VERSION: Final = "0.13.9"
FETCH_S: Final = 300.0
MAX_PROGRAM: Final = 256 << 20
BY_HAND: Final = "Install uv on the machine: `pip install uv`."


@dataclass(frozen=True)
class Wheel:
    """One file of a release: its platform tag and its SHA-256."""

    platform: str
    sha256: str


WHEELS: Final = {
    "x86_64": Wheel("musllinux_1_1_x86_64", "2c45530751517d6c3bbc69a19473f6effe47cce047bede01ffd8af7ea7b36b25"),
    "aarch64": Wheel("musllinux_1_1_aarch64", "5435c5ce14a56431208ca0996416d310f1598e8c2c8ba707688985a16bb82dbe"),
}
"""The wheels for Linux, by `platform.machine()`."""


def name_of(machine: str) -> str:
    """Return the name of the program's folder. Each release and architecture has its own folder."""
    return f"uv-{VERSION}-{machine}-{WHEELS[machine].sha256[:12]}"


def uv_program(machine: str, tools: Path) -> Path:
    """Return the path of uv for an architecture. uv is downloaded once, to the folder `tools`.

    Raises Unreachable if pip can't download uv. Raises NotSupported if neither pip nor uv is installed, or if the
    wheel has a wrong digest or is too large.
    """
    kept = tools / name_of(machine) / "uv"
    if not kept.is_file():
        with tempfile.TemporaryDirectory(prefix="gpuwarden-uv-") as folder:
            program = _unpacked(_fetched(WHEELS[machine], Path(folder)), WHEELS[machine])
        private_folder(kept.parent)
        write_private(kept, program)
    return kept


def _fetched(wheel: Wheel, folder: Path) -> Path:
    """Download a wheel with pip, which verifies the digest, and return the file."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"uv=={VERSION} --hash=sha256:{wheel.sha256}\n", "utf-8")
    words = ["download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    words += ["--disable-pip-version-check", "--platform", wheel.platform, "--dest", str(folder), "-r", str(wanted)]
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip"]
    elif uv := shutil.which("uv"):  # uv created this environment without pip
        pip = [uv, "run", "--no-project", "--no-config", "--quiet", "--with", "pip", "python", "-m", "pip"]
    else:
        raise NotSupported("uv can't be downloaded: gpuwarden's environment has no pip", BY_HAND)
    try:
        done = subprocess.run(
            [*pip, *words], capture_output=True, timeout=FETCH_S, stdin=subprocess.DEVNULL, check=False, cwd=folder
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreachable(f"pip could not download uv {VERSION}: {type(error).__name__}", BY_HAND) from error
    files = list(folder.glob("uv-*.whl"))
    if done.returncode != 0 or len(files) != 1:
        message = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise Unreachable(f"pip could not download uv {VERSION}: {line(message, 300)}", BY_HAND)
    return files[0]


def _unpacked(file: Path, wheel: Wheel) -> bytes:
    """Return the program in a wheel. Raises NotSupported if the digest is wrong or the program is too large."""
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != wheel.sha256:
        raise NotSupported(f"the wheel for uv {VERSION} does not have the pinned digest; nothing was sent", BY_HAND)
    with zipfile.ZipFile(file) as archive:
        member = archive.getinfo(f"uv-{VERSION}.data/scripts/uv")
        if member.file_size > MAX_PROGRAM:
            raise NotSupported(f"uv {VERSION} is larger than {MAX_PROGRAM:,} bytes", BY_HAND)
        return archive.read(member)
