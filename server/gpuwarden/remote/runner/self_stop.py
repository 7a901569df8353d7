"""Stop this machine from within (self-stop) if its job has ended and the user has made no requests for some time.

The self-stop process is separate and outlives the supervisor. Requests that read or change something for the user touch
the file `heard` and lock it while they run; status polls do not. The monotonic clock measures the idle time since the
last change to that file, so a change to the system clock does not trigger a self-stop.
"""

from __future__ import annotations

import json
import os
import re
import time
from typing import Any

from gpuwarden.remote.runner.files import read_small, write_all, write_atomic
from gpuwarden.remote.runner.observe import child_alive
from gpuwarden.remote.runner.path_mapping import PathMapping, inside, printable
from gpuwarden.remote.runner.process import environ_of, is_alive
from gpuwarden.remote.runner.protocol import Json, Problem
from gpuwarden.remote.runner.start import detached, let_go, take_lock
from gpuwarden.remote.runner.status import FINAL, read_status, write_status
from gpuwarden.remote.runner.store_report import GOES_ON, LOOK
from gpuwarden.remote.runner.upload_process import upload_report

HEARD, HOLD, SELF_STOPPED, KEEPING = "/heard", "/self_stop.hold", "/self_stopped.json", "/keep.lock"
QUIET_LOOK_S = 5.0
SHIFTED_LOOK_S = 0.1
ASK_S = 60.0
LAST_WORD_S = 120.0  # longest wait for the final manifest after the artifact store last received data
DOWN_S = 120.0  # seconds that a platform may take to stop the machine after it has accepted the request
FIRST_RETRY_S, MOST_RETRY_S = 30.0, 900.0
MOUNTS = "/proc/self/mounts"
IN_MEMORY = (b"tmpfs", b"ramfs", b"devtmpfs")


def record_request(folder: str) -> int:
    """Record a request. Return a descriptor with a lock that lasts until this process ends; -1 on failure."""
    import fcntl

    try:
        fd = os.open(folder + HEARD, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError:
        return -1
    try:
        os.utime(fd)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        pass
    return fd


def hold(folder: str, _: Json) -> Json:
    """Cancel the self-stop: this machine keeps running until it is stopped in another way."""
    write_atomic(folder + HOLD, b"held\n")
    return {"ok": True}


def self_stop(folder: str, order: Json) -> Json:
    """Start the self-stop process if the order requests one. A second process has no effect."""
    if order.get("self_stop"):
        process = detached(folder, "self_stopper", answers=False)
        try:
            write_all(process.stdin.fileno(), json.dumps(order).encode("ascii"))
        finally:
            process.stdin.close()
    return {"ok": True}


def self_stopper(folder: str, order: Json) -> None:
    """Stop the machine after the idle time. Exit if a hold exists or another attempt uses the run folder."""
    import fcntl

    fd = os.open(
        folder + "/self_stop.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600
    )
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    os.chdir("/")
    let_go()
    SelfStopper(folder, order).run()


class SelfStopper:
    """The self-stop process of one job. Times are seconds on the monotonic clock."""

    def __init__(self, folder: str, order: Json) -> None:
        spec = order["self_stop"]
        self.folder, self.spec, self.order = folder, spec, order
        self.after, self.deadline = float(spec["after_s"]), spec.get("deadline_s")
        self.clock = str(spec.get("clock") or "")
        self.every = SHIFTED_LOOK_S if self.clock else min(QUIET_LOOK_S, max(self.after / 8, 0.02))
        self.down = min(DOWN_S, float(spec.get("down_s") or DOWN_S))
        self.retry = float(spec.get("retry_s") or FIRST_RETRY_S)
        self.look_s = min(LAST_WORD_S, float(spec.get("look_s") or LAST_WORD_S))
        self.inode = os.stat(folder).st_ino
        self.begun = self.heard_at = self.sent_at = self.now()
        self.ended_at = -1.0
        self.not_before = 0.0
        self.tries = 0
        self.asked = False  # whether the store may have the final manifest from an earlier try
        self.back = ""
        self.mark, self.sent = self.stamp(HEARD), self.stamp(KEEPING)

    def now(self) -> float:
        """Return the monotonic time, plus the offset of a rehearsal's clock."""
        try:
            ahead = float(read_small(self.clock, 64)) if self.clock else 0.0
        except (OSError, ValueError):
            ahead = 0.0
        return time.monotonic() + ahead

    def run(self) -> None:
        """Poll until the machine is off or this process is no longer needed."""
        while self.wanted():
            if self.due():
                self.stop_machine()
            time.sleep(self.every)

    def wanted(self) -> bool:
        """Return whether the run folder still belongs to this attempt and has no hold."""
        try:
            if os.stat(self.folder).st_ino != self.inode or os.path.lexists(self.folder + HOLD):
                return False
            status = read_status(self.folder)
        except Problem:
            return True  # a disk error is inconclusive
        except OSError:
            return False
        self.look(status)
        return status is None or status.get("attempt") == self.order["attempt"]

    def stamp(self, name: str) -> Any:
        """Return a value that changes when a file is touched; None if the file is missing."""
        try:
            info = os.stat(self.folder + name, follow_symlinks=False)
        except OSError:
            return None
        return info.st_ino, info.st_mtime_ns, info.st_ctime_ns

    def look(self, status: Json | None) -> None:
        """Record whether the job has ended, and whether requests or uploaded bytes have arrived since the last call."""
        mark, sent = self.stamp(HEARD), self.stamp(KEEPING)
        if mark != self.mark:
            self.mark, self.heard_at = mark, self.now()
        if sent != self.sent:
            self.sent, self.sent_at = sent, self.now()
        if self.ended_at < 0 and status is not None and over(status):
            self.ended_at = self.now()

    def due(self) -> bool:
        """Return whether the machine must stop now.

        This is the case if the job has ended or the deadline has passed, no request has arrived for `after` seconds,
        and nothing else keeps the machine busy.
        """
        now = self.now()
        late = self.deadline is not None and now - self.begun >= self.deadline
        quiet = now - max(self.heard_at, self.ended_at) >= self.after
        uploads = now - self.sent_at < self.after  # an upload without progress does not delay the self-stop
        return (late or self.ended_at >= 0) and quiet and now >= self.not_before and not busy(self.folder, uploads)

    def stop_machine(self) -> None:
        """Try to stop this machine, unless a user's request is being processed. Report and retry failures."""
        import fcntl

        if not self.last_word():
            return
        try:
            fd = os.open(self.folder + HEARD, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            fd = -1  # no request has been recorded
        try:
            if fd >= 0:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.heard_at = self.now()
            self.take_back()
            return
        finally:
            if fd >= 0:
                os.close(fd)
        self.tries += 1
        problem = lost_by_stop(self.folder, self.spec.get("outputs") or [])
        if not problem:
            quiet = self.now() - max(self.heard_at, self.ended_at)
            self.note({"at": time.time(), "tries": self.tries, "silent_s": round(quiet)})
            problem = ask(self.spec)
        if not problem:
            end = self.now() + self.down
            while self.now() < end:
                time.sleep(self.every)
            problem = "the platform accepted the request, but the machine is still running"
        self.put_off(problem)

    def put_off(self, problem: str) -> None:
        """Delay the next try and report the problem."""
        self.take_back()
        wait = min(self.retry * 2.0 ** min(self.tries - 1, 16), MOST_RETRY_S)
        self.not_before = self.now() + wait
        self.alert(f"this machine could not stop itself: {problem}; try {self.tries}, next try in {wait:.0f} s")

    def last_word(self) -> bool:
        """Request a final manifest in the artifact store, because the machine may be terminated before it runs again.

        Returns False if the self-stop must wait. It waits if a request has arrived meanwhile. It also waits if an
        earlier try may have written a final manifest that this try can't replace, because an outdated manifest could
        allow the machine to be terminated. Otherwise, an unreachable store does not delay the self-stop, because the
        outputs are on the machine's disk.
        """
        report = upload_report(self.folder)
        before = self.asked and (report.get("look") != self.back or report.get("state") == "failed")
        if report.get("state") != "done" and not before:
            return True
        look = f"{os.getpid()}-{self.tries}-{time.time():.0f}"
        self.asked = self.ask_look(look) or before
        asked = sent = self.now()
        while self.asked and report.get("look") != look and self.now() - max(asked, sent) < self.look_s:
            time.sleep(self.every)
            self.look(None)
            sent = self.sent_at
            if self.heard_at > asked:
                self.take_back()
                return False
            report = upload_report(self.folder)
        if before and (report.get("look") != look or report.get("state") == "failed"):
            self.tries += 1
            self.put_off("the artifact store has a manifest from an earlier try that could not be replaced")
            return False
        return True

    def take_back(self) -> None:
        """Ask the uploader to retract its final manifest, because the machine keeps running."""
        if os.path.lexists(self.folder + LOOK):
            self.back = f"{GOES_ON}{os.getpid()}-{self.tries}-{time.time():.0f}"
            self.ask_look(self.back)

    def ask_look(self, look: str) -> bool:
        """Ask the uploader for a new manifest. Return whether the request was written."""
        try:
            write_atomic(self.folder + LOOK, look.encode("ascii"))
        except OSError:
            return False
        return True

    def note(self, body: Json) -> None:
        """Record the stop request in a file that is read the next time the machine starts."""
        try:
            write_atomic(self.folder + SELF_STOPPED, json.dumps(body).encode("ascii"))
        except OSError:
            pass  # a full disk must not prevent the self-stop

    def alert(self, text: str) -> None:
        """Report a failure in alerts.jsonl, and in the status file if no supervisor is running."""
        line = {"at": time.time(), "kind": "self_stop_failed", "subject": "", "step": None, "text": text[:300]}
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(self.folder + "/alerts.jsonl", flags, 0o600)
            write_all(fd, json.dumps(line).encode("ascii") + b"\n")
            os.close(fd)
            lock = take_lock(self.folder)
            if lock < 0:
                return
            status = read_status(self.folder)
            if status is not None:
                others = [row for row in status.get("last_alerts") or [] if row.get("kind") != "self_stop_failed"]
                write_status(self.folder, {**status, "last_alerts": [*others, line][-8:]})
            os.close(lock)
        except (OSError, Problem, AttributeError):
            return


def over(status: Json) -> bool:
    """Return whether a job has ended, normally or because its supervisor died."""
    if status["state"] in FINAL:
        return True
    supervised = is_alive(status.get("pid"), status.get("start_ticks"), status.get("boot_id"))
    return supervised is False and child_alive(status) is False


def busy(folder: str, uploads: bool) -> bool:
    """Return whether another job or, if `uploads` is true, an artifact store upload is running on this machine."""
    top = os.path.dirname(folder)
    try:
        others = [f"{top}/{name}" for name in os.listdir(top)]
    except OSError:
        others = []
    locks = [(other, "/lock") for other in others if other != folder] + [(folder, KEEPING)] * uploads
    return any(os.path.isfile(path + name) and is_locked(path, name) for path, name in locks)


def is_locked(folder: str, name: str) -> bool:
    """Return whether a process holds the lock."""
    try:
        lock = take_lock(folder, name)
    except (OSError, Problem):
        return True
    if lock >= 0:
        os.close(lock)
    return lock < 0


def lost_by_stop(folder: str, outputs: list[str]) -> str:
    """Return the reason why a stop would lose a declared output: it is on an in-memory file system, or contains one."""
    try:
        with open(MOUNTS, "rb") as file:
            rows = [line.split() for line in file]
    except OSError as error:
        return f"the list of mounts can't be read: {error.strerror}" if outputs else ""
    spelled = re.compile(rb"\\([0-7]{3})")  # a space in a path is written as \040
    types = {os.fsdecode(spelled.sub(lambda at: bytes([int(at[1], 8)]), row[1])): row[2] for row in rows}
    for path in outputs:
        real = os.path.realpath(PathMapping({}).locate(folder, path)[0])
        under = max((at for at in types if inside(real, at)), key=len, default="")
        if any(types[at] in IN_MEMORY for at in types if at == under or inside(at, real)):
            return f"the declared output {printable(path)[:100]} is in memory, which is erased when the machine stops"
    return ""


def ask(spec: Json) -> str:
    """Ask for this machine to be stopped. Return the error, or an empty string if the request was accepted."""
    import subprocess

    if not spec.get("command"):
        return ask_platform(spec["request"])
    try:
        done = subprocess.run(spec["command"], stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_S)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    message = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    return f"exit code {done.returncode}: {message[:160]}" if done.returncode else ""


def ask_platform(request: Json) -> str:
    """Send the platform's stop request with the key from the environment. Return the error; empty on success."""
    import urllib.request

    class NoRedirects(urllib.request.HTTPRedirectHandler):
        """Rejects redirects, because the key must be sent to this host only."""

        def redirect_request(self, *_: Any) -> None:
            """Return None, which rejects the redirect."""

    name = request["key"]
    # A shell over SSH does not have the container's variables.
    key = (os.environ.get(name) or environ_of(1).get(name) or "").strip()
    if not key:
        return f"the variable {name} is not set on this machine"
    if not (key.isascii() and key.isprintable()):  # an error about an invalid header would contain the key
        return f"the variable {name} has characters that are not valid in a key"
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
    try:
        body = json.dumps(request.get("body") or {}).encode("ascii")
        asked = urllib.request.Request(request["url"], body, headers, method=request["method"])  # noqa: S310 (profile)
        with urllib.request.build_opener(NoRedirects).open(asked, timeout=ASK_S) as reply:
            reply.read(4096)
        return ""
    except (OSError, ValueError) as error:  # HTTPError is an OSError
        return f"{type(error).__name__}: {error}".replace(key, "***")[:200]
