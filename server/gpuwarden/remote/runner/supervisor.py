"""Run one attempt of a job, from its launch to its final status."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any, Callable

from gpuwarden.remote.runner.command import (
    CHANGED_FILE,
    OF_INTENT,
    Reason,
    changed_file,
    ended,
    environment,
    exited,
    meaning,
    remain,
    spawn,
)
from gpuwarden.remote.runner.files import read_small
from gpuwarden.remote.runner.heartbeat import Vitals
from gpuwarden.remote.runner.log import Log
from gpuwarden.remote.runner.output import Output
from gpuwarden.remote.runner.process import hide_memory, kill_group, start_mark
from gpuwarden.remote.runner.progress import Progress
from gpuwarden.remote.runner.protocol import Json, Problem
from gpuwarden.remote.runner.redact import Redactor
from gpuwarden.remote.runner.reports import Reports, take_report_keys
from gpuwarden.remote.runner.seals import SEAL_AFTER_S, start_sealer
from gpuwarden.remote.runner.status_writer import Record, first_status
from gpuwarden.remote.runner.store_report import report_key
from gpuwarden.remote.runner.upload_process import secret_keys, start_uploader, take_keys, upload_trouble

TICK_S = 0.25


class Supervisor:
    """Runs one attempt of a job from launch to final status."""

    def __init__(self, folder: str, order: Json) -> None:
        spec = order["spec"]
        self.folder = folder
        self.secrets: dict[str, str] = dict(order.get("secrets") or {})
        report_keys = take_report_keys(self.secrets)
        self.seal_key = self.secrets.pop("GPUWARDEN_SEAL_KEY", "")
        if self.seal_key and not spec.get("root"):  # a rehearsal must read its processes' environments
            hide_memory()
        self.keep_keys = take_keys(self.secrets)
        self.redactor = Redactor(
            [*self.secrets.values(), *secret_keys(self.keep_keys), *secret_keys(report_keys), self.seal_key]
        )
        self.grace = float(spec.get("grace_s") or 10.0)
        self.beat_every = max(float(spec.get("heartbeat_s") or 10.0), 0.2)
        self.inode = os.stat(folder).st_ino
        self.log = Log(folder, int(spec.get("log_max_bytes") or 64 << 20))
        if os.path.lexists(folder + "/stop.json"):
            os.unlink(folder + "/stop.json")
        self.vitals = Vitals(folder, spec)
        self.reports = Reports(folder, spec, order["token"], report_keys, self.secrets)
        self.spec = {**spec, "env": {**self.reports.variables, **(spec.get("env") or {})}}
        self.record = Record(folder, first_status(order, self.beat_every), self.log, self.redactor, self.reports)
        self.status = self.record.status
        self.progress = Progress(folder, self.record, spec)
        self.output = Output(self.log, self.redactor, self.progress.printed)
        self.intent = ""  # the reason why the job must stop: canceled, preempted or timeout
        self.signaled = 0.0
        self.killed = self.warned = False
        self.begun, self.beat_at = time.monotonic(), 0.0
        self.child: Any = None
        self.sealer: Any = None
        self.uploader: Any = None
        self.upload_reported = ""

    # -- the phases of an attempt

    def run(self, ready: Callable[[], None]) -> None:
        """Launch, watch and restart the command, then write the final status. Call `ready` after the first launch."""
        self.listen()
        if not self.record.write():
            raise Problem("disk_full", f"the status can't be written to {self.folder}; nothing was launched")
        while True:
            launched = self.launch()
            if not self.status["restarts"]:
                ready()
                self.reports.alert("job_started", self.status, status="running")
            state, reason, why = self.watch() if launched else ("failed", Reason.NOT_STARTED, self.status["why"])
            if state:
                break
            self.record.alert("restart", why)
            self.status["restarts"] += 1
            if self.pause(float(self.spec.get("restart_delay_s", 1.0))):
                state, reason, why = self.intent, OF_INTENT[self.intent], "stopped while waiting for a restart"
                break
        self.finish(state, reason, why)

    def listen(self) -> None:
        """Handle signals: each one wakes the loop through a pipe, and some record that the job must stop."""
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
        """Record that the job must stop. The first reason is kept unless `override` is set (a stop by gpuwarden)."""
        if override or not self.intent:
            self.intent = intent

    def launch(self) -> bool:
        """Start the command. If that fails, write the error to the status and return False."""
        import subprocess

        if changed := changed_file(self.folder, self.spec):
            why = f"{changed} was changed or removed after the submission, so the command was not started"
            self.status.update(exit_code=CHANGED_FILE, signal=None, why=why)
            return False
        reader, writer = os.pipe()
        try:
            env = environment(self.folder, self.spec, self.secrets, self.status)
            self.child = spawn(self.folder, self.spec, env, writer)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            os.close(reader)
            self.status.update(exit_code=127, why=self.redactor.text(f"the command could not be started: {error}"))
            return False
        finally:
            os.close(writer)
        os.set_blocking(reader, False)
        self.output.pipe = reader
        pid = self.child.pid
        self.status.update(child_pid=pid, child_ticks=start_mark(pid), pgid=pid)
        self.progress.launched()
        self.record.write()
        return True

    def watch(self) -> tuple[str, str, str]:
        """Wait until the command ends. Return its state, reason and description, as `meaning` does."""
        while not exited(self.child):
            self.wait()
            self.tick()
        self.sweep()
        code, unstarted = ended(self.child)
        if self.output.drain():
            self.progress.heard()
        self.status.update(exit_code=None if code < 0 else code, signal=-code if code < 0 else None)
        if unstarted:
            return "failed", Reason.NOT_STARTED, f"the command could not be started: {unstarted}"
        return meaning(code, self.intent, self.spec, self.status["restarts"])

    def sweep(self) -> None:
        """Stop processes that the command left running in its group, with the same grace period."""
        end = time.monotonic() + self.grace
        group = self.child.pid
        kill_group(group, signal.SIGTERM)
        while remain(group) and time.monotonic() < end:
            self.wait(0.05)
            self.guard()
        if remain(group):
            kill_group(group, signal.SIGKILL)

    def pause(self, seconds: float) -> bool:
        """Wait before a restart. Return True if the job must stop instead."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.intent:
            self.wait(min(TICK_S, seconds))
            self.tick()
        return bool(self.intent)

    def finish(self, state: str, reason: str, why: str) -> None:
        """Write the final status; on a full disk, retry for five minutes."""
        self.progress.take(64)
        self.progress.look_at_files(last=True)
        if self.sealer and self.sealer.stdin:
            self.sealer.stdin.close()  # the sealer then checks one last time; don't wait for it
        self.keep()  # when this process ends, the uploader knows that no more files will be saved
        self.status.update(state=state, reason=reason, why=self.redactor.text(why), ended_at=time.time())
        self.beat(last=True)
        self.reports.ended(state, self.status["why"], self.status)
        self.reports.keep_running()
        end = time.monotonic() + 300
        while not self.record.write() and time.monotonic() < end:
            self.guard()
            time.sleep(0.5)

    # -- one turn of the loop

    def wait(self, seconds: float = TICK_S) -> None:
        """Wait up to `seconds` for output, a signal or a report; copy the output."""
        import select

        watched = [fd for fd in (self.wake, self.output.pipe, *self.reports.waits) if fd >= 0]
        readable, _, _ = select.select(watched, [], [], seconds)
        if self.wake in readable:
            os.read(self.wake, 4096)
        if any(fd in readable for fd in self.reports.waits):
            self.reports.serve()
        if self.output.pipe in readable and self.output.copy(16):
            self.progress.heard()

    def tick(self) -> None:
        """Do any periodic work that is due."""
        self.guard()
        self.vitals.kills.look(self.child.pid)  # at every tick, because an ended process has no control group
        self.progress.take(1)
        self.reports.keep_running()
        self.limits()
        self.progress.tell_stall(self.spec.get("stall_s"))
        self.escalate()
        now = time.monotonic()
        if self.sealer is None and now - self.begun >= float(self.spec.get("seal_after_s") or SEAL_AFTER_S):
            self.sealer = start_sealer(self.folder, self.spec, self.seal_key) or False
            self.keep()
        if now - self.beat_at >= self.beat_every:
            self.beat_at = now
            self.beat()
        if self.record.dirty and now - self.record.written_at >= TICK_S:
            self.record.write()

    def beat(self, last: bool = False) -> None:
        """Write the machine's vitals to the status, and check the upload."""
        self.status["beat"] = self.vitals.take(last)
        if self.uploader is not None:
            self.keep()
            trouble = upload_trouble(self.folder) if self.spec.get("keep") else ""
            if trouble and not self.upload_reported:  # the text differs with each try, so only the first is reported
                self.record.alert("keep", trouble)
            self.upload_reported = trouble
        self.record.dirty = True

    def keep(self) -> None:
        """Start the upload to the artifact store, or restart it if its process died."""
        if self.uploader is None or (self.uploader and self.uploader.poll() is not None):
            self.uploader = (
                start_uploader(self.folder, self.spec, self.status, self.keep_keys, report_key(self.seal_key)) or False
            )

    def guard(self) -> None:
        """If the run folder has been removed, the machine is being torn down: kill the job and exit."""
        try:
            if os.stat(self.folder).st_ino == self.inode:
                return
        except FileNotFoundError:
            pass
        except OSError:
            return  # a disk error is inconclusive
        if self.child is not None and self.child.returncode is None:
            kill_group(self.child.pid, signal.SIGKILL)
        os._exit(3)

    def limits(self) -> None:
        """Enforce the time limit, and warn before it is reached."""
        timeout, warn = self.spec.get("timeout_s"), self.spec.get("warn_before_s")
        if not timeout:
            return
        left = self.begun + timeout - time.monotonic()
        if warn and left <= warn and not self.warned and not self.intent:
            self.warned = True
            text = f"time limit in {left:.0f} s: SIGTERM will be sent, and SIGKILL {self.grace:.0f} s later"
            self.record.alert("timeout", text)
            self.log.write((f"[gpuwarden] {text}\n").encode())
        if left <= 0:
            self.intend("timeout")

    def escalate(self) -> None:
        """If the job must stop, send SIGTERM, and SIGKILL after the grace period."""
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
        """Return the stop request's grace period in seconds.

        The period is read from a file, because a signal can't carry a value.
        """
        try:
            return min(max(float(json.loads(read_small(self.folder + "/stop.json", 4096))["grace_s"]), 0.0), 3600.0)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return self.grace
