"""Export a job's points as CSV, as TensorBoard event files, or to trackio.

Event files are encoded here because the TensorBoard package requires 100 MB of libraries. A record consists of a
length, a masked CRC-32C of the length, the bytes of a protobuf `Event`, and a masked CRC-32C of those bytes.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import inspect
import math
import struct
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final, TextIO

from gpuwarden.checkpoints.values.crc32c import masked
from gpuwarden.core.errors import Conflict, NotFound, NotSupported
from gpuwarden.core.installing import install_command
from gpuwarden.metrics.store import Cursor, MetricStore, Point

PIECE: Final = 10_000
LARGEST_FLOAT32: Final = 3.4028234e38
"""The largest finite number in an event file. Larger numbers are written as infinity."""


def all_points(store: MetricStore, job: str) -> Iterator[tuple[str, Point]]:
    """Yield all of a job's points, metric by metric, in step order. Raises NotFound if the job has no points."""
    names = [series.name for series in store.series(job)]
    if not names:
        raise NotFound(f"job {job} has no metrics", "Report or print metrics in the job's script.")
    for name in names:
        cursor: Cursor | None = None
        while True:
            page = store.points(job, name, cursor, PIECE)
            yield from ((name, point) for point in page.points)
            cursor = page.next
            if cursor is None:
                break


def to_csv(store: MetricStore, job: str, out: TextIO) -> int:
    """Write one row per point: metric, step, seconds since the epoch, value. Return the number of points.

    A name that a spreadsheet would interpret as a formula gets a leading apostrophe.
    """
    table, count = csv.writer(out), 0
    table.writerow(["metric", "step", "timestamp", "value"])
    for name, point in all_points(store, job):
        shown = f"'{name}" if name[:1] in "=+-@" else name
        table.writerow([shown, _blank(point.step), _blank(point.at), repr(point.value)])
        count += 1
    return count


def _blank(value: float | None) -> object:
    return "" if value is None else value


def to_tensorboard(store: MetricStore, job: str, folder: Path) -> Path:
    """Write one event file under `folder`/`job` and return its path. A point without a step gets its index."""
    points = all_points(store, job)
    first = next(points)  # raises NotFound before a folder is created
    target = folder / job
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"events.out.tfevents.0.{job}.gpuwarden"
    with path.open("wb") as file:
        file.write(_record(_event(first[1].at or 0.0, 0, b"\x1a" + _bytes(b"brain.Event:2"))))
        for name, step, point in _stepped(chain([first], points)):
            single = point.value
            if math.isfinite(single) and abs(single) > LARGEST_FLOAT32:
                single = math.copysign(math.inf, single)
            value = b"\x0a" + _bytes(name.encode()) + b"\x15" + struct.pack("<f", single)
            summary = b"\x2a" + _bytes(b"\x0a" + _bytes(value))
            file.write(_record(_event(point.at or 0.0, step, summary)))
    return path


def to_trackio(store: MetricStore, job: str, project: str) -> int:
    """Log every step to a trackio project and return the number of steps.

    Raises NotSupported if trackio is missing, and Conflict if the project already has a run for this job, because the
    run would then contain each step twice.

    Trackio's output goes to standard error, and its hardware logging is disabled. If a step was reported twice, the
    last value is used.
    """
    try:
        trackio: Any = importlib.import_module("trackio")
    except ImportError as error:
        raise NotSupported("trackio is not installed", f"Install it: {install_command('trackio')}") from error
    with contextlib.suppress(ValueError):  # the project does not exist yet
        if any(run.name == job for run in trackio.Api().runs(project)):
            raise Conflict(
                f"the trackio project {project!r} already has a run named {job}",
                "Export to another project, or delete that run in trackio.",
            )
    steps: dict[int, dict[str, Any]] = {}
    for name, step, point in _stepped(all_points(store, job)):
        steps.setdefault(step, {})[name] = point.value
    known = inspect.signature(trackio.init).parameters
    off = {name: False for name in ("auto_log_cpu", "auto_log_gpu") if name in known}
    with contextlib.redirect_stdout(sys.stderr):
        run = trackio.init(project=project, name=job, **off)
        for step in sorted(steps):
            run.log(steps[step], step=step)
        run.finish()
    return len(steps)


def _stepped(points: Iterable[tuple[str, Point]]) -> Iterator[tuple[str, int, Point]]:
    """Yield points with their steps. A point without a step gets its index among the metric's points."""
    number, present = 0, ""
    for name, point in points:
        number, present = (number + 1, present) if name == present else (0, name)
        yield name, number if point.step is None else point.step, point


def _event(at: float, step: int, rest: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", at) + b"\x10" + _varint(step) + rest


def _bytes(content: bytes) -> bytes:
    return _varint(len(content)) + content


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _record(content: bytes) -> bytes:
    size = struct.pack("<Q", len(content))
    crcs = (struct.pack("<I", masked(part)) for part in (size, content))
    return size + next(crcs) + content + next(crcs)
