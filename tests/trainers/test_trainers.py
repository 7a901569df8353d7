"""The bundled trainers: built from their sources, strict about settings, and accepted by the submit gate."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from gputrain import launch
from gputrain.folder import write_json
from gputrain.hardware import Plan
from gputrain.launch import ending, launch_config, start_processes
from gputrain.outcome import Exit, Stop
from gputrain.rows import Data, load
from gputrain.settings import read_settings
from gputrain.smoke import Smoke, with_inputs
from gputrain.text import has_flash_attention
from gputrain.training import arguments, extra_arguments
from gpuwarden.core.rules import Severity, run_rules
from gpuwarden.rehearsal.hub.server import HubServer
from gpuwarden.rules.catalog import rules_of
from gpuwarden.static_analysis.shipped_trainers import trainer_names
from hubserver import config, hub_server
from real_parts import need
from rulefacts import HF_TOKEN, facts_for, seed_for_rules
from sft import WANTED as SFT_ROWS
from sft import SftSettings
from trainer_kit import SCRIPTS, shipped
from wording import Wording

TRAINERS = sorted(SCRIPTS / f"{name}.py" for name in trainer_names())
# Findings that any script gets on its first run, whatever it contains.
USUAL = {"PF-REL-004", "PF-OUT-002"}


PUSH = {"runpod": (), "hf-jobs": ("--hub-model-id", "rehearsal/tuned")}
# The rehearsal Hub's data that each method reads, and other flags that it requires.
NEEDED = {
    "sft": ("--dataset", "trl-lib/Capybara"),
    "cpt": ("--dataset", "stanfordnlp/imdb"),
    "dpo": ("--dataset", "argilla/dpo-mix-7k"),
    "orpo": ("--dataset", "argilla/distilabel-intel-orca-dpo-pairs", "--columns", "input=prompt"),
    "reward": ("--dataset", "argilla/dpo-mix-7k"),
    "kto": ("--dataset", "trl-lib/kto-mix-14k"),
    "grpo": ("--dataset", "trl-lib/tldr", "--reward", "answer"),
    "rloo": ("--dataset", "trl-lib/tldr", "--reward", "answer"),
    "distill": ("--dataset", "trl-lib/tldr", "--teacher", "Qwen/Qwen3-0.6B"),
    "image_classification": ("--dataset", "ethz/food101"),
    "object_detection": ("--dataset", "rishitdagli/cppe-5"),
    "sentence_embedding": ("--dataset", "rehearsal/triples"),
}


def header(script: Path) -> list[str]:
    """Return the lines of a script's header without the leading `# `."""
    lines = script.read_text(encoding="utf-8").splitlines()
    return [line[2:] for line in lines[lines.index("# /// script") + 1 : lines.index("# ///")]]


@pytest.mark.parametrize("script", TRAINERS, ids=lambda p: p.stem)
def test_a_trainer_has_bounded_explained_dependencies(script: Path) -> None:
    lines = header(script)
    wanted = tomllib.loads("\n".join(lines))["dependencies"]
    assert wanted
    for requirement in wanted:
        assert re.search(r">=[\d.]+,<[\d.]+", requirement), requirement
        [line] = [line for line in lines if f'"{requirement}"' in line]
        assert re.search(r",  # \w.{3,}", line), line
    assert script.stat().st_mode & 0o111


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with hub_server(tmp_path_factory.mktemp("hub")) as server:
        seed_for_rules(server.store)
        yield server


@pytest.mark.prove  # test_gate.py covers all of `submit` in the quick tests
@pytest.mark.parametrize("platform", ["runpod", "hf-jobs"])
@pytest.mark.parametrize("script", TRAINERS, ids=lambda p: p.stem)
def test_the_submit_gate_finds_nothing(hub: HubServer, script: Path, platform: str) -> None:
    outputs = ["out"] if platform == "runpod" else ["/hub/models/rehearsal/tuned"]
    spec = {"gpu": "a10g-large", "outputs": outputs, "secrets": ["HF_TOKEN"], "timeout_s": 14_400}
    text = shipped(script.stem)
    spec["args"] = ["--model", "Qwen/Qwen3-0.6B", *NEEDED.get(script.stem, ()), *PUSH[platform]]
    facts = anyio.run(lambda: facts_for(text, hub=config(hub, HF_TOKEN), platform=platform, **spec))
    found = [f for f in run_rules(rules_of("submit"), facts) if f.severity is not Severity.INFO]
    assert [(f.rule, f.message) for f in found if f.rule not in USUAL] == []


def asked(*words: str, method: str = "sft", **env: str) -> tuple[int, str]:
    """Run a trainer that should exit before it imports anything heavy."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / f"{method}.py", *words], capture_output=True, text=True, timeout=300, env=env
    )
    return done.returncode, done.stdout + done.stderr


def lines_of(log: str) -> tuple[str, str]:
    """Return the line for the error and the one for the fix."""
    [error] = [line for line in log.splitlines() if line.startswith("ERROR")]
    [fix] = [line for line in log.splitlines() if line.startswith("FIX")]
    return error, fix


BOTH = ("--model", "m", "--dataset", "d")


@pytest.mark.parametrize(
    ("words", "named", "fix"),
    [
        pytest.param((), "model", "--model", id="no-model"),
        pytest.param(("--model", "m"), "dataset", "--dataset", id="no-dataset"),
        pytest.param(("--steps", "ten"), "'ten'", "", id="steps-in-words"),
        pytest.param(("--learning-rate", "3"), "learning_rate", "0 to 1", id="learning-rate"),
        pytest.param(("--precision", ""), "precision", "auto", id="empty-choice"),
        pytest.param(("--too-long", "ignore"), "too_long", "refuse, truncate, drop", id="unknown-choice"),
        pytest.param((*BOTH, "--batch-size", "6", "--micro-batch", "4"), "batch_size", "micro_batch", id="batch"),
        pytest.param((*BOTH, "--hub-model-id", "mine"), "'mine'", "owner/name", id="hub-model-id"),
        pytest.param((*BOTH, "--hub-model-id", "a/b"), "HF_TOKEN", "HF_TOKEN", id="no-token"),
        pytest.param((*BOTH, "--quantize", "4bit", "--lora-rank", "0"), "4bit", "lora_rank", id="quantize"),
    ],
)
def test_a_wrong_setting_ends_the_run_and_names_setting_and_fix(
    words: tuple[str, ...], named: str, fix: str, wording: Wording
) -> None:
    code, log = asked(*words)
    assert code == (6 if "TOKEN" in named else 2), log
    error, remedy = lines_of(log)
    assert named in error and fix in remedy
    wording(f"{error}\n{remedy}")


def test_a_flag_without_its_value_ends_the_run() -> None:
    code, log = asked("--steps")
    error, remedy = lines_of(log)
    assert code == 2 and "--steps: expected one argument" in error and "--help" in remedy


def test_flags_override_the_environment_and_the_environment_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\nlearning_rate: 2\nseed: 1\n")
    flags = ("--config", str(file))
    for more, env, value in (
        ((), {}, 2),
        ((), {"TRAIN_LEARNING_RATE": "3"}, 3),
        (("--learning-rate", "4"), {"TRAIN_LEARNING_RATE": "3"}, 4),
    ):
        error, _ = lines_of(asked(*flags, *more, **env)[1])
        assert "learning_rate" in error and re.findall(r"\d+", error)[0] == str(value)


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        pytest.param("a.yaml", "learning_rat: 1", r"\blearning_rat\b.*\blearning_rate\b", id="misspelled"),
        pytest.param("a.yaml", "- 1", r"a\.yaml", id="list"),
        pytest.param("a.json", "{", r"a\.json", id="broken-json"),
        pytest.param("a.yaml", "steps: 2.5", r"steps .*2\.5", id="half-a-step"),
        pytest.param("a.yaml", "cpu: perhaps", "cpu .*'perhaps'", id="no-bool"),
        pytest.param("a.yaml", "1: 2", r"\b1\b", id="number-as-name"),
        pytest.param("a.yaml", "model:\n", "model", id="empty"),
        pytest.param("a.yaml", "model: [\x00", r"a\.yaml", id="broken-yaml"),
    ],
)
def test_an_invalid_settings_file_is_refused(tmp_path: Path, name: str, text: str, named: str) -> None:
    (tmp_path / name).write_text(text)
    code, log = asked("--config", str(tmp_path / name))
    assert code == 2
    error, fix = lines_of(log)
    assert re.search(named, f"{error} {fix}"), log
    assert "Traceback" not in log


def test_a_file_gives_the_same_settings_as_flags(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: m\ndataset: d\neval_dataset:\nreport: [tensorboard, trackio]\ncolumns:\n  question: prompt\n"
    )
    settings = read_settings(SftSettings, ["--config", str(file)])
    assert (settings.eval_dataset, settings.report, settings.columns) == ("", "tensorboard,trackio", "question=prompt")
    file.write_bytes(b"model: \xff\xfe")
    with pytest.raises(Stop, match=r"run\.yaml"):
        read_settings(SftSettings, ["--config", str(file)])


def test_a_misspelled_variable_is_mentioned() -> None:
    code, log = asked(TRAIN_LERNING_RATE="1", TRAIN_NODES="2")
    assert code == 2
    told = [line for line in log.splitlines() if "TRAIN_LERNING_RATE" in line]
    assert told and "TRAIN_LEARNING_RATE" in told[-1]
    assert "TRAIN_NODES" not in log


def test_online_methods_refuse_unsuitable_settings(wording: Wording) -> None:
    words = ("--model", "m", "--dataset", "d", "--reward", "answer")
    code, log = asked(*words, "--save-steps", "5", "--steps-per-rollout", "2", method="grpo")
    assert code == 2
    wording("\n".join(lines_of(log)))
    code, log = asked(*words, "--batch-size", "6", "--generations", "4", method="rloo")
    assert code == 2
    wording("\n".join(lines_of(log)))
    code, log = asked(*words[:4], method="grpo")
    assert code == 2
    wording("\n".join(lines_of(log)), "--reward")


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        pytest.param((), 2, "model", id="no-model"),
        pytest.param(("--model", "m", "--types", "Q4_K_M,Q9"), 2, "'Q9'", id="unknown-type"),
        pytest.param(("--model", "m", "--hub-model-id", "a/b"), 6, "HF_TOKEN", id="no-token"),
    ],
)
def test_an_impossible_conversion_is_refused_at_once(words: tuple[str, ...], code: int, named: str) -> None:
    ended, log = asked(*words, method="merge_and_gguf")
    assert ended == code
    assert named in lines_of(log)[0]


# ------------------------------------------------------------------------------------------------------------ rows


def test_rows_in_another_format_are_converted_by_a_function_and_limited(tmp_path: Path) -> None:
    need("datasets", importlib.util.find_spec("datasets") is not None)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"asked": f"a {n}", "said": "b"}) + "\n" for n in range(20)))
    settings = SftSettings(model="m", dataset=str(file), max_rows=8)
    with pytest.raises(Stop) as stop:
        load(settings, SFT_ROWS)
    assert stop.value.code == Exit.DATA
    made = load(settings, SFT_ROWS, convert=lambda row: {"prompt": row["asked"], "completion": row["said"]})
    assert len(made.train) == 8 and len(made.held_out) == 1
    assert sorted(made.train.column_names) == ["completion", "prompt"]
    assert {row["prompt"] for row in made.train} <= {f"a {n}" for n in range(20)}


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_a_prompt_repeated_in_the_answers_is_left_to_trl(tmp_path: Path) -> None:
    need("datasets", importlib.util.find_spec("datasets") is not None)
    said = [turn("user", "hi"), turn("assistant", "hello")]
    other = [said[0], turn("assistant", "no")]
    file = tmp_path / "pairs.jsonl"
    settings = SftSettings(model="m", dataset=str(file), eval_fraction=0.0)
    wanted = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
    file.write_text(json.dumps({"prompt": "hi", "chosen": said, "rejected": other}) + "\n")
    assert sorted(load(settings, wanted).train.column_names) == ["chosen", "rejected"]
    assert load(settings, (("prompt",),)).train.column_names == ["prompt"], "a method that reads prompts only"
    whole = {"prompt": "hi", "chosen": said, "rejected": other}
    for row in (
        {"prompt": "hi", "chosen": said[1:], "rejected": other[1:]},
        {"prompt": "hi", "chosen": [turn("system", "s"), *said[1:]], "rejected": [turn("system", "s"), *other[1:]]},
        {"prompt": "hi", "chosen": "yes", "rejected": "no"},
    ):
        file.write_text(json.dumps(whole) + "\n" + json.dumps(row) + "\n")
        with pytest.raises(Stop) as stop:
            load(settings, wanted)
        assert stop.value.code == Exit.DATA


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("", {}),
        ("neftune_noise_alpha=5,optim=adafactor", {"neftune_noise_alpha": 5, "optim": "adafactor"}),
        ("optim=adafactor,pin=FALSE", {"optim": "adafactor", "pin": False}),
        ("packing=true,loss_type=None", {"packing": True, "loss_type": None}),
        ("adam_epsilon=1e-6,eval_on_start=False", {"adam_epsilon": 1e-6, "eval_on_start": False}),
    ],
)
def test_extra_arguments_have_the_types_that_they_look_like(given: str, found: dict[str, Any]) -> None:
    assert extra_arguments(SftSettings(extra=given), {"output_dir": "out"}) == found


@pytest.mark.parametrize("given", ["output_dir=elsewhere", "hub_token=t", "packing", "=5", "a=1,a=2"])
def test_malformed_or_conflicting_extra_arguments_are_refused(given: str) -> None:
    with pytest.raises(Stop) as stop:
        extra_arguments(SftSettings(extra=given), {"output_dir": "out"})
    assert stop.value.code == Exit.CONFIG


# ------------------------------------------------------------------------------------------------------ smoke runs


def smoke(*words: str) -> Any:
    """Return the settings of a run whose smoke inputs consist of one empty file."""

    def make(folder: Path) -> None:
        (folder / "data.jsonl").touch()

    made = Smoke(make, ("--model", "{}/model", "--dataset", "{}/data.jsonl", "--steps", "8"), trains=False)
    return read_settings(SftSettings, with_inputs(SftSettings, list(words), made))


REAL = {
    "model": "meta/Big-70B", "dataset": "me/huge", "hub_model_id": "me/real-model", "eval_dataset": "me/judged",
    "columns": "a=prompt", "chat_template_from": "meta/Big-70B-Instruct",
}  # fmt: skip


@pytest.mark.parametrize("where", ["flags before", "flags behind", "variables", "file"])
def test_a_smoke_run_uses_its_own_inputs_and_never_pushes(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for name, value in REAL.items() for word in (f"--{name.replace('_', '-')}", value)]
    if where == "variables":
        words = []
        for name, value in REAL.items():
            monkeypatch.setenv(f"TRAIN_{name.upper()}", value)
    if where == "file":
        words = ["--config", str(tmp_path / "run.yaml")]
        (tmp_path / "run.yaml").write_text("".join(f"{name}: {value}\n" for name, value in REAL.items()))
    out = str(tmp_path / "out")
    words = ["--smoke", *words] if where == "flags before" else [*words, "--smoke"]
    got = smoke(*words, "--out", out, "--steps", "100")
    assert (got.model, got.dataset) == (f"{out}/inputs/model", f"{out}/inputs/data.jsonl")
    assert (got.hub_model_id, got.eval_dataset, got.columns, got.chat_template_from) == ("", "", "", "")
    assert got.steps == 100
    assert ", ".join(sorted(REAL)) in capsys.readouterr().out


@pytest.mark.parametrize(("word", "is_one"), [("1", True), ("YES", True), ("off", False)])
def test_a_variable_can_request_a_smoke_run(
    word: str, is_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAIN_SMOKE", word)
    got = smoke("--model", "m", "--dataset", "d", "--out", str(tmp_path))
    assert got.smoke is is_one and (got.model == "m") is not is_one
    assert smoke("--model", "m", "--dataset", "d", "--no-smoke").model == "m"
    monkeypatch.setenv("TRAIN_SMOKE", "perhaps")
    with pytest.raises(Stop, match=r"smoke .*'perhaps'"):
        smoke()


@pytest.mark.parametrize("name", [".inputs", "inputs"])
def test_unwritable_inputs_stop_a_smoke_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / name).symlink_to(tmp_path / ("elsewhere" if name == ".inputs" else "nowhere"))
    with pytest.raises(Stop, match="inputs") as stop:
        smoke("--smoke", "--out", str(tmp_path))
    assert stop.value.code == Exit.ENVIRONMENT and "--out" in stop.value.fix


# ------------------------------------------------------------------------------------------------- several processes


@pytest.mark.parametrize(
    ("code", "codes", "ends"),
    [
        (0, [0, 0], 0),
        (1, [75, 75], 75),
        (1, [75], 75),  # the other was killed while it was exiting
        (1, [1, 4], 4),  # one ran out of memory, and the other lost its peer
        (1, [5, 5], 5),
        (1, [75, 1], 1),
        (1, [], 1),
        (-9, [0], 1),
    ],
)
def test_several_processes_end_with_one_exit_code(code: int, codes: list[int], ends: int) -> None:
    assert ending(code, codes) == ends


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fsdp2", "deepspeed"])
def test_accelerate_accepts_the_generated_machine_configuration(
    sharding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("accelerate", importlib.util.find_spec("accelerate") is not None)
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    monkeypatch.setattr(launch, "find_spec", lambda name: True)
    file = tmp_path / "accelerate.json"
    write_json(file, launch_config(4, sharding, cpu=False))
    asked, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(file), "x.py"]))
    assert (asked.num_processes, asked.use_fsdp, asked.use_deepspeed) == (4, sharding == "fsdp2", sharding != "fsdp2")
    if sharding == "deepspeed":
        assert asked.zero_stage == 3 and asked.zero3_save_16bit_model
        return
    made = prepare_multi_gpu_env(asked)
    assert (made["FSDP_VERSION"], made["FSDP_STATE_DICT_TYPE"]) == ("2", "FULL_STATE_DICT")
    assert made["ACCELERATE_USE_FSDP"] == "true"


@pytest.mark.parametrize(
    ("sharding", "cpu"),
    [("fsdp2", True), ("deepspeed", True), ("deepspeed", False)],
)
def test_impossible_sharding_is_refused(
    sharding: str, cpu: bool, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(Stop) as stop:
        launch_config(2, sharding, cpu=cpu)
    wording(stop, sharding)


def test_processes_started_without_the_set_sharding_are_refused(
    monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    settings = SftSettings(model="m", dataset="d", sharding="fsdp2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Stop) as stop:
        start_processes(settings)
    wording(stop, "fsdp2")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    start_processes(settings)


# ------------------------------------------------------------------------------------------------------------ fast


@pytest.mark.parametrize(
    ("card", "capability", "flash", "extra"),
    [
        ("cpu", (0, 0), True, {}),
        ("Tesla T4", (7, 5), True, {}),
        ("NVIDIA A10G", (8, 6), False, {"optim": "adamw_torch_fused", "tf32": True}),
        ("NVIDIA H100", (9, 0), True, {"optim": "adamw_torch_fused", "tf32": True, "torch_compile": True}),
    ],
)
def test_fast_adds_only_settings_known_to_work_on_the_card(
    card: str,
    capability: tuple[int, int],
    flash: bool,
    extra: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = Plan(card, 24.0, capability, "bf16" if capability >= (8, 0) else "fp32", 2, 2, 1)
    plain = arguments(SftSettings(), plan, Data([1], None, {}))
    fast = arguments(SftSettings(fast=True), plan, Data([1], None, {}))
    assert plain | extra == fast
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: flash or None)
    assert has_flash_attention(plan) is (flash and capability >= (8, 0))
