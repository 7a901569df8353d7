"""One attempt of a job, from its launch to its final status."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any, Callable

from gpuwarden.remote.runner.beat import Gpu, Rooms
from gpuwarden.remote.runner.course import Course
from gpuwarden.remote.runner.files import read_small, write_all
from gpuwarden.remote.runner.ground import Ground
from gpuwarden.remote.runner.log import Log
from gpuwarden.remote.runner.mask import Redactor
from gpuwarden.remote.runner.memory import OomKills, memory
from gpuwarden.remote.runner.metrics import Tail, split_metrics
from gpuwarden.remote.runner.post import Post
from gpuwarden.remote.runner.problem import Json, Problem
from gpuwarden.remote.runner.process import boot_id, group_members, has_proc, hide_memory, kill_group, start_mark
from gpuwarden.remote.runner.seals import SEAL_AFTER_S, start_sealer
from gpuwarden.remote.runner.status import write_status

RETRY_CODES = (75, 128 + signal.SIGTERM)  # EX_TEMPFAIL, and a wrapper's way to say "my child got SIGTERM"
RETRY_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
TICK_S = 0.25
LOSSES = ("loss", "train_loss", "train/loss")
MAX_ALERTS = 500


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
