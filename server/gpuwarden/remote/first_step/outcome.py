"""The outcome of a rehearsal, as reported by the child process.

The report is untrusted, because the script runs in that process.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from gpuwarden.core.models import Frozen

Ended = Literal["passed", "fault", "stopped"]
"""`fault`: the script has an error.

`stopped`: the rehearsal ended because of a substitute, a limit, or something that this machine lacks.
"""
Text = Annotated[str, Field(max_length=2_000)]
Name = Annotated[str, Field(max_length=500)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]


class Outcome(Frozen):
    """The result of one rehearsal. `certain` is true if the error does not depend on a substitute. `why` is the reason
    for a stop.

    `line` and `text` are the number and content of the script line that caused the error, or 0 and "" if unknown.
    `reached` lists the stages that the script reached, out of import, arguments, data, model, trainer, step, save,
    resume and end.
    """

    model_config = ConfigDict(extra="ignore")

    outcome: Ended
    certain: bool = False
    why: Text = ""
    message: Text = ""
    line: Count = 0
    text: Name = ""
    reached: tuple[Name, ...] = Field(default=(), max_length=20)
    substitutes: dict[Name, Name] = Field(default={}, max_length=64)
    steps: Count = 0
    resumed: bool | None = None
    pushed: tuple[Name, ...] = Field(default=(), max_length=20)
    files: tuple[Annotated[str, Field(max_length=4_096)], ...] = Field(default=(), max_length=200)
    wants: tuple[tuple[Name, Name], ...] = Field(default=(), max_length=8)
    seconds: float = 0.0
    cpu_s: float = 0.0
    peak_mb: float = 0.0
    log: str = ""


def stopped(why: str, log: str = "") -> Outcome:
    """Return the outcome of a rehearsal that ended without a report."""
    return Outcome(outcome="stopped", why=why, log=log)
