"""Manage an attempt's reports: the local address that the job posts to, the relay, and the runner's reports."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from gpuwarden.remote.runner.files import write_all
from gpuwarden.remote.runner.protocol import Json
from gpuwarden.remote.runner.spool import Spool, utc

REPORT_KEYS = "GPUWARDEN_REPORT_"  # prefix of the job's reporting keys among the secrets
METRICS_PATH, ALERTS_PATH = "/api/training/local/metrics", "/api/alerts/trigger"
MAX_REPORT = 4 << 20
SOURCE = "runner"  # the source of the runner's alerts
RESTART_S = 5.0  # seconds between two starts of the relay if it fails repeatedly
OF_KIND = {"timeout": ("timeout_warning", "TIME_LIMIT"), "gpu_oom": ("gpu_oom", "CUDA_OOM")}
OF_STATE = {
    "succeeded": ("job_completed", "completed"),
    "failed": ("job_failed", "failed"),
    "timeout": ("job_failed", "failed"),
    "canceled": ("job_cancelled", "failed"),
}


def take_report_keys(secrets: Json) -> dict[str, str]:
    """Remove the reporting keys `TOKEN`, `KEY` and, if set, the server's `URL` from the secrets, and return them."""
    return {name[len(REPORT_KEYS) :]: secrets.pop(name) for name in list(secrets) if name.startswith(REPORT_KEYS)}


class Reports:
    """The reports of one attempt. The relay starts with the first report, or immediately if a server is configured."""

    def __init__(self, folder: str, spec: Json, job: str, keys: dict[str, str], named: Any) -> None:
        self.folder, self.job, self.keys = folder, job, keys
        self.spool = Spool(folder, "runner")
        self.listener: Any = None
        self.relay: Any = None
        self.tried = float("-inf")
        own = {**(spec.get("env") or {}), **dict.fromkeys(named, "")}
        self.names = [job, *([own["JOB_ID"]] if own.get("JOB_ID") else [])]
        if keys.get("TOKEN") and spec.get("relay", True):
            self.listener = listen()
        self.variables = {"JOB_ID": job, "USER_ID": "local"}
        if self.listener is not None:
            base = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
            # If the job sets an address itself, it gets no key for that address.
            if "METRICS_API_URL" not in own:
                self.variables.update(METRICS_API_URL=base + METRICS_PATH, JOB_TOKEN=keys["TOKEN"])
            if "ALERT_API_URL" not in own:
                self.variables.update(ALERT_API_URL=base + ALERTS_PATH, INTERNAL_API_KEY=keys.get("KEY", ""))

    @property
    def waits(self) -> list[int]:
        """Return [listening descriptor] if no relay is running and a relay may be started; otherwise []."""
        alive = self.relay is not None and self.relay.poll() is None
        idle = self.listener is not None and not alive and time.monotonic() - self.tried >= RESTART_S
        return [self.listener.fileno()] if idle else []

    def serve(self) -> None:
        """Start the relay, which accepts the waiting connections."""
        import subprocess

        self.tried = time.monotonic()
        fd = self.listener.fileno()
        argv = [sys.executable, "-I", "-S", os.path.abspath(sys.argv[0]), "relay", self.folder, str(fd)]
        request = json.dumps({"job": self.job, "names": self.names, "keys": self.keys}).encode("ascii") + b"\n"
        try:
            with open(os.devnull, "r+b") as null:
                self.relay = subprocess.Popen(
                    argv, cwd="/", stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True, bufsize=0,
                    pass_fds=(fd,),
                )  # fmt: skip
            if self.relay.stdin:
                write_all(self.relay.stdin.fileno(), request)
        except (OSError, subprocess.SubprocessError):
            self.relay = None

    def keep_running(self) -> None:
        """If a server is configured, start the relay unless it is running. It also sends the runner's reports."""
        if self.keys.get("URL") and self.waits:
            self.serve()

    def points(self, step: Any, values: Json, row: Json) -> None:
        """Report the values for one step, with the row's timestamp or the current time."""
        if values:
            stated = row.get("timestamp") if isinstance(row.get("timestamp"), (str, int, float)) else None
            place = {"step": step} if step is not None else {}
            point = {**values, **place, "timestamp": utc(time.time()) if stated is None else stated}
            self.spool.put("metrics", {"job_id": self.job, "metrics": [point]})

    def noticed(self, kind: str, text: str, status: Json) -> None:
        """Report an alert from the runner if the API has a type for it."""
        if kind in OF_KIND:
            self.alert(OF_KIND[kind][0], status, status="running", error_type=OF_KIND[kind][1], error_message=text)

    def ended(self, state: str, why: str, status: Json) -> None:
        """Report that the attempt has ended. A preemption is not reported, because the job may continue elsewhere."""
        if state in OF_STATE:
            kind, word = OF_STATE[state]
            cause = {} if state == "succeeded" else {"error_message": why}
            self.alert(kind, status, status=word, duration=int(1000 * (time.time() - status["started_at"])), **cause)

    def alert(self, kind: str, seen: Json, **more: Any) -> None:
        """Report an alert together with the known progress."""
        known = {"current_step": seen["step"], "total_steps": seen["total_steps"], "loss": seen["metrics"].get("loss")}
        body = {"type": kind, "job_id": self.job, "source": SOURCE, "timestamp": utc(time.time()), **more}
        self.spool.put("alerts", {**body, **{name: value for name, value in known.items() if value is not None}})


def listen() -> Any:
    """Return a socket that listens on the loopback address; None on failure."""
    import socket

    try:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
    except OSError:
        return None
    return listener
