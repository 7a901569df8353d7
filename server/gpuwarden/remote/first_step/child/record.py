"""Record one rehearsal: the stages it reached and the substitutes it used."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List, Optional, Set, Tuple

MOST = 40
FEW_LAYERS = 128
"""In a config, a number above this value is a width; a smaller one may also be a count of layers, heads or experts."""
_STAGES = ("import", "arguments", "data", "model", "trainer", "step", "save", "resume", "end")


class Stopped(BaseException):
    """The rehearsal can't continue, because of a substitute or the time limit.

    Not an `Exception`, because libraries would handle an `Exception` like a network failure.
    """


class Enough(BaseException):
    """A training loop of unknown length has completed enough steps."""


class Record:
    """The state of one rehearsal."""

    def __init__(self, order: Dict[str, Any]) -> None:
        self.order = order
        self.reached: List[str] = []
        self.substitutes: Dict[str, str] = {}
        self.made_up: List[str] = []
        self.steps = 0
        self.pushed: List[str] = []
        self.resumed: Optional[bool] = None
        self.usage = ""
        self.caught: Optional[Exception] = None
        self.unfit = ""
        self.frozen = False
        self.unsaved: Optional[str] = None
        self.sizes: Set[Tuple[int, int]] = set()
        self.numbers: Set[int] = set()
        self.wants: List[Tuple[str, str]] = []

    def at(self, stage: str) -> None:
        """Record that a stage has been reached."""
        assert stage in _STAGES
        if stage not in self.reached:
            self.reached.append(stage)

    def replaced(self, what: str, by: str, *, made_up: bool = False) -> None:
        """Record a substitute. A `made_up` substitute is not equivalent to the original and may cause later errors."""
        if len(self.substitutes) < MOST:
            self.substitutes.setdefault(what, by)
        if made_up and what not in self.made_up:
            self.made_up.append(what)

    def counts_on_sizes(self, words: str) -> bool:
        """Return whether a number in the script fits only the real model and may have caused the error message `words`.

        Such a number is the index of a layer or head that the small model does not have, or the real width times 1, 2,
        1/2 or 1/4.
        """
        if not any(what.startswith("model ") for what in self.substitutes):
            return False
        widths = {of for _, real in self.sizes for of in (real, real * 2, real // 2, real // 4) if real > FEW_LAYERS}
        left_out = {n for small, real in self.sizes if real <= FEW_LAYERS for n in range(small, real)}
        return bool(self.numbers & (left_out if "index" in words or "out of range" in words else widths))

    def want(self, kind: str, name: str) -> Stopped:
        """Record a repo that the parent did not download, and return the exception to raise."""
        self.wants.append((kind, name))
        return Stopped(f"the {kind} {name} was not downloaded for the rehearsal")

    def supply(self, kind: str, name: str) -> Optional[Dict[str, Any]]:
        """Return the data that the parent downloaded from a repo; None if the parent downloaded nothing."""
        found: Optional[Dict[str, Any]] = self.order.get(kind, {}).get(name)
        return found


def model_files(work: str) -> List[str]:
    """List the files in the script's working folder, largest first. The number of files examined is limited."""
    found: List[Tuple[int, str]] = []
    for folder, folders, files in os.walk(work):
        folders[:] = sorted(f for f in folders if not f.startswith("."))[:200]
        for name in files[:500]:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                found.append((os.path.getsize(path), os.path.relpath(path, work)))
        if len(found) > 5_000:
            break
    return [name for _, name in sorted(found, reverse=True)]


def write(path: str, outcome: Dict[str, Any]) -> None:
    """Write the outcome atomically, for the parent process."""
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(outcome, file)
    os.replace(path + ".part", path)
