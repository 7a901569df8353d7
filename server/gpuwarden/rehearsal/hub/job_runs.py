"""Run the rehearsal Hub's jobs. Each job is a real process in a sandbox, and its files are deleted when it ends.

A job's log is a file of JSON lines. The time limit is enforced, and jobs are canceled by a signal. Secrets are passed
to the process, but only their names are shown. If the sandbox supports it, volumes are mounted: a bucket as its own
folder, a repo as a copy. `uv run` is simulated by a small program that runs the script with this Python and installs
nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpuwarden.rehearsal.hub.buckets import HubBuckets
from gpuwarden.rehearsal.hub.job_requests import JobBody, Volume
from gpuwarden.rehearsal.hub.store import HubStore, User, iso
from gpuwarden.remote.sandbox import boxes
from gpuwarden.remote.sandbox.detect import detect
from gpuwarden.remote.sandbox.start import start
from gpuwarden.remote.sandbox.words import Kind, sandbox_arguments

DEFAULT_TIMEOUT_S = 1800
FINAL = frozenset({"COMPLETED", "CANCELED", "ERROR", "DELETED"})

_UV = """#!{python}
# Replaces uv in a rehearsal: runs the script with this Python and installs nothing.
import os, sys
args = sys.argv[1:]
if args[:1] != ["run"]:
    sys.exit("uv (rehearsal): only `uv run` is simulated")
args, takes = args[1:], {{"--with", "-p", "--python", "--index-url", "--extra-index-url", "--index"}}
while args and args[0].startswith("-") and args[0] != "-":
    flag = args.pop(0)
    if flag in takes:
        args.pop(0)
if not args:
    sys.exit("uv (rehearsal): nothing to run")
program = args[1:] if args[0] == "python" else args
os.execv(sys.executable, [sys.executable, *program])
"""


@dataclass
class RunningJob:
    """One job. `request` is the request body as received; `initiator` describes what created the job."""

    id: str
    owner: str
    request: dict[str, Any]
    created_at: float
    log: Path
    user: User
    initiator: dict[str, Any]
    stage: str = "SCHEDULING"
    message: str | None = None
    failures: int = 0
    started_at: float | None = None
    finished_at: float | None = None
    process: subprocess.Popen[str] | None = None
    thread: threading.Thread | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def finish(self, stage: str, message: str | None, now: float) -> bool:
        """Set the final stage, unless one is already set. Return whether this call set it."""
        with self.lock:
            if self.stage in FINAL:
                return False
            self.stage, self.message, self.finished_at = stage, message, now
            return True

    def kill(self) -> None:
        """Kill the job's process group if the job is running."""
        process = self.process
        if process is not None and process.poll() is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


class JobRuns:
    """All jobs on one Hub. `start_after_s` is the time that a job waits in the queue.

    If `unsandboxed` is true, jobs run without a sandbox on machines where none works.
    """

    def __init__(self, store: HubStore, buckets: HubBuckets, *, unsandboxed: bool = False) -> None:
        self.store = store
        self.buckets = buckets
        self.jobs: dict[str, RunningJob] = {}
        self.start_after_s = 0.0
        self.unsandboxed = unsandboxed
        self.endpoint = ""
        self._folder = store.root / "jobs"
        self._bin = store.root / "bin"

    def start(self, owner: str, user: User, request: dict[str, Any], initiator: dict[str, Any]) -> RunningJob:
        """Start a new job in a thread and return it."""
        job_id = secrets.token_hex(12)
        self._folder.mkdir(parents=True, exist_ok=True)
        log = self._folder / f"{job_id}.jsonl"
        log.touch()
        job = RunningJob(job_id, owner, request, self.store.clock.now(), log, user, initiator)
        self.jobs[job_id] = job
        job.thread = threading.Thread(target=self._run, args=(job,), daemon=True)
        job.thread.start()
        return job

    def close(self) -> None:
        """End all running jobs."""
        for job in self.jobs.values():
            job.kill()
            if job.thread is not None:
                job.thread.join(timeout=2)

    # ----------------------------------------------------------------------------------------------------- runs

    def _run(self, job: RunningJob) -> None:
        """Run a job until it ends, including retries. Each attempt's folder is deleted after the attempt."""
        if self.start_after_s:
            threading.Event().wait(self.start_after_s)
        body = JobBody.model_validate(job.request)
        limit = body.timeoutSeconds or DEFAULT_TIMEOUT_S
        timer = threading.Timer(limit, self._time_out, (job,))
        timer.daemon = True
        code: int | None = None
        for attempt in range(1, body.attempts + 1):
            folder = self._folder / f"{job.id}-{attempt}"
            (folder / "work").mkdir(parents=True)
            with job.lock:
                if job.stage in FINAL:
                    break
                try:
                    job.process = self._start(job, body, folder)
                except OSError as error:
                    job.stage, job.message = "ERROR", f"failed to create containerd task: {error}"
                    job.finished_at = self.store.clock.now()
                    break
                job.stage, job.started_at = "RUNNING", job.started_at or self.store.clock.now()
            if attempt == 1:
                timer.start()
            code = self._follow(job, job.process)
            shutil.rmtree(folder, ignore_errors=True)
            if code == 0:
                job.finish("COMPLETED", None, self.store.clock.now())
                break
            job.failures += 1
        job.finish("ERROR", f"Job failed with exit code: {code}. Reason: Error", self.store.clock.now())
        timer.cancel()

    def _follow(self, job: RunningJob, process: subprocess.Popen[str]) -> int:
        """Copy the output to the log until the process ends, and return the exit code."""
        assert process.stdout is not None
        with process.stdout as output, job.log.open("a", encoding="utf-8") as log:
            for line in output:
                log.write(json.dumps({"timestamp": iso(self.store.clock.now()), "data": line.rstrip("\n")}) + "\n")
                log.flush()
        return process.wait()

    def _time_out(self, job: RunningJob) -> None:
        job.finish("ERROR", "Job timeout", self.store.clock.now())
        job.kill()

    def _start(self, job: RunningJob, body: JobBody, folder: Path) -> subprocess.Popen[str]:
        """Start the command, in a sandbox if one works. It has network access, because the Hub is on loopback."""
        argv = [*body.command, *body.arguments]
        self._bin.mkdir(exist_ok=True)
        uv = self._bin / "uv"
        if not uv.exists():
            uv.write_text(_UV.format(python=sys.executable))
            uv.chmod(0o755)
        env = {"PATH": f"{self._bin}:{os.environ.get('PATH', '')}", "HOME": str(folder / "work"), "JOB_ID": job.id}
        env |= {"ACCELERATOR": body.flavor, "HF_ENDPOINT": self.endpoint, "PYTHONUNBUFFERED": "1"}
        env |= body.environment | body.secrets
        found = detect()
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        options |= {"errors": "replace"}
        if body.volumes and found.kind is not Kind.BUBBLEWRAP:
            raise OSError("volumes require bubblewrap on this machine")
        if found.kind is Kind.NONE and not self.unsandboxed:
            raise OSError("no sandbox works on this machine, and the user did not allow jobs without a sandbox")
        if found.kind is Kind.NONE:
            return subprocess.Popen(
                argv, cwd=folder / "work", env=env, stdin=subprocess.DEVNULL, start_new_session=True, **options
            )
        allowed = boxes.Allowed(network=True, caches=False)
        program = shutil.which(argv[0], path=env.get("PATH"))
        box = boxes.box_for(str(folder), env, allowed, [p for p in (program, str(uv)) if p])
        box = replace(box, mounts=tuple(self._mount(job, v, folder) for v in body.volumes))
        boxes.prepare(box)
        name, content = boxes.init_source()
        (folder / name).write_bytes(content)
        given = {**boxes.environment(found, box), **env}
        return start(sandbox_arguments(found, box, boxes.system(), str(folder / name)), argv, given, **options)

    def _mount(self, job: RunningJob, volume: Volume, folder: Path) -> tuple[str, str, bool]:
        """Return a volume's folder on this machine, its path in the job, and whether the job can write to it."""
        inner = (volume.path or "").strip("/")
        if volume.type == "bucket":
            bucket = self.buckets.seen(job.user, volume.source)
            if bucket is None or (volume.writable and not job.user.may_write(bucket.owner)):
                raise OSError(f"bucket {volume.source} was not found or is not writable")
            source = bucket.place(inner) if inner else bucket.files
        else:
            repo = self.store.get(volume.type, volume.source)
            commit = repo.commit_of(volume.revision or "main") if repo else None
            if commit is None:
                raise OSError(f"{volume.type} {volume.source} was not found")
            top = folder / f"volume-{secrets.token_hex(4)}"
            top.mkdir()
            for path, ref in commit.files.items():
                (top / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.store.blob(ref), top / path)
            source = top / inner
        if not source.is_dir():
            raise OSError(f"{volume.source} does not have the folder {inner!r}")
        return str(source), volume.mountPath.rstrip("/"), volume.writable
