"""Play an agent that does nothing and says nothing. It must pass no case."""

from __future__ import annotations

from evals.harness.recorder import Recorder
from evals.scoring.cases import Case


def play(case: Case, recorder: Recorder) -> None:
    """Do nothing."""
