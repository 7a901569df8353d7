"""Exports of a job's points: other programs read the same points that were reported."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from doors import answer, gpuwarden
from gpuwarden.core.errors import NotFound, NotSupported
from gpuwarden.metrics import export
from gpuwarden.metrics.points import NO_STEP, PostedPoints, Row, read_alert
from gpuwarden.metrics.store import Batch, MetricStore
from gpuwarden.remote.runner.output_metrics import read_events
from load_kit import ready
from real_parts import need
from wording import Wording

ROWS = (
    Row("train_loss", 1, 1_700_000_000_000_000, 2.5),
    Row("train_loss", 2, 1_700_000_001_000_000, math.nan),
    Row("train_loss", 3, 0, 1e300),
    Row("=HYPERLINK(1)", 1, 0, -0.25),
)


@pytest.fixture
def store(tmp_path: Path):
    opened = MetricStore(tmp_path)
    opened.write(Batch([PostedPoints("j1", ROWS)]))
    yield opened
    opened.close()


def test_csv_has_every_point_and_escapes_formulas(store: MetricStore) -> None:
    out = io.StringIO()
    assert export.to_csv(store, "j1", out) == 4
    head, *rows = csv.reader(io.StringIO(out.getvalue()))
    assert head == ["metric", "step", "timestamp", "value"]
    assert rows == [
        ["'=HYPERLINK(1)", "1", "", "-0.25"],
        ["train_loss", "1", "1700000000.0", "2.5"],
        ["train_loss", "2", "1700000001.0", "nan"],
        ["train_loss", "3", "", "1e+300"],
    ]


def test_our_reader_reads_exported_event_files(store: MetricStore, tmp_path: Path) -> None:
    path = export.to_tensorboard(store, "j1", tmp_path / "tb")
    content = path.read_bytes()
    rows, end = read_events(content)
    assert end == len(content)
    assert [(row["step"], row["loss"]) for row in rows if row.get("loss") == 2.5] == [(1.0, 2.5)]


@pytest.mark.real("tensorboard")
def test_tensorboard_itself_reads_every_point(store: MetricStore, tmp_path: Path) -> None:
    need("TensorBoard", find_spec("tensorboard") is not None)
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # type: ignore[import-not-found]

    store.write(Batch([PostedPoints("j1", tuple(Row("stepless", NO_STEP, n + 1, float(n)) for n in range(3)))]))
    path = export.to_tensorboard(store, "j1", tmp_path / "tb")
    events = list(EventFileLoader(str(path)).Load())
    assert events[0].file_version == "brain.Event:2"
    found = [(v.tag, e.step, v.tensor.float_val[0]) for e in events[1:] for v in e.summary.value]
    assert ("train_loss", 1, 2.5) in found and ("train_loss", 3, math.inf) in found
    assert [(step, value) for tag, step, value in found if tag == "stepless"] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert sum(math.isnan(value) for *_, value in found) == 1

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-not-found]

    whole = EventAccumulator(str(path.parent), size_guidance={"scalars": 0})
    whole.Reload()
    assert {tag: len(whole.Scalars(tag)) for tag in whole.Tags()["scalars"]} == {
        "=HYPERLINK(1)": 1, "train_loss": 3, "stepless": 3,
    }  # fmt: skip
    assert [event.wall_time for event in whole.Scalars("train_loss")] == [1.7e9, 1.7e9 + 1, 0.0]


def test_trackio_gets_every_step_once(store: MetricStore, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    run = SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: logged.append("end"))
    runs = SimpleNamespace(runs=lambda project: [])
    stand_in = SimpleNamespace(init=lambda **named: logged.append(named) or run, Api=lambda: runs)
    monkeypatch.setitem(sys.modules, "trackio", stand_in)
    assert export.to_trackio(store, "j1", "mine") == 3
    assert logged[0] == {"project": "mine", "name": "j1"}
    assert logged[1] == (1, {"=HYPERLINK(1)": -0.25, "train_loss": 2.5})
    assert logged[-1] == "end"
    monkeypatch.setitem(sys.modules, "trackio", None)  # type: ignore[arg-type]
    with pytest.raises(NotSupported):
        export.to_trackio(store, "j1", "mine")


def test_a_job_without_points_raises_and_writes_no_file(store: MetricStore, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        export.to_tensorboard(store, "j2", tmp_path / "tb")
    assert not (tmp_path / "tb").exists()


@pytest.mark.slow
@pytest.mark.real("trackio")
def test_trackio_itself_has_every_point(tmp_path: Path) -> None:
    need("trackio", find_spec("trackio") is not None)
    ctx, (job,) = ready(tmp_path / "home", 1)
    stepless = tuple(Row("stepless", NO_STEP, n + 1, float(n)) for n in range(3))
    ctx.metrics.write(Batch([PostedPoints(job, (*ROWS, Row("eval/loss", 3, 0, math.inf), *stepless))]))
    own = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path), "GRADIO_ANALYTICS_ENABLED": "0"}
    told = answer(gpuwarden(tmp_path / "home", "metrics", job, "--trackio", "mine", "--json", **own))
    assert told["ok"] and "4" in told["message"].split(), told

    again = answer(gpuwarden(tmp_path / "home", "metrics", job, "--trackio", "mine", "--json", **own))
    assert again["code"] == "conflict", again

    def values(metric: str) -> list[tuple[int, float]]:
        argv = [sys.executable, "-m", "trackio.cli", "get", "metric", "--project", "mine", "--run", job]
        done = subprocess.run(
            [*argv, "--metric", metric, "--json"],
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [(row["step"], row["value"]) for row in json.loads(done.stdout)["values"]]

    assert values("train_loss")[::2] == [(1, 2.5), (3, 1e300)] and math.isnan(values("train_loss")[1][1])
    assert values("stepless") == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert values("eval/loss") == [(3, math.inf)]
    with sqlite3.connect(tmp_path / "trackio" / "mine.db") as db:
        assert db.execute("SELECT count(*) FROM system_metrics").fetchone() == (0,), "nothing of this computer"
    db.close()


@pytest.mark.slow
def test_the_command_shows_and_exports(tmp_path: Path, wording: Wording) -> None:
    ctx, (job,) = ready(tmp_path / "home", 1)
    alert = read_alert({"type": "gpu_oom", "job_id": job, "error_message": "CUDA out of memory"}, 1.0)
    ctx.metrics.write(Batch([PostedPoints(job, ROWS)], [alert]))
    found = answer(gpuwarden(tmp_path / "home", "metrics", job, "--json"))
    assert [(m["name"], m["points"], m["odd"], m["last"]) for m in found["metrics"]] == [
        ("⟦=HYPERLINK(1)⟧", 1, 0, -0.25), ("train_loss", 3, 1, 1e300)
    ]  # fmt: skip
    assert found["alerts"] == ["⟦gpu_oom: CUDA out of memory⟧"]
    shown = gpuwarden(tmp_path / "home", "metrics", job)
    (line,) = [line for line in shown.stdout.splitlines() if "train_loss" in line]
    wording(line.partition("train_loss")[2], "1e+300", line.split()[-1])
    assert gpuwarden(tmp_path / "home", "metrics", job, "--csv").stdout.count("\n") == 5
    told = answer(gpuwarden(tmp_path / "home", "metrics", job, "--tensorboard", str(tmp_path / "tb"), "--json"))
    assert str(tmp_path / "tb" / job) in told["message"]
    both = answer(gpuwarden(tmp_path / "home", "metrics", job, "--csv", "--trackio", "x", "--json"))
    assert both["code"] == "bad_request"
    assert answer(gpuwarden(tmp_path / "home", "metrics", "jnone", "--json"))["code"] == "not_found"
