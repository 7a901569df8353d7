"""Derive a verdict from evidence. Standard library only, because the module is copied to machines.

- *refuted* requires positive evidence: damage, a contradiction between parts, or a name that is known to run code.
- *unknown* means that something was not understood or not checked; the causes name the missing evidence.
- *proven* means that everything was read, and that loading the file can't call anything outside the allow-list.

A cause is an enum member. The sentences about a cause are for readers; no code depends on their wording.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Iterable, List, Tuple  # noqa: UP035  (evaluated on Python 3.8)


class Cause(str, Enum):  # noqa: UP042
    """The reasons why a file or folder is not proven, most serious first. The first five refute the file or folder."""

    __str__ = str.__str__

    RUNS_CODE = "runs_code"
    DAMAGE = "damage"
    CONTRADICTION = "contradiction"
    """Two parts disagree: two readers would read different content, or files in one folder do not belong together."""
    NOT_FINITE = "not_finite"
    NO_RESUME = "no_resume"
    """The checkpoint is undamaged, but a part that is needed to resume is missing or does not match."""

    NEEDS_CODE = "needs_code"
    """Loading the file calls code that is not on the allow-list, so the file can't be shown to be harmless."""
    UNREAD = "unread"
    """No reader in this version understands the file completely."""
    LIMIT = "limit"
    """The file exceeds a limit on time, memory or size."""
    UNSEALED = "unsealed"
    """No digest of the file was recorded for comparison."""
    CHANGING = "changing"
    """The file changed while it was being read, or it could not be opened."""
    NOT_LOADED = "not_loaded"
    """The library that loads the file's format is missing or rejects the file."""

    @property
    def refutes(self) -> bool:
        """Return whether the cause refutes a file instead of leaving it unknown."""
        return self in _REFUTES


_REFUTES = frozenset({Cause.RUNS_CODE, Cause.DAMAGE, Cause.CONTRADICTION, Cause.NOT_FINITE, Cause.NO_RESUME})
_ORDER = {cause: place for place, cause in enumerate(Cause)}


def gravest_first(causes: Iterable[Cause]) -> Tuple[Cause, ...]:  # noqa: UP006
    """Return each cause once, most serious first."""
    return tuple(sorted(set(causes), key=_ORDER.__getitem__))


def verdict(causes: Iterable[Cause]) -> str:
    """Return proven, refuted or unknown, as in `models.Verdict`."""
    first = next(iter(gravest_first(causes)), None)
    return "proven" if first is None else "refuted" if first.refutes else "unknown"


def known(texts: Iterable[Any]) -> List[Cause]:  # noqa: UP006
    """Parse the causes that another machine reports. Causes that this version does not know are omitted."""
    by_text = {str(cause): cause for cause in Cause}
    return [by_text[t] for t in texts if isinstance(t, str) and t in by_text]


class Evidence:
    """Findings about a file or folder: `problems` refute it, `doubts` leave it unknown, and `causes` classify both.

    If a plug-in adds a problem or doubt without a cause, a default cause applies: the first in `usual` for a problem,
    the second for a doubt.
    """

    problems: List[str]  # noqa: UP006
    doubts: List[str]  # noqa: UP006
    causes: List[Cause]  # noqa: UP006
    usual = (Cause.DAMAGE, Cause.UNREAD)

    def refute(self, why: str, cause: Cause = Cause.DAMAGE) -> None:
        """Add a problem, which is positive evidence. Raises ValueError for a cause that does not refute."""
        if not cause.refutes:
            raise ValueError(f"the cause {cause} is not a refutation")
        self.problems.append(why)
        self.causes.append(cause)

    def doubt(self, why: str, cause: Cause = Cause.UNREAD) -> None:
        """Add a doubt: a part that was not understood or not checked. Raises ValueError for a cause that refutes."""
        if cause.refutes:
            raise ValueError(f"the cause {cause} is a refutation and can't be recorded as a doubt")
        self.doubts.append(why)
        self.causes.append(cause)

    def adopt(self, other: Evidence) -> None:
        """Add the problems and doubts from another check of the same file or folder."""
        self.problems += other.problems
        self.doubts += other.doubts
        self.causes += other.why

    @property
    def why(self) -> Tuple[Cause, ...]:  # noqa: UP006
        """Return the causes, most serious first. A problem or doubt without a cause gets the default cause."""
        refuting, doubting = self.usual
        found = list(self.causes)
        if self.problems and not any(c.refutes for c in found):
            found.append(refuting)
        if self.doubts and all(c.refutes for c in found):
            found.append(doubting)
        return gravest_first(found)

    @property
    def verdict(self) -> str:
        """Return the overall verdict, which the most serious cause determines."""
        return verdict(self.why)
