"""gpuwarden's runner: starts, watches and reports one job on the machine that it was shipped to.

    python -I runner.py VERB [DIR]      one JSON object on stdin, one JSON object per line on stdout

Verbs: start, supervise (used by start), poll, serve (many polls), logs, stop, list, manifest, read, bundle, disclose,
examine.
Python >= 3.8, standard library only. `DIR` is the run folder of one job:

    status.json        what is known, replaced atomically, padded so that it can be rewritten in place on a full disk
    lock               held by the living supervisor; the kernel releases it, so no claim outlives its owner
    out.<base>.log     the log; <base> is the absolute offset of its first byte. `out.log` links to the newest
    metrics.jsonl      written by the job: one JSON object per line, `step` and numbers
    alerts.jsonl       written by the supervisor
    seals.jsonl        digests of finished checkpoints, written by the sealer right after their save; the job may write
                       here too, so each line carries a code (MAC) by which its maker is known to who holds the key
    work/              the job's working folder; relative outputs live here

A job is known by (token, attempt) and is launched once: whoever gets the lock and finds no status of that attempt
launches, everybody else adopts. A process is known by pid, start ticks and boot id, never by its pid alone. Secrets
travel over stdin into the job's environment and nowhere else; their values are masked in everything that is written.

Signals to the supervisor: SIGUSR1 is our own stop (canceled); SIGTERM and SIGINT come from outside (preempted).
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import stat
import struct
import sys
import time
from typing import Any, Callable, Dict, Iterable, Iterator, NoReturn

PROC = "/proc"
FINAL = ("succeeded", "failed", "canceled", "preempted", "timeout")
MASK = b"***"
MIN_SECRET = 4  # masking every "1" or "no" would ruin a log and hide nothing
RETRY_CODES = (75, 128 + signal.SIGTERM)  # EX_TEMPFAIL, and a wrapper's way to say "my child got SIGTERM"
RETRY_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
TICK_S = 0.25
MAX_INPUT = 16 << 20
LOSSES = ("loss", "train_loss", "train/loss")
PAD = 16_384  # room for a status to grow into blocks that it owns already
MAX_ROSTER = 200_000
MAX_SKIPPED = 1000
MAX_ALERTS = 500
MAX_FRESH = 200
MAX_MEMBER = 1 << 20
MAX_BOOK = 64 << 20  # as in checkpoints/book.py
MAX_FINDINGS = 8 << 20
SEAL_AFTER_S = 5.0  # a job that ends before is sealed by its pull
SHA256, MAC = re.compile("[0-9a-f]{64}"), re.compile("([0-9a-f]{64})?")
ARCHIVE = re.compile(r"gpuwarden-checkpoints-[0-9a-f]{16}\.pyz")
PIECE = 1 << 18
Json = Dict[str, Any]  # noqa: UP006 (evaluated at run time, on Python 3.8 too)


class Problem(Exception):
    """A refusal with a code that the caller maps to an error of its own."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


# ------------------------------------------------------------------------------------------------------- processes


def has_proc() -> bool:
    """Whether processes can be told apart by their start ticks."""
    return os.path.exists(PROC + "/self/stat")


def boot_id() -> str:
    """The kernel's id of this boot, or an empty string."""
    try:
        return read_small(PROC + "/sys/kernel/random/boot_id", 64).decode("ascii").strip()
    except (OSError, ValueError):
        return ""


def proc_stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on: 0 state, 2 process group, 19 start ticks. None: no such process."""
    try:
        raw = read_small(f"{PROC}/{pid}/stat", 8192)
    except OSError:
        return None
    fields = raw[raw.rfind(b")") + 2 :].decode("ascii", "replace").split()
    return fields if len(fields) > 19 else None


def start_mark(pid: int) -> str:
    """What tells this process from a later one with the same pid: start ticks, or `ps`'s start time without /proc."""
    if has_proc():
        fields = proc_stat(pid)
        return fields[19] if fields else ""
    import subprocess

    try:
        ps = ["ps", "-o", "lstart=", "-p", str(pid)]
        done = subprocess.run(ps, capture_output=True, timeout=5, env={"LC_ALL": "C", "PATH": "/bin:/usr/bin"})
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("ascii", "replace").strip()


def is_alive(pid: Any, mark: Any, boot: Any) -> bool | None:
    """Whether exactly that process lives; None where this machine can't tell. A zombie is dead."""
    if not isinstance(pid, int) or pid <= 1:
        return False
    here = boot_id()
    if boot and here and boot != here:
        return False
    if has_proc():
        fields = proc_stat(pid)
        return bool(fields and fields[0] not in ("Z", "X", "x") and fields[19] == str(mark))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return None
    now = start_mark(pid)
    return now == str(mark) if now and mark else None


def signal_exactly(pid: int, mark: Any, boot: Any, number: int) -> bool:
    """Signal that process and no later one with its pid. Needs a proof of identity; False when there is none."""
    opener, sender = getattr(os, "pidfd_open", None), getattr(signal, "pidfd_send_signal", None)
    handle = -1
    if opener and sender:
        try:
            handle = opener(pid)
        except ProcessLookupError:
            return False
        except OSError:
            handle = -1  # an old kernel under a new Python
    try:
        if is_alive(pid, mark, boot) is not True:
            return False
        if handle >= 0 and sender:
            sender(handle, number)
        else:
            os.kill(pid, number)
        return True
    except OSError:
        return False
    finally:
        if handle >= 0:
            os.close(handle)


def group_members(pgid: int) -> list[int] | None:
    """Living processes of a process group; None without /proc."""
    if not has_proc():
        return None
    stats = ((pid, proc_stat(pid)) for pid in all_pids())
    return [pid for pid, f in stats if f and f[2] == str(pgid) and f[0] not in ("Z", "X", "x")]


def all_pids() -> list[int]:
    """All processes of this machine or container; empty without /proc."""
    try:
        return sorted(int(name) for name in os.listdir(PROC) if name.isdigit())
    except OSError:
        return []


def environ_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty where it can't be read."""
    try:
        raw = read_small(f"{PROC}/{pid}/environ", 1 << 20)
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if b"=" in item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def kill_group(pgid: int, number: int) -> None:
    """Signal a whole group. A stopped process is woken, or it would never see the signal."""
    for n in (number, signal.SIGCONT):
        try:
            os.killpg(pgid, n)
        except OSError:
            return


# ----------------------------------------------------------------------------------------------------------- files


def read_small(path: str, limit: int) -> bytes:
    """At most `limit` bytes of a regular file. Follows no link, waits on no pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        parts, left = [], limit
        while left > 0:
            part = os.read(fd, left)
            if not part:
                break
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> int:
    """Write what can be written and return how much that was."""
    done = 0
    while done < len(data):
        try:
            done += os.write(fd, data[done:])
        except OSError as error:
            if error.errno != errno.EINTR:
                break
    return done


def write_atomic(path: str, data: bytes) -> None:
    """Replace a file so that a reader sees the old or the new content, never a part."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if write_all(fd, data) != len(data):
                raise OSError(errno.ENOSPC, "no space left for", path)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise


def write_status(folder: str, status: Json) -> bool:
    """Write status.json; on a full disk into the blocks that it has already. False: it could not be written."""
    path = folder + "/status.json"
    data = json.dumps(status, allow_nan=False).encode("ascii")
    data = data.ljust(-(-len(data) // PAD) * PAD)
    try:
        write_atomic(path, data)
        return True
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return False
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        size = os.fstat(fd).st_size
        return len(data) <= size and write_all(fd, data.ljust(size)) == size
    finally:
        os.close(fd)


def read_status(folder: str) -> Json | None:
    """The status; None when none was ever written. Raises Problem when it is there and makes no sense."""
    why = ""
    for _ in range(3):  # it may be rewritten in place on a full disk
        try:
            found = json.loads(read_small(folder + "/status.json", 1 << 20).decode("utf-8"))
            if isinstance(found, dict) and isinstance(found.get("state"), str):
                return found
            why = "it holds no status"
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            why = str(error)
        time.sleep(0.01)
    raise Problem("bad_reply", f"{folder}/status.json can't be read: {why}")


def inside(path: str, bound: str) -> bool:
    """Whether a real path is `bound` or lies in it."""
    return path == bound or path.startswith(bound.rstrip("/") + "/")


class Door:
    """Opens regular files by their real path without following any link on the way.

    It keeps the last folder open, because rosters come folder by folder.
    """

    def __init__(self) -> None:
        self.folder, self.at = "", -1

    def open(self, real: str) -> int:
        """A descriptor of one file."""
        folder, name = os.path.split(real)
        if folder != self.folder or self.at < 0:
            at = open_folder(folder)
            self.close()
            self.folder, self.at = folder, at
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.at)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", real)
        return fd

    def close(self) -> None:
        """Forget the folder."""
        if self.at >= 0:
            os.close(self.at)
            self.at = -1


def open_folder(real: str) -> int:
    """A folder by its real path, through no link."""
    step = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
    at = os.open("/", step)
    try:
        for part in real.split("/"):
            if part:
                nearer = os.open(part, step, dir_fd=at)
                os.close(at)
                at = nearer
    except OSError:
        os.close(at)
        raise
    return at


# ------------------------------------------------------------------------------------------------------------- log


class Redactor:
    """Masks secret values in a stream, however it is cut: the result equals masking the whole at once.

    It holds back only an end that may be the beginning of a secret. Of a secret with several lines each is masked too.
    """

    def __init__(self, secrets: list[str]) -> None:
        values: set[str] = set()
        for text in secrets:
            values.update(v for v in [text] if len(v) >= MIN_SECRET)
            values.update(v for v in text.splitlines() if len(v) >= 2 * MIN_SECRET)
        self.values = sorted((os.fsencode(v) for v in values), key=lambda v: (-len(v), v))
        self.longest = max(map(len, self.values), default=0)
        self.heads = {v[0] for v in self.values}
        self.pattern = re.compile(b"|".join(map(re.escape, self.values))) if self.values else None
        self.held = b""

    def feed(self, data: bytes) -> bytes:
        """Take the next piece, give what is certain."""
        if self.pattern is None:
            return data
        data, out, at = self.held + data, [], 0
        hold = self._hold(data, at)
        for match in self.pattern.finditer(data):
            if match.start() >= hold:  # it may yet grow into a longer secret
                break
            out += [data[at : match.start()], MASK]
            at = match.end()
            hold = self._hold(data, at)
        out.append(data[at:hold])
        self.held = data[hold:]
        return b"".join(out)

    def finish(self) -> bytes:
        """Give what was held back."""
        held, self.held = self.held, b""
        return self.pattern.sub(MASK, held) if self.pattern else held

    def text(self, text: str) -> str:
        """Mask one complete text."""
        if self.pattern is None:
            return text
        return os.fsdecode(self.pattern.sub(MASK, os.fsencode(text)))

    def _hold(self, data: bytes, start: int) -> int:
        for at in range(max(start, len(data) - self.longest + 1), len(data)):
            if data[at] in self.heads:
                tail = data[at:]
                if any(len(v) > len(tail) and v.startswith(tail) for v in self.values):
                    return at
        return len(data)


SEGMENT = re.compile(r"out\.(\d{15})\.log")


def segments(folder: str) -> list[tuple[int, str]]:
    """The parts of the log that are still there: (absolute offset, path), oldest first."""
    try:
        found = (SEGMENT.fullmatch(name) for name in os.listdir(folder))
    except OSError:
        return []
    return sorted((int(m.group(1)), folder + "/" + m.group(0)) for m in found if m)


def log_size(folder: str) -> int:
    """Absolute end of the log."""
    for base, path in reversed(segments(folder)):
        try:
            return base + os.lstat(path).st_size
        except OSError:
            continue
    return 0


class Log:
    """Appends to the log and rotates it; what can't be written is dropped and counted, for the job must not wait."""

    def __init__(self, folder: str, max_bytes: int) -> None:
        self.folder, self.half, self.dropped = folder, max(max_bytes // 2, 1024), 0
        self.fd = -1
        known = segments(folder)
        self._open(known[-1][0] if known else 0)

    def write(self, data: bytes) -> None:
        """Append, starting a new segment where the present one is full."""
        while data:
            if self.size >= self.half:
                self._open(self.base + self.size)
            room = self.half - self.size if self.size < self.half else len(data)  # full: rotation failed
            part, data = data[:room], data[room:]
            done = write_all(self.fd, part) if self.fd >= 0 else 0
            self.size += done
            self.dropped += len(part) - done
            if done < len(part):
                self.dropped += len(data)
                return

    def _open(self, base: int) -> None:
        name = f"out.{base:015d}.log"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(self.folder + "/" + name, flags, 0o600)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise OSError(errno.EINVAL, "not a regular file", name)
        except OSError:
            if self.fd < 0:
                self.base, self.size = base, 0
            return  # keep writing to the old one
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self.base, self.size = fd, base, os.fstat(fd).st_size
        self._tidy(name)

    def _tidy(self, newest: str) -> None:
        try:
            link = self.folder + "/out.log"
            os.symlink(newest, link + ".tmp")
            os.rename(link + ".tmp", link)
            for _, path in segments(self.folder)[:-2]:
                os.unlink(path)
        except OSError:
            pass


def read_log(folder: str, cursor: int, limit: int) -> Json:
    """A piece of the log from an absolute cursor. `truncated` says that bytes before it are gone for good."""
    limit = max(4, min(limit, 1 << 20))
    known = segments(folder)
    size = log_size(folder)
    first = known[0][0] if known else 0
    start = cursor if cursor >= 0 else max(first, size + cursor)
    truncated = start < first or start > size
    if truncated:
        start = first
    data = b""
    for base, path in known:
        if start + len(data) < base:  # somebody cut the part before
            if data:
                break
            start, truncated = base, True
        if len(data) < limit:
            data += read_at(path, start + len(data) - base, limit - len(data))
    if cursor < 0:
        lead = next((i for i, b in enumerate(data[:4]) if b & 0xC0 != 0x80), 0)
        start, data = start + lead, data[lead:]
    data = whole_characters(data)
    end = start + len(data)
    return {
        "ok": True,
        "text": data.decode("utf-8", "replace"),
        "next": end,
        "size": max(size, end),
        "truncated": truncated,
    }


def read_at(path: str, offset: int, limit: int) -> bytes:
    """Bytes of one segment, nothing if it was rotated away meanwhile."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(fd, limit, offset)
    finally:
        os.close(fd)


def whole_characters(data: bytes) -> bytes:
    """Leave a cut UTF-8 character at the end for the next read, unless it is all there is."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            need = 4 if 0xF0 <= byte < 0xF8 else 3 if 0xE0 <= byte < 0xF0 else 2 if 0xC0 <= byte < 0xE0 else 1
            return data[:-back] if back < need and back < len(data) else data
    return data


# -------------------------------------------------------------------------------------------------------- heartbeat


def number_in(path: str) -> int | None:
    """The number that a kernel file holds; None for "max", an absurd limit, or no such file."""
    try:
        with open(path, encoding="ascii") as file:
            value = int(file.read(64))
    except (OSError, ValueError):
        return None
    return value if 0 <= value < 1 << 60 else None


def memory() -> tuple[int | None, int | None]:
    """Used and allowed bytes: of the control group where it has a limit, else of the machine."""
    for used, limit in (("memory.current", "memory.max"), ("memory.usage_in_bytes", "memory.limit_in_bytes")):
        for folder in cgroup_folders():
            allowed = number_in(folder + "/" + limit)
            if allowed is not None:
                return number_in(folder + "/" + used), allowed
    try:
        with open(PROC + "/meminfo", encoding="ascii") as file:
            info = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file if line.startswith("Mem")}
        return info["MemTotal"] - info["MemAvailable"], info["MemTotal"]
    except (OSError, ValueError, KeyError, IndexError):
        return None, None


def cgroup_folders(pid: Any = "self") -> Iterator[str]:
    """Where a process's memory limits may stand: its own group, then the mount's root, for v2 and v1."""
    try:
        with open(f"{PROC}/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return
    for parts in lines:
        if len(parts) == 3 and parts[1] in ("", "memory"):
            mount = "/sys/fs/cgroup" + ("/memory" if parts[1] else "")
            yield mount + parts[2].rstrip("/")
            yield mount


def oom_kills_in(folder: str) -> int | None:
    """How often the kernel killed in a control group because its memory was used up; None where it isn't counted."""
    for name in ("memory.events", "memory.oom_control"):
        try:
            with open(folder + "/" + name, encoding="ascii") as file:
                counts = dict(line.split(None, 1) for line in file if " " in line)
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return None


class OomKills:
    """Counts what the kernel kills for memory in the groups of the runner and of its command, from now on."""

    def __init__(self) -> None:
        self.first: dict[str, int] = {}
        self.most = 0
        self.look()

    def look(self, pid: Any = "self") -> int | None:
        """The kills so far: the greatest number of all groups, since an outer one counts an inner one's too."""
        for folder in {*cgroup_folders(), *cgroup_folders(pid)} if len(self.first) < 16 else ():
            count = oom_kills_in(folder)
            if count is not None:
                self.first.setdefault(folder, count)
        for folder, first in self.first.items():
            self.most = max(self.most, (oom_kills_in(folder) or 0) - first)  # a group may be gone by now
        return self.most if self.first else None


class Asked:
    """Asks in a thread what may hang for a long time: a sick driver, a network disk that went away."""

    def __init__(self) -> None:
        self.values: Json = {}
        self.thread: Any = None

    def ask(self, patience: float = 0.0) -> Json:
        """The last answer, or one that comes within `patience` seconds; asks anew unless a question is still open."""
        if not (self.thread and self.thread.is_alive()):
            import threading

            self.thread = threading.Thread(target=self._query, daemon=True)
            self.thread.start()
        if patience:
            self.thread.join(patience)
        return self.values

    def _query(self) -> None:
        raise NotImplementedError


class Rooms(Asked):
    """Disk and inodes where the declared outputs go: of the file system that has the least of each."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__()
        self.paths = paths

    def _query(self) -> None:
        rooms = []
        for path in self.paths:
            while not os.path.exists(path) and len(path) > 1:
                path = os.path.dirname(path)
            try:
                rooms.append(os.statvfs(path))
            except OSError:
                continue
        if rooms:
            fs = min(rooms, key=lambda r: r.f_bavail * r.f_frsize)
            found: Json = {"disk_free": fs.f_bavail * fs.f_frsize, "disk_total": fs.f_blocks * fs.f_frsize}
            counted = [r for r in rooms if r.f_files]  # some file systems count no inodes
            if counted:
                fs = min(counted, key=lambda r: r.f_favail)
                found.update(inodes_free=fs.f_favail, inodes_total=fs.f_files)
            self.values = found


class Gpu(Asked):
    """Asks nvidia-smi."""

    def __init__(self) -> None:
        import shutil

        super().__init__()
        self.program = shutil.which("nvidia-smi")

    def ask(self, patience: float = 0.0) -> Json:
        """As above, and nothing where there is no such program."""
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


# ---------------------------------------------------------------------------------------------------------- metrics


class Tail:
    """Follows a file of JSON lines that somebody else writes, replaces or truncates."""

    def __init__(self, path: str) -> None:
        self.path, self.offset, self.inode, self.part = path, 0, 0, b""

    def skip(self) -> None:
        """Pass over what is there now."""
        try:
            info = os.lstat(self.path)
        except OSError:
            return
        self.offset, self.inode = info.st_size, info.st_ino

    def read(self) -> list[Json]:
        """The objects that were completed since the last call; anything else in the file is passed over."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                return []
            if info.st_ino != self.inode or info.st_size < self.offset:
                self.offset, self.inode, self.part = 0, info.st_ino, b""
            data = os.pread(fd, 1 << 18, self.offset)
        finally:
            os.close(fd)
        self.offset += len(data)
        *lines, rest = (self.part + data).split(b"\n")
        self.part = rest if len(rest) <= 1 << 16 else b"?"  # no number is that long: the line will not parse
        return [found for found in map(self._parse, lines) if found is not None]

    @staticmethod
    def _parse(line: bytes) -> Json | None:
        try:
            found = json.loads(line.decode("utf-8")) if len(line) <= 1 << 16 else None
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


def split_metrics(row: Json) -> tuple[int | None, dict[str, float], list[str]]:
    """Step, finite numbers, and the names whose value is NaN or infinite."""
    step, finite, bad = None, {}, []
    for name, value in list(row.items())[:64]:
        if isinstance(value, str) and value.lower().lstrip("+-") in ("nan", "inf", "infinity"):
            value = float("nan")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        try:
            number = float(value)
        except OverflowError:
            number = float("inf")
        name = str(name)[:64].encode("utf-8", "replace").decode("utf-8")
        if number != number or number in (float("inf"), float("-inf")):
            bad.append(name)
        elif name in ("step", "global_step") and 0 <= number < 1 << 53:
            step = int(number)
        else:
            finite[name] = number
    return step, finite, bad


def middle(values: Iterable[float]) -> float:
    """The median, the upper one of two."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


class Course:
    """Compares a run with its own past: a loss that jumps away and stays, steps that come much slower.

    Both are told once, after several in a row, and once more when they are over. What is told is in the texts.
    """

    MEMORY, LEAST, ROW = 50, 20, 5  # values kept, values needed before anything is judged, values in a row
    JUMP, SLOW, SLOW_S = 5.0, 5.0, 30.0

    def __init__(self) -> None:
        self.losses: dict[str, list[float]] = {}
        self.early: dict[str, float] = {}
        self.high: dict[str, int] = {}
        self.paces: list[float] = []
        self.recent: list[tuple[float, float]] = []  # seconds, steps
        self.slow = False
        self.last: tuple[float, int] | None = None

    def loss(self, name: str, value: float, step: int | None) -> tuple[str, str] | None:
        """Take one value of a loss; an alert's kind and text where one is due."""
        past = self.losses.setdefault(name, [])
        limit = self._limit(name, past)
        if limit is None or value <= limit:
            was, self.high[name] = self.high.get(name, 0), 0
            self.losses[name] = [*past, value][-self.MEMORY :]
            return ("recovered", f"{name} is {value:.4g} at step {step} again") if was >= self.ROW else None
        self.high[name] = self.high.get(name, 0) + 1
        text = f"{name} is {value:.4g} at step {step}, the {self.ROW}th value in a row above {limit:.4g}"
        return ("spike", text) if self.high[name] == self.ROW else None

    def _limit(self, name: str, past: list[float]) -> float | None:
        """What is far above the values so far: five times their median, ten times their spread, half of the start."""
        if len(past) < self.LEAST:
            return None
        usual = middle(past)
        early = self.early.setdefault(name, middle(past[: self.LEAST // 2]))
        spread = middle(abs(v - usual) for v in past)
        return max(self.JUMP * usual, usual + 10 * spread, early / 2) if usual > 0 else None

    def pace(self, step: int, now: float) -> tuple[str, str] | None:
        """Take the newest step; an alert's kind and text where one is due."""
        last, self.last = self.last, (now, step)
        if last is None or step <= last[1]:
            return None
        self.recent.append((now - last[0], float(step - last[1])))
        if len(self.recent) <= self.ROW:
            return None
        if not self.slow:
            seconds, steps = self.recent.pop(0)
            self.paces = [*self.paces, seconds / steps][-self.MEMORY :]
        self.recent = self.recent[-self.ROW :]
        if len(self.paces) < self.LEAST:
            return None
        usual, present = middle(self.paces), middle(seconds / steps for seconds, steps in self.recent)
        slow = present > self.SLOW * usual and sum(seconds for seconds, _ in self.recent) > self.SLOW_S
        if self.slow and present < self.SLOW / 2 * usual:
            self.slow = False
            return "recovered", f"a step takes {present:.3g} s again"
        if self.slow or not slow:
            return None
        self.slow = True
        return "slowed", f"a step takes {present:.3g} s, before it took {usual:.3g} s (at step {step})"


class Post:
    """Sends events to a URL from a thread of its own: bounded queue, retries with back-off, never in the job's way."""

    def __init__(self, url: str, token: str, job: str) -> None:
        import collections
        import threading

        self.url, self.token, self.job = url, token, job
        self.queue: Any = collections.deque(maxlen=1000)
        self.wake = threading.Event()
        self.idle = threading.Event()
        self.idle.set()
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, event: Json) -> None:
        """Queue an event; the oldest is dropped when a thousand wait."""
        self.idle.clear()
        self.queue.append(event)
        self.wake.set()

    def flush(self, seconds: float) -> None:
        """Wait until everything was sent, but not long."""
        self.idle.wait(seconds)

    def _work(self) -> None:
        pause = 1.0
        while True:
            batch = list(self.queue)[:100]
            if not batch:
                self.wake.clear()
                if not self.queue:
                    self.idle.set()
                    self.wake.wait()
            elif self._send(batch):
                pause = 1.0
                for _ in batch:
                    self.queue.popleft() if self.queue else None
            else:
                time.sleep(pause)
                pause = min(pause * 2, 60.0)

    def _send(self, batch: list[Json]) -> bool:
        import urllib.request

        body = json.dumps({"job": self.job, "events": batch}, allow_nan=False).encode("ascii")
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = "Bearer " + self.token
        try:
            request = urllib.request.Request(self.url, body, headers)  # noqa: S310 (scheme checked by the caller)
            with urllib.request.urlopen(request, timeout=10) as reply:  # noqa: S310
                return bool(200 <= reply.status < 300)
        except (OSError, ValueError):
            return False


# ------------------------------------------------------------------------------------------------------- supervisor


class Supervisor:
    """Runs one attempt of a job from launch to final status."""

    def __init__(self, folder: str, order: Json) -> None:
        spec = order["spec"]
        self.folder, self.spec = folder, spec
        self.secrets: dict[str, str] = dict(order.get("secrets") or {})
        self.post_token = self.secrets.pop("GPUWARDEN_POST_TOKEN", "")
        self.seal_key = self.secrets.pop("GPUWARDEN_SEAL_KEY", "")
        if self.seal_key and not spec.get("root"):  # a rehearsal finds its processes by their environment
            hide_memory()
        self.redactor = Redactor([*self.secrets.values(), self.post_token, self.seal_key])
        self.grace = float(spec.get("grace_s") or 10.0)
        self.beat_every = max(float(spec.get("heartbeat_s") or 10.0), 0.2)
        self.inode = os.stat(folder).st_ino
        self.log = Log(folder, int(spec.get("log_max_bytes") or 64 << 20))
        self.metrics = Tail(folder + "/metrics.jsonl")
        self.metrics.skip()  # what an earlier attempt wrote is no news
        if os.path.lexists(folder + "/stop.json"):
            os.unlink(folder + "/stop.json")
        self.gpu = Gpu()
        ground, outputs = Ground(spec), [str(p) for p in spec.get("outputs") or []][:16]
        self.rooms = Rooms([folder, *(ground.locate(folder, path)[0] for path in outputs)])
        self.kills = OomKills()
        self.course = Course()
        self.post = Post(spec["post_url"], self.post_token, order["token"]) if spec.get("post_url") else None
        self.intent = ""  # why the job is being ended: canceled, preempted or timeout
        self.signaled = 0.0
        self.killed = self.warned = self.stalled = False
        self.begun = self.moved = time.monotonic()
        self.beat_at = self.written_at = 0.0
        self.dirty = True
        self.bad_names: dict[str, bool] = {}
        self.alert_texts: list[str] = []
        self.child: Any = None
        self.sealer: Any = None
        self.pipe = -1
        self.status: Json = {
            "schema": 1, "token": order["token"], "attempt": order["attempt"], "state": "running", "why": "",
            "pid": os.getpid(), "start_ticks": start_mark(os.getpid()), "boot_id": boot_id(),
            "child_pid": None, "child_ticks": "", "pgid": None, "exit_code": None, "signal": None,
            "started_at": time.time(), "updated_at": time.time(), "ended_at": None, "restarts": 0,
            "step": None, "metrics": {}, "beat": {}, "alerts": 0, "last_alerts": [], "log_dropped": 0,
            "outputs": list(spec.get("outputs") or []), "heartbeat_s": self.beat_every,
        }  # fmt: skip

    # -- the course of an attempt

    def run(self, ready: Callable[[], None]) -> None:
        """Launch, watch, restart where that is due, and leave a final status. Calls `ready` after the first launch."""
        self.listen()
        if not self.write():
            raise Problem("disk_full", f"the status can't be written to {self.folder}; nothing was launched")
        while True:
            launched = self.launch()
            ready()
            ready = _nothing
            state, why = self.watch() if launched else ("failed", self.status["why"])
            if state:
                break
            self.alert("restart", why)
            self.status["restarts"] += 1
            if self.pause(float(self.spec.get("restart_delay_s", 1.0))):
                state, why = self.intent, "ended while it waited for a restart"
                break
        self.finish(state, why)

    def listen(self) -> None:
        """Turn signals into a readable pipe and an intent."""
        self.wake, writer = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, lambda *_: None)  # not SIG_IGN, which the command would inherit
        signal.signal(signal.SIGUSR1, lambda *_: self.intend("canceled", override=True))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.intend("preempted"))

    def intend(self, intent: str, override: bool = False) -> None:
        """Decide that the job ends; the first reason stands, except that our own stop goes before."""
        if override or not self.intent:
            self.intent = intent

    def launch(self) -> bool:
        """Start the command in a group of its own. False: it could not be started, and the status says why."""
        import subprocess

        work = self.folder + "/work"
        reader, writer = os.pipe()
        try:
            os.makedirs(work, mode=0o700, exist_ok=True)
            self.child = subprocess.Popen(
                self.spec["argv"], cwd=os.path.join(work, self.spec.get("cwd") or ""), env=self.environment(),
                stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            os.close(reader)
            self.status.update(exit_code=127, why=self.redactor.text(f"the command could not be started: {error}"))
            return False
        finally:
            os.close(writer)
        os.set_blocking(reader, False)
        self.pipe = reader
        pid = self.child.pid
        self.status.update(child_pid=pid, child_ticks=start_mark(pid), pgid=pid)
        self.moved = time.monotonic()
        self.write()
        return True

    def environment(self) -> dict[str, str]:
        """What the command sees: the runner's own environment, the spec's, the secrets, and our names."""
        ours = {
            "GPUWARDEN_RUN_DIR": self.folder,
            "GPUWARDEN_OUTPUT_DIR": self.folder + "/work",
            "GPUWARDEN_METRICS": self.folder + "/metrics.jsonl",
            "GPUWARDEN_ATTEMPT": str(self.status["attempt"]),
            "GPUWARDEN_RESTARTS": str(self.status["restarts"]),
            "GPUWARDEN_JOB": self.status["token"],
        }
        if self.spec.get("timeout_s"):
            ours["GPUWARDEN_DEADLINE"] = "%.0f" % (self.status["started_at"] + self.spec["timeout_s"])
        return {**os.environ, **(self.spec.get("env") or {}), **self.secrets, **ours}

    def watch(self) -> tuple[str, str]:
        """Wait for the command's end; the final state and why, or no state where a restart is due."""
        while not self.exited():
            self.wait()
            self.tick()
        self.sweep()
        code = self.child.wait()
        self.drain()
        self.status.update(exit_code=None if code < 0 else code, signal=-code if code < 0 else None)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if self.intent:
            return self.intent, {"canceled": "stopped on request", "preempted": "a signal from outside ended it"}.get(
                self.intent, "the time limit of {} s was reached".format(self.spec.get("timeout_s"))
            ) + f" ({how})"
        if code == 0:
            return "succeeded", "exit code 0"
        if code in RETRY_CODES or -code in RETRY_SIGNALS:
            limit = int(self.spec.get("max_restarts") or 0)
            if self.status["restarts"] < limit:
                return "", f"{how} asks for a restart ({self.status['restarts'] + 1} of {limit})"
            return "failed", f"{how} asks for a restart, and all {limit} were used"
        return "failed", how + (", which is how the kernel ends a process that is out of memory" if code == -9 else "")

    def exited(self) -> bool:
        """Whether the command has ended; it stays a zombie, so that its group id can't be reused yet."""
        if has_proc() and hasattr(os, "waitid"):
            return os.waitid(os.P_PID, self.child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return self.child.poll() is not None

    def sweep(self) -> None:
        """A job is its command: what the command left running in its group is ended, with the same grace."""
        end = time.monotonic() + self.grace
        group = self.child.pid
        kill_group(group, signal.SIGTERM)
        while self.remain(group) and time.monotonic() < end:
            self.wait(0.05)
            self.guard()
        if self.remain(group):
            kill_group(group, signal.SIGKILL)

    @staticmethod
    def remain(group: int) -> bool:
        """Whether the group has living members besides the ended command."""
        members = group_members(group)
        if members is not None:
            return bool(members)
        try:
            os.killpg(group, 0)
        except OSError:
            return False
        return True

    def pause(self, seconds: float) -> bool:
        """Wait before a restart; true when the job is to be ended instead."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.intent:
            self.wait(min(TICK_S, seconds))
            self.tick()
        return bool(self.intent)

    def finish(self, state: str, why: str) -> None:
        """Leave the final status; on a full disk keep trying for five minutes, since everything hangs on it."""
        self.take_metrics(64)
        if self.sealer and self.sealer.stdin:
            self.sealer.stdin.close()  # it looks a last time, and nobody waits for it
        now = time.time()
        self.status.update(state=state, why=self.redactor.text(why), ended_at=now)
        self.beat(last=True)
        self.event("state", {"state": state, "why": why})
        end = time.monotonic() + 300
        while not self.write() and time.monotonic() < end:
            self.guard()
            time.sleep(0.5)
        if self.post:
            self.post.flush(5.0)

    # -- one turn of the loop

    def wait(self, seconds: float = TICK_S) -> None:
        """Sleep until output, a signal or the time comes; take the output."""
        import select

        watched = [fd for fd in (self.wake, self.pipe) if fd >= 0]
        readable, _, _ = select.select(watched, [], [], seconds)
        if self.wake in readable:
            os.read(self.wake, 4096)
        if self.pipe in readable:
            self.copy(16)

    def copy(self, times: int) -> bool:
        """Move output to the log, a bounded number of times. False at the end of the output."""
        for _ in range(times):
            try:
                data = os.read(self.pipe, 1 << 16)
            except OSError:
                return True  # nothing more for now
            if not data:
                os.close(self.pipe)
                self.pipe = -1
                return False
            self.log.write(self.redactor.feed(data))
            if not self.metrics.inode:
                self.moved = time.monotonic()
        return True

    def drain(self) -> None:
        """Take what is left in the pipe; a process that escaped the group may hold it open for ever."""
        if self.pipe >= 0 and self.copy(64):
            os.close(self.pipe)
        self.pipe = -1
        self.log.write(self.redactor.finish())

    def tick(self) -> None:
        """Everything that is due now."""
        self.guard()
        self.kills.look(self.child.pid)  # at every tick, since an ended process has no group any more
        self.take_metrics(1)
        self.limits()
        self.escalate()
        now = time.monotonic()
        if self.sealer is None and now - self.begun >= float(self.spec.get("seal_after_s") or SEAL_AFTER_S):
            self.sealer = start_sealer(self.folder, self.spec, self.seal_key) or False
        if now - self.beat_at >= self.beat_every:
            self.beat_at = now
            self.beat()
        if self.dirty and now - self.written_at >= TICK_S:
            self.write()

    def beat(self, last: bool = False) -> None:
        """Memory, disk, inodes and GPU now; what can't be read is left out."""
        used, limit = memory()
        room = self.rooms.ask(1.0 if last else 0.05)  # a disk that is well answers at once
        gpu = self.gpu.values if last else self.gpu.ask()
        self.status["beat"] = {"mem_used": used, "mem_limit": limit, "oom_kills": self.kills.look(), **room, **gpu}
        self.dirty = True

    def guard(self) -> None:
        """When the run folder is gone, the machine is being torn down: end the job and leave."""
        try:
            if os.stat(self.folder).st_ino == self.inode:
                return
        except FileNotFoundError:
            pass
        except OSError:
            return  # a sick disk proves nothing
        if self.child is not None and self.child.returncode is None:
            kill_group(self.child.pid, signal.SIGKILL)
        os._exit(3)

    def limits(self) -> None:
        """Time limit, the warning before it, and stalls."""
        now = time.monotonic()
        timeout, warn = self.spec.get("timeout_s"), self.spec.get("warn_before_s")
        left = self.begun + timeout - now if timeout else None
        if left is not None and warn and left <= warn and not self.warned and not self.intent:
            self.warned = True
            text = f"the time limit comes in {left:.0f} s; SIGTERM will be sent, then SIGKILL {self.grace:.0f} s later"
            self.alert("timeout", text)
            self.log.write((f"[gpuwarden] {text}\n").encode())
        if left is not None and left <= 0:
            self.intend("timeout")
        stall = self.spec.get("stall_s")
        if stall and now - self.moved > stall and not self.stalled:
            self.stalled = True
            self.alert("stall", "nothing new for {:.0f} s (last step {})".format(now - self.moved, self.status["step"]))

    def escalate(self) -> None:
        """Once the job is to end: SIGTERM, the grace, SIGKILL."""
        if not self.intent or self.child is None or self.child.returncode is not None:
            return
        now = time.monotonic()
        if not self.signaled:
            self.signaled = now
            if self.intent == "canceled":
                self.grace = self.asked_grace()
            kill_group(self.child.pid, signal.SIGTERM)
        elif now - self.signaled >= self.grace and not self.killed:
            self.killed = True
            kill_group(self.child.pid, signal.SIGKILL)

    def asked_grace(self) -> float:
        """The grace that `stop` asked for; a signal can't carry it."""
        try:
            return min(max(float(json.loads(read_small(self.folder + "/stop.json", 4096))["grace_s"]), 0.0), 3600.0)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return self.grace

    def take_metrics(self, times: int) -> None:
        """Read what the job wrote; flag what is not finite."""
        for _ in range(times):
            rows = self.metrics.read()
            for row in rows:
                self.take_row(row)
            if not rows:
                return
            step = self.status["step"]
            if step is not None:
                self.tell(self.course.pace(step, time.monotonic()))

    def take_row(self, row: Json) -> None:
        """One line of metrics."""
        step, finite, bad = split_metrics(row)
        if step is not None:
            self.status["step"] = step
        known: dict[str, float] = self.status["metrics"]
        for name, value in finite.items():
            if name in known or len(known) < 64:
                known[name] = value
            self.bad_names.pop(name, None)
            if name in LOSSES:
                self.tell(self.course.loss(name, value, step))
        for name in bad:
            known.pop(name, None)  # an older value would read as the present one
            if name not in self.bad_names and len(self.bad_names) < 64:
                self.bad_names[name] = True
                self.alert("nonfinite", "{} is not finite at step {}".format(name, self.status["step"]))
        self.event("metrics", {"step": self.status["step"], "metrics": finite})
        self.moved, self.stalled, self.dirty = time.monotonic(), False, True

    def tell(self, alert: tuple[str, str] | None) -> None:
        """Pass an alert on where there is one."""
        if alert:
            self.alert(*alert)

    def alert(self, kind: str, text: str) -> None:
        """Tell it: in alerts.jsonl, in the status, to the URL. The file is bounded."""
        text = self.redactor.text(text)[:300]
        self.status["alerts"] += 1
        self.alert_texts = [*self.alert_texts, f"{kind}: {text}"][-8:]
        self.status["last_alerts"] = self.alert_texts
        self.dirty = True
        line = {"at": time.time(), "kind": kind, "step": self.status["step"], "text": text}
        self.event("alert", line)
        if self.status["alerts"] > MAX_ALERTS:
            return
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(self.folder + "/alerts.jsonl", flags, 0o600)
        except OSError:
            return
        write_all(fd, json.dumps(line).encode("ascii") + b"\n")
        os.close(fd)

    def event(self, kind: str, body: Json) -> None:
        """Queue something for the URL, where there is one."""
        if self.post:
            self.post.put({"at": time.time(), "attempt": self.status["attempt"], **body, "event": kind})

    def write(self) -> bool:
        """Write the status now."""
        self.written_at, self.dirty = time.monotonic(), False
        self.status.update(updated_at=time.time(), log_dropped=self.log.dropped)
        return write_status(self.folder, self.status)


def _nothing() -> None:
    pass


# ---------------------------------------------------------------------------------------------------------- seals


def hide_memory() -> None:
    """Ask the kernel to let no process of the same user read this one's memory, as far as it can be asked."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    except (ImportError, OSError, AttributeError, TypeError):
        pass


def start_sealer(folder: str, spec: Json, key: str) -> Any:
    """Start the shipped archive beside the job, giving way to it. None where that can't be: then the pull seals.

    It lives as long as somebody holds the other end of its stdin, so it never outlives a killed supervisor for long.
    The key goes there as well, and nowhere else.
    """
    import shutil
    import subprocess

    archive = find_archive(folder, spec.get("archive"))
    tops = [os.path.realpath(Ground(spec).locate(folder, str(p))[0]) for p in spec.get("outputs") or []]
    if not archive or not tops:
        return None
    ionice = shutil.which("ionice")
    argv = [*([ionice, "-c3"] if ionice else []), sys.executable, "-I", "-S", archive, "seal", *tops]
    argv += ["--book", folder + "/seals.jsonl", "--attached"]
    argv += ["--quiet", str(spec.get("seal_quiet_s") or 30), "--every", str(spec.get("seal_every_s") or 10)]
    argv += ["--keyed"] if key else []
    try:
        with open(os.devnull, "r+b") as null:
            sealer = subprocess.Popen(
                argv, cwd="/", stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True, bufsize=0
            )
        if key and sealer.stdin:
            write_all(sealer.stdin.fileno(), key.encode("ascii") + b"\n")
        return sealer
    except (OSError, UnicodeError, subprocess.SubprocessError):
        return None


def find_archive(folder: str, name: Any) -> str:
    """The path of the shipped archive of that name, or nothing."""
    if not isinstance(name, str) or not ARCHIVE.fullmatch(name):
        return ""
    import hashlib

    path = folder + "/" + name
    try:
        digest = hashlib.sha256(read_small(path, 1 << 22)).hexdigest()
    except OSError:
        return ""
    return path if digest[:16] in name else ""  # the job may write here


def seals(folder: str) -> dict[str, Json]:
    """Real path -> the last line of the book about it. A line that a kill cut short is passed over.

    Who wrote a line can't be told here, for the job may write them as well; who holds the key can tell by its `mac`.
    """
    try:
        data = read_small(folder + "/seals.jsonl", MAX_BOOK)
    except OSError:
        return {}
    rows: dict[str, Json] = {}
    for line in data.splitlines():
        try:
            row = json.loads(line.decode("ascii"))
            known = {k: row[k] for k in ("size", "mtime_ns", "ctime_ns", "sha256", "sealed_at")}
            plain = all(type(known[k]) is int for k in ("size", "mtime_ns", "ctime_ns"))
            dated = type(known["sealed_at"]) in (int, float) and 0 <= known["sealed_at"] < 1e12
            known["mac"] = row.get("mac") or ""
            if plain and dated and SHA256.fullmatch(known["sha256"]) and MAC.fullmatch(known["mac"]):
                rows[str(row["path"])] = known
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return rows


def examine(folder: str, request: Json) -> Json:
    """Let the shipped archive look at outputs where they lie; its lines are passed on, bounded, with signs of life."""
    import subprocess
    import threading

    archive = find_archive(folder, request.get("archive"))
    if not archive:
        raise Problem("no_archive", "the archive that examines checkpoints is not here")
    ground, paths = Ground(request), [str(p) for p in request.get("paths") or []]
    tops = [bounded(folder, ground, path) for path in paths]
    seconds = min(max(float(request.get("seconds") or 0), 1.0), 86400.0)
    argv = [sys.executable, "-I", archive, "examine", *tops, "--book", folder + "/seals.jsonl"]
    argv += ["--seconds", str(seconds), *(["--structure"] if request.get("structure") else [])]
    if request.get("deeper") in ("load", "resume"):
        argv.append("--" + request["deeper"])
    if request.get("against"):
        argv.append("--against=" + bounded(folder, ground, str(request["against"])))
    child = subprocess.Popen(argv, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    timer = threading.Timer(seconds + 30, child.kill)
    timer.start()
    try:
        lines = passed_on(child)
    finally:
        timer.cancel()
        child.kill()
        child.wait()
    if len(lines) != len(paths):
        raise Problem("io_error", f"it ended after {len(lines)} of {len(paths)} outputs, with code {child.returncode}")
    for number, line in enumerate(lines):
        reply({"output": paths[number], "found": line})
    return {"ok": True, "outputs": len(lines)}


def bounded(folder: str, ground: Ground, path: str) -> str:
    """The real path of a declared one. Raises Problem for a link that leaves its folder."""
    top, bound = ground.locate(folder, path)
    real = os.path.realpath(top)
    if not inside(real, bound):
        raise Problem("bad_request", f"{printable(path)} is a link that leaves its folder")
    return real


def passed_on(child: Any) -> list[Json]:
    """The lines of a child, with a sign of life every few seconds for who waits. Raises Problem above a bound."""
    import select

    data = bytearray()
    while True:
        if not select.select([child.stdout], [], [], 5)[0]:
            reply({"progress": len(data)})
            continue
        part = os.read(child.stdout.fileno(), 1 << 16)
        data += part
        if len(data) > MAX_FINDINGS:
            raise Problem("io_error", f"it found more than {MAX_FINDINGS} bytes to say")
        if not part:
            break
    try:
        return [json.loads(line.decode("ascii")) for line in bytes(data).splitlines()]
    except (ValueError, RecursionError):
        raise Problem("io_error", "its answer is no JSON") from None


# ------------------------------------------------------------------------------------------------------------ verbs


def check_order(order: Json) -> None:
    """Refuse an order that can't be carried out."""
    spec = order.get("spec")
    argv = spec.get("argv") if isinstance(spec, dict) else None
    sound = isinstance(argv, list) and argv and all(isinstance(word, str) and "\0" not in word for word in argv)
    if not sound or not isinstance(order.get("token"), str) or not isinstance(order.get("attempt"), int):
        raise Problem("bad_request", "start needs spec.argv (a list of words), a token and an attempt number")
    url = (spec or {}).get("post_url") or ""
    if url and not url.startswith(("https://", "http://")):
        raise Problem("bad_request", "post_url must be http or https")


def adopted(folder: str, order: Json) -> Json | None:
    """The answer when that attempt, or a later one, was launched before; None when it was not."""
    status = read_status(folder)
    if status is None:
        return None
    if status.get("token") != order["token"]:
        raise Problem("conflict", f"{folder} belongs to another job")
    if not isinstance(status.get("attempt"), int) or status["attempt"] < order["attempt"]:
        return None
    return {
        "ok": True,
        "adopted": True,
        "pid": status.get("pid"),
        "state": status["state"],
        "attempt": status["attempt"],
    }


def start(folder: str, order: Json) -> Json:
    """Launch an attempt in the background, once, or adopt it."""
    import select
    import subprocess

    check_order(order)
    known = adopted(folder, order)
    if known:
        return known
    errors = os.open(
        folder + "/runner.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    argv = [sys.executable, "-I", "-S", os.path.abspath(__file__), "supervise", folder]
    process = subprocess.Popen(
        argv, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True, bufsize=0
    )
    os.close(errors)
    assert process.stdin and process.stdout
    try:
        write_all(process.stdin.fileno(), json.dumps(order).encode("ascii"))
    finally:
        process.stdin.close()
    if not select.select([process.stdout], [], [], 30)[0]:
        raise Problem("unreachable", "the supervisor did not answer within 30 s; it may have launched the job")
    line = process.stdout.readline()
    try:
        reply = json.loads(line)
    except ValueError:
        raise Problem("unreachable", f"the supervisor ended without an answer; see {folder}/runner.err") from None
    return reply if isinstance(reply, dict) else {"ok": False, "code": "bad_reply", "error": "no object"}


def supervise(folder: str, order: Json) -> Json | None:
    """Take the lock, launch, watch to the end. Answers `start` with one line and then lets go of its pipes."""
    check_order(order)
    lock = -1
    begun = time.monotonic()
    while lock < 0:
        lock = take_lock(folder)
        known = adopted(folder, order)
        if known:
            return known
        earlier = read_status(folder)
        patience = 1 if earlier and earlier["state"] == "running" else 10  # one that has ended is about to leave
        if lock < 0 and time.monotonic() - begun > patience:
            raise Problem("conflict", f"an earlier attempt still runs in {folder}; stop it first")
        time.sleep(0 if lock >= 0 else 0.02)
    if earlier and child_alive(earlier) is not False:
        raise Problem("conflict", f"the process of an earlier attempt still runs in {folder}; stop it first")
    os.chdir("/")

    def ready() -> None:
        reply({"ok": True, "adopted": False, "pid": os.getpid(), "state": "running", "attempt": order["attempt"]})
        let_go()

    Supervisor(folder, order).run(ready)
    return None


def take_lock(folder: str) -> int:
    """The job's lock, or -1 while another supervisor holds it."""
    import fcntl

    fd = os.open(folder + "/lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
            return -1
        why = f"{folder} is on a file system without locks ({error}); choose another run folder"
        raise Problem("not_supported", why) from None
    return fd


def let_go() -> None:
    """Detach from the pipes of whoever launched us."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        sys.stdout.flush()
    except OSError:
        pass
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


def child_alive(status: Json) -> bool | None:
    """Whether the command's own process lives."""
    return is_alive(status.get("child_pid"), status.get("child_ticks"), status.get("boot_id"))


def orphans(folder: str, status: Json) -> list[int]:
    """Living members of the command's group that carry our run folder in their environment."""
    group = status.get("pgid")
    members = (group_members(group) or []) if isinstance(group, int) and group > 1 else []
    return [pid for pid in members if environ_of(pid).get("GPUWARDEN_RUN_DIR") == folder]


def observe(folder: str) -> Json:
    """One job's status with what only a look at the machine tells."""
    if not os.path.isdir(folder):
        return {"state": "missing", "now": time.time()}
    try:
        status = read_status(folder)
    except Problem as problem:
        return {"state": "unreadable", "why": str(problem), "now": time.time()}
    if status is None:
        return {"state": "absent", "now": time.time()}
    alive = is_alive(status.get("pid"), status.get("start_ticks"), status.get("boot_id"))
    if alive is False and status["state"] == "running":
        status = read_status(folder) or status  # it may have ended properly between the two looks
    status.update(alive=alive, child_alive=child_alive(status), log_bytes=log_size(folder), now=time.time())
    status["identity"] = "ticks" if has_proc() else "ps"
    return status


def poll(_: str, request: Json) -> Json:
    """All jobs of this machine that are asked for, in one answer."""
    return {"ok": True, "jobs": {folder: observe(folder) for folder in request.get("dirs") or []}}


def logs(folder: str, request: Json) -> Json:
    """A piece of the log."""
    if not os.path.isdir(folder):
        raise Problem("not_found", f"there is no run folder {folder}")
    return read_log(folder, int(request.get("cursor") or 0), int(request.get("limit") or 1 << 16))


def stop(folder: str, request: Json) -> Json:
    """End a job and say what became of it. Nothing is signaled whose identity is not proven."""
    status = read_status(folder) if os.path.isdir(folder) else None
    if status is None or (request.get("token") and status.get("token") != request["token"]):
        return {"ok": True, "result": "gone"}
    grace = min(max(float(request.get("grace_s") or 0), 0.0), 3600.0)
    end = time.monotonic() + float(request["wait_s"] if request.get("wait_s") is not None else grace + 5)
    if status["state"] in FINAL:
        return {"ok": True, "result": stop_rest(folder, status, grace, end, "gone")}
    try:
        write_atomic(folder + "/stop.json", json.dumps({"grace_s": grace}).encode("ascii"))
    except OSError:
        pass  # then the spec's grace holds
    identity = (status.get("pid"), status.get("start_ticks"), status.get("boot_id"))
    if not isinstance(identity[0], int) or not signal_exactly(identity[0], identity[1], identity[2], signal.SIGUSR1):
        if is_alive(*identity) is not False:
            return {"ok": True, "result": "pending"}
        return {"ok": True, "result": stop_rest(folder, read_status(folder) or status, grace, end, "gone")}
    while True:
        late = time.monotonic() >= end
        if is_alive(*identity) is False:  # the final status comes first, the supervisor's end after it
            status = read_status(folder) if os.path.isdir(folder) else None
            return {"ok": True, "result": stop_rest(folder, status, grace, end, "stopped") if status else "gone"}
        if late:
            return {"ok": True, "result": "pending"}
        time.sleep(0.02)


def stop_rest(folder: str, status: Json, grace: float, end: float, otherwise: str) -> str:
    """End what outlived its supervisor: the group, if its leader or members are proven to be ours."""
    group = status.get("pgid")

    def living() -> bool:
        return child_alive(status) is True or bool(orphans(folder, status))

    if not isinstance(group, int) or group <= 1 or not living():
        return otherwise
    lock = take_lock(folder)
    if lock < 0:  # a supervisor lives after all
        return "pending"
    kill_group(group, signal.SIGTERM)
    hard, killed = min(time.monotonic() + grace, end), False
    while living():
        now = time.monotonic()
        if now >= hard and not killed:
            killed = True
            kill_group(group, signal.SIGKILL)
        elif now >= end and killed:
            return "pending"
        time.sleep(0.02)
    if status["state"] not in FINAL:
        status.update(state="canceled", why="stopped on request; its supervisor was gone", ended_at=time.time())
        write_status(folder, status)
    return "stopped"


# ----------------------------------------------------------------------------------------------------------- roster


def printable(name: str) -> str:
    """A name that fits into JSON, with bytes that are no UTF-8 spelled out."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")[:4096]


class Ground:
    """Where the absolute paths of a machine lie. `root` is empty on a real one; a rehearsal's is a folder, and its
    `mounts` (path -> folder) are volumes that lie outside of it.
    """

    def __init__(self, given: Json) -> None:
        self.root = str(given.get("root") or "")
        mounts = given.get("mounts") if isinstance(given.get("mounts"), dict) else {}
        pairs = [(str(at).rstrip("/"), os.path.realpath(str(real))) for at, real in (mounts or {}).items()]
        self.mounts = sorted(pairs, key=lambda pair: -len(pair[0]))

    def locate(self, folder: str, path: str) -> tuple[str, str]:
        """Where a declared path lies on this machine, and the real folder that it must not leave."""
        if not path.startswith("/"):
            return os.path.join(folder, "work", path), folder + "/work"
        plain = os.path.normpath("/" + path.lstrip("/"))
        for at, real in self.mounts:
            if inside(plain, at):
                return real + plain[len(at) :], real
        return os.path.join(self.root or "/", path.lstrip("/")), os.path.realpath(self.root or "/")

    def shown(self, real: str) -> str:
        """The machine's absolute path of a real one."""
        for at, top in self.mounts:
            if inside(real, top):
                return at + real[len(top) :]
        return "/" + os.path.relpath(real, os.path.realpath(self.root or "/"))


class Roster:
    """Lists declared outputs: regular files, once each; everything else is named in `skipped` with its reason."""

    def __init__(self, folder: str, ground: Ground, emit: Callable[[Json], None], digests: bool) -> None:
        self.folder, self.ground, self.emit, self.digests = folder, ground, emit, digests
        self.missing: list[str] = []
        self.skipped: list[Json] = []
        self.seen: dict[str, bool] = {}
        self.door = Door()
        self.seals = seals(folder)
        self.more_skipped = 0

    def skip(self, shown: str, why: str) -> None:
        """Name something that is not in the roster."""
        if len(self.skipped) < MAX_SKIPPED:
            self.skipped.append({"path": printable(shown), "why": why})
        else:
            self.more_skipped += 1

    def add(self, declared: str) -> None:
        """One declared output: a file, or a folder with everything in it."""
        top, bound = self.ground.locate(self.folder, declared)
        real = os.path.realpath(top)
        if not os.path.lexists(real):
            self.missing.append(declared)
        elif not inside(real, bound) or (declared.startswith("/") and real == bound):
            self.skip(declared, "a link that leaves its folder")
        elif os.path.isdir(real):
            self.walk(self.shown(declared, real), real)
        else:
            self.file(self.shown(declared, real), real)

    def shown(self, declared: str, real: str) -> str:
        """An absolute output goes by its real path: where a link leads decides what a teardown deletes."""
        if not declared.startswith("/"):
            return declared.rstrip("/")
        return self.ground.shown(real)

    def walk(self, declared: str, top: str) -> None:
        """Everything in a folder, in a stable order, through no link."""

        def unreadable(error: OSError) -> None:
            self.skip(str(error.filename), f"can't be read: {error.strerror}")

        for path, folders, files in os.walk(top, onerror=unreadable, followlinks=False):
            folders.sort()
            shown = declared + path[len(top) :]
            for name in sorted(files) + [f for f in folders if os.path.islink(path + "/" + f)]:
                self.entry(shown + "/" + name, path + "/" + name, top)

    def entry(self, shown: str, path: str, top: str) -> None:
        """One name: links are taken only to files of the same folder."""
        if os.path.islink(path):
            real = os.path.realpath(path)
            if not os.path.exists(real):
                self.skip(shown, "a link to nothing")
            elif not inside(real, top):
                self.skip(shown, "a link that leaves its folder")
            elif os.path.isdir(real):
                self.skip(shown, "a link to a folder that is listed under its own name")
            else:
                self.file(shown, real)
        else:
            self.file(shown, path)

    def file(self, shown: str, real: str) -> None:
        """One regular file."""
        if shown in self.seen:
            return
        self.seen[shown] = True
        if len(self.seen) > MAX_ROSTER:
            raise Problem("bad_request", f"more than {MAX_ROSTER} files; declare narrower outputs")
        try:
            shown.encode("utf-8")
            info = os.lstat(real)
            if not stat.S_ISREG(info.st_mode):
                self.skip(shown, "no regular file")
                return
            row: Json = {"path": shown, **stamp(info)}
            if self.digests:
                row.update(self.hash(real))
                if row["sha256"] is None:
                    self.skip(shown, "it kept changing while it was read")
            sealed = self.seals.get(real)
            if sealed and all(row[k] == sealed[k] for k in stamp(info)):  # what was saved, beside what is there now
                row["seal"] = {k: sealed[k] for k in ("sha256", "sealed_at", "mac")}
            self.emit(row)
        except UnicodeEncodeError:
            self.skip(shown, "its name is no UTF-8")
        except OSError as error:
            self.skip(shown, f"can't be read: {error.strerror}")

    def hash(self, real: str) -> Json:
        """Size, times and digest that belong together; no digest for a file that changed three times under our hands.

        A file's times are what tells later that it is still this one. The kernel alone sets the time of change.
        """
        import hashlib

        row: Json = {}
        for _ in range(3):
            fd = self.door.open(real)
            try:
                before = os.fstat(fd)
                sha, count, spoke = hashlib.sha256(), 0, time.monotonic()
                while True:
                    block = os.read(fd, 1 << 20)
                    if not block or count > before.st_size:
                        break
                    sha.update(block)
                    count += len(block)
                    if time.monotonic() - spoke > 5:  # a sign of life for who waits
                        spoke = time.monotonic()
                        self.emit({"progress": count})
                after = os.fstat(fd)
                row = stamp(after)
                now = os.lstat(real)
            finally:
                os.close(fd)
            same = stamp(before) == row and now.st_ino == after.st_ino
            if same and count == row["size"]:
                return {**row, "sha256": sha.hexdigest()}
        return {**row, "sha256": None}


def stamp(info: os.stat_result) -> Json:
    """What tells a file from a later content of the same name and size."""
    return {"size": info.st_size, "mtime_ns": info.st_mtime_ns, "ctime_ns": info.st_ctime_ns}


def roster(folder: str, request: Json, digests: bool) -> Json:
    """Print the files of the declared outputs, then a summary."""
    if not os.path.isdir(folder):
        raise Problem("not_found", f"there is no run folder {folder}")
    taken = time.time()
    found = Roster(folder, Ground(request), lambda row: reply(row, now="progress" in row), digests)
    for path in request.get("paths") or []:
        found.add(path)
    return {
        "ok": True, "taken_at": taken, "files": len(found.seen), "missing": found.missing,
        "skipped": found.skipped, "more_skipped": found.more_skipped,
    }  # fmt: skip


class Shelf:
    """What may be read from outside: the working folder and the declared outputs."""

    def __init__(self, folder: str, ground: Ground) -> None:
        self.folder, self.ground = folder, ground
        status = read_status(folder) or {}
        tops = [ground.locate(folder, p)[0] for p in status.get("outputs") or [] if str(p).startswith("/")]
        self.allowed = [folder + "/work", *map(os.path.realpath, tops)]
        self.door = Door()
        self.known: dict[str, str] = {}

    def open(self, path: str) -> int:
        """Open one file of a roster. The folder it lies in is looked at once."""
        above, name = os.path.split(path)
        if above not in self.known:
            self.known[above] = os.path.realpath(os.path.dirname(self.ground.locate(self.folder, path)[0]))
        folder = self.known[above]
        if name not in ("", ".", "..") and any(inside(folder, bound) for bound in self.allowed):
            try:
                return self.door.open(folder + "/" + name)
            except OSError:
                pass  # a link, or nothing: the long way says which
        real = os.path.realpath(self.ground.locate(self.folder, path)[0])
        if not os.path.lexists(real):
            raise Problem("not_found", f"there is no file {printable(path)}")
        if not any(inside(real, bound) for bound in self.allowed):
            raise Problem("bad_request", f"{printable(path)} lies outside the working folder and the declared outputs")
        return self.door.open(real)


def put_out(data: bytes | bytearray | memoryview) -> None:
    """Write to stdout, all of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def read(folder: str, request: Json) -> None:
    """Write one file's bytes from an offset to stdout; errors go to stderr, and the exit code is 1.

    With `seal` the file is hashed on its way: exactly `size` bytes, then one line with its digest and times.
    """
    fd = Shelf(folder, Ground(request)).open(str(request["path"]))
    try:
        offset, size = int(request.get("offset") or 0), os.fstat(fd).st_size
        if not 0 <= offset <= size:
            raise Problem("bad_request", f"the file has no byte {offset}")
        os.lseek(fd, offset, os.SEEK_SET)
        widen(1)
        if not request.get("seal"):
            pass_on(fd, None, lambda _: None)
        elif size != request.get("size"):
            raise Problem("bad_reply", "it has another size than its roster says")
        else:
            sealed(fd, size)
    finally:
        os.close(fd)


def pass_on(fd: int, size: int | None, see: Callable[[memoryview], None]) -> int:
    """Write a file on to stdout, at most `size` bytes, in pieces that stay in the processor's cache; their number."""
    piece, count = memoryview(bytearray(PIECE)), 0
    while size is None or count < size:
        got = os.readv(fd, [piece if size is None else piece[: size - count]])
        if not got:
            break
        see(piece[:got])
        put_out(piece[:got])
        count += got
    return count


def sealed(fd: int, size: int) -> None:
    """A whole file, then what was hashed."""
    import hashlib

    sha = hashlib.sha256()
    if pass_on(fd, size, sha.update) != size:
        raise Problem("bad_reply", "it became shorter while it was read")
    put_out(json.dumps({**stamp(os.fstat(fd)), "sha256": sha.hexdigest()}).encode() + b"\n")


def widen(pipe: int) -> None:
    """Let more wait between us and the server, where the system can: fewer changes between the two."""
    try:
        import socket

        kind = os.fstat(pipe).st_mode
        if stat.S_ISSOCK(kind):
            with socket.socket(fileno=os.dup(pipe)) as line:
                line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        elif stat.S_ISFIFO(kind) and sys.platform == "linux":
            import fcntl

            fcntl.fcntl(pipe, 1031, 1 << 20)  # F_SETPIPE_SZ, which has no name before Python 3.10
    except OSError:
        pass


def bundle(folder: str, request: Json) -> None:
    """Write many small files to stdout as one tar stream. Each member is named by its number in `paths`, and says in
    its link name, which a file has no use for, its digest and times. A file that can't be read, or is larger than a
    member may be, is left out.
    """
    import hashlib

    shelf, out = Shelf(folder, Ground(request)), bytearray()
    for number, path in enumerate(request.get("paths") or []):
        try:
            fd = shelf.open(str(path))
        except (OSError, Problem):
            continue
        try:
            content = os.read(fd, MAX_MEMBER + 1)
            info = os.fstat(fd)
        except OSError:
            continue
        finally:
            os.close(fd)
        if len(content) == info.st_size <= MAX_MEMBER:
            seal = b"%s %x %x" % (hashlib.sha256(content).hexdigest().encode(), info.st_mtime_ns, info.st_ctime_ns)
            out += tar_header(number, len(content), seal) + content + bytes(-len(content) % 512)
        if len(out) > MAX_MEMBER:
            put_out(out)
            out = bytearray()
    put_out(out + bytes(1024))


def tar_header(name: int, size: int, link: bytes) -> bytes:
    """A ustar header of a regular file; `tarfile` takes five times as long to load and to write it."""
    numbers = (b"0000600", b"0000000", b"0000000", b"%011o" % size, b"%011o" % 0)
    fields = (b"%d" % name, *numbers, b" " * 8, b"0", link, b"ustar\x0000")
    block = struct.pack("100s8s8s8s12s12s8sc100s8s247x", *fields)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


# -------------------------------------------------------------------------------------------------------- disclosure

WORKLOADS = re.compile(
    r"(python|pypy|torchrun|accelerate|deepspeed|jupyter|ray|rsync|rclone|aria2c|wget|curl|git|hf|huggingface-cli|uv"
    r"|tmux|screen|ollama|vllm|sglang|node|java|julia)[0-9.:]*"
)


def disclose(folder: str, request: Json) -> Json:
    """Processes that are no job of ours, and files that nobody declared."""
    status = read_status(folder) or {}
    root = request.get("root") or ""
    since = status.get("started_at") if isinstance(status.get("started_at"), (int, float)) else time.time() - 86400
    files, complete = fresh_files(folder, status, root, float(since or 0), list(request.get("exclude") or []))
    return {
        "ok": True,
        "processes": processes(request.get("marker")),
        "files": files,
        "complete": complete and has_proc(),
    }


def processes(marker: str | None) -> list[str]:
    """Workloads here, bounded; with a marker only processes that carry it. Ours are left out while their job runs."""
    chain, pid = {os.getpid()}, os.getppid()
    while pid > 1 and pid not in chain:
        chain.add(pid)
        pid = int((proc_stat(pid) or ["", "0"])[1])
    found = []
    for pid in all_pids():
        text = None if pid in chain else describe(pid, marker)
        if text:
            found.append(text)
    return found[:MAX_FRESH]


def describe(pid: int, marker: str | None) -> str:
    """A line about a process that must be disclosed; empty for one that need not."""
    fields = proc_stat(pid)
    try:
        words = read_small(f"{PROC}/{pid}/cmdline", 4096).decode("utf-8", "backslashreplace").split("\0")
    except OSError:
        return ""
    if not fields or fields[0] in ("Z", "X", "x") or not words[0]:
        return ""
    environ = environ_of(pid)
    name, _, value = (marker or "").partition("=")
    if marker and environ.get(name) != value:
        return ""
    if not marker and not WORKLOADS.fullmatch(os.path.basename(words[0])):
        return ""
    if any(ARCHIVE.fullmatch(os.path.basename(w)) and os.path.isfile(os.path.dirname(w) + "/lock") for w in words):
        return ""  # the sealer, which ends by itself
    ours = runs_for(words, environ)
    state = observe(ours)["state"] if ours else ""
    if state == "running":
        return ""
    left = f" (left over from {os.path.basename(ours)}, which is {state})" if ours else ""
    return f"pid {pid}: {' '.join(' '.join(words).split())[:200]}{left}"


def runs_for(words: list[str], environ: dict[str, str]) -> str:
    """The run folder that a process belongs to: a supervisor's by its command line, a job's by its environment."""
    for at, word in enumerate(words):
        if (
            word.startswith("/")
            and os.path.basename(word).startswith("runner")
            and words[at + 1 : at + 2] == ["supervise"]
        ):
            return words[at + 2] if len(words) > at + 2 else ""
    return environ.get("GPUWARDEN_RUN_DIR", "")


def fresh_files(folder: str, status: Json, root: str, since: float, exclude: list[str]) -> tuple[list[Json], bool]:
    """Regular files written since the job began that no output covers, and whether that is all of them.

    Looked at are the job's working folder, and `root` outside of run folders; bounded in number, entries and time.
    """
    ground = Ground({"root": root})
    declared = [os.path.realpath(ground.locate(folder, str(p))[0]) for p in [*(status.get("outputs") or []), *exclude]]
    work, own = os.path.realpath(folder + "/work"), os.path.realpath(folder)
    found: list[Json] = []
    end, entries = time.monotonic() + 10, 0
    for top in [work] + ([os.path.realpath(root)] if root else []):
        for path, folders, files in os.walk(top, followlinks=False):
            keep = [f for f in sorted(folders) if f != "__pycache__"]
            keep = [f for f in keep if not any(inside(path + "/" + f, d) for d in declared)]
            folders[:] = [f for f in keep if top == work or not is_run_folder(path + "/" + f, own)]
            for name in sorted(files):
                entries += 1
                if len(found) >= MAX_FRESH or entries > 100_000 or time.monotonic() > end:
                    return found, False
                real = path + "/" + name
                if not any(inside(real, d) for d in declared):
                    found += fresh(real, top, work, since)
    return found, True


def is_run_folder(path: str, own: str) -> bool:
    """Whether a folder is a job's run folder, ours or another's."""
    return path == own or (os.path.isfile(path + "/status.json") and os.path.exists(path + "/lock"))


def fresh(real: str, top: str, work: str, since: float) -> list[Json]:
    """The file as a row, if it is regular and was written since."""
    try:
        info = os.lstat(real)
    except OSError:
        return []
    if not stat.S_ISREG(info.st_mode) or max(info.st_mtime, info.st_ctime) < since:
        return []
    shown = real[len(top) + 1 :] if top == work else real[len(top.rstrip("/")) :]
    return [{"path": printable(shown), "size": info.st_size, "mtime_ns": info.st_mtime_ns}]


# ------------------------------------------------------------------------------------------------------------- main


def serve() -> None:
    """Answer polls, one line for each line of stdin, until it closes: a poll without the price of starting Python."""
    for line in sys.stdin:
        try:
            reply(poll("", json.loads(line)))
        except (ValueError, RecursionError, AttributeError, TypeError, OSError) as error:
            reply({"ok": False, "code": "bad_request", "error": f"{type(error).__name__}: {error}"})


def reply(answer: Json, now: bool = True) -> None:
    """One JSON line, at once or with the next ones. A listener that went away changes nothing."""
    try:
        sys.stdout.write(json.dumps(answer, allow_nan=False) + "\n")
        if now:
            sys.stdout.flush()
    except OSError:
        pass


VERBS: dict[str, Callable[[str, Json], Json | None]] = {
    "start": start,
    "supervise": supervise,
    "poll": poll,
    "logs": logs,
    "stop": stop,
    "list": lambda folder, request: roster(folder, request, digests=False),
    "manifest": lambda folder, request: roster(folder, request, digests=True),
    "read": read,
    "bundle": bundle,
    "disclose": disclose,
    "examine": examine,
}


def answer(argv: list[str]) -> Json | None:
    """Carry out one verb."""
    if argv == ["serve"]:
        serve()
        return None
    verb = VERBS.get(argv[0]) if argv else None
    if verb is None or (argv[0] != "poll" and len(argv) != 2):
        raise Problem("bad_request", "usage: runner.py {} [DIR]".format("|".join(VERBS)))
    folder = os.path.realpath(argv[1]) if len(argv) > 1 else ""
    try:
        request = json.loads(sys.stdin.buffer.read(MAX_INPUT) or b"{}")
    except (ValueError, RecursionError):
        raise Problem("bad_request", "stdin holds no JSON object") from None
    if not isinstance(request, dict):
        raise Problem("bad_request", "stdin holds no JSON object")
    return verb(folder, request)


def main(argv: list[str]) -> NoReturn:
    """Run a verb; a failure is one JSON object too, and exit code 1."""
    try:
        found = answer(argv)
    except Problem as problem:
        fail(argv, problem.code, str(problem))
    except OSError as error:
        code = "not_found" if isinstance(error, FileNotFoundError) else "io_error"
        fail(argv, code, f"{error.strerror}: {printable(str(error.filename))}")
    if found is not None:
        reply(found)
    sys.exit(0)


def fail(argv: list[str], code: str, error: str) -> NoReturn:
    """Say what is wrong, where the caller looks for it."""
    line = {"ok": False, "code": code, "error": error}
    if argv[:1] in (["read"], ["bundle"]):
        sys.stderr.write(json.dumps(line) + "\n")
    else:
        reply(line)
    sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
