"""List other processes and undeclared files, which a teardown would also destroy."""

from __future__ import annotations

import os
import re
import stat
import time

from gpuwarden.remote.runner.files import read_small
from gpuwarden.remote.runner.observe import observe
from gpuwarden.remote.runner.path_mapping import PathMapping, inside, printable
from gpuwarden.remote.runner.process import PROC, all_pids, environ_of, has_proc, proc_stat
from gpuwarden.remote.runner.protocol import Json
from gpuwarden.remote.runner.seals import ARCHIVE
from gpuwarden.remote.runner.status import read_status

MAX_FRESH = 200
WORKLOADS = re.compile(
    r"(python|pypy|torchrun|accelerate|deepspeed|jupyter|ray|rsync|rclone|aria2c|wget|curl|git|hf|huggingface-cli|uv"
    r"|tmux|screen|ollama|vllm|sglang|node|java|julia)[0-9.:]*"
)
RUNNER = re.compile(r"/(runner-[0-9a-f]{12}\.py|gpuwarden/remote/runner)$")
REQUESTS = (
    "start", "poll", "serve", "logs", "stop", "list", "manifest", "fetch", "read", "bundle", "disclose", "examine",
    "self_stop", "hold", "look", "spool",
)  # fmt: skip
"""The runner's verbs that exit by themselves. `supervise`, `keep`, `relay` and `self_stopper` keep running."""


def disclose(folder: str, request: Json) -> Json:
    """Return the processes that do not belong to a running gpuwarden job, and the undeclared files."""
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
    """Describe at most `MAX_FRESH` workloads that do not belong to a running job.

    With a marker (`NAME=value`), describe the processes that have this environment variable instead.
    """
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
    """Describe a process that the user should know about before a teardown. Return "" for other processes."""
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
        return ""  # the sealer, which exits by itself
    if "self_stopper" in words[:-1] and os.path.isfile(words[words.index("self_stopper") + 1] + "/self_stop.lock"):
        return ""  # the self-stop process
    if is_uploader(words):
        return ""  # the relay, or the upload to the artifact store, which the gate checks separately
    if is_request(words):
        return ""  # a request from another gpuwarden process, such as the watch
    ours = runs_for(words, environ)
    state = observe(ours)["state"] if ours else ""
    if state == "running":
        return ""
    left = f" (left over from the job in {os.path.basename(ours)}, whose state is {state})" if ours else ""
    return f"pid {pid}: {' '.join(' '.join(words).split())[:200]}{left}"


def is_uploader(words: list[str]) -> bool:
    """Return whether a command line belongs to the artifact store upload or to the report relay."""
    verb, folder = runner_call(words)
    return verb in ("keep", "relay") and os.path.isfile(folder + "/lock")


def is_request(words: list[str]) -> bool:
    """Return whether a command line is a request from gpuwarden to the runner."""
    return runner_call(words)[0] in REQUESTS


def runner_call(words: list[str]) -> tuple[str, str]:
    """Return the verb and folder in a runner command line; both are empty for other programs."""
    at = next((at for at, word in enumerate(words) if RUNNER.search(word)), len(words))
    verb, folder = [*words[at + 1 : at + 3], "", ""][:2]
    return verb, folder


def runs_for(words: list[str], environ: dict[str, str]) -> str:
    """Return a process's run folder, from a supervisor's command line or a job's environment; empty if unknown."""
    for at, word in enumerate(words):
        if (
            word.startswith("/")
            and os.path.basename(word).startswith("runner")
            and words[at + 1 : at + 2] == ["supervise"]
        ):
            return words[at + 2] if len(words) > at + 2 else ""
    return environ.get("GPUWARDEN_RUN_DIR", "")


def fresh_files(folder: str, status: Json, root: str, since: float, exclude: list[str]) -> tuple[list[Json], bool]:
    """Return undeclared regular files written since the job began, and whether the list is complete.

    The search covers the job's working folder, and `root` except for run folders. The time and the number of entries
    are limited. Only the `MAX_FRESH` largest files are listed, so that many samples do not crowd out a checkpoint.
    """
    mapping = PathMapping({"root": root})
    declared = [os.path.realpath(mapping.locate(folder, str(p))[0]) for p in [*(status.get("outputs") or []), *exclude]]
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
                if entries > 100_000 or time.monotonic() > end:
                    return largest(found), False
                real = path + "/" + name
                if not any(inside(real, d) for d in declared):
                    found += fresh(real, top, work, since)
    return largest(found), len(found) <= MAX_FRESH


def largest(found: list[Json]) -> list[Json]:
    """Return the `MAX_FRESH` largest files, in their original order."""
    if len(found) <= MAX_FRESH:
        return found
    kept = sorted(range(len(found)), key=lambda at: (-int(found[at]["size"]), at))[:MAX_FRESH]
    return [found[at] for at in sorted(kept)]


def is_run_folder(path: str, own: str) -> bool:
    """Return whether a folder is the run folder of this or another job."""
    return path == own or (os.path.isfile(path + "/status.json") and os.path.exists(path + "/lock"))


def fresh(real: str, top: str, work: str, since: float) -> list[Json]:
    """Return a list with the row for a file; empty unless it is a regular file that was written after `since`."""
    try:
        info = os.lstat(real)
    except OSError:
        return []
    if not stat.S_ISREG(info.st_mode) or max(info.st_mtime, info.st_ctime) < since:
        return []
    shown = real[len(top) + 1 :] if top == work else real[len(top.rstrip("/")) :]
    return [{"path": printable(shown), "size": info.st_size, "mtime_ns": info.st_mtime_ns}]
