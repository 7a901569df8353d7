"""The kit restarts a Ray head once if its raylet gave up on a slow agent, and in no other case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ray_kit import Head

SLOW = (
    "[2026-11-22 11:20:31,114 C 811 811] (raylet) node_manager.cc:3557:  An unexpected system state has occurred.\n"
    "Check failed: _s.ok() Bad status: TimedOut: Timed out waiting for file /tmp/r/session_1/{}_0a\n"
)
BROKEN = "[2026-11-22 11:20:31,114 C 811 811] (raylet) plasma.cc:12:  Check failed: fd >= 0 no space left on device\n"


class Played(Head):
    """A head whose raylets end with the given messages in turn; with an empty message, it runs the first job."""

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        super().__init__(folder)
        self.words, self.starts = list(words), 0

    def _launch(self) -> None:
        assert not (self.folder / "ray").exists(), "what an earlier start left confuses the next one"
        self.starts += 1
        logs = self.folder / "ray" / "session_latest" / "logs"
        logs.mkdir(parents=True)
        (logs / "raylet.err").write_text(self.words[self.starts - 1])

    def _ready(self) -> bool:
        return not self.words[self.starts - 1]


@pytest.mark.slow
@pytest.mark.parametrize("port", ["metrics_agent_port", "metrics_export_port", "runtime_env_agent_port"])
def test_a_head_whose_raylet_gave_up_on_an_agent_restarts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], port: str
) -> None:
    head = Played(tmp_path, [SLOW.format(port), ""])
    try:
        assert head.start().starts == 2
    finally:
        head.stop()
    assert SLOW.format(port) in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("words", "starts"), [([SLOW.format("metrics_agent_port")] * 2, 2), ([BROKEN], 1)])
def test_a_repeated_or_other_failure_reports_the_raylets_message(tmp_path: Path, words: list[str], starts: int) -> None:
    head = Played(tmp_path, words)
    try:
        with pytest.raises(pytest.fail.Exception) as failed:
            head.start()
    finally:
        head.stop()
    assert head.starts == starts and words[-1].strip() in str(failed.value)
