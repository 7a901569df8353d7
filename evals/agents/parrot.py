"""A scripted agent that sends the messages of a good agent but makes no calls. It must not pass any case."""

from __future__ import annotations

from evals.harness.recorder import Recorder
from evals.scoring.cases import Case
from evals.selftest.reference_transcript import reference


def play(case: Case, recorder: Recorder) -> None:
    """Send the reference transcript's messages."""
    for say in reference(case).transcript().says:
        if say.role == "assistant":
            recorder.say(say.text)
