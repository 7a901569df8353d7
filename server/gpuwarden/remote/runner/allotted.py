"""Run a job inside an engine's allocation, such as a Slurm allocation. The engine may rerun the command by itself.

The engine's batch script runs `allot`, which prints no reply and exits when the job ends. The order is in
`order.<attempt>.json` in the run folder. The secrets are in the environment variable `GPUWARDEN_ORDER`, which is not
passed to the job. If an engine runs a batch script again, `restart` (the number of earlier runs) determines whether the
job must run again.

An engine may kill this process but not the command, which has its own process group. If the request sets `guard`, a
separate process then kills the command, so that the command never runs at the same time as a later attempt.

For a job on several nodes, `nodes` in the request is the engine command that starts a program on each node. The
runner checks the nodes first, and does not start the job's command if they can't work together.

Other fields of the request: `codes` maps states to exit codes for engines that interpret exit codes. `echo` repeats
the job's output on stdout, for engines whose log is the only readable output. `outlast` keeps this process alive until
the upload to the artifact store ends, for engines that delete the machine when this process exits.

SIGUSR1, SIGTERM and SIGINT announce the end of the allocation. If `stop.json` or `canceled.<attempt>` is in the run
folder, gpuwarden requested the end. A later start removes `stop.json`, but not `canceled.<attempt>`.
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
from gpuwarden.remote.runner.group import check_nodes
from gpuwarden.remote.runner.process import all_pids, environ_of
from gpuwarden.remote.runner.protocol import Json, Problem
from gpuwarden.remote.runner.start import check_order, take_lock
from gpuwarden.remote.runner.status import FINAL, read_status, write_status
from gpuwarden.remote.runner.status_writer import first_status
from gpuwarden.remote.runner.supervisor import Supervisor
from gpuwarden.remote.runner.upload_process import upload_trouble

SECRETS = "GPUWARDEN_ORDER"
REQUEUE_S = 30.0
UNFIT_NODES = 96
CODES = {"succeeded": 0, "canceled": 143, "preempted": 143, "timeout": 124}


class AllocationSupervisor(Supervisor):
    """A supervisor inside an allocation. The engine announces the end of the allocation with signals."""

    def __init__(self, folder: str, order: Json, nodes: Sequence[str] = (), count: int = 0) -> None:
        super().__init__(folder, order)
        self.nodes, self.count = nodes, count

    def listen(self) -> None:
        """Treat the engine's signals as the end of the allocation, or as a cancellation if gpuwarden requested it."""
        super().listen()
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.ended_by_engine())

    def launch(self) -> bool:
        """Start the command. If the job has several nodes, check the nodes before the first start."""
        if self.nodes and not self.status["restarts"]:
            found = check_nodes(self.folder, self.nodes, self.count, self.spec["env"])
            for problem in found:
                self.log.write(self.redactor.text(f"[gpuwarden] {problem['text']}\n").encode())
            if found:
                texts = "; ".join(str(problem["text"]) for problem in found)
                why = f"the job's nodes can't work together (see nodes.json): {texts}"[:900]
                self.status.update(exit_code=UNFIT_NODES, why=self.redactor.text(why))
                return False
        return super().launch()

    def ended_by_engine(self) -> None:
        """Record that the job must stop: canceled if gpuwarden requested the end, otherwise preempted."""
        asked = os.path.lexists(self.folder + "/stop.json") or is_canceled(self.folder, self.status["attempt"])
        self.intend("canceled" if asked else "preempted", override=asked)


def allot(folder: str, request: Json) -> Json | None:
    """Run one attempt of the job until it ends, and ask the engine to requeue the job if it was preempted.

    Exit with the code for the job's final state or, without such a code, with the exit code of the command.
    """
    order = order_of(folder, int(request["attempt"]), os.environ.get(str(request.get("part") or ""), ""))
    lock = lock_of(folder)
    restart = restart_of(folder, order, request)
    codes = {**CODES, **request.get("codes", {})}
    if is_canceled(folder, order["attempt"]):
        status = read_status(folder) or {}
        ended = status.get("state") in set(FINAL) - {"preempted"} and status.get("attempt") == order["attempt"]
        if not ended:  # an earlier run was killed before it wrote a final status
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
        supervisor = AllocationSupervisor(folder, order, request.get("nodes") or (), int(request.get("count") or 0))
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
        requeue([word.replace("{id}", supervisor.status["engine_id"]) for word in request["requeue"]])
    code = supervisor.status.get("exit_code")
    sys.exit(codes.get(state, code if isinstance(code, int) and 0 < code < 256 else 1))


def outlast(supervisor: Supervisor) -> None:
    """Wait until the upload to the artifact store ends, and log its last error. A further signal ends this process."""
    if not supervisor.uploader:
        return
    supervisor.uploader.stdin.close()  # signals to the uploader that no more files will be saved
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    supervisor.uploader.wait()
    if trouble := upload_trouble(supervisor.folder):
        supervisor.log.write(f"[gpuwarden] {trouble}\n".encode())


def restart_of(folder: str, order: Json, request: Json) -> int:
    """Return the number of times that the engine has already started this attempt.

    The engine reports the number. If the engine does not count the runs, each run with a new id adds one to the
    previous run's number.
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
    """Return an attempt's order, including its secrets, which are removed from the environment.

    All parts of an array share one environment, which contains a variable for each part. The variable's name ends with
    the part's number.
    """
    given = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(SECRETS)}
    try:
        order: Any = json.loads(read_small(f"{folder}/order.{attempt}.json", 16 << 20))
        secrets: Any = json.loads(given.get(f"{SECRETS}_{part}" if part else SECRETS) or "{}")
    except (OSError, ValueError, RecursionError) as error:
        raise Problem("bad_request", f"the order for attempt {attempt} can't be read: {error}") from None
    if not isinstance(order, dict) or not isinstance(secrets, dict) or order.get("attempt") != attempt:
        raise Problem("bad_request", f"{folder} has no order for attempt {attempt}")
    check_order(order)
    return {**order, "secrets": secrets}


def lock_of(folder: str) -> int:
    """Acquire the job's lock and return its descriptor.

    Return -1 on a file system without locks, where only the engine prevents a second run.
    """
    try:
        lock = take_lock(folder)
    except Problem:
        return -1
    if lock < 0:
        raise Problem("conflict", f"another run of this job holds the lock of {folder}")
    return lock


def is_due(folder: str, order: Json, restart: int) -> bool:
    """Return whether this run of the batch script must run the job, because it is the first run or a requeue."""
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
    """Return whether the attempt has been canceled permanently. If the engine restarts it, the command does not run."""
    return os.path.lexists(f"{folder}/canceled.{attempt}")


def requeue(command: list[str]) -> None:
    """Ask the engine to requeue this job. If the engine refuses, the job ends."""
    import subprocess

    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=REQUEUE_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"the job could not be requeued: {error}\n")


def guard(folder: str, attempt: int, lock: int) -> None:
    """Fork a process that waits until this one exits, then kills the remaining processes of the attempt's command.

    The processes are found by their environment, because the command's pid may not be in the status when this process
    dies.
    """
    reader, writer = os.pipe()  # `writer` is closed when this process ends
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
            for fd in (0, 1, 2):  # an engine may wait until these are closed
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
