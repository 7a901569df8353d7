"""Read a trainer's output line by line and derive the training progress."""

from __future__ import annotations

import re
import time
from typing import Iterator

from gpuwarden.remote.runner.log_lines import MAX_LINE, Lazy, Reading, read_cell, read_line

BUDGET_S = 0.02  # CPU seconds between two calls of `rest`, so that large outputs can't slow down the supervisor
WORTH = Lazy(
    rb"(?i)loss|epoch|step|iter|learning_rate|\d/\s{0,8}\d|\dit \[|\d\.\d{3,8}\s|\d%\)|\xe8\xae\xad\xe7\xbb\x83"
)
ANNOUNCED = Lazy(r"(?i)total (?:optimization|train(?:ing)?) steps\s{0,4}[:=]\s{0,4}(\d[\d,]{0,14})")
EPOCH_LINE = Lazy(r"\s{0,8}epoch:?\s{1,4}(\d{1,6})\s{0,2}(?:/|of)\s{0,2}(\d{1,6})\s{0,4}$", re.IGNORECASE)
COLUMNS = Lazy(r"\s{0,12}Epoch\s{1,12}GPU_mem\s{1,12}(.{1,300})", re.IGNORECASE)
CELLS = Lazy(r"\s{0,12}(\d{1,6})/(\d{1,6})\s{1,12}[\d.]{1,8}[GMK]\s{1,12}(.{1,300})")
PATIENCE = 3  # consecutive non-finite norms before a report; the first steps of mixed-precision runs often have some


class Lines:
    """Splits a stream into lines and truncates lines that are too long."""

    def __init__(self) -> None:
        self.part, self.skipping = b"", False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the completed lines. A carriage return, as in progress bars, also ends a line."""
        *lines, rest = re.split(rb"[\r\n]", data)
        for line in lines:
            whole, self.part = self.part + line, b""
            if not self.skipping:
                yield whole
            self.skipping = False
        self.part = b"" if self.skipping else self.part + rest
        if len(self.part) > MAX_LINE:
            if not self.skipping:
                yield self.part[:MAX_LINE]
            self.part, self.skipping = b"", True


class LogReader:
    """Converts a job's output to rows of metrics. Only numbers are taken from the output."""

    def __init__(self) -> None:
        self.lines = Lines()
        self.total: int | None = None
        self.announced: int | None = None
        self.first_epoch = 1  # becomes 0 if epoch 0 appears
        self.epoch: float | None = None
        self.epochs: int | None = None
        self.heading: float | None = None  # the epoch in the last line that contains only an epoch
        self.bar: tuple[int, int] = (-1, 0)  # confidence that the bar shows training steps, and its maximum
        self.last_at, self.laps = 0, 0
        self.columns: list[str] = []
        self.epoch_columns = 0
        self.odd_norms = 0
        self.spent = 0.0

    def rest(self) -> None:
        """Start a new time budget."""
        self.spent = 0.0

    def feed(self, data: bytes) -> Iterator[dict[str, float]]:
        """Read more output and yield rows. Lines are skipped once the time budget is used up."""
        for line in self.lines.feed(data):
            if self.spent > BUDGET_S or not WORTH.search(line[:MAX_LINE]):
                continue
            begun = time.process_time()
            try:
                row = self.take(line[:MAX_LINE].decode("utf-8", "replace"))
            except (ArithmeticError, LookupError, ValueError):
                row = {}  # a job's output must never stop the supervisor
            self.spent += time.process_time() - begun
            if row:
                yield row

    def take(self, text: str) -> dict[str, float]:
        """Return the numbers in one line by name; empty if the line contains none."""
        announced = ANNOUNCED.search(text)
        if announced is not None:
            self.announced = int(announced.group(1).replace(",", ""))
            return {}
        head = COLUMNS.match(text)
        if head is not None:
            self.columns = head.group(1).lower().split()
            return {}
        heading = EPOCH_LINE.match(text)
        if heading is not None:
            self._enter_epoch(float(heading.group(1)), int(heading.group(2)))
            self.heading = self.epoch
            return {}
        cell = read_cell(text)
        if cell is not None:
            name = {"total_timesteps": "step", "loss": "loss", "learning_rate": "learning_rate"}.get(cell[0])
            return {name: cell[1]} if name else {}
        found = self.table_row(text) or self.epoch_row(text) or read_line(text)
        return self.row_of(found) if found is not None else {}

    def epoch_row(self, text: str) -> Reading | None:
        """Read a row under the header `epoch train_loss  valid_loss ...`, which notebooks print for each epoch."""
        words = text.split()[:16]
        if len(words) > 2 and words[0].lower() == "epoch" and words[1].lower() in ("train_loss", "loss"):
            self.epoch_columns = len(words)
            return None
        if not words or len(words) != self.epoch_columns or not words[0].isdigit():
            return None
        try:
            return Reading(epoch=float(words[0]), loss=float(words[1]))
        except ValueError:
            return None

    def table_row(self, text: str) -> Reading | None:
        """Read a row under the header `Epoch GPU_mem box_loss ...`. The losses in the row are summed."""
        cells = CELLS.match(text) if self.columns else None
        found = read_line(text) if cells is not None else None
        if cells is None or found is None:
            return None
        values = cells.group(3).split()[: len(self.columns)]
        named = ((self.columns[n], value) for n, value in enumerate(values))
        losses = [value for name, value in named if name.endswith("loss") or name in ("box", "obj", "cls")]
        try:
            loss: float | None = sum(map(float, losses)) if losses else None
        except ValueError:
            loss = None
        epoch, last = float(cells.group(1)), int(cells.group(2))
        count = last + (self.first_epoch == 0 or epoch == 0)  # epochs start at 0 or at 1
        return found._replace(loss=loss, epoch=epoch, epochs=count, trains=True)

    def row_of(self, found: Reading) -> dict[str, float]:
        """Convert a reading to a row of numbers by name. The step is counted from the start of the run."""
        if found.epoch is not None and (found.trains or found.loss is not None):
            self._enter_epoch(found.epoch, found.epochs)
        row: dict[str, float] = {}
        step = self.count_step(found)
        if step is not None:
            row["step"] = step
        if found.lr is not None and found.trains:
            row["learning_rate"] = found.lr
        if found.checked_loss is not None:
            row["val_loss"] = found.checked_loss
        early = found.bar and found.at is not None and found.at[0] == 0  # a bar may show NaN before its first step
        if found.loss is not None and (_finite(found.loss) or not early):
            row["loss"] = found.loss
        if found.grad_norm is not None:
            self.odd_norms = 0 if _finite(found.grad_norm) else self.odd_norms + 1
            if self.odd_norms in (0, PATIENCE) or found.loss == 0.0:
                row["grad_norm"] = found.grad_norm
        return row

    def _enter_epoch(self, epoch: float, epochs: int | None) -> None:
        if not epoch.is_integer():
            return  # a fractional epoch, or NaN
        if epoch == 0:
            self.first_epoch = 0
        if epochs is not None:
            self.epochs = epochs
        self.epoch = epoch

    def count_step(self, found: Reading) -> int | None:
        """Return the step counted from the start of the run, and update the total."""
        if found.step is not None and found.trains:
            # If a step has a total, it may be the step within an epoch.
            if found.total is not None and self.epochs is not None and found.epoch is not None:
                self.total = self._all_epochs(found.total)
                return int(found.epoch - self.first_epoch) * found.total + found.step
            self.total = found.total or self.announced or self.total
            return found.step
        if found.at is None or not found.trains:
            return None
        here, end = found.at
        if found.bar and not self.is_the_bar(found, end):
            return None
        if found.loss is None and not found.bar and found.lr is None and found.epoch is None:
            return None
        epoch = None if found.whole else self.heading if found.epoch is None else found.epoch
        if epoch is not None and epoch.is_integer():
            self.total = self._all_epochs(end)
            return int(epoch - self.first_epoch) * end + here
        if here < self.last_at and end > 1:
            self.laps += 1
        self.last_at = here
        self.total = self.announced or (None if self.laps else end)
        return self.laps * end + here

    def _all_epochs(self, each: int) -> int | None:
        """Return the total number of steps in the run; None if unknown. Some trainers count epochs from 0."""
        if self.announced:
            return self.announced
        if self.epochs is None:
            return None
        return (self.epochs + (self.epoch == self.epochs and self.first_epoch == 0)) * each

    def is_the_bar(self, found: Reading, end: int) -> bool:
        """Return whether a progress bar shows training steps.

        Bars with a loss are preferred, then bars with an epoch or the announced total, then the first bar.
        """
        sure = 2 if found.loss is not None else 1 if found.epoch is not None or end == self.announced else 0
        if sure > self.bar[0] or (sure == 2 and end != self.bar[1]):
            self.bar = (sure, end)
        return end == self.bar[1]


def _finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")
