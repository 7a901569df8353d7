"""Run a job inside an allocation of an engine, which may start the same command again by itself.

The engine starts `allot` as its batch script; it answers to nobody and ends with the job. What was asked for is in
`order.<attempt>.json` of the run folder, the secrets in the variable `GPUWARDEN_ORDER`, which the job does not get. An
engine that repeats a batch script, for whatever reason, starts the job once: its runs are counted by `restart`.

An engine may kill this process and not the command, which has its own process group. With `guard` in the request
a process outside of both ends the command then, so that a later attempt never runs beside it.

A job on several nodes has `nodes` in the request, the engine's command that starts a program on each of them: they are
looked at first, and the command is not started where they can't work together.

An engine may have its own meaning for an exit code: `codes` in the request names another one for a state. Where the
engine's log is all that can be read of a job, `echo` repeats the job's output on stdout. Where the engine deletes the
machine when this process ends, `outlast` keeps this process until the artifact store has everything, or its upload
ends.

SIGUSR1 and SIGTERM both say that the allocation ends. `stop.json` in the run folder says that it was asked for here,
and so does `canceled.<attempt>`, which no later start removes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from typing import Any, Sequence

from gpuwarden.remote.runner.command import Reason
from gpuwarden.remote.runner.files import read_small
from gpuwarden.remote.runner.group import look_at_nodes
from gpuwarden.remote.runner.keep import keep_trouble
from gpuwarden.remote.runner.process import all_pids, environ_of
from gpuwarden.remote.runner.protocol import Json, Problem
from gpuwarden.remote.runner.start import check_order, take_lock
from gpuwarden.remote.runner.status import FINAL, read_status, write_status
from gpuwarden.remote.runner.status_writer import first_status
from gpuwarden.remote.runner.supervisor import Supervisor

SECRETS = "GPUWARDEN_ORDER"
REQUEUE_S = 30.0
UNFIT_NODES = 96
CODES = {"succeeded": 0, "canceled": 143, "preempted": 143, "timeout": 124}


class Allotted(Supervisor):
    """A supervisor whose machine is lent for a time: its signals mean that this time is over."""

    def __init__(self, folder: str, order: Json, nodes: Sequence[str] = (), count: int = 0) -> None:
        super().__init__(folder, order)
        self.nodes, self.count = nodes, count

    def listen(self) -> None:
        """Read the engine's warning as the allocation's end, and an end that was asked for as a cancel."""
        super().listen()
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.ended_by_engine())

    def launch(self) -> bool:
        """Look at the nodes before the first start of the command, where there are several."""
        if self.nodes and not self.status["restarts"]:
            found = look_at_nodes(self.folder, self.nodes, self.count, self.spec["env"])
            for problem in found:
                self.log.write(self.redactor.text(f"[gpuwarden] {problem['text']}\n").encode())
            if found:
                texts = "; ".join(str(problem["text"]) for problem in found)
                why = f"its nodes can't work together (nodes.json): {texts}"[:900]
                self.status.update(exit_code=UNFIT_NODES, why=self.redactor.text(why))
                return False
        return super().launch()

    def ended_by_engine(self) -> None:
        """Record that the job shall end, and whether that was asked for."""
        asked = os.path.lexists(self.folder + "/stop.json") or is_canceled(self.folder, self.status["attempt"])
        self.intend("canceled" if asked else "preempted", override=asked)


def allot(folder: str, request: Json) -> Json | None:
    """Run the job of one attempt to its end, and exit with its code. Ask the engine to run it again where due."""
    order = order_of(folder, int(request["attempt"]), os.environ.get(str(request.get("part") or ""), ""))
    lock = lock_of(folder)
    restart = restart_of(folder, order, request)
    codes = {**CODES, **request.get("codes", {})}
    if is_canceled(folder, order["attempt"]):
        status = read_status(folder) or {}
        ended = status.get("state") in set(FINAL) - {"preempted"} and status.get("attempt") == order["attempt"]
        if not ended:  # an earlier start of this attempt was ended before it could say so
            first = first_status(order, 10.0)
            why = "stopped on request, before it started"
            write_status(
                folder, {**first, "state": "canceled", "reason": Reason.STOPPED, "why": why, "ended_at": time.time()}
            )
        sys.exit(codes.get("canceled", 1))
    if not is_due(folder, order, restart):
        sys.exit(codes.get(str((read_status(folder) or {}).get("state")), 1))
    if request.get("guard"):
        guard(folder, int(request["attempt"]), lock)
    try:
        supervisor = Allotted(folder, order, request.get("nodes") or (), int(request.get("count") or 0))
        supervisor.log.echo = 1 if request.get("echo") else -1
        supervisor.status.update(requeues=restart, engine_id=os.environ.get(str(request.get("id") or ""), "")[:100])
        supervisor.run(lambda: None)
        if request.get("outlast"):
            outlast(supervisor)
    finally:
        if lock >= 0:
            os.close(lock)
    state = supervisor.status["state"]
    if state == "preempted" and restart < int(order["spec"].get("max_restarts") or 0) and request.get("requeue"):
        again([word.replace("{id}", supervisor.status["engine_id"]) for word in request["requeue"]])
    code = supervisor.status.get("exit_code")
    sys.exit(codes.get(state, code if isinstance(code, int) and 0 < code < 256 else 1))


def outlast(supervisor: Supervisor) -> None:
    """Wait until the upload to the artifact store ends, and log its errors. Another signal ends the wait."""
    if not supervisor.keeper:
        return
    supervisor.keeper.stdin.close()  # nobody saves any more
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    supervisor.keeper.wait()
    if trouble := keep_trouble(supervisor.folder):
        supervisor.log.write(f"[gpuwarden] {trouble}\n".encode())


def restart_of(folder: str, order: Json, request: Json) -> int:
    """Return how often the engine has started this attempt before: its own count, else one more than the last run's.

    An engine without a count gives each of its runs another id.
    """
    if request.get("restarts"):
        return int(os.environ.get(str(request["restarts"]), "") or 0)
    status = read_status(folder) or {}
    if (status.get("token"), status.get("attempt")) != (order["token"], order["attempt"]):
        return 0
    last = status.get("requeues", 0)
    same = status.get("engine_id") == os.environ.get(str(request.get("id") or ""), "")[:100]
    return (last if isinstance(last, int) else 0) + (not same)


def order_of(folder: str, attempt: int, part: str = "") -> Json:
    """Return the order of an attempt with its secrets, which leave the environment.

    All `part`s of an array get one environment, in which each has a variable with its number.
    """
    given = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(SECRETS)}
    try:
        order: Any = json.loads(read_small(f"{folder}/order.{attempt}.json", 16 << 20))
        secrets: Any = json.loads(given.get(f"{SECRETS}_{part}" if part else SECRETS) or "{}")
    except (OSError, ValueError, RecursionError) as error:
        raise Problem("bad_request", f"the order of attempt {attempt} can't be read: {error}") from None
    if not isinstance(order, dict) or not isinstance(secrets, dict) or order.get("attempt") != attempt:
        raise Problem("bad_request", f"{folder} has no order of attempt {attempt}")
    check_order(order)
    return {**order, "secrets": secrets}


def lock_of(folder: str) -> int:
    """Return the job's lock; -1 on a file system without locks, where the engine alone prevents a second run."""
    try:
        lock = take_lock(folder)
    except Problem:
        return -1
    if lock < 0:
        raise Problem("conflict", f"another run of this job has {folder}")
    return lock


def is_due(folder: str, order: Json, restart: int) -> bool:
    """Return whether this run of the batch script has anything to do: no other did it, and it was not finished."""
    status = read_status(folder)
    if status is None or status.get("token") != order["token"]:
        return True
    done = (status.get("attempt"), status.get("requeues", 0))
    if not all(isinstance(n, int) for n in done):
        return False
    if done[0] != order["attempt"]:
        return bool(done[0] < order["attempt"])
    return bool(done[1] < restart) and status["state"] not in (set(FINAL) - {"preempted"})


def is_canceled(folder: str, attempt: int) -> bool:
    """Return whether the attempt was canceled for good: an engine may start it again, and it does nothing."""
    return os.path.lexists(f"{folder}/canceled.{attempt}")


def again(command: list[str]) -> None:
    """Ask the engine to queue this job again; where it refuses, the job's end is what it sees."""
    import subprocess

    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=REQUEUE_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"the job could not be queued again: {error}\n")


def guard(folder: str, attempt: int, lock: int) -> None:
    """Fork a process that outlives this one, and kills what this one's death leaves of the attempt's command.

    The command is found by its environment: when this process dies, its number may not be in the status yet.
    """
    reader, writer = os.pipe()  # closed when this process has ended, and a command that it starts has its environment
    first = os.fork()
    if first:
        os.close(reader)
        os.waitpid(first, 0)
        return
    try:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)
            for fd in (writer, lock):
                if fd >= 0:
                    os.close(fd)
            for fd in (0, 1, 2):  # an engine may wait for the end of our output
                os.dup2(os.open(os.devnull, os.O_RDWR), fd)
            while os.read(reader, 1):
                pass
            marks = {"GPUWARDEN_RUN_DIR": folder, "GPUWARDEN_ATTEMPT": str(attempt)}
            for pid in all_pids():
                if marks.items() <= environ_of(pid).items():
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
    finally:
        os._exit(0)
