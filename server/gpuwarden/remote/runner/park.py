"""Stop this machine from inside, once its job has ended and nobody came for what it saved.

A process of its own beside the supervisor, which it outlives. Whatever gpuwarden reads here for somebody touches the
file `heard` and keeps it locked meanwhile; a look that only asks how the job is does not. Silence is measured on the
monotonic clock from the last change of that file, so a clock that leaps parks nothing.
"""

from __future__ import annotations

import json
import os
import re
import time
from typing import Any

from gpuwarden.remote.runner.files import read_small, write_all, write_atomic
from gpuwarden.remote.runner.keep import keep_report
from gpuwarden.remote.runner.keep_report import GOES_ON, LOOK
from gpuwarden.remote.runner.observe import child_alive
from gpuwarden.remote.runner.path_mapping import PathMapping, inside, printable
from gpuwarden.remote.runner.process import environ_of, is_alive
from gpuwarden.remote.runner.protocol import Json, Problem
from gpuwarden.remote.runner.start import detached, let_go, take_lock
from gpuwarden.remote.runner.status import FINAL, read_status, write_status

HEARD, HOLD, PARKED, KEEPING = "/heard", "/park.hold", "/parked.json", "/keep.lock"
QUIET_LOOK_S = 5.0
SHIFTED_LOOK_S = 0.1
ASK_S = 60.0
LAST_WORD_S = 120.0  # how long the artifact store may take to get the last word, since it last got anything
DOWN_S = 120.0  # how long a platform that took the request may need
FIRST_RETRY_S, MOST_RETRY_S = 30.0, 900.0
MOUNTS = "/proc/self/mounts"
IN_MEMORY = (b"tmpfs", b"ramfs", b"devtmpfs")


def hear(folder: str) -> int:
    """Note that somebody came. Return the descriptor whose lock says so until this process ends, -1 without one."""
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
    """Keep this machine on until somebody else ends it."""
    write_atomic(folder + HOLD, b"held\n")
    return {"ok": True}


def park(folder: str, order: Json) -> Json:
    """Begin to wait for silence, where a park is ordered. Beginning twice changes nothing."""
    if order.get("park"):
        process = detached(folder, "parker", answers=False)
        try:
            write_all(process.stdin.fileno(), json.dumps(order).encode("ascii"))
        finally:
            process.stdin.close()
    return {"ok": True}


def parker(folder: str, order: Json) -> None:
    """Wait for silence and stop the machine; leave when the run folder is another attempt's or somebody holds it."""
    import fcntl

    fd = os.open(folder + "/park.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    os.chdir("/")
    let_go()
    Parker(folder, order).run()


class Parker:
    """Waits beside one job. Times are seconds on the monotonic clock."""

    def __init__(self, folder: str, order: Json) -> None:
        spec = order["park"]
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
        self.asked = False  # the artifact store may have a last word from before the machine went on
        self.back = ""
        self.mark, self.sent = self.stamp(HEARD), self.stamp(KEEPING)

    def now(self) -> float:
        """Return the time that no clock setting changes, with the hours by which a rehearsal's clock is set forward."""
        try:
            ahead = float(read_small(self.clock, 64)) if self.clock else 0.0
        except (OSError, ValueError):
            ahead = 0.0
        return time.monotonic() + ahead

    def run(self) -> None:
        """Look until the machine is off or this process is not needed any more."""
        while self.wanted():
            if self.due():
                self.stop_machine()
            time.sleep(self.every)

    def wanted(self) -> bool:
        """Return whether the run folder is still that of this attempt, and nobody holds the machine."""
        try:
            if os.stat(self.folder).st_ino != self.inode or os.path.lexists(self.folder + HOLD):
                return False
            status = read_status(self.folder)
        except Problem:
            return True  # a sick disk proves nothing
        except OSError:
            return False
        self.look(status)
        return status is None or status.get("attempt") == self.order["attempt"]

    def stamp(self, name: str) -> Any:
        """Return what differs after each touch of a file."""
        try:
            info = os.stat(self.folder + name, follow_symlinks=False)
        except OSError:
            return None
        return info.st_ino, info.st_mtime_ns, info.st_ctime_ns

    def look(self, status: Json | None) -> None:
        """Take in whether the job has ended, and whether somebody came or something was kept since the last look."""
        mark, sent = self.stamp(HEARD), self.stamp(KEEPING)
        if mark != self.mark:
            self.mark, self.heard_at = mark, self.now()
        if sent != self.sent:
            self.sent, self.sent_at = sent, self.now()
        if self.ended_at < 0 and status is not None and over(status):
            self.ended_at = self.now()

    def due(self) -> bool:
        """Return whether it has been silent for long enough since the end, or since the deadline."""
        now = self.now()
        late = self.deadline is not None and now - self.begun >= self.deadline
        quiet = now - max(self.heard_at, self.ended_at) >= self.after
        uploads = now - self.sent_at < self.after  # one that only fails keeps no machine on
        return (late or self.ended_at >= 0) and quiet and now >= self.not_before and not busy(self.folder, uploads)

    def stop_machine(self) -> None:
        """Ask for the stop, unless somebody reads here at this moment. A failure is reported, and it is tried again."""
        import fcntl

        if not self.last_word():
            return
        try:
            fd = os.open(self.folder + HEARD, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            fd = -1  # nobody ever came
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
            problem = "the platform took the request, and the machine still runs"
        self.put_off(problem)

    def put_off(self, problem: str) -> None:
        """Go on for a while and report why."""
        self.take_back()
        wait = min(self.retry * 2.0 ** min(self.tries - 1, 16), MOST_RETRY_S)
        self.not_before = self.now() + wait
        self.alert(f"this machine could not stop itself: {problem}; try {self.tries}, the next one in {wait:.0f} s")

    def last_word(self) -> bool:
        """Have the artifact store list what is here now, as nobody may see this machine again before it is ended.

        A store that can't be reached keeps no machine on: what was saved is on its disk. But one that may have a last
        word from before does, since the machine would be ended by it. Return false where that is so, or where somebody
        came meanwhile.
        """
        report = keep_report(self.folder)
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
            report = keep_report(self.folder)
        if before and (report.get("look") != look or report.get("state") == "failed"):
            self.tries += 1
            self.put_off("the artifact store has what was here before an earlier try, and takes nothing newer")
            return False
        return True

    def take_back(self) -> None:
        """Ask the upload to take its last word back, since the machine goes on."""
        if os.path.lexists(self.folder + LOOK):
            self.back = f"{GOES_ON}{os.getpid()}-{self.tries}-{time.time():.0f}"
            self.ask_look(self.back)

    def ask_look(self, look: str) -> bool:
        """Ask the upload to look again. Return whether that could be asked."""
        try:
            write_atomic(self.folder + LOOK, look.encode("ascii"))
        except OSError:
            return False
        return True

    def note(self, body: Json) -> None:
        """Leave a record of the request for whoever starts the machine again."""
        try:
            write_atomic(self.folder + PARKED, json.dumps(body).encode("ascii"))
        except OSError:
            pass  # a full disk keeps no machine on

    def alert(self, text: str) -> None:
        """Report a failure in alerts.jsonl and, where no supervisor writes it, in the status."""
        line = {"at": time.time(), "kind": "self_park", "subject": "", "step": None, "text": text[:300]}
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
                others = [row for row in status.get("last_alerts") or [] if row.get("kind") != "self_park"]
                write_status(self.folder, {**status, "last_alerts": [*others, line][-8:]})
            os.close(lock)
        except (OSError, Problem, AttributeError):
            return


def over(status: Json) -> bool:
    """Return whether a job has ended, properly or with its supervisor."""
    if status["state"] in FINAL:
        return True
    supervised = is_alive(status.get("pid"), status.get("start_ticks"), status.get("boot_id"))
    return supervised is False and child_alive(status) is False


def busy(folder: str, uploads: bool) -> bool:
    """Return whether gpuwarden works here: an upload to an artifact store, if `uploads`, or another job."""
    top = os.path.dirname(folder)
    try:
        others = [f"{top}/{name}" for name in os.listdir(top)]
    except OSError:
        others = []
    locks = [(other, "/lock") for other in others if other != folder] + [(folder, KEEPING)] * uploads
    return any(os.path.isfile(path + name) and is_locked(path, name) for path, name in locks)


def is_locked(folder: str, name: str) -> bool:
    """Return whether a living process has a lock."""
    try:
        lock = take_lock(folder, name)
    except (OSError, Problem):
        return True
    if lock >= 0:
        os.close(lock)
    return lock < 0


def lost_by_stop(folder: str, outputs: list[str]) -> str:
    """Return why a stop would lose a declared output: its real path is in memory, or has memory mounted inside."""
    try:
        with open(MOUNTS, "rb") as file:
            rows = [line.split() for line in file]
    except OSError as error:
        return f"what is mounted can't be read: {error.strerror}" if outputs else ""
    spelled = re.compile(rb"\\([0-7]{3})")  # a space in a name is \040 there
    types = {os.fsdecode(spelled.sub(lambda at: bytes([int(at[1], 8)]), row[1])): row[2] for row in rows}
    for path in outputs:
        real = os.path.realpath(PathMapping({}).locate(folder, path)[0])
        under = max((at for at in types if inside(real, at)), key=len, default="")
        if any(types[at] in IN_MEMORY for at in types if at == under or inside(at, real)):
            return f"the declared output {printable(path)[:100]} is in memory, which a stop empties"
    return ""


def ask(spec: Json) -> str:
    """Ask for this machine's stop. Return why that failed, nothing when the request was taken."""
    import subprocess

    if not spec.get("command"):
        return ask_platform(spec["request"])
    try:
        done = subprocess.run(spec["command"], stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_S)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    return f"exit code {done.returncode}: {said[:160]}" if done.returncode else ""


def ask_platform(request: Json) -> str:
    """Send the platform's own request with the key that this machine has for itself."""
    import urllib.request

    class Straight(urllib.request.HTTPRedirectHandler):
        """Follows nothing: the key is for one host."""

        def redirect_request(self, *_: Any) -> None:
            """Refuse."""

    name = request["key"]
    # A shell over SSH lacks the container's variables.
    key = (os.environ.get(name) or environ_of(1).get(name) or "").strip()
    if not key:
        return f"the variable {name} is not set on this machine"
    if not (key.isascii() and key.isprintable()):  # an error about such a header quotes it in another spelling
        return f"the variable {name} has characters that no key has"
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
    try:
        body = json.dumps(request.get("body") or {}).encode("ascii")
        asked = urllib.request.Request(request["url"], body, headers, method=request["method"])  # noqa: S310 (profile)
        with urllib.request.build_opener(Straight).open(asked, timeout=ASK_S) as reply:
            reply.read(4096)
        return ""
    except (OSError, ValueError) as error:  # HTTPError is an OSError
        return f"{type(error).__name__}: {error}".replace(key, "***")[:200]
