"""Measure the time of verification as a multiple of a plain sequential read of the same files in the same run.

    python bench/checkpoints.py [--gib 0.5] [--files 16] [--repeats 3] [--folder DIR]

Each row is measured in turn with the plain read, so that both have the same conditions. Compare ratios: they carry over
between machines, seconds do not. "Warm" reads from the page cache; "cold" reads after the files were evicted from it,
as for a checkpoint that was pulled or mounted. Rows of torch, sha256sum and safetensors appear if these are installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench._figures import arguments, figure

from gpuwarden.checkpoints.sealing import manifest
from gpuwarden.checkpoints.values.checksums import digests
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.models import Level, Manifest, Verdict

FAST = digests()[-1]
TORCH = importlib.util.find_spec("torch") is not None


class Bench:
    """Files of one kind, and the plain read that is the peer of every row."""

    def __init__(self, folder: Path, repeats: int) -> None:
        self.folder, self.repeats, self.what = folder, repeats, ""
        self.gib = sum(p.stat().st_size for p in folder.iterdir()) / 2**30

    def row(self, label: str, work: Callable[[], Any], *, cold: bool = False) -> None:
        """Time the plain read and the work in turn, and print the medians of the time and of the ratio."""
        reads, works = [], []
        self._prepare(cold)
        for _ in range(self.repeats):
            reads.append(timed(self.read))
            if cold:
                self._prepare(cold)
            works.append(timed(work))
            if cold:
                self._prepare(cold)
        took, ratio = statistics.median(works), statistics.median(w / r for w, r in zip(works, reads, strict=True))
        peer = f"plain read {statistics.median(reads) * 1000:.1f} ms"
        figure(f"{self.what}, {'cold' if cold else 'warm'}: {label}", f"{took * 1000:.1f} ms", peer, ratio)

    def head(self, what: str) -> None:
        """Print the size and kind of the files, and keep the kind for the rows."""
        print(f"{self.gib:.2f} GiB of {what}")
        self.what = what.partition(" in ")[2]

    def read(self) -> None:
        """Read every file once, 1 MiB at a time: the peer of the ratios."""
        buffer = bytearray(1 << 20)
        for path in sorted(self.folder.iterdir()):
            with path.open("rb", buffering=0) as f:
                while f.readinto(buffer):
                    pass

    def proven(self, level: Level, listing: Manifest | None = None, threads: int = 2) -> Callable[[], None]:
        """Return a verification that fails with AssertionError if the verdict is wrong."""

        def work() -> None:
            report = verify(self.folder, level, manifest=listing, threads=threads)
            assert report.verdict is Verdict.PROVEN, report

        return work

    def listing(self, digest: str) -> Manifest:
        """Return a manifest of the files with one digest."""
        return Manifest.model_validate(manifest.take(self.folder, digests=(digest,)))

    def _prepare(self, cold: bool) -> None:
        if not cold:
            self.read()
            return
        for path in self.folder.iterdir():
            with path.open("rb") as f:
                os.fsync(f.fileno())
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds that `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    """Print the tables."""
    folder = tempfile.gettempdir()
    sizes = {"gib": (0.5, 0.01), "files": (16, 2), "repeats": (3, 1)}
    args = arguments(__doc__, {**sizes, "folder": (folder, folder)})
    kinds: list[tuple[Callable[..., None], Callable[[Bench], None], int]] = [
        (safetensors, shards, args.files),
        (archives, zips, args.files),
        (safetensors, lone, 1),
    ]
    for write, measure, files in kinds:
        with tempfile.TemporaryDirectory(dir=args.folder) as made:
            write(Path(made), args.gib, files)
            measure(Bench(Path(made), args.repeats))


# ----------------------------------------------------------------------------------------------------------- files


def safetensors(folder: Path, gib: float, files: int) -> None:
    """Write bf16 weights in `files` files. The header is written by hand: safetensors' numpy writer lacks bf16."""
    rng = np.random.default_rng(0)
    rows = int(gib * 2**30 / files / 16 / 2 / 1024)
    for i in range(files):
        bits = (rng.normal(size=(rows, 1024)).astype("f4").view("u4") >> 16).astype("<u2")
        size = bits.nbytes
        entry = {"dtype": "BF16", "shape": [rows, 1024]}
        header = {f"layer{i}.{j}": {**entry, "data_offsets": [j * size, (j + 1) * size]} for j in range(16)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / f"part-{i:02}.safetensors").open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for j in range(16):
                out.write(np.roll(bits, j).tobytes())


def archives(folder: Path, gib: float, files: int) -> None:
    """Write fp32 tensors in `files` torch archives with a CRC per tensor, or in .npz if torch is not installed."""
    rng = np.random.default_rng(1)
    for i in range(files):
        arrays = {f"{j}": rng.standard_normal((int(gib * 2**30 / files / 4 / 1024 / 4), 1024), "f4") for j in range(4)}
        if TORCH:
            import torch

            torch.save({k: torch.from_numpy(v) for k, v in arrays.items()}, folder / f"part-{i:02}.pt")
        else:
            np.savez(folder / f"part-{i:02}.npz", allow_pickle=False, **arrays)


# ---------------------------------------------------------------------------------------------------------- tables


def shards(bench: Bench) -> None:
    """Measure a sharded model in safetensors."""
    bench.head(f"bf16 in {len(list(bench.folder.iterdir()))} safetensors")
    bench.row("structure", bench.proven(Level.STRUCTURE))
    quick, sure = bench.listing(FAST), bench.listing("sha256")
    bench.row("content: scan, 1 thread", bench.proven(Level.CONTENT, threads=1))
    bench.row("content: scan, 2 threads", bench.proven(Level.CONTENT))
    bench.row(f"content: scan + {FAST}, 1 thread", bench.proven(Level.CONTENT, quick, 1))
    bench.row(f"content: scan + {FAST}, 2 threads", bench.proven(Level.CONTENT, quick))
    bench.row("content: scan + sha256, 2 threads", bench.proven(Level.CONTENT, sure))
    names = sorted(map(str, bench.folder.iterdir()))
    if shutil.which("sha256sum"):
        bench.row("sha256sum", lambda: subprocess.run(["sha256sum", *names], check=True, capture_output=True))
    if TORCH:
        bench.row("safetensors load_file + torch.isfinite", lambda: finite(*names))
    cold(bench, ("content: scan, 2 threads", None), (f"content: scan + {FAST}, 2 threads", quick),
         ("content: scan + sha256, 2 threads", sure))  # fmt: skip
    memory(bench)


def zips(bench: Bench) -> None:
    """Measure archives with CRCs."""
    kind = "torch archives" if TORCH else "npz archives"
    bench.head(f"fp32 in {len(list(bench.folder.iterdir()))} {kind}")
    quick = bench.listing(FAST)
    bench.row("structure", bench.proven(Level.STRUCTURE))
    bench.row("content: scan + CRC, 1 thread", bench.proven(Level.CONTENT, threads=1))
    bench.row("content: scan + CRC, 2 threads", bench.proven(Level.CONTENT))
    bench.row(f"content: scan + CRC + {FAST}, 2 threads", bench.proven(Level.CONTENT, quick))
    if TORCH:
        import torch

        names = sorted(bench.folder.iterdir())
        bench.row("torch.load, weights_only", lambda: [len(torch.load(n, weights_only=True)) for n in names])
    cold(bench, ("content: scan + CRC, 2 threads", None), (f"content: scan + CRC + {FAST}, 2 threads", quick))
    memory(bench)


def lone(bench: Bench) -> None:
    """Measure a single file, which two threads share."""
    bench.head("bf16 in one safetensors")
    quick = bench.listing(FAST)
    bench.row("content: scan, 1 thread", bench.proven(Level.CONTENT, threads=1))
    bench.row("content: scan, 2 threads", bench.proven(Level.CONTENT))
    bench.row(f"content: scan + {FAST}, 1 thread", bench.proven(Level.CONTENT, quick, 1))
    bench.row(f"content: scan + {FAST}, 2 threads", bench.proven(Level.CONTENT, quick))


def cold(bench: Bench, *rows: tuple[str, Manifest | None]) -> None:
    """Measure with an empty page cache, if the system can evict files from it."""
    if not hasattr(os, "posix_fadvise"):
        return
    for label, listing in rows:
        bench.row(label, bench.proven(Level.CONTENT, listing), cold=True)


def finite(*names: str) -> None:
    """Check that every tensor is finite, with the libraries' own functions."""
    import torch
    from safetensors.torch import load_file

    assert all(bool(torch.isfinite(t).all()) for name in names for t in load_file(name).values())


def memory(bench: Bench) -> None:
    """Measure the peak memory of a fresh process: this one still has the written files in memory. Linux only."""
    code = (
        "import pathlib, sys; from gpuwarden.checkpoints.sealing import manifest;"
        "from gpuwarden.core.models import Manifest;"
        "from gpuwarden.checkpoints.verify import verify; folder = pathlib.Path(sys.argv[1]);"
        "verify(folder, manifest=Manifest.model_validate(manifest.take(folder)));"
        "print([l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')][0])"
    )
    if sys.platform != "linux":
        return
    peak = int(subprocess.check_output([sys.executable, "-c", code, str(bench.folder)])) / 1024
    size = 1024 * bench.gib
    figure(f"{bench.what}: peak memory of manifest and check", f"{peak:.0f} MiB", f"files {size:.0f} MiB", peak / size)


if __name__ == "__main__":
    main()
