"""Prepare the files needed to run a job on a machine, and parse the runner's replies."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gpuwarden.core.errors import BadReply, BadRequest, Conflict, NotFound, NotSupported, Unreachable, WardenError
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import (
    MAX_METRICS,
    Artifact,
    Disclosure,
    Heartbeat,
    JobSpec,
    Manifest,
    Observation,
    Place,
    RunnerAlert,
    Supervisor,
)
from gpuwarden.core.plural import counted
from gpuwarden.core.reasons import Code, Reason, because, known_code
from gpuwarden.core.sanitize import line
from gpuwarden.core.states import Job
from gpuwarden.core.store_address import StoreAddress
from gpuwarden.remote import cell_queue as queue_program
from gpuwarden.remote.runner_bundle import one_file

INPUTS_HERE: Final = "inputs.whole"
"""A marker file in the run folder. It exists once all inputs are in the working folder."""
STARTED: Final = (INPUTS_HERE, "status.json")
"""If a run folder contains one of these files, the job has started and may change its inputs."""

GRACE_S: Final = 10.0
WARN_BEFORE_S: Final = 300
HEARTBEAT_S: Final = 10.0
LOG_MAX_BYTES: Final = 64 << 20
STALL_S: Final = 1800.0
"""The runner reports a stall after this many seconds without a new step (or log line, if the job reports no steps)."""
MARKER: Final = "GPUWARDEN_REHEARSAL_INSTANCE"
"""An environment variable that a rehearsal sets for every process of an instance."""
_SIGKILL: Final = 9  # the `signal` module does not define SIGKILL on Windows
_PLAIN_TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,80}")


@cache
def runner_source() -> bytes:
    """Return the runner's source as one file."""
    return one_file()


@cache
def checker() -> tuple[str, bytes]:
    """Return the name and content of the archive that examines and seals checkpoints on the machine."""
    from gpuwarden.checkpoints import archive  # imported here, because importing all checkpoint readers is slow

    content = archive.build()
    return archive.name(content), content


def content_name(stem: str, content: bytes) -> str:
    """Return a file name with the content's digest, so that uploads never overwrite a file that a running job uses."""
    return f"{stem}-{hashlib.sha256(content).hexdigest()[:12]}.py"


def run_name(token: str) -> str:
    """Return the name of the run folder for a token, derived only from the token."""
    if _PLAIN_TOKEN.fullmatch(token):
        return f"gw-{token}"
    return f"gw-{hashlib.sha256(token.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


@dataclass(frozen=True)
class Launch:
    """A prepared job, with the files for its run folder and the spec for the runner's `start`.

    The spec includes the files' digests, because a later start, after a requeue or restart, reads the files again.
    """

    files: dict[str, bytes]
    runner: str
    spec: dict[str, Any]


def prepare(spec: JobSpec, place: Place, run_dir: str, interpreter: Sequence[str]) -> Launch:
    """Convert a job to files and a runner spec. `interpreter`, such as `("python3",)`, precedes a script's path."""
    runner = content_name("runner", runner_source())
    pyz, content = checker()
    files = {runner: runner_source(), pyz: content}
    argv = list(spec.command)
    if spec.script is not None:
        content = spec.script.encode("utf-8", "surrogatepass")
        script = content_name("script", content)
        files[script] = content
        argv = [*interpreter, f"{run_dir}/{script}", *spec.args]
    if spec.cells:
        queue, order = cell_queue(spec)
        files |= {content_name("cells", queue): queue, (listed := content_name("order", order)): order}
        argv = [*interpreter, f"{run_dir}/{content_name('cells', queue)}", f"{run_dir}/{listed}", *argv]
    timeout = spec.timeout_s
    # A script is stored outside the working folder, so Python would not find modules among the job's inputs.
    modules = {"PYTHONPATH": f"{run_dir}/work"} if spec.inputs and spec.script is not None else {}
    return Launch(
        files,
        runner,
        {
            "argv": argv,
            "env": {"PYTHONUNBUFFERED": "1", **modules, **spec.env},
            "outputs": list(spec.outputs),
            "timeout_s": timeout,
            "warn_before_s": min(WARN_BEFORE_S, timeout / 10) if timeout else None,
            "grace_s": GRACE_S,
            "max_restarts": spec.max_restarts,
            "heartbeat_s": HEARTBEAT_S,
            "stall_s": STALL_S,
            "log_max_bytes": LOG_MAX_BYTES,
            **place.mapping,
            **({"self_stop": place.self_stop_order.order} if place.self_stop_order else {}),
            "archive": pyz,
            "files": digests({name: data for name, data in files.items() if name not in (runner, pyz)}),
            **({"keep": vars(StoreAddress.parse(spec.artifact_store)), **marked(place)} if spec.artifact_store else {}),
        },
    )


def digests(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the SHA-256 of each file, which the runner compares before each start."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def cell_queue(spec: JobSpec) -> tuple[bytes, bytes]:
    """Return the program that runs a fan-out's cells, and the list of cells."""
    cells = [{**cell.model_dump(), "args": list(cell.args), "folder": cell.folder} for cell in spec.cells]
    order = {"cells": cells, "slots": spec.gpu_count, "cell_timeout_s": spec.cell_timeout_s}
    return Path(queue_program.__file__).read_bytes(), json.dumps(order).encode()


def marked(place: Place) -> dict[str, str]:
    """Return the marker that identifies a rehearsal's processes on this machine, or {} for a real machine."""
    value = place.env.get(MARKER)
    return {"marker": f"{MARKER}={value}"} if value else {}


# ------------------------------------------------------------------------------------------------ the replies


MARK_CHARS: Final = 100


class _Lenient(BaseModel):
    """A reply from a machine. Unknown fields, which a newer runner may send, are ignored. Known fields are checked."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class _Beat(_Lenient):
    gpu_util: float | None = None
    gpu_mem_used: int | None = None
    mem_used: int | None = None
    mem_limit: int | None = None
    disk_free: int | None = None
    disk_total: int | None = None
    inodes_free: int | None = None
    inodes_total: int | None = None
    oom_kills: int | None = None


class _Alert(_Lenient):
    kind: str
    text: str
    subject: str = ""
    step: int | None = None


class _Status(_Lenient):
    state: str
    now: float
    attempt: int = 1
    reason: str = Field(default="", max_length=100)
    why: str = Field(default="", max_length=4096)
    exit_code: int | None = None
    signal: int | None = None
    step: int | None = None
    total_steps: int | None = Field(default=None, ge=1)
    eta_at: float | None = None
    source: str = Field(default="", max_length=20)
    curve: tuple[tuple[int, float], ...] = Field(default=(), max_length=128)
    metrics: dict[str, float] = Field(default_factory=dict, max_length=MAX_METRICS)
    started_at: float | None = None
    ended_at: float | None = None
    updated_at: float | None = None
    last_alerts: tuple[_Alert | str, ...] = Field(default=(), max_length=32)
    log_bytes: int = 0
    heartbeat_s: float = HEARTBEAT_S
    beat: _Beat = _Beat()
    alive: bool | None = None
    child_alive: bool | None = None
    confirmed: bool = False
    machine: str = Field(default="", max_length=MARK_CHARS)
    upload: str = ""


_STATES: Final = {
    "succeeded": Job.SUCCEEDED,
    "failed": Job.FAILED,
    "timeout": Job.FAILED,
    "canceled": Job.CANCELED,
    "preempted": Job.PREEMPTED,
}
_NO_STATUS: Final = {"missing": Code.NO_RUN_FOLDER, "absent": Code.NO_STATUS}
_CLAIMS: Final = frozenset({Code.EXITED, Code.KILLED_BY_SIGNAL, Code.NOT_STARTED, Code.RESTARTS_USED})
"""The reasons for a job's end that may come from a status file. All others are derived from observations."""
_OF_STATE: Final = {"timeout": Code.TIME_LIMIT, "canceled": Code.STOPPED, "preempted": Code.TERMINATED}


def supervisor(reply: Mapping[str, Any]) -> Supervisor | None:
    """Return the identity that the runner's `start` reported, or None if it reported none.

    Raises BadReply for a reply without an attempt number, because the job may or may not have been launched.
    """
    if not isinstance(reply.get("attempt"), int):
        raise BadReply("the runner's start command returned no attempt number", do(Action.CHECK, "before trying again"))
    try:
        return Supervisor(**{k: reply.get(k) for k in ("pid", "start_ticks", "boot_id", "machine")})  # type: ignore[arg-type]
    except ValidationError:
        return None


def observation(reply: Mapping[str, Any]) -> Observation:
    """Interpret one entry in a `poll` reply. An invalid reply means UNKNOWN, never that the job has ended."""
    folder = reply.get("folder", reply.get("state"))  # prevents a job's status file from setting `folder`
    if isinstance(folder, str) and folder in _NO_STATUS:
        mark = reply.get("machine")
        known = mark if isinstance(mark, str) and len(mark) <= MARK_CHARS else ""
        return _unknown(reply, because(_NO_STATUS[folder])).model_copy(update={"machine": known, "lost": True})
    try:
        status = _Status.model_validate(dict(reply))
    except ValidationError as error:
        return _unknown(reply, because(Code.BAD_STATUS, problem=counted(error.error_count(), "invalid field")))
    job, reason, stale = _judge(status)
    return Observation(
        state=job,
        why=reason.text,
        reason=reason.code,
        at=status.now,
        exit_code=status.exit_code,
        signal=status.signal,
        attempt=status.attempt,
        step=status.step,
        total_steps=status.total_steps,
        eta_at=status.eta_at,
        source=line(status.source, 20),
        curve=status.curve,
        metrics=status.metrics,
        started_at=status.started_at,
        ended_at=status.ended_at,
        last_beat_at=status.updated_at,
        alerts=tuple(_alert(a) for a in status.last_alerts),
        log_bytes=status.log_bytes,
        stale=stale,
        beat=Heartbeat(**status.beat.model_dump()),
        machine=status.machine,
        upload=line(status.upload, 300),
    )


def _alert(alert: _Alert | str) -> RunnerAlert:
    """Return an alert with shortened text, because the job can edit its status. Older runners wrote `kind: text`."""
    if isinstance(alert, str):
        kind, _, text = alert.partition(": ")
        alert = _Alert(kind=kind, text=text)
    return RunnerAlert(
        kind=line(alert.kind, 40), text=line(alert.text, 300), subject=line(alert.subject, 200), step=alert.step
    )


def _unknown(reply: Mapping[str, Any], reason: Reason) -> Observation:
    try:
        at = float(reply["now"]) if isinstance(reply.get("now"), (int, float)) else 0.0
    except OverflowError:
        at = 0.0
    at = at if math.isfinite(at) else 0.0  # the ledger can't store infinity or NaN
    return Observation(state=Job.UNKNOWN, why=reason.text, reason=reason.code, at=at)


def _judge(status: _Status) -> tuple[Job, Reason, bool]:
    """Return the job's state, the reason for it, and whether the status is stale.

    Only process liveness is observed directly; the status file may be wrong.
    """
    if status.state != "running" and status.confirmed and status.alive:
        # The supervisor writes its final status last, so either it is about to exit, or the job wrote this status.
        return Job.RUNNING, because(Code.ENDING, state=line(status.state, 40)), False
    if status.state in _STATES:
        return _STATES[status.state], Reason(_claimed(status), message=status.why), False
    if status.state != "running":
        return Job.UNKNOWN, because(Code.UNKNOWN_STATE, status.why, state=repr(line(status.state, 40))), False
    silent = status.now - (status.updated_at or 0.0)
    stale = silent > 3 * status.heartbeat_s + 5
    if status.alive is False and status.child_alive is False:
        return Job.FAILED, because(Code.VANISHED), True
    if status.alive is False:
        return Job.RUNNING, because(Code.UNWATCHED), True
    if status.alive is None:
        return Job.RUNNING, because(Code.LIVENESS_UNKNOWN), stale
    return Job.RUNNING, because(Code.SILENT_SUPERVISOR, seconds=round(silent)) if stale else because(Code.ALIVE), stale


def _claimed(status: _Status) -> Code:
    """Return the reason code for a job's end, as given in its final status."""
    if status.state in _OF_STATE:
        return _OF_STATE[status.state]
    killed = status.signal == _SIGKILL or status.exit_code == 128 + _SIGKILL
    if status.state == "failed" and killed and status.beat.oom_kills:
        return Code.OUT_OF_MEMORY
    return known_code(status.reason, _CLAIMS) or (Code.KILLED_BY_SIGNAL if status.signal else Code.EXITED)


class NoArchive(NotFound):
    """The archive that examines checkpoints is missing from the machine. The caller can upload it again."""


_ERRORS: Final[dict[str, type[WardenError]]] = {
    "not_found": NotFound,
    "conflict": Conflict,
    "bad_request": BadRequest,
    "bad_reply": BadReply,
    "unreachable": Unreachable,
    "not_supported": NotSupported,
    "no_archive": NoArchive,
}


def raise_for(reply: Mapping[str, Any]) -> None:
    """Raise the error in a runner's reply. Do nothing if the reply is `ok`."""
    if reply.get("ok") is True:
        return
    code, message = str(reply.get("code")), line(reply.get("error"), 500)
    if code in {"disk_full", "io_error"}:
        raise BadRequest(
            f"file access failed on the machine: {message}",
            "Free space or fix the permissions on the machine, then try again.",
        )
    raise _ERRORS.get(code, BadReply)(message, do(Action.CHECK, "before trying again"))


def manifest(lines: Sequence[Mapping[str, Any]]) -> Manifest:
    """Parse the runner's `list` or `manifest` lines. Raises BadReply for an incomplete manifest."""
    return _manifest(
        lambda: tuple(Artifact.model_validate(dict(row)) for row in lines[:-1] if "progress" not in row), lines[-1:]
    )


def fetched_manifest(raw: bytes) -> Manifest:
    """Parse the manifest that the runner's `fetch` sends. Each line lists many files."""
    *lines, last = raw.strip().split(b"\n")
    rows = _rows()
    try:
        summary = json.loads(last)
    except (ValueError, RecursionError):
        summary = None
    return _manifest(
        lambda: tuple(file for line in lines for file in rows.validate_json(line)),
        [summary] if isinstance(summary, dict) else [],
    )


@cache
def _rows() -> TypeAdapter[list[Artifact]]:
    return TypeAdapter(list[Artifact])


def _manifest(files: Callable[[], tuple[Artifact, ...]], end: Sequence[Mapping[str, Any]]) -> Manifest:
    """Build a manifest from its files and its last line."""
    if not end or end[0].get("ok") is None:
        raise BadReply("the manifest is truncated: its last line is missing", "Request it again.")
    last = end[0]
    raise_for(last)
    try:
        skipped = [f"{s['path']}: {s['why']}" for s in last["skipped"]]
        if last["more_skipped"]:
            skipped.append(f"and {last['more_skipped']} more")
        return Manifest(taken_at=last["taken_at"], files=files(), missing=last["missing"], skipped=tuple(skipped))
    except (ValidationError, KeyError, TypeError) as error:
        raise BadReply(
            f"invalid manifest: {line(error)}", "Check whether another gpuwarden version started the job."
        ) from error


def findings(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Parse the runner's `examine` lines into findings, keyed by output. Raises BadReply for an incomplete reply."""
    if not lines or lines[-1].get("ok") is None:
        raise BadReply("the findings are truncated: their last line is missing", "Request them again.")
    raise_for(lines[-1])
    rows = [row for row in lines[:-1] if "progress" not in row]
    if len(rows) != lines[-1].get("outputs") or not all(isinstance(row.get("found"), dict) for row in rows):
        raise BadReply("invalid findings", "Check whether another gpuwarden version started the job.")
    return {str(row.get("output")): row["found"] for row in rows}


def disclosure(reply: Mapping[str, Any]) -> Disclosure:
    """Parse the runner's reply to `disclose`."""
    raise_for(reply)
    try:
        return Disclosure(processes=reply["processes"], files=reply["files"], complete=reply["complete"])
    except (ValidationError, KeyError) as error:
        raise BadReply(
            f"invalid disclosure: {line(error)}", "Check whether another gpuwarden version started the job."
        ) from error
