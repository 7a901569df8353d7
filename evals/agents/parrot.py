"""A scripted agent that sends the messages of a good agent but makes no calls. It must not pass any case."""

from __future__ import annotations

from evals.harness.recorder import Recorder
from evals.scoring.cases import Case
from evals.selftest.witness import witness


def play(case: Case, recorder: Recorder) -> None:
    """Send the witness's messages."""
    for say in witness(case).transcript().says:
        if say.role == "assistant":
            recorder.say(say.text)
