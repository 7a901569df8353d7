"""The one exception of this package: something a maintainer wrote can't be used, and what to do about it."""

from __future__ import annotations


class EvalError(Exception):
    """A case, world, witness, run or option that can't be used. `remedy` says what to do next.

    It is never raised for what an agent did or what a transcript contains: those are problems of a trial.
    """

    def __init__(self, message: str, remedy: str, *, file: object = None, line: int | None = None) -> None:
        where = "" if file is None else f"{file}:{line}: " if line else f"{file}: "
        super().__init__(f"{where}{message}. {remedy}")
        self.message, self.remedy = message, remedy
