"""Does nothing and says nothing. It must pass no case."""

from __future__ import annotations

from evals.cases import Case
from evals.recorder import Recorder


def play(case: Case, recorder: Recorder) -> None:
    """Nothing."""
