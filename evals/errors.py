"""The only exception of this package, for invalid input from a maintainer."""

from __future__ import annotations


class EvalError(Exception):
    """A case, world, witness, run or option that can't be used. `remedy` is the next step.

    It is never raised for the acts of an agent or the content of a transcript: those are problems of a trial.
    """

    def __init__(self, message: str, remedy: str, *, file: object = None, line: int | None = None) -> None:
        where = "" if file is None else f"{file}:{line}: " if line else f"{file}: "
        super().__init__(f"{where}{message}. {remedy}")
        self.message, self.remedy = message, remedy
