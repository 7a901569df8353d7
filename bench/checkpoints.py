"""How fast verification is, as multiples of a plain sequential read of the same files in the same run.

    python bench/checkpoints.py [--gib 2] [--files 16] [--folder DIR]

Every figure is the median of five runs over a warm page cache. The ratio is what counts: it carries over between
machines, seconds do not. Lines for torch, sha256sum and safetensors appear where those are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gpuwarden.checkpoints import manifest
from gpuwarden.checkpoints.kernels import digesters
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.models import Level, Manifest, Verdict

REPEATS = 5


def write(folder: Path, gib: float, files: int) -> None:
    """bf16 weights in so many files. The header is written by hand: safetensors' numpy writer has no bf16."""
    rng = np.random.default_rng(0)
    rows = int(gib * 2**30 / files / 2 / 2 / 1024)
    for i in range(files):
        bits = (rng.normal(size=(rows, 1024)).astype("f4").view("u4") >> 16).astype("<u2")
        size = bits.nbytes
        entry = {"dtype": "BF16", "shape": [rows, 1024]}
        header = {
            f"layer{i}.a": {**entry, "data_offsets": [0, size]},
            f"layer{i}.b": {**entry, "data_offsets": [size, 2 * size]},
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / f"part-{i:02}.safetensors").open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.write(bits.tobytes())
            out.write(bits[::-1].tobytes())


def plain_read(folder: Path) -> None:
    """Read every file once, 1 MiB at a time: what the ratios are to."""
    buffer = bytearray(1 << 20)
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as f:
            while f.readinto(buffer):
                pass


def main() -> None:
    """Print the table."""
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--gib", type=float, default=2.0)
    ask.add_argument("--files", type=int, default=16)
    ask.add_argument("--folder", type=Path, default=None)
    args = ask.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        measure(Path(made), args.gib, args.files)


def measure(root: Path, gib: float, files: int) -> None:
    """Write the files, then time each way of looking at them."""
    folder = root / "model"
    folder.mkdir()
    write(folder, gib, files)
    fast = "xxh3_128" if "xxh3_128" in digesters() else "sha256"
    rosters = {d: Manifest.model_validate(manifest.take(folder, digests=(d,))) for d in {fast, "sha256"}}
    base = median(lambda: plain_read(folder))
    print(f"{'plain sequential read, 1 thread':52} {base * 1000:9.1f} ms   1.00x   {gib / base:5.1f} GiB/s")
    rows: list[tuple[str, Callable[[], Any]]] = [
        ("structure", lambda: proven(folder, Level.STRUCTURE)),
        ("content: scan, 1 thread", lambda: proven(folder, Level.CONTENT, threads=1)),
        ("content: scan, 2 threads", lambda: proven(folder, Level.CONTENT)),
        (f"content: scan + {fast}, 1 thread", lambda: proven(folder, Level.CONTENT, rosters[fast], threads=1)),
        (f"content: scan + {fast}, 2 threads", lambda: proven(folder, Level.CONTENT, rosters[fast])),
        ("content: scan + sha256, 2 threads", lambda: proven(folder, Level.CONTENT, rosters["sha256"])),
    ]
    for label, work in rows + zips(root, gib, files):
        show(label, median(work), base, gib)
    print(f"peak memory of a process that verifies the content: {peak(folder)}")
    for label, work in others(folder):
        show(label, median(work), base, gib)


def peak(folder: Path) -> str:
    """What a fresh process needs; this one has made the files and remembers them. Linux only: getrusage inherits."""
    code = (
        "import pathlib, sys; from gpuwarden.checkpoints.verify import verify; verify(pathlib.Path(sys.argv[1]));"
        "print([l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')][0])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], check=False, capture_output=True)
    return f"{int(done.stdout) / 1024:.0f} MiB" if done.returncode == 0 else "unknown here"


def show(label: str, took: float, base: float, gib: float) -> None:
    """One row."""
    print(f"{label:52} {took * 1000:9.1f} ms {took / base:6.2f}x   {gib / took:5.1f} GiB/s", flush=True)


def proven(folder: Path, level: Level, roster: Manifest | None = None, threads: int = 2) -> None:
    """Verify; a wrong verdict ends the benchmark."""
    report = verify(folder, level, manifest=roster, threads=threads)
    assert report.verdict is Verdict.PROVEN, report.problems


def zips(root: Path, gib: float, files: int) -> list[tuple[str, Callable[[], Any]]]:
    """The same amount as .npz, which carries a CRC per array."""
    folder = root / "zips"
    folder.mkdir()
    rng = np.random.default_rng(1)
    for i in range(files):
        np.savez(folder / f"part-{i:02}.npz", w=rng.normal(size=int(gib * 2**30 / files / 8)).astype("f8"))
    roster = Manifest.model_validate(manifest.take(folder))
    quick = roster.model_copy(update={"files": tuple(f.model_copy(update={"sha256": None}) for f in roster.files)})
    table: list[tuple[str, Callable[[], Any]]] = [
        ("npz content: scan + CRC, 2 threads", lambda: proven(folder, Level.CONTENT)),
    ]
    if all(f.xxh3_128 for f in quick.files):
        table.append(("npz content: scan + CRC + xxh3_128, 2 threads", lambda: proven(folder, Level.CONTENT, quick)))
    return table


def others(folder: Path) -> list[tuple[str, Callable[[], Any]]]:
    """What people would use instead."""
    names = sorted(str(p) for p in folder.iterdir())
    table: list[tuple[str, Callable[[], Any]]] = []
    if shutil.which("sha256sum"):
        table.append(("sha256sum", lambda: subprocess.run(["sha256sum", *names], check=True, capture_output=True)))
    if importlib.util.find_spec("torch"):
        import torch
        from safetensors.torch import load_file

        def load() -> None:
            for name in names:
                assert all(bool(torch.isfinite(t).all()) for t in load_file(name).values())

        torch.save(load_file(names[0]), folder.parent / "one.pt")
        table.append(("safetensors load + torch.isfinite", load))
        one = folder.parent / "one.pt"
        table.append(("torch.load of one file of these", lambda: torch.load(one, weights_only=True)))
    return table


def median(work: Callable[[], Any]) -> float:
    """Seconds, the middle of five runs."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    main()
