"""A scripted agent that makes no calls and sends no messages. It must not pass any case."""

from __future__ import annotations

from evals.harness.recorder import Recorder
from evals.scoring.cases import Case


def play(case: Case, recorder: Recorder) -> None:
    """Do nothing."""
