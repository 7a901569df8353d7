"""Track a job's progress by its metrics or else its output, and flag anomalies."""

from __future__ import annotations

import time

from gpuwarden.remote.runner.anomaly import Course
from gpuwarden.remote.runner.metrics import Tail, split_metrics
from gpuwarden.remote.runner.protocol import Json
from gpuwarden.remote.runner.status_writer import Record

LOSSES = ("loss", "train_loss", "train/loss")


class Progress:
    """Read the job's metrics from now on, and put them into the record."""

    def __init__(self, folder: str, record: Record) -> None:
        self.record, self.course = record, Course()
        self.metrics = Tail(folder + "/metrics.jsonl")
        self.metrics.skip()  # lines of an earlier attempt are old
        self.moved, self.stalled = time.monotonic(), False
        self.bad_names: dict[str, bool] = {}

    def launched(self) -> None:
        """Record that the command was started."""
        self.moved = time.monotonic()

    def heard(self) -> None:
        """Count the command's output as progress, unless the command writes metrics."""
        if not self.metrics.offset:
            self.moved = time.monotonic()

    def take(self, times: int) -> None:
        """Read new metrics; flag values that are not finite."""
        for _ in range(times):
            rows = self.metrics.read()
            for row in rows:
                self.take_row(row)
            if not rows:
                return
            step = self.record.status["step"]
            if step is not None:
                self.tell(self.course.pace(step, time.monotonic()))

    def take_row(self, row: Json) -> None:
        """Take one line of metrics."""
        step, finite, bad = split_metrics(row)
        if step is not None:
            self.record.status["step"] = step
        known: dict[str, float] = self.record.status["metrics"]
        for name, value in finite.items():
            if name in known or len(known) < 64:
                known[name] = value
            self.bad_names.pop(name, None)
            if name in LOSSES:
                self.tell(self.course.loss(name, value, step))
        for name in bad:
            known.pop(name, None)  # an older value would appear as the present one
            if name not in self.bad_names and len(self.bad_names) < 64:
                self.bad_names[name] = True
                text = "{} is not finite at step {}".format(name, self.record.status["step"])
                self.record.alert("nonfinite", text, name)
        self.record.event("metrics", {"step": self.record.status["step"], "metrics": finite})
        self.record.dirty = True
        self.moved, self.stalled = time.monotonic(), False

    def tell(self, alert: tuple[str, str, str] | None) -> None:
        """Raise an alert where there is one."""
        if alert:
            self.record.alert(*alert)

    def tell_stall(self, patience: float | None) -> None:
        """Alert once when nothing new came for so long."""
        idle = time.monotonic() - self.moved
        if patience and idle > patience and not self.stalled:
            self.stalled = True
            self.record.alert(
                "stall", "nothing new for {:.0f} s (last step {})".format(idle, self.record.status["step"])
            )
