"""Healthy files from real libraries, in hundreds of configurations: none is refuted, and few remain unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwarden.core.models import Level, Verdict
from healthy import configurations, measure

pytestmark = [pytest.mark.prove, pytest.mark.filterwarnings("ignore")]
LEAST, MOST_UNKNOWN = 120, 0.02


@pytest.mark.long
def test_no_healthy_file_is_refuted_at_any_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third of the configurations that was held out while verdicts were corrected has to meet the same limits."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    written, failed = measure.write(tmp_path, configurations())
    # A library may be missing, but an installed one must write its files.
    excused = ("needs ", "torch can't read it back")
    assert not {name: why for name, why in failed.items() if not why.startswith(excused)}
    if len(written) < LEAST:
        pytest.skip(f"only {len(written)} configurations could be written: {sorted(set(failed.values()))}")
    found = {}
    for level in Level:
        if level is not Level.RESUME:
            found = measure.examine_all(tmp_path, written, level)
        for unseen in (False, True):
            part = [one for one in written if one.unseen is unseen]
            got = measure.tally(tmp_path, part, found, level)
            with capsys.disabled():
                print(f"\n{measure.line(level, part, got)}", end="")
            assert not got.verdicts[Verdict.REFUTED] and not got.whole[Verdict.REFUTED], got.lines
            assert got.unknown_share <= MOST_UNKNOWN, got.lines
