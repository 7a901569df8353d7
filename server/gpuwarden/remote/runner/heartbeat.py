"""Measure the machine's memory, disks and GPUs. Calls that may hang run in a separate thread."""

from __future__ import annotations

import os
from typing import Any

from gpuwarden.remote.runner.memory import OomKills, memory
from gpuwarden.remote.runner.path_mapping import PathMapping
from gpuwarden.remote.runner.protocol import Json


class ThreadedReader:
    """Makes calls in a separate thread, because a call may hang if a driver fails or a network disk is unreachable."""

    def __init__(self) -> None:
        self.values: Json = {}
        self.thread: Any = None

    def ask(self, patience: float = 0.0) -> Json:
        """Start a call unless one is running. Return its result, or the previous result if the call takes longer than
        `patience` seconds.
        """
        if not (self.thread and self.thread.is_alive()):
            import threading

            self.thread = threading.Thread(target=self._query, daemon=True)
            self.thread.start()
        if patience:
            self.thread.join(patience)
        return self.values

    def _query(self) -> None:
        raise NotImplementedError


class DiskSpace(ThreadedReader):
    """Free disk space and inodes for the declared outputs: the lowest values among their file systems."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__()
        self.paths = paths

    def _query(self) -> None:
        systems = []
        for path in self.paths:
            while not os.path.exists(path) and len(path) > 1:
                path = os.path.dirname(path)
            try:
                systems.append(os.statvfs(path))
            except OSError:
                continue
        if systems:
            fs = min(systems, key=lambda r: r.f_bavail * r.f_frsize)
            found: Json = {"disk_free": fs.f_bavail * fs.f_frsize, "disk_total": fs.f_blocks * fs.f_frsize}
            counted = [r for r in systems if r.f_files]  # some file systems do not count inodes
            if counted:
                fs = min(counted, key=lambda r: r.f_favail)
                found.update(inodes_free=fs.f_favail, inodes_total=fs.f_files)
            self.values = found


class Gpu(ThreadedReader):
    """Queries the GPUs with nvidia-smi."""

    def __init__(self) -> None:
        import shutil

        super().__init__()
        self.program = shutil.which("nvidia-smi")

    def ask(self, patience: float = 0.0) -> Json:
        """Return GPU utilization and memory; empty if `nvidia-smi` is not available."""
        return super().ask(patience) if self.program else {}

    def _query(self) -> None:
        import subprocess

        ask = [str(self.program), "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
        try:
            out = subprocess.run(ask, capture_output=True, timeout=60).stdout.decode("ascii", "replace")
            rows = [[float(x) for x in line.split(",")] for line in out.splitlines() if line.strip()]
            used = int(sum(r[1] for r in rows)) << 20
            self.values = {"gpu_util": sum(r[0] for r in rows) / len(rows), "gpu_mem_used": used} if rows else {}
        except (OSError, ValueError, IndexError, subprocess.SubprocessError):
            self.values = {}


class Vitals:
    """Measures memory, disk, inodes and GPU. A value that can't be read is None or left out."""

    def __init__(self, folder: str, spec: Json) -> None:
        mapping, outputs = PathMapping(spec), [str(p) for p in spec.get("outputs") or []][:16]
        self.gpu = Gpu()
        self.disks = DiskSpace([folder, *(mapping.locate(folder, path)[0] for path in outputs)])
        self.kills = OomKills()

    def take(self, last: bool) -> Json:
        """Return the current values. If `last`, wait longer for the disks, and reuse the previous GPU values."""
        used, limit = memory()
        disk = self.disks.ask(1.0 if last else 0.05)  # a healthy disk answers immediately
        gpu = self.gpu.values if last else self.gpu.ask()
        return {"mem_used": used, "mem_limit": limit, "oom_kills": self.kills.look(), **disk, **gpu}
