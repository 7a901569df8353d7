"""Play an agent that says what a good one would say, without a single call. It must pass no case."""

from __future__ import annotations

from evals.harness.recorder import Recorder
from evals.scoring.cases import Case
from evals.selftest.witness import witness


def play(case: Case, recorder: Recorder) -> None:
    """Say the witness's words."""
    for say in witness(case).transcript().says:
        if say.role == "assistant":
            recorder.say(say.text)
