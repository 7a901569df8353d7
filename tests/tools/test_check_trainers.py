"""The scheduled check of the trainers against releases: it reads wheels, built by the test, without importing them."""

from __future__ import annotations

import ast
import importlib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from paths import ROOT

SCRIPT = """# /// script
# dependencies = [
#   "transformers>=5,<6",  # the trainer
#   "trl>=1,<2",  # the method
# ]
# ///
from transformers import TrainerCallback
from trl import DemoConfig, DemoTrainer


class Watch(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = True


def arguments():
    given = {"output_dir": "out", "max_steps": 3}
    given["seed"] = 1
    return given


def build():
    trainer = DemoTrainer(args=DemoConfig(**arguments(), beta=0.1), processing_class=None)
    trainer.add_callback(Watch())
    return trainer
"""
TRANSFORMERS = {
    "transformers/__init__.py": "_lazy = {'trainer': ['Trainer', 'TrainerCallback', 'TrainingArguments']}\n",
    "transformers/trainer.py": (
        "from dataclasses import dataclass\nraise RuntimeError('imported')\n\n\n"
        "@dataclass\nclass TrainingArguments:\n    output_dir: str = ''\n    max_steps: int = 0\n"
        "    seed: int = 0\n\n\n"
        "class Trainer:\n    def __init__(self, args=None, processing_class=None):\n        self.args = args\n\n"
        "    def add_callback(self, callback): ...\n\n\n"
        "class TrainerCallback:\n    def on_step_end(self, args, state, control, **kwargs): ...\n"
    ),
}
TRL = {
    "trl/__init__.py": "from .demo import DemoConfig, DemoTrainer\n",
    "trl/demo.py": (
        "from dataclasses import dataclass\nfrom transformers import Trainer, TrainingArguments\n\n\n"
        "@dataclass\nclass DemoConfig(TrainingArguments):\n    beta: float = 0.0\n\n\n"
        "class DemoTrainer(Trainer):\n    pass\n"
    ),
}


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        yield importlib.import_module("check_trainers")


def wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Write a wheel that pip accepts."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    more = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as made:
        for path, text in {**files, **more}.items():
            made.writestr(path, text)


def checked(tool: ModuleType, at: Path) -> int:
    (at / "scripts").mkdir(exist_ok=True)
    (at / "scripts" / "demo.py").write_text(SCRIPT)
    code: int = tool.main(["--wheels", str(at / "wheels"), "--scripts", str(at / "scripts")])
    return code


@pytest.mark.prove
def test_a_complete_release_passes_and_an_out_of_bounds_release_is_marked(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(tmp_path / "wheels", "transformers", "5.1.0", TRANSFORMERS)
    wheel(tmp_path / "wheels", "trl", "1.5.0", TRL)
    newer = TRL | {"trl/demo.py": TRL["trl/demo.py"].replace("beta", "strength")}
    wheel(tmp_path / "wheels", "trl", "2.0.0", newer)
    assert checked(tool, tmp_path) == 3
    said = capsys.readouterr().out.splitlines()
    within, beyond = (n for n, line in enumerate(said) if line[:1].strip())
    assert "trl 1.5.0" in said[within] and "trl 2.0.0" in said[beyond] and beyond == within + 1
    assert all(word in "".join(said[beyond + 1 :]) for word in ("trl 2.0.0", "trl.DemoConfig(beta=)", "demo.py"))
    wheel(tmp_path / "wheels", "trl", "1.6.0", newer)
    assert checked(tool, tmp_path) == 1


CHANGES = [
    ("transformers", "max_steps: int", "steps: int", "trl.DemoConfig(max_steps=)"),
    ("transformers", "    seed: int", "    random: int", "trl.DemoConfig(seed=)"),
    ("transformers", "def add_callback", "def attach", "transformers.Trainer.add_callback"),
    ("transformers", "def on_step_end", "def after_step", "transformers.TrainerCallback.on_step_end"),
    ("transformers", ", processing_class=None", "", "trl.DemoTrainer(processing_class=)"),
    ("trl", "class DemoTrainer", "class Demonstration", "trl.DemoTrainer"),
]


@pytest.mark.parametrize(("package", "old", "new", "thing"), CHANGES, ids=[c[3].rpartition(".")[2] for c in CHANGES])
def test_everything_missing_from_a_release_is_reported(
    tool: ModuleType, tmp_path: Path, package: str, old: str, new: str, thing: str
) -> None:
    files = {"transformers": TRANSFORMERS, "trl": TRL}
    releases = []
    for name, content in files.items():
        changed = {p: t.replace(old, new) if name == package else t for p, t in content.items()}
        assert name != package or changed != content
        wheel(tmp_path, name, "1.0", changed)
        releases.append(tool.Release(name, "1.0", tmp_path / f"{name}-1.0-py3-none-any.whl"))
    uses = {use: {"demo.py"} for use in tool.uses_of(ast.parse(SCRIPT))}
    found = list(tool.lacking(uses, tool.Library(releases)))
    assert [line for line in found if f" {thing}" in line], found


CONFIGURED = {
    "transformers/__init__.py": "_lazy = {'models': ['TinyConfig']}\n",
    "transformers/base.py": (
        "from typing import dataclass_transform\n\n\nclass Mixin:\n    pass\n\n\n"
        "@dataclass_transform(kw_only_default=True)\nclass PreTrainedConfig(Mixin):\n    use_cache: bool = True\n"
    ),
    "transformers/models.py": (
        "from .base import *\nfrom .circle import *\n\n\n"
        "@strict\nclass TinyConfig(PreTrainedConfig):\n    hidden_size: int = 8\n"
    ),
    "transformers/circle.py": "from .models import *\nfrom .circle import *\nfrom .base import *\n",
}


@pytest.mark.parametrize(
    ("keyword", "has"), [("hidden_size", True), ("use_cache", True), ("width", False)], ids=lambda v: str(v)
)
def test_fields_of_subclasses_of_a_marked_class_are_arguments(
    tool: ModuleType, tmp_path: Path, keyword: str, has: bool
) -> None:
    wheel(tmp_path, "transformers", "5.2", CONFIGURED)
    library = tool.Library([tool.Release("transformers", "5.2", tmp_path / "transformers-5.2-py3-none-any.whl")])
    assert library.has(tool.Use("transformers", "TinyConfig", "", keyword)) is has
    assert library.has(tool.Use("transformers.circle", "NoSuchConfig")) is False


@pytest.mark.slow
def test_a_reintroduced_argument_that_the_gate_considers_removed_is_reported(tool: ModuleType, tmp_path: Path) -> None:
    more = {
        p: t.replace("    seed: int = 0", "    seed: int = 0\n    no_cuda: bool = False")
        for p, t in TRANSFORMERS.items()
    }
    wheel(tmp_path, "transformers", "6.0", more)
    library = tool.Library([tool.Release("transformers", "6.0", tmp_path / "transformers-6.0-py3-none-any.whl")])
    assert [line for line in tool.back(library) if "TrainingArguments" in line and "no_cuda" in line]


@pytest.mark.prove
def test_an_unavailable_release_does_not_pass(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    assert checked(tool, tmp_path) == 2


def test_the_sft_trainer_has_comparable_uses(tool: ModuleType) -> None:
    uses = tool.uses_of(tool.whole(ROOT / "skills/gpu-training/scripts/sft.py"))
    text = set(map(str, uses))
    assert {"trl.SFTConfig(max_length=)", "trl.SFTConfig(gradient_accumulation_steps=)"} <= text
    assert {"transformers.Trainer._save_checkpoint", "transformers.TrainerCallback.on_pre_optimizer_step"} <= text
