"""Define the package's only exception, for invalid input from a maintainer."""

from __future__ import annotations


class EvalError(Exception):
    """Raised if a case, scenario, reference transcript, run or option can't be used. `remedy` is the next step.

    Never raised for an agent's actions or a transcript's content, because they affect only one trial.
    """

    def __init__(self, message: str, remedy: str, *, file: object = None, line: int | None = None) -> None:
        where = "" if file is None else f"{file}:{line}: " if line else f"{file}: "
        super().__init__(f"{where}{message}. {remedy}")
        self.message, self.remedy = message, remedy
