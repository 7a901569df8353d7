"""Runs measured on GPUs: one line of data each, their effect on the estimates, and the table that lists them."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.hardware import GPUS
from gpuwarden.static_analysis.estimate.memory import vram
from gpuwarden.static_analysis.estimate.setup import Run, run_measured
from gpuwarden.static_analysis.estimate.time import duration
from gpuwarden.static_analysis.measured import CPU, Measured, measured_file, read_measured
from paths import ROOT
from real_parts import need
from trainer_kit import jsonl, language_model, rows_of
from wording import Wording

DAY = date(2026, 11, 22)
RESULT: dict[str, Any] = {
    "plan": {"device": "NVIDIA A100-SXM4-80GB", "memory_gb": 85.1, "micro": 4, "precision": "bf16", "world": 1},
    "settings": {"lora_rank": 16, "quantize": "none", "max_length": 2048, "fast": False},
    "figures": {"parameters": 8_000_000_000, "tokens": 600_000, "seconds": 200.0, "rows_per_second": 2.5,
                "recomputes": True},
    "resumed_from": None, "step": 30, "peak_memory_gb": 31.5, "versions": {"torch": "2.13.0"},
}  # fmt: skip


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        yield importlib.import_module("measure_gpu")


@pytest.fixture
def measured(tool: ModuleType) -> Measured:
    made: Measured = tool.measured_of("sft", "Qwen/Qwen3-8B", RESULT, DAY)
    return made


def test_the_result_of_a_run_becomes_one_line(measured: Measured, tmp_path: Path) -> None:
    assert (measured.gpu, measured.method, measured.task) == ("a100", "lora", "sft")
    assert (measured.peak_gb, measured.tokens_per_second, measured.rows_per_second) == (31.5, 3000.0, 2.5)
    file = tmp_path / "runs.jsonl"
    file.write_text(measured.model_dump_json() + "\n")
    assert read_measured(file) == (measured,)


@pytest.mark.parametrize(
    ("part", "name", "value", "names"),
    [
        ("plan", "world", 2, ""),
        ("plan", "device", "Voodoo 2", "Voodoo 2"),
        ("figures", "rows_per_second", 0.0, "rows_per_second"),
        ("figures", "rows_per_second", float("nan"), "rows_per_second"),
    ],
)
def test_an_incomplete_run_result_is_refused(
    tool: ModuleType, part: str, name: str, value: Any, names: str, wording: Wording
) -> None:
    with pytest.raises(ValueError, match=names or None) as refused:
        tool.measured_of("sft", "m/m", {**RESULT, part: {**RESULT[part], name: value}}, DAY)
    if part == "plan":
        wording(refused, *([names] if names else []))


def test_an_invalid_line_is_reported_with_its_number(tmp_path: Path, measured: Measured, wording: Wording) -> None:
    right = measured.model_dump_json()
    (tmp_path / "runs.jsonl").write_text(f"{right}\n{json.dumps({**json.loads(right), 'gpu': 'voodoo2'})}\n")
    with pytest.raises(BadRequest) as refused:
        read_measured(tmp_path / "runs.jsonl")
    wording(refused, "voodoo2", "line 2")


@pytest.mark.parametrize(("peak", "low", "high"), [(0.5, True, False), (31.5, False, False), (400.0, False, True)])
def test_only_a_peak_outside_the_estimate_widens_the_estimate(
    measured: Measured, peak: float, low: bool, high: bool, wording: Wording
) -> None:
    one = measured.model_copy(update={"peak_gb": peak})
    before, after = vram(run_measured(one), ()), vram(run_measured(one), (one,))
    assert (after.low < before.low, after.high > before.high) == (low, high)
    assert after.low <= peak + 0.6 and after.high >= peak
    wording(before.how)
    wording(after.how, "2026-11-22")


def test_other_methods_and_pictures_are_not_corrected(measured: Measured) -> None:
    extreme = measured.model_copy(update={"peak_gb": 400.0})
    for run in (Run(params=10**9, method="full"), Run(params=10**9, method="lora", task="detection")):
        assert vram(run, (extreme,)) == vram(run, ())


@pytest.mark.parametrize(("speed", "low", "high"), [(10.0, False, True), (3000.0, False, False), (1e5, True, False)])
def test_a_speed_outside_the_usual_range_widens_that_cards_duration(
    measured: Measured, speed: float, low: bool, high: bool
) -> None:
    one = measured.model_copy(update={"tokens_per_second": speed})
    run = Run(params=8_000_000_000, method="lora", rows=10_000, epochs=1.0, checkpointing=True)
    before, after = duration(run, GPUS["a100"], ()), duration(run, GPUS["a100"], (one,))
    assert before is not None and after is not None
    assert (after.low < before.low, after.high > before.high) == (low, high)
    assert duration(run, GPUS["h100"], (one,)) == duration(run, GPUS["h100"], ())


def test_shipped_runs_are_on_gpus_and_shown_on_the_page(tool: ModuleType) -> None:
    runs = read_measured(measured_file())
    assert all(run.gpu != CPU for run in runs)
    page = (ROOT / "references" / "hardware.md").read_text(encoding="utf-8")
    block = page.partition(tool.MARKS[0])[2].partition(tool.MARKS[1])[0].strip()
    assert block == tool.table(runs).strip(), "run tools/measure_gpu.py --table --write references/hardware.md"
    for trainer in set(tool.trained()) - {run.trainer for run in runs}:
        assert f"| {trainer} |" in block


def test_a_measured_run_is_shown_with_its_uncorrected_estimate(tool: ModuleType, measured: Measured) -> None:
    [line] = [text for text in tool.table([measured]).splitlines() if text.startswith("| sft |")]
    assert "| 31.5 GB | " in line and str(vram(run_measured(measured), ())) in line and "3,000" in line


@pytest.mark.prove
def test_the_command_measures_a_real_run(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("torch", "transformers", "trl", "peft", "datasets", "accelerate"):
        need(name, importlib.util.find_spec(name) is not None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model, data = language_model(tmp_path / "model"), jsonl(tmp_path / "rows.jsonl", rows_of("sft"))
    words = ["sft", "--model", str(model), "--dataset", str(data), "--steps", "10", "--here"]
    at = tmp_path / "runs.jsonl"
    small = ["--", "--cpu", "--batch-size", "4", "--micro-batch", "2", "--max-length", "128"]
    assert tool.main([*words, "--at", str(at), *small]) == 0
    [run] = read_measured(at)
    assert (run.gpu, run.card, run.method, run.precision, run.steps) == (CPU, "cpu", "lora", "fp32", 10)
    assert 100_000 < run.parameters < 1_000_000 and run.micro_batch == 2 and run.recomputes
    assert run.tokens_per_second and run.tokens_per_second > run.rows_per_second > 0
    assert 0.1 < run.peak_gb < 10, "resident memory of the process"
    assert "| sft | " in capsys.readouterr().out
    assert tool.main([*words, "--at", str(at), "--", "--cpu", "--batch-size", "nine"]) == 2
    assert len(read_measured(at)) == 1


def test_a_cpu_run_is_never_added_to_the_shipped_file(
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    wording: Wording,
) -> None:
    def ran(words: list[str], **more: Any) -> Any:
        out = Path(words[words.index("--out") + 1])
        plan = {**RESULT["plan"], "device": "cpu", "precision": "fp32", "memory_gb": 0.0}
        (out / "result.json").write_text(json.dumps({**RESULT, "plan": plan}))
        return tool.subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(tool.subprocess, "run", ran)
    before = measured_file().read_bytes()
    assert tool.main(["sft", "--model", "m", "--dataset", "d", "--", "--cpu"]) == 1
    wording(capsys.readouterr().err)
    assert measured_file().read_bytes() == before
    assert tool.main(["sft", "--model", "m", "--dataset", "d", "--at", str(tmp_path / "x.jsonl")]) == 0
