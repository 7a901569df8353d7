"""Read a run's failure from its log: its location, the progress before it, and errors from which the run recovered.

Only the failure is matched against the reference entries, so each line gets a `Weight`: an exception that ended the run
has the highest weight, a warning counts only if there is no error, and an error after which training continued does not
count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum, StrEnum
from functools import cached_property

from gpuwarden.core.models import Frozen
from gpuwarden.knowledge import failure_marks as marks
from gpuwarden.knowledge.evidence import versions
from gpuwarden.knowledge.log_lines import LogLine, read_lines, step_of
from gpuwarden.knowledge.tracebacks import RaisedException, exceptions

CONTINUED = 2
"""A run counts as continued if at least this many different steps follow an error."""
MANY_STEPS = 8
LONG = 100
"""Text with at least this many lines and several steps counts as a log, even if printed samples contain questions."""
VERY_LONG = 400
"""In text with at least this many lines, two steps are enough, because model outputs fill the lines between them."""
LAST = 6
"""The number of lines that count as the end of a log, where a run reports why it ended."""
MAX_DEVICE_LINES = 8
MAX_RECOVERED = 20
MAX_CALLERS = 6
_FILE = re.compile(r"\s*File \"")


class Weight(IntEnum):
    """The relevance of a log line to the end of the run."""

    RECOVERED = 0
    PLAIN = 1
    SAID = 2
    HARD = 3
    RAISED = 4


class Outcome(StrEnum):
    """A run's outcome, judging by its log and exit code."""

    FAILED = "failed"
    SUCCEEDED = "succeeded"
    RUNNING = "running"
    UNKNOWN = "unknown"


class MissingName(Frozen):
    """A name that a library's installed release lacks. The release tables are searched for it.

    `callers` lists the calls in the traceback's source lines, innermost first. They are needed because the messages of
    Python 3.9 and older do not name the class. `partial` means that the module was only partly imported, because of a
    circular import or a local file with the same name.
    """

    kind: str
    owner: str
    name: str
    callers: tuple[str, ...] = ()
    partial: bool = False


class Line(Frozen):
    """A log line with its number, starting at 1."""

    number: int
    text: str


class ExceptionRead(Frozen):
    """A summary of one exception. `frame` is its innermost call outside Python's standard library."""

    type: str
    message: str
    line: int
    rank: str = ""
    frame: str = ""
    package: str = ""
    version: str = ""


class Failure(Frozen):
    """A run's outcome, judging by its log, with the evidence."""

    outcome: Outcome
    exception: ExceptionRead | None = None
    chain: tuple[ExceptionRead, ...] = ()
    gone: MissingName | None = None
    progress: Line | None = None
    exit_code: int | None = None
    signal: str = ""
    device: tuple[Line, ...] = ()
    recovered: tuple[ExceptionRead, ...] = ()
    ranks: int = 0
    is_log: bool = True
    versions: tuple[str, ...] = ()
    """Releases named in the log, as `package version`."""

    @property
    def query(self) -> str:
        """Return the text to search for on the web or in issues: the exception, or else the first device error, or an
        empty string.
        """
        if self.exception is None:
            return self.device[0].text[:200] if self.device else ""
        where = f" {self.exception.package}" if self.exception.package else ""
        return f"{self.exception.type}: {self.exception.message}"[:200].strip(" :") + where


class Reading:
    """A log, its failure, and the weight of each of its lines."""

    def __init__(self, log: str, exit_code: int | None = None) -> None:
        self.lines = read_lines(log)
        self._weights: dict[int, Weight] = {}
        self._until: dict[str, int] = {}
        self._steps = [(at, line.rank, step) for at, line in enumerate(self.lines) if (step := step_of(line))]
        self._ended = [at for at, line in enumerate(self.lines) if marks.ENDED.search(line.text)]
        self.raised = exceptions(self.lines)
        self._at = {line.number: at for at, line in reversed(list(enumerate(self.lines)))}
        self.fatal = [one for one in self.raised if not self._went_on(self._at[one.at], one.rank, ignored=one.ignored)]
        self._fatal = frozenset(self.fatal)
        own = [one for one in self.fatal if one.name not in marks.FOLLOWS]
        self.primary = next(iter(own or self.fatal), None)
        """The exception that ended the run: the first one that is not a consequence of another."""
        self._hard = [
            at
            for at, line in enumerate(self.lines)
            if marks.HARD.search(line.text)
            and not marks.WARNS.search(line.text)
            and not marks.NOISE.search(line.text)
            and not self._went_on(at, line.rank)
        ]
        self.failure = self._failure(log, exit_code)
        self.joined = {one.at: one.text for last in self.fatal for one in last.chain}
        """The complete exceptions, keyed by the number of the line with the type. Terminals may wrap their messages."""

    def weight(self, at: int) -> Weight:
        """Return the weight of a line, given its index in `lines`."""
        if not self._weights:
            self._weigh()
        known = self._weights.get(at)
        if known is not None:
            return known
        text = self.lines[at].text
        if marks.WARNS.search(text) or marks.NOISE.search(text):
            return Weight.PLAIN
        if marks.HARD.search(text):
            return Weight.RECOVERED if self._went_on(at, self.lines[at].rank) else Weight.HARD
        if step_of(self.lines[at]):
            return Weight.HARD if self.odd and marks.ODD.search(text) else Weight.PLAIN
        return Weight.SAID if marks.SAID.search(text) else Weight.PLAIN

    @property
    def last_words(self) -> tuple[str, ...]:
        """Return the errors reported in the last lines."""
        end = range(max(0, len(self.lines) - LAST), len(self.lines))
        texts = (self.lines[at].text for at in end if self.weight(at) >= Weight.SAID)
        return tuple(text[:400] for text in texts if marks.BLAMES.search(text) and not marks.HARMLESS.search(text))

    @property
    def source(self) -> str:
        """Return the source line that raised the exception, if the log shows it. An assertion without a message can be
        recognized only by this line.
        """
        if self.primary is None:
            return ""
        above = (
            line.body for line in reversed(self.lines[: self._at[self.primary.at]]) if line.rank == self.primary.rank
        )
        found = next((body for body in above if body.strip(" ^~")), "")
        return found.strip()[:400] if found[:1].isspace() and not _FILE.match(found) else ""

    @cached_property
    def odd(self) -> bool:
        """Return whether the last step or an evaluation reports a metric value that indicates a broken run."""
        texts = [self.lines[at].text for at, _, _ in self._steps]
        return any(map(marks.ODD.search, texts[-1:])) or any(map(marks.ODD_EVALUATION.search, texts))

    @property
    def shaped(self) -> bool:
        """Return whether most of the first lines look like log lines. If so, even a short text counts as a log."""
        few = self.lines[:40]
        return len(few) > 1 and 2 * sum(marks.SHAPED.match(line.text) is not None for line in few) > len(few)

    def _weigh(self) -> None:
        """Set the weights of exception lines and, if the run continued after an exception, of its traceback."""
        self._weights[-1] = Weight.PLAIN
        rank = self.primary.rank if self.primary else ""
        for last in self.raised:
            for one in last.chain:
                if last not in self._fatal:
                    between = range(self._at[one.first], self._at[one.last] + 1)
                    self._weights |= {at: Weight.RECOVERED for at in between if self.lines[at].rank == one.rank}
                    continue
                follows = (one.name in marks.FOLLOWS and last is not self.primary) or last.rank != rank
                weight = Weight.HARD if follows else Weight.RAISED
                self._weights |= {self._at[line.number]: weight for line in one.lines}

    def _went_on(self, at: int, rank: str, *, ignored: bool = False) -> bool:
        """Return whether the run continued after a line: its rank completed more steps, or the run succeeded later."""
        if rank not in self._until:
            steps: set[str] = set()
            self._until[rank] = -1
            for place, other, step in reversed(self._steps):
                steps.add(step if not rank or not other or other == rank else "")
                if len(steps - {""}) >= CONTINUED:
                    self._until[rank] = place
                    break
        return ignored or at < self._until[rank] or at < max(self._ended, default=-1)

    def _failure(self, log: str, exit_code: int | None) -> Failure:
        code, signal = exit_code, ""
        for line in self.lines[-200:]:
            if exit_code is None and (found := marks.EXIT_CODE.search(line.text)):
                code = int(found["code"])
            if found := marks.SIGNAL.search(line.text):
                signal = found["name"]
        if code is not None and not signal and (number := -code if code < 0 else code - 128) in marks.SIGNALS:
            signal = marks.SIGNALS[number]
        known = dict(entry.rsplit(" ", 1) for entry in versions(log[-200_000:]))
        chain = self.primary.chain if self.primary else ()
        steps = [at for at, _, _ in self._steps if self.primary is None or at < self._at[self.primary.first]]
        device = [self.lines[at] for at in self._hard if marks.DEVICE.search(self.lines[at].text)]
        steps_of_a_log = CONTINUED if len(self.lines) >= VERY_LONG else MANY_STEPS
        long = len(self._steps) >= steps_of_a_log and len(self.lines) >= LONG
        continued = len(self._steps) >= CONTINUED and self.shaped
        return Failure(
            outcome=self._outcome(code),
            exception=_short(self.primary, known) if self.primary else None,
            chain=tuple(_short(one, known) for one in chain[:-1]),
            gone=next(filter(None, (self._gone(one) for one in reversed(chain))), None),
            progress=_kept(self.lines[steps[-1]]) if steps else None,
            exit_code=code,
            signal=signal,
            device=tuple(_kept(line) for line in {line.text: line for line in device}.values())[:MAX_DEVICE_LINES],
            recovered=tuple(_short(one, known) for one in self.raised if one not in self._fatal)[:MAX_RECOVERED],
            ranks=len({line.rank for line in self.lines if line.rank}),
            is_log=long or not _is_report(self.lines[: 3 if continued else 60]),
            versions=tuple(f"{name} {number}" for name, number in known.items()),
        )

    def _gone(self, raised: RaisedException) -> MissingName | None:
        """Return the name that an exception reports as missing, with the calls in its traceback's source lines."""
        found = missing_name(raised.message)
        if found is None:
            return None
        source = [line.body for line in self.lines[self._at[raised.first] : self._at[raised.at]]]
        called = [match[1] for text in reversed(source) for match in reversed(list(marks.CALLED.finditer(text)))]
        partial = "partially initialized" in raised.message
        return found.model_copy(update={"callers": tuple(dict.fromkeys(called))[:MAX_CALLERS], "partial": partial})

    def _outcome(self, code: int | None) -> Outcome:
        if code:
            return Outcome.FAILED
        if code == 0:
            return Outcome.SUCCEEDED
        if self.fatal or self._hard:
            return Outcome.FAILED
        if self.odd:
            return Outcome.UNKNOWN
        if self._ended:
            return Outcome.SUCCEEDED
        different = {step for _, _, step in self._steps}
        return Outcome.RUNNING if len(different) >= CONTINUED else Outcome.UNKNOWN


def missing_name(message: str) -> MissingName | None:
    """Return the attribute, keyword or name that an exception's message reports as missing."""
    for kind, shape in marks.GONE:
        if found := shape.search(message):
            return MissingName(kind=kind, owner=found["owner"], name=found["name"])
    return None


def read_failure(log: str, exit_code: int | None = None) -> Failure:
    """Return a run's outcome, judging by its log and exit code."""
    return Reading(log, exit_code).failure


def _is_report(lines: Sequence[LogLine]) -> bool:
    """Return whether the text is a user's report, that is, has sentences in the first person or a question."""
    for line in lines:
        text = line.text
        if (
            not step_of(line)
            and not marks.WARNS.search(text)
            and not marks.HARD.search(text)
            and not marks.LOGGED.match(text)
            and marks.REPORT.search(text[:400])
        ):
            return True
    return False


def _kept(line: LogLine) -> Line:
    return Line(number=line.number, text=line.text[:400])


def _short(raised: RaisedException, known: dict[str, str]) -> ExceptionRead:
    frame = raised.innermost
    package = frame.package if frame else ""
    return ExceptionRead(
        type=raised.type,
        message=raised.message[:1_000],
        line=raised.at,
        rank=raised.rank,
        frame=f"{frame.path}:{frame.line} in {frame.function}" if frame else "",
        package=package,
        version=known.get(package.lower().replace("_", "-"), "") if package else "",
    )
