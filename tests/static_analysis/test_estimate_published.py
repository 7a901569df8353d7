"""Estimates compared with published peaks, speeds, and paces: the share within the intervals, and their widths."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from datetime import date
from urllib.parse import urlsplit

import pytest

from gpuwarden.core.hardware import GPUS
from gpuwarden.rules.pf_hw_001_memory_fits import REACHED
from gpuwarden.static_analysis.estimate.memory import memory
from gpuwarden.static_analysis.estimate.time import tokens_per_second
from gpuwarden.static_analysis.pace import Pace, remaining
from published import published_paces, published_runs, published_sources

GB = 1e9


def inside(found: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the share of values within their intervals, and the median ratio of an interval's high to its low end."""
    rows = list(found)
    share = sum(low <= value <= high for low, value, high in rows) / len(rows)
    return share, statistics.median(high / low for low, _, high in rows)


def test_the_published_table_is_large_and_has_sources() -> None:
    peaks = [run for run in published_runs() if run.peak_gb is not None]
    splits = Counter(run.split for run in peaks)
    assert len(peaks) >= 470 and splits["home"] <= 0.6 * len(peaks) and splits["unseen"] >= 60
    for source in published_sources().values():
        assert urlsplit(source.url).scheme == "https" and source.date > date(2021, 1, 1) and source.note


@pytest.mark.parametrize(
    ("split", "share", "width"), [("home", 0.95, 1.65), ("former", 0.93, 1.80), ("unseen", 0.93, 1.80)]
)
def test_the_formula_interval_covers_most_published_peaks(split: str, share: float, width: float) -> None:
    rows = []
    for run in published_runs():
        if run.split == split and run.peak_gb is not None and run.counted:
            low, high = memory(run.run, run.counted)
            rows.append((low / GB, run.peak_gb, high / GB))
    held, wide = inside(rows)
    assert held >= share and wide <= width


def test_few_published_peaks_exceed_the_warning_limit_of_wide_intervals() -> None:
    peaks = [run for run in published_runs() if run.peak_gb is not None and run.counted]
    wide = [(run.peak_gb or 0.0, low / GB, high / low) for run in peaks
            for low, high in [memory(run.run, run.counted or "occupied")] if high > 2 * low]  # fmt: skip
    assert len(wide) > 100
    assert sum(peak > low * width**REACHED for peak, low, width in wide) / len(wide) < 1 / 14


@pytest.mark.parametrize(("split", "share", "width"), [("home", 0.95, 8.5), ("former", 0.9, 8.5)])
def test_most_published_speeds_lie_in_a_wide_interval(split: str, share: float, width: float) -> None:
    rows = []
    for run in published_runs():
        if run.split == split and run.tokens_per_second is not None:
            low, high = tokens_per_second(run.run, GPUS[run.gpu])
            rows.append((low, run.tokens_per_second, high))
    held, wide = inside(rows)
    assert held >= share and wide <= width


def test_the_first_minutes_of_published_runs_predict_the_total_time() -> None:
    rows = []
    for pace in published_paces():
        (first, begun), (step, now) = pace.seen[0], pace.seen[-1]
        left = remaining(pace.steps - step, Pace(seconds=(now - begun) / (step - first), steps=step, elapsed_s=now))
        assert left is not None
        rows.append((now + left.low, pace.total_s, now + left.high))
    held, wide = inside(rows)
    assert len(rows) >= 60 and held >= 0.9 and wide <= 4
