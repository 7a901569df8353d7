"""Every kind of bad input, for every trainer that it applies to, gives one line for the error and one for the fix."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.models import Level, Verdict
from hubserver import hub_server
from real_parts import need
from rulefacts import HF_TOKEN
from trainer_kit import (
    METHODS,
    NEEDS,
    PICTURES,
    SCRIPTS,
    TEXTS,
    Trainers,
    encoder,
    language_model,
    picture_rows,
    refused,
    rows_of,
    turn,
)

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(sys.platform != "linux", reason="forks after PyTorch was imported"),
]
TALKS = tuple(m for m in TEXTS if m != "cpt")
ANSWERS = ("sft", "dpo", "orpo", "reward", "kto")
OTHER = [{"unheard": 1, "of": 2}] * 8


class Bad(NamedTuple):
    """A kind of bad input: the trainers that it applies to, the exit code, and words in the two lines."""

    name: str
    methods: tuple[str, ...]
    code: int
    says: tuple[str, ...]
    flags: tuple[str, ...] = ()


KINDS = (
    Bad("an empty file", METHODS, 3, ("empty.jsonl",), ("--dataset", "empty.jsonl")),
    Bad("a file that is not there", METHODS, 3, ("nowhere.jsonl", "--dataset"), ("--dataset", "nowhere.jsonl")),
    Bad("a split that is not there", METHODS, 3, ("test", "--eval-dataset"), ("--eval-split", "test")),
    Bad("other columns", METHODS, 3, ("of, unheard", "--columns")),
    Bad("a row without the assistant's turn", ANSWERS, 3, ("row 3", "assistant")),
    Bad("an empty value", (*TEXTS, "sentence_embedding"), 3, ("row 3", "empty")),
    Bad("no chat template", TALKS, 3, ("--chat-template-from",)),
    Bad("no padding token", (*TEXTS, "sentence_embedding"), 3, ("pad",)),
    Bad("a label beyond the head", PICTURES, 3, ("'blue'", "--labels"), ("--labels", "red,green")),
    Bad("a corrupt picture", PICTURES, 3, ("row 3",)),
    Bad("a box outside", ("object_detection",), 3, ("--boxes clip",)),
    Bad("no room on the disk", METHODS, 6, ("GB", "--keep"), ("--keep", "1000000000")),
    Bad("no token", METHODS, 6, ("HF_TOKEN",), ("--hub-model-id", "a/b")),
    Bad("no GPU", METHODS, 6, ("GPU", "--cpu"), ("--no-cpu",)),
    Bad("another GPU", METHODS, 6, ("cpu", "H100", "--expect-gpu"), ("--expect-gpu", "H100")),
    Bad("checkpoints of another run", METHODS, 2, ("--out",)),
    Bad("a model that is not there", METHODS, 6, ("nobody/nothing",), ("--model", "nobody/nothing")),
)
CASES = [pytest.param(bad, method, id=f"{bad.name}-{method}") for bad in KINDS for method in bad.methods]


def bad_rows(bad: Bad, method: str, folder: Path) -> list[dict[str, Any]] | None:
    """Return rows of which the third is bad, or all of them for "other columns"; None if the rows are good."""
    if bad.name == "other columns":
        return OTHER
    rows = picture_rows(method, folder / "changed") if method in PICTURES else rows_of(method)
    column = {"sft": "messages", "cpt": "text", "sentence_embedding": "anchor", "kto": "completion"}.get(
        method, "chosen"
    )
    column = column if column in rows[2] else "prompt"
    match bad.name:
        case "a row without the assistant's turn":
            rows[2] = {**rows[2], column: [turn("user", "and then?")]}
        case "an empty value":
            rows[2] = {**rows[2], column: [] if isinstance(rows[2][column], list) else ""}
        case "a label beyond the head" if method == "image_classification":
            rows[2]["label"] = "blue"
        case "a label beyond the head":
            rows[2]["objects"]["category"] = ["blue"]
        case "a corrupt picture":
            file = folder / rows[2]["image"]
            file.write_bytes(file.read_bytes()[:60])
        case "a box outside":
            rows[2]["objects"]["bbox"] = [[20, 4, 20, 4]]
        case _:
            return None
    return rows


def flags_of(bad: Bad, method: str, trainers: Trainers, out: Path) -> list[str]:
    """Return the flags for a small run with the bad input."""
    made = trainers.folder / f"lacking-{bad.name}-{method}"
    match bad.name:
        case "no chat template":
            return ["--model", str(language_model(made, template=None))]
        case "no padding token" if method in TEXTS:
            return ["--model", str(language_model(made, pad=None))]
        case "no padding token":
            return ["--model", str(encoder(made, pad=None))]
        case "checkpoints of another run":
            (out / "checkpoint-2").mkdir(parents=True)
            (out / "checkpoint-2" / "model.safetensors").write_bytes(b"dear")
    return [*bad.flags, *(["--eval-fraction", "0"] if method in PICTURES and "split" not in bad.name else [])]


@pytest.mark.parametrize(("bad", "method"), CASES)
def test_bad_input_ends_a_trainer_at_once_and_harms_nothing(trainers: Trainers, bad: Bad, method: str) -> None:
    import torch

    for name in NEEDS.get(method, ()):
        need(name, importlib.util.find_spec(name) is not None)
    if bad.name == "no GPU" and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    out = trainers.folder / f"out-{bad.name.replace(' ', '-')}-{method}"
    data = trainers.data(method, bad_rows(bad, method, trainers.folder))
    words = [*trainers.small(method, data), *flags_of(bad, method, trainers, out)]
    refused(trainers.run(method, str(out), *words), bad.code, *bad.says)
    assert not list(out.glob("checkpoint-*/trainer_state.json")), "a step was trained"
    if bad.name == "checkpoints of another run":
        assert (out / "checkpoint-2" / "model.safetensors").read_bytes() == b"dear"
        assert [p.name for p in out.iterdir()] == ["checkpoint-2"]


GATED = ["sft", "dpo", "image_classification", "sentence_embedding", "merge_and_gguf"]


@pytest.mark.parametrize(
    ("method", "token"),
    [
        *(pytest.param(name, HF_TOKEN, id=f"{name} without access") for name in GATED),
        pytest.param("sft", "", id="without a token"),
    ],
)
def test_a_gated_model_is_reported_with_the_way_to_get_access(
    trainers: Trainers, tmp_path: Path, method: str, token: str
) -> None:
    for name in NEEDS.get(method, ()):
        need(name, importlib.util.find_spec(name) is not None)
    with hub_server(tmp_path / "hub") as hub:
        repo = hub.store.put("model", "lab/gated", {"config.json": "{}"})
        repo.gated = "manual"
        hub.store.save(repo)
        words = ["--types", "Q8_0"] if method == "merge_and_gguf" else trainers.small(method, trainers.data(method))
        words = [
            sys.executable,
            str(SCRIPTS / f"{method}.py"),
            *words,
            "--model",
            "lab/gated",
            "--out",
            str(tmp_path / "o"),
        ]
        env = {k: v for k, v in os.environ.items() if k not in {"HF_TOKEN", "HF_HUB_OFFLINE"}}
        env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
        env |= {"HF_TOKEN": token} if token else {}
        done = subprocess.run(words, env=env, cwd=trainers.folder, capture_output=True, text=True)
    assert done.returncode == 6, done.stderr
    [error] = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    [fix] = [line for line in done.stderr.splitlines() if line.startswith("FIX")]
    assert "lab/gated" in error and "gated" in error.replace("lab/gated", "") and "HF_TOKEN" in fix


# ------------------------------------------------------------------------------------------------- the conversion


def test_an_unreadable_or_unstartable_conversion_is_reported(trainers: Trainers) -> None:
    model = str(language_model(trainers.folder / "to-convert"))
    for flags, code, says in (
        (["--model", "nobody/nothing"], 6, ("nobody/nothing",)),
        (["--model", model, "--hub-model-id", "a/b"], 6, ("HF_TOKEN",)),
        (["--model", model, "--llama-cpp", str(trainers.folder)], 2, ("--llama-cpp",)),
        (["--model", model, "--types", "Q4_K_M"], 3, ("hidden_size", "64", "--fallback")),
    ):
        refused(trainers.run("merge_and_gguf", f"convert-{code}-{says[0][:4]}", "--types", "F16", *flags), code, *says)
    refused(trainers.run("merge_and_gguf", "/proc/nowhere", "--model", model), 6, "/proc/nowhere", "--out")


def test_a_conversion_into_the_folder_of_its_run_leaves_the_run_resumable(trainers: Trainers) -> None:
    from gputrain.folder import claim

    out = trainers.folder / "trained"
    (out / "final").mkdir(parents=True)
    run = {"method": "sft", "seed": 1}
    claim(out / "run.json", run, [])
    (out / "baseline.json").write_text("{}")
    claim(out / "conversion.json", {"model": "final", "base": ""}, [])
    claim(out / "run.json", run, ["final"])
    assert (out / "baseline.json").exists()


def test_a_conversion_keeps_the_files_of_another_model(trainers: Trainers) -> None:
    out = trainers.folder / "taken"
    (out / "gguf").mkdir(parents=True)
    (out / "gguf" / "mine.gguf").write_bytes(b"dear")
    model = str(language_model(trainers.folder / "newcomer"))
    refused(trainers.run("merge_and_gguf", str(out), "--model", model), 2, "gguf", "--out")
    assert (out / "gguf" / "mine.gguf").read_bytes() == b"dear"
    assert [p.name for p in out.iterdir()] == ["gguf"]


def test_a_conversion_without_disk_space_ends_before_writing(
    trainers: Trainers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import merge_and_gguf as merge

    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    settings = merge.GgufSettings(model=str(language_model(tmp_path / "model")), out=str(tmp_path), types="F16")
    with pytest.raises(merge.Stop, match="GB") as stop:
        merge.merge(settings, ["F16"])
    assert stop.value.code == merge.Exit.ENVIRONMENT and "disk" in stop.value.fix
    assert not (tmp_path / "merged").exists()


def test_a_killed_conversion_starts_again_and_leaves_whole_files_only(tmp_path: Path) -> None:
    """GPUWARDEN_LLAMA_CPP contains the paths of llama.cpp's source and build, as SOURCE:BUILD; `make gguf` sets it."""
    source, _, build = os.environ.get("GPUWARDEN_LLAMA_CPP", "").partition(":")
    if not build:
        pytest.skip("GPUWARDEN_LLAMA_CPP does not name a source and a build of llama.cpp")
    words = [sys.executable, str(SCRIPTS / "merge_and_gguf.py"), "--smoke", "--out", str(tmp_path / "out")]
    words += ["--llama-cpp", source, "--llama-cpp-build", build, "--types", "F16,Q8_0"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    files = tmp_path / "out" / "gguf"
    for line in ("conversion", "quantization"):
        with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
            assert run.stdout is not None
            assert any(said.startswith(line) for said in run.stdout), "the conversion ended early"
            os.killpg(run.pid, signal.SIGKILL)
        for file in files.glob("*.gguf"):
            assert verify(file, Level.LOAD).verdict is Verdict.PROVEN
    (files / "old-Q4_0.gguf.part").write_bytes(b"cut")
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(p.suffix for p in files.iterdir()) == [".gguf", ".gguf"]
    assert verify(files, Level.LOAD).verdict is Verdict.PROVEN
