"""Launch a job once, detached from the caller."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from typing import Any

from gpuwarden.remote.runner.files import write_all
from gpuwarden.remote.runner.observe import child_alive
from gpuwarden.remote.runner.output_json import reply
from gpuwarden.remote.runner.process import boot_id, machine_mark, start_mark
from gpuwarden.remote.runner.protocol import Json, Problem
from gpuwarden.remote.runner.status import read_status
from gpuwarden.remote.runner.supervisor import Supervisor


def check_order(order: Json) -> None:
    """Raise Problem for an invalid request."""
    spec = order.get("spec")
    argv = spec.get("argv") if isinstance(spec, dict) else None
    sound = isinstance(argv, list) and argv and all(isinstance(word, str) and "\0" not in word for word in argv)
    if not sound or not isinstance(order.get("token"), str) or not isinstance(order.get("attempt"), int):
        raise Problem("bad_request", "start needs spec.argv (a list of strings), a token and an attempt number")
    url = (order.get("secrets") or {}).get("GPUWARDEN_REPORT_URL") or ""
    if url and not url.startswith(("https://", "http://")):
        raise Problem("bad_request", "the server's URL must start with http:// or https://")


def adopted(folder: str, order: Json) -> Json | None:
    """Return the reply if this attempt or a later one has already been launched; otherwise None."""
    status = read_status(folder)
    if status is None:
        return None
    if status.get("token") != order["token"]:
        raise Problem("conflict", f"{folder} belongs to another job")
    if not isinstance(status.get("attempt"), int) or status["attempt"] < order["attempt"]:
        return None
    return {
        "ok": True,
        "adopted": True,
        "pid": status.get("pid"),
        "start_ticks": status.get("start_ticks"),
        "boot_id": status.get("boot_id"),
        "machine": machine_mark(),
        "state": status["state"],
        "attempt": status["attempt"],
    }


def start(folder: str, order: Json) -> Json:
    """Launch an attempt once, in the background, or adopt it if it has already been launched."""
    import select

    check_order(order)
    known = adopted(folder, order)
    if known:
        return known
    process = detached(folder)
    try:
        write_all(process.stdin.fileno(), json.dumps(order).encode("ascii"))
    finally:
        process.stdin.close()
    if not select.select([process.stdout], [], [], 30)[0]:
        raise Problem("unreachable", "the supervisor did not answer within 30 s; it may have launched the job")
    line = process.stdout.readline()
    try:
        reply = json.loads(line)
    except ValueError:
        raise Problem("unreachable", f"the supervisor exited without a reply; see {folder}/runner.err") from None
    return reply if isinstance(reply, dict) else {"ok": False, "code": "bad_reply", "error": "no object"}


def detached(folder: str, verb: str = "supervise", answers: bool = True) -> Any:
    """Start a runner in a new session. It reads a request from stdin; a supervisor also replies with one line."""
    import subprocess

    errors = os.open(
        folder + "/runner.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    argv = [sys.executable, "-I", "-S", os.path.abspath(sys.argv[0]), verb, folder]
    out = subprocess.PIPE if answers else subprocess.DEVNULL
    process = subprocess.Popen(
        argv, cwd="/", stdin=subprocess.PIPE, stdout=out, stderr=errors, start_new_session=True, bufsize=0
    )
    os.close(errors)
    return process


def supervise(folder: str, order: Json) -> Json | None:
    """Acquire the lock, launch the job and watch it until it ends. Send one line to `start`, then close the pipes."""
    check_order(order)
    lock = -1
    begun = time.monotonic()
    while lock < 0:
        lock = take_lock(folder)
        known = adopted(folder, order)
        if known:
            return known
        earlier = read_status(folder)
        patience = 1 if earlier and earlier["state"] == "running" else 10  # the supervisor of an ended job exits soon
        if lock < 0 and time.monotonic() - begun > patience:
            raise Problem("conflict", f"an earlier attempt is still running in {folder}; stop it first")
        time.sleep(0 if lock >= 0 else 0.02)
    if earlier and child_alive(earlier) is not False:
        raise Problem("conflict", f"a process from an earlier attempt is still running in {folder}; stop it first")
    os.chdir("/")

    def ready() -> None:
        own = {"pid": os.getpid(), "start_ticks": start_mark(os.getpid()), "boot_id": boot_id()}
        own["machine"] = machine_mark()
        reply({"ok": True, "adopted": False, **own, "state": "running", "attempt": order["attempt"]})
        let_go()

    Supervisor(folder, order).run(ready)
    return None


def take_lock(folder: str, name: str = "lock") -> int:
    """Acquire a lock in the run folder; return its descriptor, or -1 if another process holds it."""
    import fcntl

    fd = os.open(folder + "/" + name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
            return -1
        why = f"{folder} is on a file system that does not support locks ({error}); choose another run folder"
        raise Problem("not_supported", why) from None
    return fd


def let_go() -> None:
    """Detach from the caller's pipes."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        sys.stdout.flush()
    except OSError:
        pass
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
