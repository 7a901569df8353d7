"""gpuwarden's probe: report a machine's state before a paid job is launched on it.

    python -I - '{"paths": [...], "urls": [...]}'  < probe.py       one JSON object on stdout

Python >= 3.8, standard library only. Writes no files and uses no GPU memory. If a part of the state can't
be read, the field `why` of that part contains the reason. Takes at most about 45 seconds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Dict, List

CALL_S = 15
WEB_S = 8
Json = Dict[str, Any]

GPU_FIELDS = ("index", "name", "driver_version", "memory.total", "memory.used", "utilization.gpu", "pci.bus_id")
# Some drivers and GPUs lack these fields, so each field is queried separately.
HEALTH_FIELDS = {
    "temperature": ("temperature.gpu",),
    "compute_cap": ("compute_cap",),
    "ecc_uncorrected": ("ecc.errors.uncorrected.volatile.total",),
    "remap_pending": ("remapped_rows.pending", "retired_pages.pending"),
    "remap_failure": ("remapped_rows.failure",),
    "throttle": ("clocks_event_reasons.active", "clocks_throttle_reasons.active"),
}
XID = re.compile(r"NVRM: Xid \(PCI:([^)]*)\): (\d+),?(.*)")


def run(argv: list[str]) -> str:
    """Return a command's output. Raises OSError with the last line of the output if the command fails."""
    env = dict(os.environ, LC_ALL="C")
    try:
        done = subprocess.run(argv, capture_output=True, timeout=CALL_S, env=env, stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        raise OSError("%s did not answer within %d s" % (argv[0], CALL_S)) from None
    out = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        words = (done.stderr.decode("utf-8", "replace").strip() or out.strip())[-300:]
        raise OSError("%s: %s" % (argv[0], words or "exit code %d" % done.returncode))
    return out


def text(path: str) -> str:
    """Return a small file's text."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(1 << 20).strip()


def number(value: str) -> float | None:
    """Parse a number in nvidia-smi's output; None for other text, such as `[N/A]`."""
    try:
        return float(int(value, 16)) if value.startswith("0x") else float(value)
    except ValueError:
        return None


def query(fields: tuple[str, ...]) -> list[list[str]]:
    """Return the rows of `nvidia-smi --query-gpu`."""
    out = run(["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits"])
    return [[cell.strip() for cell in line.split(",")] for line in out.splitlines() if line.strip()]


def gpus() -> Json:
    """Return information about every GPU, including its health."""
    if not shutil.which("nvidia-smi"):
        devices = sorted(d for d in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", d))
        return {"list": [], "why": "nvidia-smi is not installed", "devices": devices}
    found = []
    for row in query(GPU_FIELDS):
        cells = dict(zip(GPU_FIELDS, row))
        found.append(
            {
                "index": int(cells["index"]), "name": cells["name"], "driver": cells["driver_version"],
                "bus": cells["pci.bus_id"], "used_mib": number(cells["memory.used"]),
                "util": number(cells["utilization.gpu"]),
            }
        )  # fmt: skip
    for key, names in HEALTH_FIELDS.items():
        for name in names:
            try:
                rows = query((name,))
            except OSError:
                continue
            for gpu, row in zip(found, rows):
                gpu[key] = row[0] if key == "compute_cap" else yes_or_number(row[0])
            break
    header = run(["nvidia-smi"])
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", header)
    apps = run(["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"])
    return {"list": found, "cuda": cuda.group(1) if cuda else None, "processes": len(apps.strip().splitlines())}


def yes_or_number(value: str) -> float | None:
    """Convert `Yes` and `No` to 1 and 0, and parse other text as a number."""
    return {"yes": 1.0, "no": 0.0}.get(value.lower(), number(value))


def xids() -> Json:
    """Return the Xid errors that the driver wrote to the kernel log."""
    log = run(["dmesg"])
    hits = [XID.search(line) for line in log.splitlines()]
    return {"list": [{"bus": m[1], "code": int(m[2]), "text": m[3].strip()[:200]} for m in hits if m][-50:]}


def torch() -> Json:
    """Return torch's version, read from its files, because importing torch takes seconds and memory."""
    from importlib.util import find_spec

    spec = find_spec("torch")
    if spec is None or not spec.origin:
        return {"version": None}
    source = text(os.path.join(os.path.dirname(spec.origin), "version.py"))
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", source, re.M)
    cuda = re.search(r"^cuda[^=]*=\s*['\"]([^'\"]+)", source, re.M)
    return {"version": version.group(1) if version else "?", "cuda": cuda.group(1) if cuda else None}


def mount_table() -> list[tuple[str, str, str]]:
    """Return (mount point, file system, options) for every mount, as listed by the kernel."""
    rows = []
    for line in text("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, after = left.split(), right.split()
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), fields[4])
        rows.append((point, after[0] if after else "?", fields[5]))
    return rows


def disks(paths: list[str]) -> Json:
    """Return each path's free space and mount point, or those of its nearest existing parent."""
    mounts = mount_table()
    return {"list": [disk(p, mounts) for p in paths]}


def disk(path: str, mounts: list[tuple[str, str, str]]) -> Json:
    """Return the mount, permissions and free space of one path, or of its nearest existing parent."""
    near = os.path.realpath(path)
    while not os.path.isdir(near):
        near = os.path.dirname(near)
    fs = os.statvfs(near)
    inside = [m for m in mounts if near == m[0] or near.startswith(m[0].rstrip("/") + "/")]
    point, kind, options = max(enumerate(inside), key=lambda at: (len(at[1][0]), at[0]))[1]
    return {
        "path": path, "exists": os.path.isdir(path), "mount": point, "fs": kind,
        "read_only": "ro" in options.split(","),
        "writable": os.access(near, os.W_OK | os.X_OK), "free": fs.f_bavail * fs.f_frsize,
        "total": fs.f_blocks * fs.f_frsize, "inodes_free": fs.f_favail, "inodes": fs.f_files,
    }  # fmt: skip


def limits() -> Json:
    """Return the control group's limits (v1 or v2), which may be lower than the host's resources."""
    found: Json = {"cpus": os.cpu_count(), "cpus_usable": len(os.sched_getaffinity(0))}
    base = "/sys/fs/cgroup"
    for key, two, one in (
        ("memory_max", "memory.max", "memory/memory.limit_in_bytes"),
        ("memory_used", "memory.current", "memory/memory.usage_in_bytes"),
        ("pids_max", "pids.max", "pids/pids.max"),
    ):
        for name in (two, one):
            try:
                value = text(base + "/" + name)
                found[key] = int(value) if value.isdigit() and int(value) < 1 << 60 else None
                break
            except (OSError, ValueError):
                continue
    found["cpu_quota"] = cpu_quota(base)
    meminfo = dict(re.findall(r"(\w+):\s+(\d+) kB", text("/proc/meminfo")))
    found["memory_total"] = int(meminfo.get("MemTotal", 0)) * 1024
    try:
        kills = re.search(r"^oom_kill (\d+)", text(base + "/memory.events"), re.M)
        found["oom_kills"] = int(kills.group(1)) if kills else None
    except OSError:
        pass
    fs = os.statvfs("/dev/shm")  # noqa: S108
    found["shm"] = fs.f_blocks * fs.f_frsize
    return found


def cpu_quota(base: str) -> float | None:
    """Return the number of CPUs that the control group may use; None if unlimited."""
    try:
        quota, _, period = text(base + "/cpu.max").partition(" ")
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    try:
        quota_us = int(text(base + "/cpu/cpu.cfs_quota_us"))
        return quota_us / int(text(base + "/cpu/cpu.cfs_period_us")) if quota_us > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def reach(url: str) -> Json:
    """Return whether a URL responds, its response time, and the server's date."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    start = time.monotonic()
    try:
        if not url.startswith(("http://", "https://")):
            raise ValueError("not a web address")
        with urlopen(Request(url, method="HEAD"), timeout=WEB_S) as answer:  # noqa: S310
            status, date = answer.status, answer.headers.get("Date")
    except HTTPError as error:
        status, date = error.code, error.headers.get("Date")
    except Exception as error:
        return {"url": url, "ok": False, "why": str(getattr(error, "reason", error))[:300]}
    return {"url": url, "ok": True, "status": status, "date": date, "ms": int((time.monotonic() - start) * 1000)}


def web(urls: list[str]) -> Json:
    """Check all URLs concurrently, and return the results."""
    found: List[Json] = [{"url": u, "ok": False, "why": "no answer in time"} for u in urls]

    def one(at: int) -> None:
        found[at] = reach(urls[at])

    threads = [threading.Thread(target=one, args=(at,), daemon=True) for at in range(len(urls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WEB_S + 2)
    return {"list": list(found)}


def main(request: Json) -> None:
    """Run all parts concurrently and print their results."""
    parts: Dict[str, Callable[[], Json]] = {
        "gpus": gpus,
        "xids": xids,
        "torch": torch,
        "disks": lambda: disks(list(request.get("paths") or [])),
        "limits": limits,
        "web": lambda: web(list(request.get("urls") or [])),
    }
    found: Json = {"ok": True, "now": time.time(), "python": sys.version.split()[0]}

    def fill(name: str) -> None:
        try:
            found[name] = parts[name]()
        except Exception as error:
            found[name] = {"why": "%s: %s" % (type(error).__name__, str(error)[:300])}

    threads = [threading.Thread(target=fill, args=(name,), daemon=True) for name in parts]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 3 * CALL_S
    for name, thread in zip(parts, threads):
        thread.join(max(end - time.monotonic(), 0))
        found.setdefault(name, {"why": "no answer in time"})
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
