"""Progress that the job doesn't report, read from the output and the files of trainers."""

from __future__ import annotations

import json
import math
import random
import struct
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from counting import lines_run
from gpuwarden.remote.runner import log_lines, log_reader
from gpuwarden.remote.runner.log_lines import MAX_LINE, Lazy, read_line
from gpuwarden.remote.runner.log_reader import BUDGET_S, LogReader
from gpuwarden.remote.runner.output_metrics import OutputMetrics, read_events, trainer_state
from gpuwarden.remote.runner.pace import POINTS, Curve, Pace
from paths import CORPUS
from runner_kit import call, ended, log, order, sh, until
from training_logs import SEEN, UNSEEN, Printed

TICK = 1 / 1024
EXPRESSIONS = {
    name: one for module in (log_lines, log_reader) for name, one in vars(module).items() if isinstance(one, Lazy)
}


class Ticking:
    """A module of clocks that advance by a tick at each call."""

    def __init__(self) -> None:
        self.looks = count()

    def __getattr__(self, clock: str) -> Callable[[], float]:
        return lambda: next(self.looks) * TICK


@pytest.fixture(autouse=True)
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the reader spend a tick of processor time on each line."""
    monkeypatch.setattr(log_reader, "time", Ticking())


Found = tuple[float | None, int | None, float | None, float | None, bool]


def read(text: str) -> Found:
    """Read a whole log, and return step, total, loss, learning rate, and whether it contains an alarm."""
    reader, known, alarm = LogReader(), dict[str, float](), False
    for piece in range(0, len(data := text.encode() + b"\n"), 37):  # a pipe may split the text anywhere
        for row in reader.feed(data[piece : piece + 37]):
            alarm |= any(not math.isfinite(row.get(name, 0.0)) for name in ("loss", "grad_norm"))
            known = {k: v for k, v in {**known, **row}.items() if math.isfinite(v)}
        reader.rest()
    step = known.get("step")
    return step, reader.total if step is not None else None, known.get("loss"), known.get("learning_rate"), alarm


@pytest.mark.parametrize("printed", SEEN, ids=lambda p: p.where)
def test_trainer_output_is_parsed(printed: Printed) -> None:
    assert read(printed.text) == (printed.step, printed.total, printed.loss, printed.lr, printed.nan)


def test_held_out_output_formats_are_never_misread() -> None:
    answers = {p.where: (read(p.text), (p.step, p.total, p.loss, p.lr, p.nan)) for p in UNSEEN}
    wrong = {where: a for where, a in answers.items() if any(g not in (None, w) for g, w in zip(*a, strict=True))}
    assert wrong == {}, "a number may be missing, not wrong"
    assert sum(got == want for got, want in answers.values()) >= 25 and len(UNSEEN) == 28
    assert [where for where, (got, want) in answers.items() if got[4] is not want[4]] == []


LOGS = sorted((CORPUS / "logs").glob("*/*.log"))


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.name)
def test_only_diverging_training_logs_raise_an_alarm(log: Path) -> None:
    assert read(log.read_text("utf-8"))[4] is ("--nan" in log.stem), log
    assert len(LOGS) > 30


@pytest.mark.parametrize(
    "text",
    [
        "the run stops if loss is nan", "loss is nan when labels are all masked",
        "When the loss is inf we skip a batch",
        "step 3: nan_to_num applied", "Information: 3 infinite loops avoided", "mean_nan: nan, iou_class_7: nan",
        "| person | 0.51 | cat | nan |", "train_acc=0.5 f1=nan", "eval: loss nan for an absent class", "val_loss=nan",
        "loss_scale: inf", "{'eval_loss': nan, 'epoch': 1.0}", "lowest loss: inf", "best val loss: inf", "loss=info",
        "patience 3, min_loss inf", "banana loss 0.5", "Config(loss=nan, lr=0.1)",
    ],
)  # fmt: skip
def test_healthy_mentions_of_nan_raise_no_alarm(text: str) -> None:
    assert read(text)[4] is False
    assert read(f"step 5: loss 0.5\n{text}\nstep 6: loss 0.4")[2:] == (0.4, None, False)


TRAINER = """
import sys, torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments
torch.set_num_threads(1)
class Data(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, n): return dict.fromkeys(("input_ids", "labels"), torch.arange(8))
class Odd(Trainer):
    def compute_loss(self, *args, **more):
        loss = super().compute_loss(*args, **more)
        return loss * float("nan") if sys.argv[1] == "nan" and not isinstance(loss, tuple) else loss
tiny = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
args = TrainingArguments("out", max_steps=6, per_device_train_batch_size=4, logging_steps=2, eval_strategy="steps",
                         eval_steps=4, save_steps=4, use_cpu=True, report_to="none", disable_tqdm=sys.argv[1] == "bare")
Odd(Qwen2ForCausalLM(Qwen2Config(vocab_size=32, **tiny)), args, train_dataset=Data(), eval_dataset=Data()).train()
"""


@pytest.mark.prove
@pytest.mark.real
@pytest.mark.parametrize("kind", ["healthy", "bare", "nan"])
def test_output_of_the_installed_trainer_is_parsed(folder: Path, kind: str) -> None:
    pytest.importorskip("transformers")
    (folder / "train.py").write_text(TRAINER)
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    call("start", folder, order([sys.executable, "../train.py", kind], env=env, outputs=["out"]))
    seen = ended(folder, 240)  # it imports torch
    assert (seen["state"], seen["step"], seen["total_steps"]) == ("succeeded", 6, 6), log(folder)
    odd = {alert["subject"] for alert in seen["last_alerts"] if alert["kind"] == "nonfinite"}
    assert odd == ({"grad_norm"} if kind == "nan" else set())
    assert seen["metrics"]["loss"] == 0.0 if kind == "nan" else 0 < seen["metrics"]["loss"] < 10


PIECES = (
    "epoch", "Epoch", "step", "iter", "loss", "lr", "grad_norm", "train", "val", "Train:", "nan", "inf", "-inf",
    "1e999",
    "٣", "²", "-1", "0", "7", "1/2", "5/0", "9/3", "[3/9]", "[1][2/4]", " ", "  ", ":", "=", "|", "{", "}", "'", '"',
    "[",
    "]", "(", "%|", "100%|██| 3/3 [", "it [", "GPU_mem", "box_loss", "\t", "\r", "\n", "\x1b[0m", "\ud83d", "9" * 15,
    "1.5", "Total optimization steps = 9", "Epoch 1/0", "Epoch    GPU_mem   box_loss\n", "epoch train_loss\n",
    "is", ",",
)  # fmt: skip


@pytest.mark.attack("runner", "a line that is made to crash the supervisor")
def test_random_lines_never_raise_and_give_only_numbers() -> None:
    dice = random.Random(14)
    for _ in range(6_000):
        text = "".join(dice.choices(PIECES, k=dice.randint(1, 14)))
        reader = LogReader()
        for line in text.split("\n"):
            row = reader.take(line)  # not through `feed`, which ignores errors
            assert all(isinstance(value, (int, float)) for value in row.values()), text
            assert set(row) <= {"step", "loss", "val_loss", "learning_rate", "grad_norm"}, text
            assert 0 <= row.get("step", 0) < 1 << 60, text


HOSTILE = [
    "loss" * 100_000, "loss: " * 50_000, "1/2 " * 60_000, "9" * 300_000, "loss=" + "9" * 100_000, "100%|" * 40_000,
    "loss: nan " * 30_000 + "\n" * 60_000, "\x1b[" * 90_000, "━" * 90_000, "[1/2][" * 40_000, "loss -" * 50_000,
    "(((((" * 50_000, "epoch 1/" * 40_000, "loss train " * 30_000, " " * 300_000 + "loss",
]  # fmt: skip


@pytest.mark.attack("runner", "a log that is made to slow the supervisor")
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_line_costs_no_more_than_its_length(text: str) -> None:
    """An expression with quadratic cost would take many minutes for such a text."""
    data = text.encode()
    for name, one in EXPRESSIONS.items():
        for _ in one.finditer(data if name == "WORTH" else text):
            pass
    read_line(text)
    assert lines_run(lambda: read_line(text[:2000])) < 12 * lines_run(lambda: read_line(text[:250]))
    reader = LogReader()
    for piece in range(0, len(data), 1 << 16):
        list(reader.feed(data[piece : piece + (1 << 16)]))
    assert reader.spent <= BUDGET_S + TICK and len(reader.lines.part) <= MAX_LINE


def test_a_flood_of_lines_is_skipped_until_the_next_turn() -> None:
    reader = LogReader()
    rows = list(reader.feed(b"".join(b"step %d: loss 1.5\n" % n for n in range(200_000))))
    assert rows == [{"step": n, "loss": 1.5} for n in range(math.ceil(BUDGET_S / TICK))]
    reader.rest()
    assert list(reader.feed(b"step 7: loss 2.5\n")) == [{"step": 7, "loss": 2.5}]


@pytest.mark.attack("runner", "a job that prints its own status")
def test_output_sets_only_numbers(folder: Path) -> None:
    lines = '{"state": "failed", "step": 9, "loss": 1.5, "why": "x", "total_steps": 3}\n'
    (folder / "lines").write_text(lines + "step 10 state: canceled loss: 1.25\n")
    call("start", folder, sh("cat ../lines"))
    seen = ended(folder)
    assert (seen["state"], seen["step"], seen["metrics"]) == ("succeeded", 10, {"loss": 1.25})
    assert seen["source"] == "output" and seen["total_steps"] is None


def test_a_training_nan_is_an_alarm_and_an_evaluation_nan_a_warning(folder: Path) -> None:
    (folder / "lines").write_text("{'eval_loss': 'nan', 'epoch': '1'}\n{'loss': 'nan', 'epoch': '1.2'}\n")
    call("start", folder, sh("cat ../lines"))
    seen = ended(folder)
    assert [(a["kind"], a["subject"]) for a in seen["last_alerts"]] == [
        ("odd_metric", "val_loss"),
        ("nonfinite", "loss"),
    ]


@pytest.mark.slow
def test_the_jobs_own_metrics_take_precedence(folder: Path) -> None:
    exact = '{"step": 5, "loss": 0.5, "total_steps": 50}'
    (folder / "lines").write_text("step 900/9000 loss: 7.5 lr: 0.25\n")
    text = f"echo '{exact}' >> $GPUWARDEN_METRICS; until [ -e ../go ]; do sleep 0.05; done"
    call("start", folder, sh(f"cat ../lines; {text}; cat ../lines"))
    until(folder, lambda s: s["source"] == "metrics")
    (folder / "go").touch()
    seen = ended(folder)
    assert (seen["step"], seen["total_steps"], seen["source"]) == (5, 50, "metrics")
    assert seen["metrics"] == {"loss": 0.5, "learning_rate": 0.25}


def state_file(path: Path, entries: int) -> Path:
    """Write a `trainer_state.json` with a long history, as the Trainer does."""
    history = [{"epoch": n / 10, "loss": 2.0 - n / 1e6, "learning_rate": 1e-4, "step": n} for n in range(entries)]
    state = {"best_metric": None, "global_step": 4000, "log_history": history, "logging_steps": 1, "max_steps": 9000}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(state, indent=2))
    return path


@pytest.mark.slow
def test_trainer_state_is_read_despite_a_long_history(tmp_path: Path) -> None:
    row, total = trainer_state(str(state_file(tmp_path / "checkpoint-4000/trainer_state.json", 60_000)))
    assert (row, total) == ({"loss": 2.0 - 59_999 / 1e6, "learning_rate": 1e-4, "step": 4000}, 9000)
    (tmp_path / "bad.json").write_text('{"global_step": 1' + "{" * 40_000)
    assert trainer_state(str(tmp_path / "bad.json")) == ({"step": 1}, None)
    assert trainer_state(str(tmp_path / "none.json")) == ({}, None)


def record(body: bytes) -> bytes:
    return struct.pack("<QI", len(body), 0) + body + bytes(4)


def scalar(tag: bytes, step: int, value: float) -> bytes:
    inner = b"\x0a" + bytes([len(tag)]) + tag + b"\x15" + struct.pack("<f", value)
    summary = b"\x0a" + bytes([len(inner)]) + inner
    return record(b"\x09" + bytes(8) + b"\x10" + bytes([step]) + b"\x2a" + bytes([len(summary)]) + summary)


def test_tensorboard_event_files_are_read(tmp_path: Path) -> None:
    first = record(b"\x1a\x0dbrain.Event:2") + scalar(b"train/loss", 7, 1.5) + record(b"\x2a\xff\xff\xff\xff")
    rows, used = read_events(first + scalar(b"lr", 8, 0.5)[:-3])
    assert (rows, used) == ([{"step": 7, "loss": 1.5}], len(first))
    out = tmp_path / "work/out"
    out.mkdir(parents=True)
    file = out / "events.out.tfevents.1.host.1.0"
    file.write_bytes(first)
    looker = OutputMetrics(str(tmp_path), {"outputs": ["out"]}, 0.0)
    assert looker.ask(5.0) == {"rows": [{"step": 7, "loss": 1.5}], "total": None}
    with file.open("ab") as more:
        more.write(scalar(b"train/learning_rate", 9, 0.25))
    state_file(out / "checkpoint-1/trainer_state.json", 3)
    looker.thread.join()
    looker.ask(5.0)
    assert looker.values["total"] == 9000 and looker.values["rows"][0] == {"step": 9, "learning_rate": 0.25}


@pytest.mark.attack("runner", "saved files that are links, pipes, huge or endless")
def test_hostile_files_yield_no_metrics(tmp_path: Path) -> None:
    import os

    out = tmp_path / "work/out"
    out.mkdir(parents=True)
    os.mkfifo(out / "trainer_state.json")
    (out / "events.out.tfevents.link").symlink_to("/dev/zero")
    (out / "events.out.tfevents.zero").write_bytes(bytes(1 << 21))
    (out / "events.out.tfevents.odd").write_bytes(struct.pack("<QI", 1 << 62, 0) + b"\xff" * 4096)
    (out / "loop").symlink_to(out)
    looker = OutputMetrics(str(tmp_path), {"outputs": ["out"]}, 0.0)
    assert looker.ask(10.0) == {"rows": [], "total": None}


def test_the_eta_uses_the_last_minutes() -> None:
    pace = Pace()
    for minute in range(60):
        pace.reached(minute * 600, minute * 60.0)  # ten steps a second, for an hour
    for second in range(1, 400):
        pace.reached(59 * 600 + second, 59 * 60.0 + second)  # then one
    left = pace.left_s(59 * 600 + 399 + 1000)
    assert left is not None and 990 < left < 1010
    assert pace.left_s(None) is None and Pace().left_s(10) is None


def test_a_curve_has_few_points_however_long_a_run() -> None:
    curve = Curve()
    for step in range(100_000):
        curve.add(step, 1.0 if step < 50_000 else 3.0)
    assert POINTS <= len(curve.points) < 2 * POINTS and [curve.points[0][1], curve.points[-1][1]] == [1.0, 3.0]
