"""Arguments after a script go to the script, except for gpuwarden options that the script doesn't declare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.guidance import manual_text
from gpuwarden.interfaces.cli import main as _main  # adds the commands to the group
from gpuwarden.interfaces.cli.base import cli
from gpuwarden.static_analysis.flag_owner import flags_of
from wording import Wording

ARGPARSE = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--gpu")
args = parser.parse_args()
"""
LENIENT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
args, rest = parser.parse_known_args()
"""
PREFIX = ARGPARSE.replace('"--gpu"', '"--gpu_count"')
STRICT = ARGPARSE.replace('parser.add_argument("--gpu")\n', "")
TRL = """
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser
parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
"""
SILENT = "print('no options')\n"


def parsed(command: str, *words: str) -> dict[str, Any]:
    """Return the parameters that a command gets, without running it."""
    assert _main
    return cli.commands[command].make_context(command, list(words)).params


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    texts = {
        "gpu.py": ARGPARSE,
        "lenient.py": LENIENT,
        "strict.py": STRICT,
        "prefix.py": PREFIX,
        "trl.py": TRL,
        "train.py": SILENT,
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_arguments_after_a_script_belong_to_the_script() -> None:
    words = ("--model_name_or_path", "Qwen/Qwen3-0.6B", "--lr", "2e-5", "-x", "--flag=1", "last")
    got = parsed("submit", "--platform", "local", "--gpu", "H100", "train.py", *words)
    assert got["what"] == ("train.py", *words) and got["gpu"] == "H100" and got["platform"] == "local"
    got = parsed("fan-out", "--on", "local", "--seeds", "3", "train.py", *words)
    assert got["what"] == ("train.py", *words) and got["seeds"] == 3
    got = parsed("estimate", "--gpu", "a100", "train.py", *words)
    assert got["what"] == ("train.py", *words) and got["gpus"] == ("a100",)


def test_two_dashes_still_separate_script_arguments() -> None:
    expected = ("train.py", "--lr", "2e-5", "--gpu", "4")
    for words in (
        ("--platform", "local", "--", "train.py", "--lr", "2e-5", "--gpu", "4"),
        ("train.py", "--platform", "local", "--", "--lr", "2e-5", "--gpu", "4"),
        ("--platform", "local", "train.py", "--", "--lr", "2e-5", "--gpu", "4"),
        ("--platform", "local", "train.py", "--lr", "2e-5", "--", "--gpu", "4"),
    ):
        got = parsed("submit", *words)
        assert (got["what"], got["platform"], got["gpu"]) == (expected, "local", None), words
    got = parsed("submit", "--platform", "local", "--", "python", "-c", "print(1)", "--name", "x")
    assert got["what"] == ("python", "-c", "print(1)", "--name", "x") and got["name"] is None


def test_arguments_after_a_command_belong_to_the_command() -> None:
    got = parsed("submit", "--platform", "local", "torchrun", "--nproc_per_node", "8", "train.py", "--lr", "1")
    assert got["what"] == ("torchrun", "--nproc_per_node", "8", "train.py", "--lr", "1")


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("train.py --platform local", "--platform local train.py"),
        ("--platform local train.py --gpu H100", "--platform local --gpu H100 train.py"),
        ("strict.py --lr 2 --gpu=H100", "--gpu=H100 strict.py --lr 2"),
        ("trl.py --max_steps 5 --gpu H100", "--gpu H100 trl.py --max_steps 5"),
        ("gpu.py --gpu 0 --dry-run", "--dry-run gpu.py --gpu 0"),
        ("prefix.py --gpu H100", "--gpu H100 prefix.py"),  # argparse alone would accept it as --gpu_count
        ("train.py --secret HF_TOKEN --json", "--secret HF_TOKEN --json train.py"),
        ("strict.py --dry-run -- --gpu 4", "--dry-run -- strict.py --gpu 4"),
        ("strict.py --lr 2 --dry-run -- --gpu 4", "--dry-run -- strict.py --lr 2 --gpu 4"),
    ],
)
def test_gpuwarden_option_may_follow_a_script_that_does_not_declare_it(words: str, same: str) -> None:
    assert parsed("submit", *words.split()) == parsed("submit", *same.split())


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("lenient.py", "--gpu", "4"), id="lenient"),
        pytest.param(("none.pyz", "--timeout", "60"), id="archive"),
        pytest.param(("true", "--gpu", "4"), id="program"),
    ],
)
def test_ambiguous_option_is_refused_with_both_alternatives(words: tuple[str, ...], wording: Wording) -> None:
    with pytest.raises(BadRequest) as refused:
        parsed("submit", "--platform", "local", *words)
    wording(refused, words[0], words[1])
    assert "`--`" in manual_text(refused.value.next_steps)
    assert parsed("submit", "--platform", "local", "--", *words)["what"] == words


def test_option_declared_by_the_script_belongs_to_the_script() -> None:
    assert parsed("submit", "--platform", "local", "gpu.py", "--gpu", "0")["gpu"] is None
    assert parsed("estimate", "--gpu", "t4", "gpu.py", "--gpu", "0")["gpus"] == ("t4",)
    got = parsed("submit", "--platform", "local", "trl.py", "--project", "mine")  # a TrainingArguments field
    assert got["what"] == ("trl.py", "--project", "mine")


def test_non_script_target_takes_options_on_either_side() -> None:
    assert parsed("estimate", "owner/model", "--gpu", "t4")["gpus"] == ("t4",)
    assert parsed("fan-out", "f0123456789", "--follow")["follow"] is True
    with pytest.raises(click.UsageError, match="--steeps"):
        parsed("estimate", "owner/model", "--steeps", "3")


def test_missing_script_is_an_error_only_if_its_text_is_needed() -> None:
    assert parsed("submit", "--platform", "local", "none.py", "--lr", "1")["what"] == ("none.py", "--lr", "1")
    with pytest.raises(BadRequest, match=r"none\.py"):
        parsed("submit", "--platform", "local", "none.py", "--gpu", "1")


WORDS = st.lists(st.text("abc-=. \u00e9", min_size=1).filter(lambda w: w != "--" and w not in {"-h", "--"}), max_size=6)


@pytest.mark.slow
@given(words=WORDS)
def test_script_arguments_arrive_unchanged(words: list[str]) -> None:
    assert parsed("submit", "--platform", "local", "train.py", *words)["what"] == ("train.py", *words)
    assert parsed("submit", "--platform", "local", "--", "train.py", *words)["what"] == ("train.py", *words)


def test_declared_flags_are_recognized() -> None:
    assert flags_of(ARGPARSE, ()).declares("--gpu=1") is True
    assert flags_of(STRICT, ()).declares("--gpu") is False
    assert flags_of(LENIENT, ()).declares("--gpu") is None
    assert flags_of(SILENT, ()).declares("--gpu") is False
    assert flags_of("def f(:", ()).declares("--gpu") is None
    assert flags_of("from hydra import main\n", ()).declares("--gpu") is None
