"""The metrics that a job writes, and how they are reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner_kit import call, ended, sh, until


@pytest.mark.slow
def test_valid_metrics_are_kept_and_invalid_lines_skipped(folder: Path) -> None:
    lines = [
        '{"step": 1, "loss": 2.0}', "no json", "[1]", '{"step": 2, "loss": NaN}', '{"step": 3, "loss": Infinity}',
        '{"step": 4, "loss": 1.0, "big": 1' + "0" * 400 + "}", "[" * 5000, "x" * 200_000, '{"step": true, "name": "a"}',
        '{"step": 5, "acc": "nan", "lr": 0.1}',
    ]  # fmt: skip
    (folder / "lines").write_text("\n".join(lines) + "\n")
    call("start", folder, sh('cat ../lines >> "$GPUWARDEN_METRICS"; sleep 0.4'))
    seen = ended(folder)
    assert (seen["state"], seen["step"], seen["metrics"]) == ("succeeded", 5, {"loss": 1.0, "lr": 0.1})
    alerts = [json.loads(line) for line in (folder / "alerts.jsonl").read_text().splitlines()]
    assert [(a["kind"], a["text"].split()[0]) for a in alerts] == [("nonfinite", n) for n in ("loss", "big", "acc")]
    assert seen["alerts"] == 3


@pytest.mark.slow
def test_a_stall_is_reported_once(folder: Path) -> None:
    text = 'echo \'{"step": 7}\' >> "$GPUWARDEN_METRICS"; until [ -e ../go ]; do sleep 0.05; done; sleep 1'
    call("start", folder, sh(text, stall_s=0.4))
    until(folder, lambda s: s["last_alerts"])
    (folder / "go").touch()
    seen = ended(folder)
    assert [a["kind"] for a in seen["last_alerts"]] == ["stall"]
