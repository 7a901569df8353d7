"""The settings that a bundled trainer declares are read from its text, but not from other scripts."""

from __future__ import annotations

from typing import Any

import pytest

from gpuwarden.static_analysis.bundle import with_package
from gpuwarden.static_analysis.script import parse_bundle, read_script
from gpuwarden.static_analysis.script_usage import Push
from gpuwarden.static_analysis.static_eval import Program
from gpuwarden.static_analysis.typed_settings import TypedSettings, typed_settings
from trainer_kit import shipped

OWN = "def option(default, text, **limits): ...\ndef read_settings(kind, words): ...\n"
RUN = "settings = read_settings(S, [])\n"


def read(text: str, *argv: str, **env: str) -> TypedSettings | None:
    bundle, tree, _ = parse_bundle(text)
    return typed_settings(Program(with_package(tree, bundle), env, argv))


def pushes(text: str, *argv: str) -> tuple[Push, ...]:
    return read_script(text, {}, argv).uses.pushes


def sft(*argv: str, **env: str) -> TypedSettings:
    found = read(shipped("sft"), *argv, **env)
    assert found is not None
    return found


def wrong(found: TypedSettings) -> list[str]:
    return [n for n, value in found.given.items() if n in found.declared and found.declared[n].correction(value)]


@pytest.mark.parametrize(
    ("env", "given"),
    [
        ({"TRAIN_STEPS": "10"}, {"steps": 10}),
        ({"TRAIN_LEARNING_RATE": "3e-5"}, {"learning_rate": 3e-5}),
        ({"TRAIN_SMOKE": "1"}, {"smoke": True}),
        ({"TRAIN_SMOKE": "off"}, {"smoke": False}),
        ({"TRAIN_REVISION": "1"}, {"revision": "1"}),
        ({"TRAIN_STEPS": "ten"}, {"steps": "ten"}),
    ],
)
def test_variables_are_parsed_like_in_the_trainer(env: dict[str, str], given: dict[str, Any]) -> None:
    found = sft(**env)
    assert found.given == given
    assert wrong(found) == (["steps"] if given == {"steps": "ten"} else [])


@pytest.mark.parametrize(
    ("argv", "unknown", "outside"),
    [
        (["--no-fast", "--steps", "5"], [], []),
        (["--no-steps"], ["no_steps"], []),
        (["--learning-rate", "nan"], [], ["learning_rate"]),
        (["--steps"], [], ["steps"]),
        (["--datset", "x"], ["datset"], []),
        (["--steps", "9" * 400], [], []),
    ],
)
def test_arguments_refused_by_the_trainer_are_found(argv: list[str], unknown: list[str], outside: list[str]) -> None:
    found = sft(*argv)
    assert (found.unknown, wrong(found)) == (unknown, outside)


@pytest.mark.slow
def test_a_smoke_run_has_no_required_settings() -> None:
    assert sft("--smoke").missing == []
    assert sft("--no-smoke").missing == ["dataset", "model"]
    assert sft("--config", "my.yaml").missing == []


@pytest.mark.parametrize(
    "text",
    [
        "from base import Settings, option, read_settings\nclass Settings(Settings):\n  lr: float = option(0.1, 'x')\n",
        "from mylib import Common, option, read_settings\nclass S(Common):\n  lr: float = option(0.1, 'x')\n" + RUN,
        OWN + "class S(Common):\n  lr: float = option(0.1, 'x')\n" + RUN,
        OWN
        + "class S(Settings):\n  lr: float = option(0.1, 'x')\nclass Settings(S):\n  n: int = option(1, 'x')\n"
        + RUN,
        OWN + "class S(S):\n  lr: float = option(0.1, 'x')\n" + RUN,
        OWN + "class A: ...\nclass B: ...\nclass S(A, B):\n  lr: float = option(0.1, 'x')\n" + RUN,
        OWN + "class S(base.Common):\n  lr: float = option(0.1, 'x')\n" + RUN,
        OWN + "class S:\n  lr: float = option(0.1, 'x')\n  n: int | None = option(None, 'x')\n" + RUN,
        OWN + "class S:\n  lr: float = option(0.1, 'x')\n  n = option(None, 'x')\n" + RUN,
        OWN + "class S(metaclass=Odd):\n  lr: float = option(0.1, 'x')\n" + RUN,
    ],
)
def test_a_script_with_other_setting_declarations_is_not_judged(text: str) -> None:
    assert read(text, "--epochs", "3") is None


@pytest.mark.parametrize(
    "limits",
    [
        "choices=(1, 2, 4)",
        "choices=[['a']]",
        f"most=0x{'f' * 600}",
        f"least=-{'9' * 600}",
        "choices=unknown",
        "most=1e999",
    ],
)
def test_odd_limits_never_raise(limits: str) -> None:
    found = read(OWN + f"class S:\n  gpus: int = option(1, 'x', {limits})\n" + RUN, "--gpus", "2")
    assert found is not None and wrong(found) == []


@pytest.mark.slow
def test_an_upload_added_to_a_copied_trainer_is_detected() -> None:
    text = shipped("sft")
    assert pushes(text) == ()
    added = text.replace(
        "\nif __name__", "\nHfApi().upload_folder(folder_path='.', repo_id='somebody/else')\n\nif __name__"
    )
    assert [p.target for p in pushes(added)] == ["somebody/else"]
    asked = pushes(text, "--hub-model-id", "me/mine")
    assert asked and len(asked) == len({p.line for p in asked})
