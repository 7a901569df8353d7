"""The trainers run on the CPU: to the end, through kills and signals, and with every kind of bad input."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.models import Level, Verdict
from hubserver import hub_server
from real_parts import need
from rulefacts import HF_TOKEN
from trainer_kit import (
    FAULTS,
    METHODS,
    NEEDS,
    SCRIPTS,
    TEMPLATE,
    TEXTS,
    Ended,
    Trainers,
    curve,
    language_model,
    picture_rows,
    refused,
    rows_of,
    turn,
    weights,
)
from wording import Wording

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="forks after PyTorch was imported"),
]
STEPS, EVERY = 8, 2


def told(ended: Ended) -> str:
    """Return the line for the error and the one for the fix."""
    return "\n".join(line for line in ended.log.splitlines() if line.startswith(("ERROR", "FIX")))


def result(trainers: Trainers, out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((trainers.folder / out / "result.json").read_text())
    return found


# ------------------------------------------------------------------------------------------------- a whole life


@pytest.mark.parametrize("method", ["sft", *(pytest.param(m, marks=pytest.mark.prove) for m in METHODS if m != "sft")])
def test_an_offline_smoke_run_gives_metrics_result_card_and_proof(trainers: Trainers, method: str) -> None:
    need_libraries(method)
    out, metrics = f"life-{method}", trainers.folder / f"metrics-{method}.jsonl"
    real = {"TRAIN_HUB_MODEL_ID": "me/real-model", "TRAIN_MODEL": "meta/Big-70B"}
    ended = trainers.run(method, out, "--smoke", GPUWARDEN_METRICS=str(metrics), **real)
    assert ended.code == 0, ended.log
    assert sorted(p.name for p in (trainers.folder / out).glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-8"]
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert {r["step"] for r in rows if "loss" in r} == set(range(1, STEPS + 1))
    assert next(r["step"] for r in rows if "eval_loss" in r) == 0
    found = result(trainers, out)
    assert (found["status"], found["step"]) == ("completed", STEPS)
    objective = found["objective"]
    assert objective["value"] == found["metrics"][objective["name"]]
    assert found["baseline"][objective["name"]] is not None
    card = (trainers.folder / out / "final" / "README.md").read_text()
    assert objective["name"] in card and "transformers" in card and '"learning_rate"' in card
    report = verify(trainers.folder / out, Level.RESUME)
    assert report.verdict is Verdict.PROVEN, report.reasons
    assert [c.path for c in report.checkpoints if c.step == STEPS]


def need_libraries(method: str) -> None:
    for name in NEEDS.get(method, ()):
        need(name, importlib.util.find_spec(name) is not None)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("method", "full"), [*((m, f) for m in TEXTS for f in (False, True)), *((m, True) for m in NEEDS)]
)
def test_a_killed_run_resumes_bit_for_bit(trainers: Trainers, method: str, full: bool) -> None:
    """The first kill comes at a random step, the second during the save that follows the last complete checkpoint."""
    need_libraries(method)
    kill = random.SystemRandom().randrange(EVERY + 1, STEPS + 1)
    last_whole = (kill - 1) // EVERY * EVERY
    print(f"killed at step {kill}")
    words = trainers.small(method, trainers.data(method), STEPS, EVERY)
    words += ["--lora-rank", "0"] if full and method in TEXTS else []
    whole, broken = f"whole-{method}-{full}", f"broken-{method}-{full}"
    assert (ended := trainers.run(method, whole, *words)).code == 0, ended.log
    assert trainers.run(method, broken, *words, fault="Killed", step=kill).code == -9
    assert trainers.run(method, broken, *words, fault="KilledInSave", step=last_whole + EVERY).code == -9
    last = trainers.run(method, broken, *words)
    assert last.code == 0, last.log
    assert result(trainers, broken)["resumed_from"] == f"checkpoint-{last_whole}"
    assert curve(trainers.folder / broken) == curve(trainers.folder / whole)
    final = weights(trainers.folder / whole / "final")
    assert final and weights(trainers.folder / broken / "final") == final
    report = verify(trainers.folder / broken, Level.RESUME)
    assert report.verdict is Verdict.PROVEN, report.reasons


def test_a_kill_during_a_save_leaves_whole_checkpoints_and_the_run_resumes(trainers: Trainers) -> None:
    words = trainers.small("sft", trainers.data("sft"))
    assert trainers.run("sft", "cut", *words, fault="KilledInSave", step=4).code == -9
    assert [p.name for p in (trainers.folder / "cut").glob("checkpoint-*")] == ["checkpoint-2"]
    ended = trainers.run("sft", "cut", *words)
    assert ended.code == 0, ended.log
    assert result(trainers, "cut")["resumed_from"] == "checkpoint-2"


def files_of(out: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p.relative_to(out)): (p.stat().st_mtime_ns, p.read_bytes()) for p in out.rglob("*") if p.is_file()}


def test_restarting_a_finished_run_changes_nothing(trainers: Trainers) -> None:
    words = trainers.small("sft", trainers.data("sft"), 4, 2)
    assert (ended := trainers.run("sft", "done", *words)).code == 0, ended.log
    before = files_of(trainers.folder / "done")
    again = trainers.run("sft", "done", *words)
    assert again.code == 0 and "model:" not in again.log, again.log
    after = files_of(trainers.folder / "done")
    assert {n: f for n, f in after.items() if n != "run.json"} == {n: f for n, f in before.items() if n != "run.json"}


@pytest.mark.parametrize("rank", ["0", "4"])
def test_a_kill_after_the_last_checkpoint_adds_no_step(trainers: Trainers, rank: str) -> None:
    """The learning rate is constant, so another step would change the weights."""
    words = trainers.small("sft", trainers.data("sft"), 4, 2)
    words += ["--scheduler", "constant", "--lora-rank", rank]
    assert (ended := trainers.run("sft", "late", *words)).code == 0, ended.log
    out = trainers.folder / "late"
    whole, metrics = weights(out / "final"), result(trainers, "late")["metrics"]
    shutil.rmtree(out / "final")
    (out / "result.json").unlink()
    assert (ended := trainers.run("sft", "late", *words)).code == 0, ended.log
    assert sorted(p.name for p in out.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert weights(out / "final") == whole and result(trainers, "late")["step"] == 4
    assert all(result(trainers, "late")["metrics"][name] == metrics[name] for name in ("eval_loss", "train_loss"))


def test_an_adapter_does_not_go_on_over_other_weights(trainers: Trainers) -> None:
    base = language_model(trainers.folder / "base")
    words = [*trainers.small("sft", trainers.data("sft")), "--model", str(base)]
    assert trainers.run("sft", "moved", *words, fault="Killed", step=5).code == -9
    language_model(base, seed=7)
    refused(trainers.run("sft", "moved", *words), 2, "base")
    language_model(base)
    ended = trainers.run("sft", "moved", *words)
    assert ended.code == 0, ended.log


@pytest.mark.prove
def test_a_full_disk_ends_the_run_with_one_line(
    trainers: Trainers, disk: Callable[[str], Path], wording: Wording
) -> None:
    out = disk("size=64m") / "out"
    words = trainers.small("sft", trainers.data("sft"))
    env = {"FAULT_FILLS": str(out.parent / "filler")}
    ended = trainers.run("sft", str(out), *words, "--report", "none", fault="Filled", step=3, **env)
    refused(ended, 6)
    wording(told(ended).replace(str(out), "OUT"))
    assert [p.name for p in out.glob("checkpoint-*")] == ["checkpoint-2"]
    (out.parent / "filler").unlink()
    ended = trainers.run("sft", str(out), *words, "--report", "none")
    assert ended.code == 0 and result(trainers, str(out))["resumed_from"] == "checkpoint-2", ended.log


def test_a_resumed_run_keeps_its_best_checkpoint(trainers: Trainers) -> None:
    words = [*trainers.small("sft", trainers.data("sft")), "--eval-fraction", "0.2", "--keep", "1"]
    assert trainers.run("sft", "best", *words, fault="Killed", step=5).code == -9
    for state in (trainers.folder / "best").glob("checkpoint-*/trainer_state.json"):
        best = json.loads(state.read_text())["best_model_checkpoint"]
        assert best is None or (trainers.folder / best).is_dir(), best
    ended = trainers.run("sft", "best", *words)
    assert ended.code == 0 and "does not exist" not in " ".join(ended.log.split()), ended.log


def test_a_pretend_machine_needs_no_gpu(trainers: Trainers) -> None:
    words = [word for word in trainers.small("sft", trainers.data("sft"), 2, 2) if word != "--cpu"]
    ended = trainers.run("sft", "pretend", *words, GPUWARDEN_REHEARSAL_INSTANCE="i1", CUDA_VISIBLE_DEVICES="")
    assert ended.code == 0, ended.log


def test_a_log_line_has_the_step_the_total_and_the_time_left(trainers: Trainers) -> None:
    ended = trainers.run("sft", "lines", *trainers.small("sft", trainers.data("sft"), 4, 2))
    rows = [ast.literal_eval(line) for line in ended.log.splitlines() if line.startswith("{'step'")]
    losses = [row for row in rows if "loss" in row]
    assert [(row["step"], row["total"]) for row in losses] == [(n, 4) for n in range(1, 5)]
    assert all(re.fullmatch(r"\d+:\d\d:\d\d", row["left"]) for row in losses) and losses[-1]["left"] == "0:00:00"


@pytest.mark.parametrize("method", ["grpo", pytest.param("rloo", marks=pytest.mark.prove)])
def test_constant_rewards_cause_a_warning(trainers: Trainers, method: str) -> None:
    varying = trainers.run(method, "varying", "--smoke")
    assert varying.code == 0 and "WARNING: all answers" not in varying.log, varying.log
    assert any(float(v) > 0 for v in re.findall(r"'reward_std': '([\d.e-]+)'", varying.log))
    flat = trainers.run(method, "flat", "--smoke", "--reward", "boxed")
    assert flat.code == 0 and flat.log.count("WARNING: all answers") == 1, flat.log


def test_a_damaged_checkpoint_is_set_aside_and_the_older_one_used(trainers: Trainers) -> None:
    words = trainers.small("sft", trainers.data("sft"))
    assert trainers.run("sft", "damaged", *words, fault="Killed", step=5).code == -9
    file = trainers.folder / "damaged" / "checkpoint-4" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    ended = trainers.run("sft", "damaged", *words)
    assert ended.code == 0, ended.log
    assert result(trainers, "damaged")["resumed_from"] == "checkpoint-2"
    assert list((trainers.folder / "damaged").glob("incomplete-checkpoint-4-*/adapter_model.safetensors"))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_saves_at_that_step_and_ends_with_its_own_code(
    trainers: Trainers, name: str, wording: Wording
) -> None:
    words = trainers.small("sft", trainers.data("sft"), every=100)
    ended = trainers.run("sft", name, *words, fault="Terminated", step=5, FAULT_SIGNAL=name)
    refused(ended, 75)
    wording(told(ended), " 5")
    assert not (trainers.folder / name / "final").exists()
    assert result(trainers, name)["status"] == "interrupted"
    assert trainers.run("sft", name, *words).code == 0
    assert result(trainers, name)["resumed_from"] == "checkpoint-5"


# ------------------------------------------------------------------------------------------- memory, divergence


def test_a_nonfinite_gradient_ends_the_run_before_a_weight_update(trainers: Trainers) -> None:
    words = trainers.small("sft", trainers.data("sft"))
    refused(trainers.run("sft", "nan", *words, fault="NotFinite", step=6), 5, " 6", "learning-rate")
    out = trainers.folder / "nan"
    assert sorted(p.name for p in out.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert verify(out, Level.RESUME).verdict is Verdict.PROVEN
    assert result(trainers, "nan")["exit_code"] == 5


@pytest.mark.prove
def test_out_of_memory_restarts_once_with_the_same_effective_batch(trainers: Trainers) -> None:
    words = trainers.small("sft", trainers.data("sft"))
    ended = trainers.run("sft", "oom", *words, fault="OutOfMemory", step=6)
    assert ended.code == 0, ended.log
    found = result(trainers, "oom")
    assert (found["plan"]["micro"], found["plan"]["accumulate"]) == (1, 4)
    assert (found["resumed_from"], found["step"]) == ("checkpoint-4", STEPS)
    again = trainers.run("sft", "oom2", *words, fault="OutOfMemory", step=3, FAULT_ALWAYS="1")
    refused(again, 4, " 1 ", "GPU")


# ---------------------------------------------------------------------------------------------------- bad input

TALK = [turn("user", "one"), turn("assistant", "two")]
BAD_ROWS: list[tuple[str, str, list[dict[str, Any]]]] = [
    ("sft", "column", [{"question": "a", "reply": "b"}] * 4),
    ("sft", "turn", [{"messages": TALK}, {"messages": TALK[:1]}]),
    ("sft", "roles", [{"messages": [{"role": "user", "content": None}]}]),
    ("sft", "speaker", [{"messages": [turn("human", "a"), turn("assistant", "b")]}] * 4),
    (
        "sft",
        "call",
        [
            {
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "function_call", "value": "b"},
                    {"from": "gpt", "value": "c"},
                ]
            }
        ]
        * 4,
    ),
    ("sft", "tools", [{"messages": TALK, "tools": "no"}] * 4),
    ("dpo", "ties", [{"prompt": "a", "chosen": "b", "rejected": "b"}] * 4),
    ("sft", "blank", [{"text": "a"}, {"text": ""}]),
    ("dpo", "pair", [{"prompt": "a", "chosen": "b"}] * 4),
    ("kto", "label", [{"prompt": "a", "completion": "b", "label": "good"}] * 4),
    ("kto", "labels", [{"prompt": "a", "completion": "b", "label": True}] * 8),
    ("grpo", "answer", [{"prompt": "a"}] * 8),
    ("sft", "long", [{"text": "two plus two " * 200}] * 8),
]


@pytest.mark.parametrize(("method", "name", "rows"), BAD_ROWS, ids=[b[1] for b in BAD_ROWS])
def test_unsuitable_rows_end_the_run_before_loading_weights(
    trainers: Trainers, method: str, name: str, rows: list[dict[str, Any]], wording: Wording
) -> None:
    ended = trainers.run(method, f"bad-{name}", *trainers.small(method, trainers.data(method, rows)))
    refused(ended, 3)
    wording(told(ended))
    assert "model:" not in ended.log


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--dataset", "missing.jsonl"], 3, ("missing.jsonl",)),
        (["--dataset", "empty.jsonl"], 3, ("empty.jsonl",)),
        (["--dataset", "broken.jsonl"], 3, ("broken.jsonl",)),
        (["--dataset", "a.txt"], 3, ("a.txt", ".jsonl")),
        (["--dataset", "nobody/nothing"], 6, ("nobody/nothing", "HF_HUB_OFFLINE")),
        (["--eval-split", "test"], 3, ("test", "--eval-dataset")),
        (["--columns", "text=messages"], 3, ("text", "--columns")),
        (["--columns", "more=messages"], 3, ("messages", "--columns")),
        (["--dataset", "nothing-here"], 3, ("nothing-here",)),
        (["--model", "nobody/nothing"], 6, ("nobody/nothing",)),
        (["--no-cpu"], 6, ("GPU", "--cpu")),
        (["--expect-gpu", "H100"], 6, ("H100", "--expect-gpu")),
        (["--callback", "missing.py:C"], 2, ("missing.py:C",)),
        (["--objective", "loss"], 2, ("'loss'", "eval_loss", "--objective")),
        (["--report", "wandb"], 2, ("'wandb'", "tensorboard")),
        (["--precision", "fp16"], 2, ("fp16", "GPU")),
        (["--out", "/proc/nowhere"], 6, ("/proc/nowhere", "--out")),
    ],
    ids=lambda v: v[-1] if isinstance(v, list) else None,
)
def test_each_kind_of_bad_input_has_its_message_and_exit_code(
    trainers: Trainers, words: list[str], code: int, expected: tuple[str, ...]
) -> None:
    import torch

    if words == ["--no-cpu"] and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    (trainers.folder / "empty.jsonl").touch()
    (trainers.folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (trainers.folder / "a.txt").write_text("a")
    (trainers.folder / "nothing-here").mkdir(exist_ok=True)
    base = trainers.small("sft", trainers.data("sft", [row | {"more": "a"} for row in rows_of("sft")]))
    ended = trainers.run("sft", words[1], *base) if "--out" in words else trainers.run("sft", "unused", *base, *words)
    refused(ended, code, *expected)
    assert "model:" not in ended.log or "--objective" in words


@pytest.mark.parametrize(
    ("more", "flag"),
    [
        ({"template": None}, "--chat-template-from"),
        ({"pad": None}, "--pad-token"),
    ],
    ids=["template", "pad"],
)
def test_an_incomplete_tokenizer_is_refused(
    trainers: Trainers, tmp_path: Path, more: dict[str, None], flag: str
) -> None:
    language_model(tmp_path / "m", **more)
    words = [*trainers.small("sft", trainers.data("sft")), "--model", str(tmp_path / "m")]
    refused(trainers.run("sft", "lacks", *words), 3, flag)


def test_the_folder_of_another_run_is_refused_and_unchanged(trainers: Trainers, wording: Wording) -> None:
    data = trainers.data("sft")
    words = trainers.small("sft", data, steps=2)
    assert trainers.run("sft", "mine", *words).code == 0
    out = trainers.folder / "mine"
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    refused(trainers.run("sft", "mine", *words, "--learning-rate", "0.01"), 2, "learning_rate", "0.01")
    refused(
        trainers.run("sft", "mine", *trainers.small("sft", trainers.data("sft", rows_of("sft", 20)), steps=2)),
        2,
        "data",
    )
    (out / "run.json").unlink()
    before.pop(out / "run.json")
    before.pop(out, None)
    ended = trainers.run("sft", "mine", *words)
    refused(ended, 2)
    wording(told(ended))
    assert all(p.stat().st_mtime_ns == at for p, at in before.items() if p.is_file())


def test_a_final_model_without_checkpoints_is_not_replaced_by_another_run(trainers: Trainers, wording: Wording) -> None:
    words = trainers.small("sft", trainers.data("sft"), steps=2)
    dear = trainers.folder / "theirs" / "final" / "thesis.txt"
    dear.parent.mkdir(parents=True)
    dear.write_text("dear")
    ended = trainers.run("sft", "theirs", *words)
    refused(ended, 2)
    wording(told(ended), "final")
    assert trainers.run("sft", "alone", *words).code == 0
    shutil.rmtree(trainers.folder / "alone" / "checkpoint-2")
    before = result(trainers, "alone")
    refused(trainers.run("sft", "alone", *words, "--seed", "7"), 2, "seed", "42", "7")
    assert dear.read_text() == "dear" and result(trainers, "alone") == before


def test_a_baseline_is_measured_with_the_training_settings(trainers: Trainers) -> None:
    words = trainers.small("sft", trainers.data("sft"), steps=2)
    out = trainers.folder / "baseline"
    assert trainers.run("sft", "baseline", *words, fault="Killed", step=1).code == -9
    before = json.loads((out / "baseline.json").read_text())["eval_loss"]
    assert trainers.run("sft", "baseline", *words, "--seed", "7").code == 0
    assert result(trainers, "baseline")["baseline"]["eval_loss"] != before


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_are_part_of_the_training_text(trainers: Trainers, tmp_path: Path, as_text: bool) -> None:
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE
    model = language_model(tmp_path / "m", template=template)
    tools: Any = [{"type": "function", "function": {"name": "weather", "description": "two plus " * 60}}]
    tools = json.dumps(tools) if as_text else tools
    rows = [{"messages": [turn("user", f"a {n}"), turn("assistant", "b")], "tools": tools} for n in range(8)]
    words = [*trainers.small("sft", trainers.data("sft", rows), steps=2), "--model", str(model)]
    refused(trainers.run("sft", "tools", *words), 3, "max_length 128")
    assert trainers.run("sft", f"tools-{as_text}", *words, "--max-length", "256").code == 0
    tokens = json.loads((trainers.folder / f"tools-{as_text}" / "metrics.jsonl").read_text().splitlines()[1])
    assert tokens["num_tokens"] > 4 * 128


def test_a_pair_with_identical_answers_is_reported(trainers: Trainers) -> None:
    rows = [{"prompt": f"a {n}", "chosen": "b", "rejected": "b" if n == 2 else "c"} for n in range(8)]
    ended = trainers.run("dpo", "tie", *trainers.small("dpo", trainers.data("dpo", rows), steps=2))
    assert ended.code == 0, ended.log
    assert [line for line in ended.log.splitlines() if re.match(r"1 of 8\b", line)], ended.log


# ------------------------------------------------------------------------------------------------------ pictures


def box(*sides: int) -> dict[str, Any]:
    return {"bbox": [list(sides)], "category": ["red"]}


@pytest.mark.parametrize(
    ("method", "change"),
    [
        pytest.param("image_classification", {"label": ["blue"]}, id="label"),
        pytest.param("object_detection", {"objects": box(20, 4, 20, 4)}, id="box-outside"),
        pytest.param("object_detection", {"objects": box(20, 4, 0, 4)}, id="empty-box"),
        pytest.param("object_detection", {"objects": box()}, id="box-without-sides"),
        pytest.param("object_detection", {"objects": {"bbox": [[1, 1, 2, 2]]}}, id="no-category"),
    ],
)
def test_untrainable_images_are_reported(
    trainers: Trainers, method: str, change: dict[str, Any], wording: Wording
) -> None:
    ended = with_picture(trainers, method, change)
    refused(ended, 3)
    wording(told(ended))


LABELS = (
    ("null", ["red", "green", None], "None"),
    ("floats", [0.0, 1.0, 1.5], "whole numbers"),
    ("slip", ["red"] * 10 + ["green"] * 10 + ["gren"], "'gren'"),
    ("other-case", ["red"] * 3 + ["Red"] * 3 + ["green"], "'red'"),
    ("far-index", [0, 1, 2, 7], "7"),
)


@pytest.mark.parametrize(("labels", "named"), [pytest.param(a, b, id=name) for name, a, b in LABELS])
def test_mistaken_labels_end_the_run_before_the_model_is_loaded(
    trainers: Trainers, labels: list[Any], named: str
) -> None:
    need_libraries("image_classification")
    rows = picture_rows("image_classification", trainers.folder / "labelled")
    for row, label in zip(rows, labels * 24, strict=False):
        row["label"] = label
    rows = rows[: len(labels) * max(1, 24 // len(labels))]
    words = trainers.small("image_classification", trainers.data("image_classification", rows))
    refused(trainers.run("image_classification", "labelled", *words, "--model", "nobody/nothing"), 3, named)


@pytest.mark.parametrize(
    "labels", [["red"] * 10 + ["blue"] * 10 + ["green"] * 4, [0] * 10 + [1] * 10 + [2] * 4, ["cat1", "cat2"] * 12]
)
def test_rare_labels_unlike_the_others_are_accepted_as_classes(trainers: Trainers, labels: list[Any]) -> None:
    need_libraries("image_classification")
    rows = picture_rows("image_classification", trainers.folder / "labelled")
    for row, label in zip(rows, labels, strict=True):
        row["label"] = label
    words = trainers.small("image_classification", trainers.data("image_classification", rows))
    refused(trainers.run("image_classification", "labelled", *words, "--model", "nobody/nothing"), 6, "nobody/nothing")


@pytest.mark.parametrize("name", ["broken.png", "missing.png"])
def test_unreadable_images_are_reported(trainers: Trainers, name: str) -> None:
    refused(with_picture(trainers, "image_classification", {"image": name}), 3, name)


def with_picture(trainers: Trainers, method: str, change: dict[str, Any]) -> Ended:
    """Run a trainer on pictures of which the first, or every one, is changed."""
    need_libraries(method)
    rows = picture_rows(method, trainers.folder / "changed")
    everywhere = "objects" in change and "category" not in change["objects"]
    (trainers.folder / "broken.png").write_bytes((trainers.folder / "changed" / "0.png").read_bytes()[:60])
    rows = [row | change if everywhere or not number else row for number, row in enumerate(rows)]
    data = trainers.data(method, rows)
    more = ["--labels", "red,green", "--eval-fraction", "0"]
    if "label" in change:
        data.write_text(data.read_text().replace('["blue"]', '"blue"'))
    return trainers.run(method, "bad-picture", *trainers.small(method, data), *more)


def test_a_coco_folder_and_a_folder_of_classes_are_read(trainers: Trainers) -> None:
    for method in ("object_detection", "image_classification"):
        need_libraries(method)
    rows = picture_rows("object_detection", trainers.folder / "coco")
    names = {"red": 3, "green": 7}
    coco = {
        "images": [{"id": n, "file_name": Path(row["image"]).name} for n, row in enumerate(rows)],
        "categories": [{"id": number, "name": name} for name, number in names.items()],
        "annotations": [
            {
                "id": n,
                "image_id": n,
                "category_id": names[row["objects"]["category"][0]],
                "bbox": row["objects"]["bbox"][0],
            }
            for n, row in enumerate(rows)
        ],
    }
    (trainers.folder / "coco" / "_annotations.coco.json").write_text(json.dumps(coco))
    for number, row in enumerate(rows):
        color = trainers.folder / "classes" / row["objects"]["category"][0]
        color.mkdir(parents=True, exist_ok=True)
        color.joinpath(f"{number}.png").write_bytes((trainers.folder / row["image"]).read_bytes())
    for method, folder in (("object_detection", "coco"), ("image_classification", "classes")):
        ended = trainers.run(method, f"from-{folder}", *trainers.small(method, trainers.folder / folder, steps=2))
        assert ended.code == 0, ended.log
        config = json.loads((trainers.folder / f"from-{folder}" / "final" / "config.json").read_text())
        assert set(config["id2label"].values()) == {"red", "green"}


COCO_FAULTS: list[tuple[str, str, Any, str]] = [
    ("annotations", "bbox", None, "annotation 2: 'bbox'"),
    ("annotations", "bbox", [], "annotation 2: "),
    ("annotations", "image_id", 99, "annotation 2: 99"),
    ("annotations", "category_id", 98, "annotation 2: 98"),
    ("images", "file_name", None, "images: 'file_name'"),
    ("images", "file_name", "gone.png", "gone.png"),
]


@pytest.mark.parametrize(("part", "name", "value", "named"), COCO_FAULTS, ids=[f"{f[1]}-{f[2]}" for f in COCO_FAULTS])
def test_invalid_coco_annotations_are_reported(
    trainers: Trainers, tmp_path: Path, part: str, name: str, value: Any, named: str
) -> None:
    coco = coco_folder(trainers, tmp_path)
    coco[part][1] = {n: v for n, v in {**coco[part][1], name: value}.items() if v is not None}
    (tmp_path / "_annotations.coco.json").write_text(json.dumps(coco))
    refused(trainers.run("object_detection", "coco-bad", *trainers.small("object_detection", tmp_path)), 3, named)


def test_crowds_are_skipped_and_images_are_found_in_a_subfolder(trainers: Trainers, tmp_path: Path) -> None:
    need_libraries("object_detection")
    coco = coco_folder(trainers, tmp_path)
    for one in coco["annotations"][:2]:
        one |= {"iscrowd": 1, "bbox": [0, 0, 99, 99], "segmentation": {"counts": [1], "size": [32, 32]}}
    (tmp_path / "_annotations.coco.json").write_text(json.dumps(coco))
    words = trainers.small("object_detection", tmp_path, steps=2)
    ended = trainers.run("object_detection", "crowds", *words)
    assert ended.code == 0, ended.log
    assert [line for line in ended.log.splitlines() if re.match(r"2 crowd\b", line)], ended.log


def coco_folder(trainers: Trainers, folder: Path) -> dict[str, Any]:
    """Write pictures to a subfolder; return their annotations."""
    rows = picture_rows("object_detection", folder / "images")
    return {
        "images": [{"id": n, "file_name": Path(row["image"]).name} for n, row in enumerate(rows)],
        "categories": [{"id": 3, "name": "red"}, {"id": 7, "name": "green"}],
        "annotations": [
            {"id": n, "image_id": n, "category_id": 7 if n % 2 else 3, "bbox": row["objects"]["bbox"][0]}
            for n, row in enumerate(rows)
        ],
    }


def test_classes_at_different_depths_are_refused_with_the_fix(trainers: Trainers, tmp_path: Path) -> None:
    for number, row in enumerate(picture_rows("image_classification", tmp_path / "made")):
        target = tmp_path / "classes" / row["label"] / ("deep" if number == 3 else "") / f"{number}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / row["image"]).rename(target)
    words = trainers.small("image_classification", tmp_path / "classes")
    refused(trainers.run("image_classification", "deep", *words), 3, "image")


# ---------------------------------------------------------------------------------------------------------- GGUF


@pytest.mark.prove
def test_an_adapter_is_converted_to_proven_gguf_files(trainers: Trainers) -> None:
    """GPUWARDEN_LLAMA_CPP contains the paths of llama.cpp's source and build, as SOURCE:BUILD; builds take minutes."""
    source, _, build = os.environ.get("GPUWARDEN_LLAMA_CPP", "").partition(":")
    if not build:
        pytest.skip("GPUWARDEN_LLAMA_CPP does not name a source and a build of llama.cpp")
    wide = language_model(trainers.folder / "wide", hidden=256)
    words = [*trainers.small("sft", trainers.data("sft"), steps=2), "--model", str(wide)]
    assert trainers.run("sft", "adapter", *words).code == 0
    flags = ["--model", "adapter/final", "--llama-cpp", source, "--llama-cpp-build", build, "--pre-tokenizer", "gpt-2"]
    ended = trainers.run("merge_and_gguf", "files", *flags, "--types", "Q4_K_M,Q8_0")
    assert ended.code == 0, ended.log
    files = {f["type"]: f["tensors"] for f in result(trainers, "files")["files"]}
    assert files["Q4_K_M"]["Q4_K"] and files["Q8_0"]["Q8_0"]
    assert verify(trainers.folder / "files" / "gguf", Level.LOAD).verdict is Verdict.PROVEN


def test_k_types_are_refused_for_unsuitable_model_sizes(trainers: Trainers) -> None:
    ended = trainers.run("merge_and_gguf", "narrow", "--model", str(trainers.model), "--types", "Q4_K_M")
    refused(ended, 3, "hidden_size", "64", "--fallback")


# ------------------------------------------------------------------------------- services, and several processes


class Api(BaseHTTPRequestHandler):
    """The training system's API: records every request, and answers every third one with 503."""

    asked: ClassVar[list[tuple[str, str, dict[str, Any]]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers.get("Authorization") or self.headers.get("X-API-Key") or ""
        self.asked.append((self.path, key, body))
        self.send_response(503 if len(self.asked) % 3 == 0 else 200)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Print nothing."""


def test_metrics_and_alerts_reach_an_intermittent_api(trainers: Trainers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Api, "asked", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        at = f"http://127.0.0.1:{server.server_port}"
        ended = trainers.run(
            "sft", "posted", *trainers.small("sft", trainers.data("sft")),
            METRICS_API_URL=f"{at}/metrics", ALERT_API_URL=f"{at}/alerts", JOB_ID="j", USER_ID="u", JOB_TOKEN="t-1",
            INTERNAL_API_KEY="k-1",
        )  # fmt: skip
        server.shutdown()
        thread.join()
    assert ended.code == 0, ended.log
    taken = [asked for number, asked in enumerate(Api.asked, 1) if number % 3]
    points = [body["metrics"][0] for path, key, body in taken if path == "/metrics" and key == "Bearer t-1"]
    assert [p["step"] for p in points if "train_loss" in p and "train_runtime" not in p] == list(range(1, STEPS + 1))
    alerts = [body["type"] for path, key, body in taken if path == "/alerts" and key == "k-1"]
    assert alerts == ["job_started", "job_completed"]


def test_unwritable_metrics_do_not_end_a_run(trainers: Trainers) -> None:
    words = trainers.small("sft", trainers.data("sft"), steps=2)
    new = trainers.folder / "new" / "metrics.jsonl"
    assert trainers.run("sft", "to-new", *words, GPUWARDEN_METRICS=str(new)).code == 0
    assert len(new.read_text().splitlines()) > 2
    ended = trainers.run("sft", "to-full", *words, GPUWARDEN_METRICS="/dev/full")
    assert ended.code == 0, ended.log
    assert len([line for line in ended.log.splitlines() if "/dev/full" in line]) == 1


@pytest.mark.prove
def test_the_final_model_and_its_card_are_pushed(trainers: Trainers, tmp_path: Path) -> None:
    with hub_server(tmp_path / "hub") as hub:
        words = [*trainers.small("sft", trainers.data("sft"), steps=2), "--hub-model-id", "rehearsal/tuned"]
        where = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        flags = [sys.executable, str(SCRIPTS / "sft.py"), *words, "--out", str(tmp_path / "pushed")]
        env = os.environ | where | {"OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf")}
        wrong = subprocess.run(flags, env=env | {"HF_TOKEN": "hf_wrong"}, capture_output=True, text=True)
        assert wrong.returncode == 6 and "rehearsal/tuned" in wrong.stderr, wrong.stderr
        done = subprocess.run(flags, env=env | {"HF_TOKEN": HF_TOKEN}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        repo = hub.store.get("model", "rehearsal/tuned")
        commit = repo.commit_of("main") if repo else None
        assert commit and "README.md" in commit.files
        assert commit.files["adapter_model.safetensors"].xet, "the upload did not go through xet"


@pytest.mark.long
@pytest.mark.prove
def test_two_processes_train_one_model_get_signals_and_survive_out_of_memory(
    trainers: Trainers, tmp_path: Path
) -> None:
    """The machine's signal reaches the process that started the others, whose exit code is the run's."""
    words = [*trainers.small("sft", trainers.data("sft"), steps=40, every=2), "--processes", "2"]
    flags = [sys.executable, str(SCRIPTS / "sft.py"), *words, "--out", str(tmp_path / "two")]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    env.pop("HF_TOKEN", None)

    def run(fault: str, step: int) -> subprocess.CompletedProcess[str]:
        faulty = env | {"FAULT_STEP": str(step), "FAULT_SIGNAL": "SIGUSR1"}
        return subprocess.run([*flags, "--callback", f"{FAULTS}:{fault}"], env=faulty, capture_output=True, text=True)

    stopped = run("LauncherTold", 5)
    assert stopped.returncode == 75, stopped.stderr
    assert json.loads((tmp_path / "two" / "result.json").read_text())["status"] == "interrupted"
    saved = max(int(p.name.removeprefix("checkpoint-")) for p in (tmp_path / "two").glob("checkpoint-*"))
    done = run("OutOfMemory", 36)
    assert done.returncode == 0, done.stderr
    assert f"checkpoint-{saved}" in done.stdout
    result = json.loads((tmp_path / "two" / "result.json").read_text())
    assert (result["plan"]["world"], result["plan"]["micro"], result["plan"]["accumulate"]) == (2, 1, 2)
    assert result["step"] == 40
    assert result["resumed_from"] == "checkpoint-34"
