"""Start the job's process, check whether its process group is alive, and interpret its exit code."""

from __future__ import annotations

import os
import signal
from typing import Any, Mapping

from gpuwarden.remote.runner.files import read_small, write_all
from gpuwarden.remote.runner.process import group_members, has_proc
from gpuwarden.remote.runner.protocol import Json

RETRY_CODES = (75, 128 + signal.SIGTERM)  # EX_TEMPFAIL, and the exit code of a wrapper whose child received SIGTERM
RETRY_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


CHANGED_FILE = 94
"""The exit code of a job that was not started because a file was changed after submission."""
MOST_FILE = 64 << 20


class Reason:
    """The reasons why an attempt ended, stored as `reason` in the status. `core.reasons.Code` has the same codes."""

    EXITED = "exited"
    KILLED = "killed_by_signal"
    NOT_STARTED = "not_started"
    TIME_LIMIT = "time_limit"
    STOPPED = "stopped"
    TERMINATED = "terminated"
    RESTARTS_USED = "restarts_used"


OF_INTENT = {"canceled": Reason.STOPPED, "preempted": Reason.TERMINATED, "timeout": Reason.TIME_LIMIT}


def environment(folder: str, spec: Json, secrets: dict[str, str], status: Json) -> dict[str, str]:
    """Return the command's environment: variables from the runner and the spec, secrets, and gpuwarden's variables."""
    ours = {
        "GPUWARDEN_RUN_DIR": folder,
        "GPUWARDEN_OUTPUT_DIR": folder + "/work",
        "GPUWARDEN_METRICS": folder + "/metrics.jsonl",
        "GPUWARDEN_ATTEMPT": str(status["attempt"]),
        "GPUWARDEN_RESTARTS": str(status["restarts"]),
        "GPUWARDEN_JOB": status["token"],
    }
    if spec.get("timeout_s"):
        ours["GPUWARDEN_DEADLINE"] = "%.0f" % (status["started_at"] + spec["timeout_s"])
    return {**os.environ, **(spec.get("env") or {}), **secrets, **ours}


def changed_file(folder: str, spec: Json) -> str:
    """Return the name of a file in the run folder that no longer matches its digest in the spec; "" if all match.

    A job can change its files, and so can the user's other jobs. The job's order is not checked.
    """
    import hashlib

    for name, digest in (spec.get("files") or {}).items():
        try:
            if hashlib.sha256(read_small(f"{folder}/{name}", MOST_FILE)).hexdigest() != digest:
                return str(name)
        except OSError:
            return str(name)
    return ""


def spawn(folder: str, spec: Json, env: dict[str, str], output: int) -> Any:
    """Start the command in a new process group."""
    import subprocess

    work = folder + "/work"
    os.makedirs(work, mode=0o700, exist_ok=True)
    if spec.get("sandbox"):
        return spawn_boxed(folder, spec, env, output)
    return subprocess.Popen(
        spec["argv"], cwd=os.path.join(work, spec.get("cwd") or ""), env=env,
        stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def spawn_boxed(folder: str, spec: Json, env: dict[str, str], output: int) -> Any:
    """Start the command in a sandbox.

    The program that creates the sandbox gets no input that the job controls. The job's variables are sent over a pipe
    to the first program inside the sandbox, which reports the command's exit over another pipe. The signals that
    end a job are blocked in the program that creates the sandbox, because they are meant for the command but are sent
    to the whole process group.
    """
    import subprocess

    variables = packed(env)
    given, feed = os.pipe()
    report, report_end = os.pipe()
    ours = {**os.environ, "GPUWARDEN_RUN_DIR": folder}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    try:
        child = subprocess.Popen(
            [*spec["sandbox"], str(given), str(report_end), *spec["argv"]], cwd=folder + "/work", env=ours,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            pass_fds=(given, report_end),
        )  # fmt: skip
    except BaseException:
        os.close(feed)
        os.close(report)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(given)
        os.close(report_end)
    write_all(feed, variables)
    os.close(feed)
    child.report = report  # type: ignore[attr-defined]
    return child


def packed(env: Mapping[str, str]) -> bytes:
    """Encode an environment for the first program in a sandbox. Raises ValueError if it can't be encoded."""
    if any("=" in name or not name or "\0" in name + value for name, value in env.items()):
        raise ValueError("illegal environment variable")
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())


def ended(child: Any) -> tuple[int, str]:
    """Wait for a command. Return its exit code (negative for a signal), and the error if it could not be started."""
    code = child.wait()
    report = getattr(child, "report", -1)
    if report < 0:
        return code, ""
    os.set_blocking(report, False)
    try:
        word, _, rest = os.read(report, 4096).decode("utf-8", "replace").partition("\n")[0].partition(" ")
    except OSError:
        word, rest = "", ""
    finally:
        os.close(report)
    if word == "error":
        return 127, rest
    if word != "status" or not rest.isdigit():
        return 128 - code if code > 128 else code, ""  # killed with its sandbox, or started without one
    status = int(rest)
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status), ""


def exited(child: Any) -> bool:
    """Return whether the command has ended. It is not reaped, so that its process group id is not reused."""
    if has_proc() and hasattr(os, "waitid"):
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return child.poll() is not None


def remain(group: int) -> bool:
    """Return whether the process group has running members other than the command that ended."""
    members = group_members(group)
    if members is not None:
        return bool(members)
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    return True


def meaning(code: int, intent: str, spec: Json, restarts: int) -> tuple[str, str, str]:
    """Return an attempt's final state, its reason code and a description. The state is empty if a restart is due."""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    if intent:
        return (
            intent,
            OF_INTENT[intent],
            {"canceled": "stopped on request", "preempted": "an external signal ended the job"}.get(
                intent, "the time limit of {} s was reached".format(spec.get("timeout_s"))
            )
            + f" ({how})",
        )
    if code == 0:
        return "succeeded", Reason.EXITED, "exit code 0"
    if code in RETRY_CODES or -code in RETRY_SIGNALS:
        limit = int(spec.get("max_restarts") or 0)
        if restarts < limit:
            return "", Reason.EXITED, f"{how} requests a restart ({restarts + 1} of {limit})"
        return "failed", Reason.RESTARTS_USED, f"{how} requests a restart, but all {limit} restarts were used"
    reason = Reason.KILLED if code < 0 else Reason.EXITED
    memory = ", the signal that the kernel sends when memory is exhausted" if code == -9 else ""
    return "failed", reason, how + memory
