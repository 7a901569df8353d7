"""Register the kinds of checks. Each kind is a small function that takes a trial and a spec.

Each kind and its keys are defined in a module `check_<topic>.py`, which is found by its name. Add a kind only if a real
task needs it; twelve kinds have been enough so far.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Final

from evals.scoring.endstate import EndState
from evals.scoring.matching import Env, call_faults, faults, match_call, regex_faults
from evals.transcripts.canonical import Call, Transcript

MAX_WORK: Final = 200_000
"""Maximum number of candidate assignments that one check tries, so that ten thousand equal calls do not hang the
scorer."""


@dataclass(frozen=True)
class Check:
    """One check of a case. `redundant` is the reason to keep a check although another one kills the same mutants."""

    id: str
    kind: str
    spec: dict[str, Any]
    veto: bool = False
    may_skip: bool = False
    redundant: str = ""
    invariant: bool = False


class Status(StrEnum):
    """The status of a check. NOT_EXERCISED: the situation that it checks did not occur."""

    PASS = "pass"  # noqa: S105
    FAIL = "fail"
    NOT_EXERCISED = "not_exercised"


@dataclass(frozen=True)
class Outcome:
    """A check's outcome and its reason. `act`: the check failed because of an action, not an omission."""

    status: Status
    why: str = ""
    act: bool = False
    seqs: tuple[int, ...] = ()


PASS: Final = Outcome(Status.PASS)


def fail(why: str, *, act: bool = False, seqs: tuple[int, ...] = ()) -> Outcome:
    """Return a failing outcome."""
    return Outcome(Status.FAIL, why, act, seqs)


def not_exercised(why: str) -> Outcome:
    """Return the outcome for a check if the situation that it checks did not occur."""
    return Outcome(Status.NOT_EXERCISED, why)


@dataclass(frozen=True)
class Trial:
    """The input of checks."""

    transcript: Transcript
    end: EndState

    @property
    def env(self) -> Env:
        """Return the scenario's facts, which are the initial bindings of every pattern."""
        return self.end.facts


Run = Callable[[dict[str, Any], Trial], Outcome]


@dataclass(frozen=True)
class Kind:
    """One kind of check: its function, and for each key the function that validates the value when a case is loaded."""

    name: str
    run: Run
    needs: dict[str, Callable[[Any], Iterator[str]]]
    takes: dict[str, Callable[[Any], Iterator[str]]]

    def faults(self, spec: dict[str, Any]) -> Iterator[str]:
        """Describe the errors in a spec."""
        for key in self.needs.keys() - spec.keys():
            yield f"a check of the kind {self.name} needs {key!r}"
        for key, value in spec.items():
            form = self.needs.get(key) or self.takes.get(key)
            if form is None:
                yield f"a check of the kind {self.name} can't have the key {key!r}"
            else:
                yield from (f"{key}: {fault}" for fault in form(value))


KINDS: Final[dict[str, Kind]] = {}


def kind(name: str, needs: dict[str, Any], takes: dict[str, Any] | None = None) -> Callable[[Run], Run]:
    """Register a kind of check. `needs` and `takes` contain the validators of its required and its optional keys."""

    def wrap(run: Run) -> Run:
        KINDS[name] = Kind(name, run, needs, takes or {})
        return run

    return wrap


@cache
def load_kinds() -> dict[str, Kind]:
    """Import every file `check_*.py` in this folder and return all kinds."""
    for path in sorted(Path(__file__).parent.glob("check_*.py")):
        importlib.import_module(f"evals.scoring.{path.stem}")
    return KINDS


def run_check(check: Check, trial: Trial) -> Outcome:
    """Run one check of a case on a trial."""
    return load_kinds()[check.kind].run(check.spec, trial)


# ------------------------------------------------------------------------------------------ validators of spec keys


def a_call(value: Any) -> Iterator[str]:
    """Yield the errors in a call pattern."""
    return call_faults(value)


def calls(value: Any) -> Iterator[str]:
    """Yield the errors in a list of call patterns, which may not be empty."""
    if not isinstance(value, list) or not value:
        yield "should be a list of call patterns"
        return
    for pattern in value:
        yield from call_faults(pattern)


def a_pattern(value: Any) -> Iterator[str]:
    """Yield the errors in an object pattern."""
    if not isinstance(value, dict) or not value:
        yield "should be a non-empty object pattern"
    yield from faults(value)


def a_regex(value: Any) -> Iterator[str]:
    """Yield the errors in a regular expression."""
    return regex_faults(value)


def a_number(value: Any) -> Iterator[str]:
    """Yield an error unless the value is a non-negative number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        yield f"should be a non-negative number, not {value!r}"


def a_text(value: Any) -> Iterator[str]:
    """Yield an error unless the value is a non-empty string."""
    if not isinstance(value, str) or not value:
        yield "should be text"


def a_flag(value: Any) -> Iterator[str]:
    """Yield an error unless the value is true or false."""
    if not isinstance(value, bool):
        yield "should be true or false"


def anything(value: Any) -> Iterator[str]:
    """Accept any value, because the kind of check validates it."""
    return iter(())


# ------------------------------------------------------------------------------------------------------- searching


def found(trial: Trial, pattern: dict[str, Any], env: Env, *, ok: bool | None = None) -> Iterator[tuple[Call, Env]]:
    """Yield every call that matches a pattern, with its bindings, in call order."""
    for call in trial.transcript.calls:
        bound = match_call(pattern, call, env, ok=ok)
        if bound is not None:
            yield call, bound
