"""Write an attempt's state to its status file, to alerts.jsonl, and to the spool."""

from __future__ import annotations

import json
import os
import time

from gpuwarden.remote.runner.files import write_all
from gpuwarden.remote.runner.log import Log
from gpuwarden.remote.runner.process import boot_id, start_mark
from gpuwarden.remote.runner.protocol import Json
from gpuwarden.remote.runner.redact import Redactor
from gpuwarden.remote.runner.reports import Reports
from gpuwarden.remote.runner.status import write_status

MAX_ALERTS = 500


def first_status(order: Json, beat_every: float) -> Json:
    """Return an attempt's initial status."""
    return {
        "schema": 1, "token": order["token"], "attempt": order["attempt"], "state": "running", "reason": "", "why": "",
        "pid": os.getpid(), "start_ticks": start_mark(os.getpid()), "boot_id": boot_id(),
        "child_pid": None, "child_ticks": "", "pgid": None, "exit_code": None, "signal": None,
        "started_at": time.time(), "updated_at": time.time(), "ended_at": None, "restarts": 0,
        "step": None, "total_steps": None, "eta_at": None, "source": "", "curve": [],
        "metrics": {}, "beat": {}, "alerts": 0, "last_alerts": [], "log_dropped": 0,
        "outputs": list(order["spec"].get("outputs") or []), "heartbeat_s": beat_every,
    }  # fmt: skip


class Record:
    """Maintains the status and reports alerts. `dirty` is true if the file does not contain the latest status yet."""

    def __init__(self, folder: str, status: Json, log: Log, redactor: Redactor, reports: Reports) -> None:
        self.folder, self.status, self.log, self.redactor, self.reports = folder, status, log, redactor, reports
        self.dirty, self.written_at = True, 0.0

    def alert(self, kind: str, text: str, subject: str = "") -> None:
        """Report an alert in alerts.jsonl (at most `MAX_ALERTS`), in the status and in the spool.

        `subject` is, for example, the name of a metric.
        """
        text, subject = self.redactor.text(text)[:300], self.redactor.text(subject)[:100]
        self.status["alerts"] += 1
        line = {"at": time.time(), "kind": kind, "subject": subject, "step": self.status["step"], "text": text}
        self.status["last_alerts"] = [*self.status["last_alerts"], line][-8:]
        self.dirty = True
        self.reports.noticed(kind, text, self.status)
        if self.status["alerts"] > MAX_ALERTS:
            return
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(self.folder + "/alerts.jsonl", flags, 0o600)
        except OSError:
            return
        write_all(fd, json.dumps(line).encode("ascii") + b"\n")
        os.close(fd)

    def write(self) -> bool:
        """Write the status. Return whether that succeeded."""
        self.written_at, self.dirty = time.monotonic(), False
        self.status.update(updated_at=time.time(), log_dropped=self.log.dropped)
        return write_status(self.folder, self.status)
