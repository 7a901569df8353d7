"""A disk that can be filled quickly."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from real_parts import need


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a small disk, if this user may mount one."""
    made: list[Path] = []

    def make(options: str) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        argv = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        mounted = shutil.which("mount") and subprocess.run(argv, capture_output=True, check=False, timeout=300)
        need("the right to mount a tmpfs", bool(mounted) and mounted.returncode == 0)
        made.append(folder)
        return folder

    yield make
    for folder in made:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=300)


def fill(folder: Path) -> Path:
    """Leave no byte free on a disk."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    return filler
