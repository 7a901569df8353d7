"""Parse a job's posts: metric points and alerts.

The input is untrusted; the output contains only bounded values. A post with an invalid structure is rejected
(`Malformed`). If a single value is not a number, only that value is omitted, and the omission is reported.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple

from gpuwarden.core.sanitize import line

MAX_POINTS: Final = 1_000
"""Maximum number of points in one post."""
MAX_NAMES: Final = 64
"""Maximum number of metrics in one point."""
MAX_LOOKED: Final = 256
"""Maximum number of entries in one point that are examined, including entries that are not metrics."""
MAX_NAME: Final = 100
MAX_TEXT: Final = 1_000
NO_STEP: Final = -1
"""The step that is stored for a point without a step."""
_NUMBER = re.compile(r"[+-]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][+-]?\d{1,4})?")
_ODD: Final = {"nan": math.nan, "inf": math.inf, "infinity": math.inf}
_SECONDS: Final = 1e11
"""Larger timestamps are in milliseconds, smaller ones in seconds."""
_LATEST: Final = 1 << 62


class Problem(StrEnum):
    """Codes for problems with a post or with one of its values."""

    NO_OBJECT = "not_an_object"
    NO_JOB = "job_id_missing"
    NO_POINTS = "metrics_missing"
    TOO_MANY_POINTS = "too_many_points"
    BAD_STEP = "step_not_an_integer"
    BAD_TIME = "timestamp_unreadable"
    UNPLACED = "neither_step_nor_timestamp"
    BAD_TYPE = "unknown_alert_type"
    NOT_A_NUMBER = "not_a_number"
    TOO_MANY_NAMES = "too_many_metrics"
    FULL = "job_has_too_many_points"


class AlertType(StrEnum):
    """The types of alerts that a job can send."""

    STARTED = "job_started"
    COMPLETED = "job_completed"
    FAILED = "job_failed"
    CANCELLED = "job_cancelled"
    OOM = "gpu_oom"
    TIMEOUT = "timeout_warning"


class Malformed(ValueError):
    """The post is invalid. `field` is the path of the invalid part."""

    def __init__(self, problem: Problem, field: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.problem, self.field = problem, field


class Ignored(NamedTuple):
    """A value that was omitted from a post."""

    field: str
    problem: Problem


class Row(NamedTuple):
    """One value of one metric. `at` is in microseconds since the epoch, or 0 if the job sent no time."""

    name: str
    step: int
    at: int
    value: float


@dataclass(frozen=True)
class PostedPoints:
    """The points in one post."""

    job: str
    rows: tuple[Row, ...]
    ignored: tuple[Ignored, ...] = ()


@dataclass(frozen=True)
class PostedAlert:
    """One alert.

    `fields` contains the known fields that the job sent. A repeated post has the same `key`.
    """

    job: str
    type: AlertType
    at: int
    key: str
    fields: dict[str, Any]


def as_object(body: object) -> Mapping[str, Any]:
    """Return the body if it is a JSON object. Raises Malformed otherwise."""
    if not isinstance(body, dict):
        raise Malformed(Problem.NO_OBJECT, "body")
    return body


def job_of(body: object) -> str:
    """Return a post's job id. Raises Malformed if it is missing or invalid."""
    job = as_object(body).get("job_id")
    if not isinstance(job, str) or not job or len(job) > MAX_NAME:
        raise Malformed(Problem.NO_JOB, "job_id")
    return job


def read_points(body: object) -> PostedPoints:
    """Parse a post to the metrics API. Raises Malformed if its structure is invalid."""
    job, listed = job_of(body), as_object(body).get("metrics")
    if isinstance(listed, dict):
        listed = [listed]
    if not isinstance(listed, list) or not listed:
        raise Malformed(Problem.NO_POINTS, "metrics")
    if len(listed) > MAX_POINTS:
        raise Malformed(Problem.TOO_MANY_POINTS, "metrics")
    rows: list[Row] = []
    ignored: list[Ignored] = []
    for number, point in enumerate(listed):
        _read_point(f"metrics[{number}]", point, rows, ignored)
    return PostedPoints(job, tuple(rows), tuple(ignored))


def _read_point(where: str, point: object, rows: list[Row], ignored: list[Ignored]) -> None:
    if not isinstance(point, dict):
        raise Malformed(Problem.NO_OBJECT, where)
    step, at = read_step(point.get("step"), f"{where}.step"), read_time(point.get("timestamp"), f"{where}.timestamp")
    if step == NO_STEP and not at:
        raise Malformed(Problem.UNPLACED, where)
    taken = 0
    for place, (name, given) in enumerate(point.items()):
        if place >= MAX_LOOKED:
            ignored.append(Ignored(where, Problem.TOO_MANY_NAMES))
            break
        if name in ("step", "timestamp") or given is None:
            continue
        value, field = read_number(given), clean_name(name)
        if value is None or not field:
            ignored.append(Ignored(f"{where}.{field}", Problem.NOT_A_NUMBER))
        elif taken >= MAX_NAMES:
            ignored.append(Ignored(f"{where}.{field}", Problem.TOO_MANY_NAMES))
        else:
            taken += 1
            rows.append(Row(field, step, at, value))


@lru_cache(4096)
def clean_name(name: str) -> str:
    """Return a metric's name as one short line without secrets. Results are cached, because names repeat."""
    return line(name, MAX_NAME)[:MAX_NAME]


def read_number(given: object) -> float | None:
    """Convert a value to a float. Strings, NaN and infinity are accepted. Return None if the value is not a number."""
    if isinstance(given, str):
        text = given.strip().lower()
        if _NUMBER.fullmatch(text):
            return float(text)
        odd = _ODD.get(text.lstrip("+-"))
        return -odd if odd is not None and text.startswith("-") else odd
    if isinstance(given, bool) or not isinstance(given, int | float):
        return None
    try:
        return float(given)
    except OverflowError:
        return math.inf if given > 0 else -math.inf


def read_step(given: object, field: str) -> int:
    """Return a step, or NO_STEP if it is missing. Raises Malformed if it is not a non-negative integer."""
    if given is None:
        return NO_STEP
    value = read_number(given)
    if value is None or not value.is_integer() or not 0 <= value < 1 << 53:
        raise Malformed(Problem.BAD_STEP, field)
    return int(value)


def read_time(given: object, field: str) -> int:
    """Convert an ISO 8601 string or a number to microseconds since the epoch. Return 0 if the time is missing.

    A time without a time zone is interpreted as UTC, because `datetime.utcnow()` returns such times. Raises Malformed
    for any other value.
    """
    if given is None:
        return 0
    try:
        if isinstance(given, str) and not _NUMBER.fullmatch(given):
            moment = datetime.fromisoformat(given)
            moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
            at = round(moment.timestamp() * 1e6)
        else:
            number = read_number(given)
            at = round((number if number is not None else math.nan) * (1e6 if abs(number or 0) < _SECONDS else 1e3))
    except (ValueError, OverflowError):
        raise Malformed(Problem.BAD_TIME, field) from None
    if not 0 < at < _LATEST:
        raise Malformed(Problem.BAD_TIME, field)
    return at


_TEXTS: Final = ("source", "user_id", "model_name", "status", "error_message", "error_type")
_NUMBERS: Final = ("progress", "current_step", "total_steps", "loss", "duration")


def alert_fields(body: object) -> dict[str, Any]:
    """Return an alert's known fields. Strings are truncated so that sanitizing them is fast.

    Raises Malformed if the body is not an object.
    """
    given = as_object(body)
    known = {name: given.get(name) for name in ("job_id", "type", "timestamp", *_TEXTS, *_NUMBERS)}
    texts = {name: value[: 4 * MAX_TEXT] for name, value in known.items() if isinstance(value, str)}
    return {name: value for name, value in known.items() if isinstance(value, int | float)} | texts


def read_alert(body: object, now: float) -> PostedAlert:
    """Parse a post to the alerts API. Raises Malformed if the post is invalid.

    A job's alerts usually have no timestamp. Identical alerts from one job are therefore stored once, on the assumption
    that the job lost the response and repeated the post. The runner adds a `timestamp` to the alerts that it reports.
    """
    job, given = job_of(body), as_object(body)
    try:
        kind = AlertType(given.get("type", ""))
    except (ValueError, TypeError):
        raise Malformed(Problem.BAD_TYPE, "type") from None
    stated = read_time(given.get("timestamp"), "timestamp")
    known: dict[str, Any] = {name: line(given[name], MAX_TEXT) for name in _TEXTS if isinstance(given.get(name), str)}
    numbers = ((name, read_number(given.get(name))) for name in _NUMBERS)
    known |= {name: value for name, value in numbers if value is not None and math.isfinite(value)}
    key = json.dumps([kind, stated, *sorted(known.items())])
    return PostedAlert(job, kind, stated or round(now * 1e6), key, known)
