"""Add observations to a job's status: whether the job's supervisor and process are alive."""

from __future__ import annotations

import os
import time

from gpuwarden.remote.runner.log import log_size
from gpuwarden.remote.runner.process import environ_of, group_members, has_proc, is_alive, machine_mark
from gpuwarden.remote.runner.protocol import Json, Problem
from gpuwarden.remote.runner.status import read_status
from gpuwarden.remote.runner.upload_process import upload_trouble


def child_alive(status: Json) -> bool | None:
    """Return whether the command's process is alive; None if unknown."""
    return is_alive(status.get("child_pid"), status.get("child_ticks"), status.get("boot_id"))


def orphans(folder: str, status: Json) -> list[int]:
    """Return the running processes in the command's process group that have this run folder in their environment."""
    group = status.get("pgid")
    members = (group_members(group) or []) if isinstance(group, int) and group > 1 else []
    return [pid for pid in members if environ_of(pid).get("GPUWARDEN_RUN_DIR") == folder]


def observe(folder: str, launched: Json | None = None) -> Json:
    """Return the content of a job's status file, with observations added.

    `launched` is the supervisor's identity as reported at launch. If it is given, the identity in the file is
    ignored, because a job can write its status file. The keys `folder`, `alive`, `child_alive`, `confirmed`, `machine`
    and `upload` always have observed values. `upload` is the current error from the artifact store upload, even
    after the job's end.
    """
    if not os.path.isdir(folder):
        return {"state": "missing", "folder": "missing", "now": time.time(), "machine": machine_mark()}
    try:
        status = read_status(folder)
    except Problem as problem:
        return {"state": "unreadable", "folder": "unreadable", "why": str(problem), "now": time.time()}
    if status is None:
        return {"state": "absent", "folder": "absent", "now": time.time(), "machine": machine_mark()}
    known = launched or status
    alive = is_alive(known.get("pid"), known.get("start_ticks"), known.get("boot_id"))
    if alive is False and status["state"] == "running":
        status = read_status(folder) or status  # the job may have ended normally after the first read
    status.update(alive=alive, child_alive=child_alive(status), log_bytes=log_size(folder), now=time.time())
    status["identity"] = "ticks" if has_proc() else "ps"
    status.update(machine=machine_mark(), folder="present", confirmed=bool(launched), upload=upload_trouble(folder))
    return status


def poll(_: str, request: Json) -> Json:
    """Return the statuses of the requested jobs. `launched` maps folders to their supervisors' identities."""
    launched = request.get("launched") or {}
    return {"ok": True, "jobs": {folder: observe(folder, launched.get(folder)) for folder in request.get("dirs") or []}}
