"""Track a job's progress from its metrics, its output or its saved files, and report anomalies."""

from __future__ import annotations

import time

from gpuwarden.remote.runner.anomaly import AnomalyDetector, at_step
from gpuwarden.remote.runner.log_lines import Lazy
from gpuwarden.remote.runner.log_reader import LogReader
from gpuwarden.remote.runner.metrics import Tail, split_metrics
from gpuwarden.remote.runner.output_metrics import OutputMetrics
from gpuwarden.remote.runner.pace import Curve, Pace
from gpuwarden.remote.runner.protocol import Json
from gpuwarden.remote.runner.status_writer import Record

LOSSES = ("loss", "train_loss", "train/loss")
TOTALS = ("total_steps", "max_steps")
FILES, PRINTED, EXACT = 1, 2, 3  # values from a better source are not overwritten
SOURCES = {FILES: "files", PRINTED: "output", EXACT: "metrics"}
LOOK_EVERY_S, POST_EVERY_S = 20.0, 1.0
GPU_OOM = Lazy(rb"(?:CUDA|HIP|XPU|MPS backend)[a-z: ]{0,20}out of memory|torch(?:\.cuda)?\.OutOfMemoryError")
OOM_TEXT = "the output reports that a GPU ran out of memory"


class Progress:
    """Reads the job's new metrics and writes them to the record."""

    def __init__(self, folder: str, record: Record, spec: Json) -> None:
        self.record, self.course = record, AnomalyDetector()
        self.metrics = Tail(folder + "/metrics.jsonl")
        self.metrics.skip()  # existing lines belong to an earlier attempt
        self.moved, self.stalled = time.monotonic(), False
        self.bad_names: dict[str, bool] = {}
        self.log, self.pace, self.curve = LogReader(), Pace(), Curve()
        self.files = OutputMetrics(folder, spec, time.time())
        self.looked = self.posted = time.monotonic()
        self.sources: dict[str, int] = {}
        self.tail, self.out_of_memory = b"", False

    def launched(self) -> None:
        """Reset the progress after the command has been started or restarted."""
        self.moved = time.monotonic()
        self.log, self.pace = LogReader(), Pace()

    def heard(self) -> None:
        """Count output from the command as progress, unless the command writes metrics."""
        if not self.metrics.offset:
            self.moved = time.monotonic()

    def printed(self, data: bytes) -> None:
        """Read metrics from a piece of the command's output. Alert once if it reports that a GPU ran out of memory."""
        if not self.out_of_memory and GPU_OOM.search(self.tail + data):  # the text may span two pieces
            self.out_of_memory = True
            self.record.alert("gpu_oom", OOM_TEXT)
        self.tail = (self.tail + data)[-64:]
        for row in self.log.feed(data):
            self.take_row({**row, "total_steps": self.log.total}, PRINTED)

    def take(self, times: int) -> None:
        """Read at most `times` pieces of new metrics, read saved files, and check the speed."""
        self.log.rest()
        for _ in range(times):
            rows = self.metrics.read()
            for row in rows:
                self.take_row(row)
            if not rows:
                break
        self.look_at_files()
        step = self.record.status["step"]
        if step is not None:
            self.alert(self.course.pace(step, time.monotonic()))

    def look_at_files(self, last: bool = False) -> None:
        """Process the results of the last search for saved files, and start another search if one is due."""
        now = time.monotonic()
        if not self.files.tops or (now - self.looked < LOOK_EVERY_S and not last):
            return
        self.looked, found = now, self.files.ask(1.0 if last else 0.0)
        self.files.values = {}
        for row in found.get("rows", ()):
            self.take_row({**row, "total_steps": found.get("total")}, FILES)

    def take_row(self, row: Json, source: int = EXACT) -> None:
        """Process one row of metrics; alert about values that are not finite."""
        step, finite, bad = split_metrics(row)
        total = next((finite.pop(name) for name in TOTALS if name in finite), None)
        if total is not None and self.better("total", source):
            self.record.status["total_steps"] = int(total) or None
        if step is not None and self.better("step", source):
            self.record.status.update(step=step, source=SOURCES[source])
            self.pace.reached(step, time.monotonic())
        known: dict[str, float] = self.record.status["metrics"]
        shown: Json = {}
        for name, value in finite.items():
            if not self.better(name, source):
                continue
            if name in known or len(known) < 64:
                known[name] = value
            shown[name] = value
            self.bad_names.pop(name, None)
            if name in LOSSES:
                self.alert(self.course.loss(name, value, step))
                self.curve.add(self.record.status["step"], value)
        for name in bad:
            if self.better(name, source):
                shown[name] = "nan"
                known.pop(name, None)  # an older value would otherwise look current
                self.alert_bad(name, source)
        self.report(step, shown, row, source)

    def better(self, name: str, source: int) -> bool:
        """Return whether a source is at least as reliable as the best source of this metric so far."""
        best = self.sources.get(name, 0)
        if len(self.sources) < 256:
            self.sources[name] = max(best, source)
        return source >= best

    def report(self, step: int | None, shown: Json, row: Json, source: int) -> None:
        """Write the speed and loss curve to the status, and spool the values. Values from output are rate-limited."""
        left_s = self.pace.left_s(self.record.status["total_steps"])
        eta = None if left_s is None else time.time() + left_s
        self.record.status.update(eta_at=eta, curve=self.curve.points)
        self.record.dirty = True
        now = time.monotonic()
        if source == EXACT or (shown and now - self.posted > POST_EVERY_S):
            self.posted = now
            self.record.reports.points(self.record.status["step"] if step is None else step, shown, row)
        if source == EXACT:
            self.moved, self.stalled = now, False

    def alert_bad(self, name: str, source: int) -> None:
        """Alert once about a value that is not finite.

        A validation loss may be NaN without an error, for example if a class has no samples.
        """
        if name not in self.bad_names and len(self.bad_names) < 64:
            self.bad_names[name] = True
            text = f"{name} is not finite{at_step(self.record.status['step'])}"
            self.record.alert("odd_metric" if source < EXACT and name == "val_loss" else "nonfinite", text, name)

    def alert(self, alert: tuple[str, str, str] | None) -> None:
        """Record an alert unless it is None."""
        if alert:
            self.record.alert(*alert)

    def tell_stall(self, patience: float | None) -> None:
        """Alert once if the job has made no progress for `patience` seconds."""
        idle = time.monotonic() - self.moved
        if patience and idle > patience and not self.stalled:
            self.stalled = True
            self.record.alert(
                "stall", "no progress for {:.0f} s (last step {})".format(idle, self.record.status["step"])
            )
