"""Parse Slurm's job records: rows from `squeue --json` in every version since 21.08, and lines from `sacct`.

In newer versions, a state is a list with flags, a number is an object that can be unset or infinite, and an exit code
is an object instead of a wait status. If a row can't be parsed, BadReply is raised, because the job may still be
running.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpuwarden.core.errors import BadReply
from gpuwarden.core.models import Allocation
from gpuwarden.core.sanitize import line

NO_VALUE: Final = frozenset({0xFFFFFFFE, 0xFFFFFFFF, 2**64 - 2, 2**64 - 1})
"""The values that older versions use for an unset or infinite number."""
NO_SHORT: Final = frozenset({0xFFFE, 0xFFFF})
"""The same for 16-bit fields. In wider fields, such as an id or a duration, these are ordinary numbers."""
MOST: Final = 1e11
"""Larger numbers are invalid. As a time in seconds since the epoch, this number is in the year 5138."""
WAITING: Final = frozenset({"PENDING", "SUSPENDED"})
RUNNING: Final = frozenset({"RUNNING"})
TAKEN: Final = frozenset({"PREEMPTED", "NODE_FAIL", "BOOT_FAIL"})
"""Final states that the job did not cause: the engine preempted it, or its machine failed."""
ENDED: Final = frozenset({"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY"}) | TAKEN
QUEUED_AGAIN: Final = frozenset({"REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
_NAME = re.compile(r"(.+)-a([1-9]\d{0,3})")


@dataclass(frozen=True)
class Row:
    """One Slurm job. `stem` and `attempt` come from its name, which gpuwarden assigned."""

    stem: str
    attempt: int
    id: int
    state: str
    flags: frozenset[str]
    exit_code: int | None
    signal: int | None
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    allocation: Allocation
    message: str = ""
    """The batch script's output if the runner never started."""
    dropped: bool = False
    """True if the engine dropped the job before any machine had room for it. Ray does this; Slurm never does."""

    @property
    def waits(self) -> bool:
        """Return whether the job is waiting for a machine. A requeued job's old machine may still be in cleanup."""
        return self.state in WAITING or bool(self.flags & QUEUED_AGAIN and self.state not in ENDED)

    @property
    def over(self) -> bool:
        """Return whether the job has ended permanently and released its machines."""
        return self.state in ENDED and "COMPLETING" not in self.flags


def queue_rows(found: Mapping[str, Any]) -> list[Row]:
    """Parse the rows of the agent's `squeue`. Raises BadReply for a row that can't be parsed."""
    rows = found.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BadReply("Slurm's queue has an unknown format", "The list was ignored; try again.")
    return [_queue_row(row) for row in rows]


def _queue_row(row: Mapping[str, Any]) -> Row:
    state, flags = states(row.get("job_state"))
    code, signal = exit_of(row.get("exit_code"))
    started, ended = when(row.get("start_time")), when(row.get("end_time"))
    stem, attempt = _named(row.get("name"))
    begun = state not in WAITING
    number_of_job = number(row.get("job_id"))
    if number_of_job is None:
        raise BadReply("Slurm lists one of gpuwarden's jobs without an id", "The list was ignored; try again.")
    limit = number(row.get("time_limit"))
    return Row(
        stem, attempt, int(number_of_job), state, flags,
        exit_code=code if state in ENDED else None,
        signal=signal if state in ENDED else None,
        submitted_at=when(row.get("submit_time")) or 0.0,
        started_at=started if begun else None,
        ended_at=ended if state in ENDED else None,
        allocation=Allocation(
            engine="slurm",
            id=line(row.get("task") or str(int(number_of_job)), 40),
            state=" ".join((state, *sorted(flags))),
            why="" if row.get("state_reason") in (None, "None") else line(row.get("state_reason"), 80),
            queue=line(row.get("partition") or "", 80),
            nodes=line(row.get("nodes") or "", 200),
            restarts=int(number(row.get("restart_cnt"), NO_SHORT) or 0),
            ends_at=when(started + limit * 60) if begun and started and limit is not None else None,
            resources=line(row.get("tres_alloc_str") or row.get("tres_req_str") or "", 200),
        ),
    )  # fmt: skip


def accounting_rows(text: str, folders: Mapping[str, str]) -> list[Row]:
    """Parse `sacct`'s lines about these jobs. Raises BadReply for a line that can't be parsed.

    `folders` contains the run folder of each job. The folder must match, because other jobs may have the same name.
    """
    rows = []
    for text_line in filter(None, text.split("\n")):
        fields = text_line.split("|", 11)
        if len(fields) != 12:
            raise BadReply(f"sacct printed a line with {len(fields)} fields", "The list was ignored; try again.")
        stem, attempt = _named(fields[1])
        if folders.get(stem) != fields[11]:
            continue
        state, flags = states(fields[2])
        code, signal = exit_of(fields[3])
        submitted, started, ended, used = (number(field) for field in fields[4:8])
        found = re.fullmatch(r"(\d{1,18})(_\d{1,9})?", fields[0])
        if found is None:
            raise BadReply("sacct lists one of gpuwarden's jobs without an id", "The list was ignored; try again.")
        rows.append(
            Row(
                stem, attempt, int(found[1]), state, flags,
                exit_code=code if state in ENDED else None,
                signal=signal if state in ENDED else None,
                submitted_at=submitted or 0.0,
                started_at=started,
                ended_at=ended if state in ENDED else None,
                allocation=Allocation(
                    engine="slurm", id=fields[0], state=state, queue=line(fields[8], 80), nodes=line(fields[10], 200),
                    used_s=used, resources=line(fields[9], 200),
                ),
            )
        )  # fmt: skip
    return rows


def newest(rows: Iterable[Row]) -> dict[str, Row]:
    """Return one row for each job, from its last attempt; a live row takes precedence over an ended row."""
    return {row.stem: row for row in sorted(rows, key=lambda r: (r.attempt, not r.over, r.submitted_at, r.id))}


def _named(name: object) -> tuple[str, int]:
    found = _NAME.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        raise BadReply(
            "Slurm lists a job under a name that gpuwarden never assigns", "The list was ignored; try again."
        )
    return found[1], int(found[2])


def number(value: object, unset: frozenset[int] = frozenset()) -> float | None:
    """Parse a number in any version's format; None if it is unset, infinite or invalid.

    `unset` contains additional values that mean that the field is unset.
    """
    if isinstance(value, Mapping):
        if value.get("set") is False or value.get("infinite") is True:
            return None
        value = value.get("number")
    if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or value in NO_VALUE | unset:
        return None
    return float(value) if 0 <= value < MOST else None


def when(value: object) -> float | None:
    """Parse a time in seconds since the epoch; None if it is not set yet."""
    return number(value) or None


def states(value: object) -> tuple[str, frozenset[str]]:
    """Parse a job's base state and flags from `RUNNING`, `["PENDING", "REQUEUED"]` or `CANCELLED by 1000`."""
    while isinstance(value, Mapping):
        value = value.get("current")
    words = value if isinstance(value, list) else str(value or "").replace(",", " ").split(" by ")[0].split()
    known = [str(word).rstrip("+").upper() for word in words]
    base = next((word for word in known if word in WAITING | RUNNING | ENDED), None)
    if base is None and set(known) & QUEUED_AGAIN:
        base = "PENDING"
    if base is None and set(known) & {"COMPLETING", "CONFIGURING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING"}:
        base = "RUNNING"
    if base is None:
        raise BadReply(f"Slurm reports an unknown state: {line(value, 80)}", "The reply was ignored; try again.")
    return base, frozenset(known) - {base}


def exit_of(value: object) -> tuple[int | None, int | None]:
    """Parse exit code and signal from a wait status, from `3:0`, or from the object in newer versions."""
    if isinstance(value, Mapping) and "return_code" in value:
        signal = value.get("signal")
        named = signal.get("signal_id", signal.get("id")) if isinstance(signal, Mapping) else None
        return _ended(number(value.get("return_code")), number(named, NO_SHORT))
    if isinstance(value, str) and (found := re.fullmatch(r"(\d{1,9}):(\d{1,9})", value)):
        return _ended(float(found[1]), float(found[2]))
    status = number(value)
    return (None, None) if status is None else _ended(float(int(status) >> 8 & 0xFF), float(int(status) & 0x7F))


def _ended(code: float | None, signal: float | None) -> tuple[int | None, int | None]:
    return (None, int(signal)) if signal else (None if code is None else int(code), None)
