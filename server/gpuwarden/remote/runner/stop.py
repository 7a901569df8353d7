"""Stop a job. Only processes with a verified identity are signaled."""

from __future__ import annotations

import json
import os
import signal
import time

from gpuwarden.remote.runner.command import Reason
from gpuwarden.remote.runner.files import write_atomic
from gpuwarden.remote.runner.observe import child_alive, orphans
from gpuwarden.remote.runner.process import is_alive, kill_group, signal_exactly
from gpuwarden.remote.runner.protocol import Json
from gpuwarden.remote.runner.start import take_lock
from gpuwarden.remote.runner.status import FINAL, read_status, write_status


def stop(folder: str, request: Json) -> Json:
    """Stop a job. Return the result: `stopped`, `pending` (a process may still be running), or `gone`."""
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
        pass  # the spec's grace period then applies
    identity = (status.get("pid"), status.get("start_ticks"), status.get("boot_id"))
    if not isinstance(identity[0], int) or not signal_exactly(identity[0], identity[1], identity[2], signal.SIGUSR1):
        if is_alive(*identity) is not False:
            return {"ok": True, "result": "pending"}
        return {"ok": True, "result": stop_rest(folder, read_status(folder) or status, grace, end, "gone")}
    while True:
        late = time.monotonic() >= end
        if is_alive(*identity) is False:  # the final status was written before the exit
            status = read_status(folder) if os.path.isdir(folder) else None
            return {"ok": True, "result": stop_rest(folder, status, grace, end, "stopped") if status else "gone"}
        if late:
            return {"ok": True, "result": "pending"}
        time.sleep(0.02)


def stop_rest(folder: str, status: Json, grace: float, end: float, otherwise: str) -> str:
    """Stop the processes that outlived their supervisor, if at least one is verified to belong to the job.

    Return the result, or `otherwise` if no such process exists.
    """
    group = status.get("pgid")

    def living() -> bool:
        return child_alive(status) is True or bool(orphans(folder, status))

    if not isinstance(group, int) or group <= 1 or not living():
        return otherwise
    lock = take_lock(folder)
    if lock < 0:  # a supervisor is running after all
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
        status.update(
            state="canceled",
            reason=Reason.STOPPED,
            why="stopped on request, after its supervisor had died",
            ended_at=time.time(),
        )
        write_status(folder, status)
    return "stopped"
