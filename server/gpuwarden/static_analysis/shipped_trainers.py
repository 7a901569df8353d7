"""Read the bundled trainers' settings and columns from their files."""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

from gpuwarden.core.errors import NotFound
from gpuwarden.data import data_dir
from gpuwarden.static_analysis.bundle import FOLDER, IMPORTS, bundled, shipped_package, with_package
from gpuwarden.static_analysis.script import parse_bundle
from gpuwarden.static_analysis.static_eval import Program
from gpuwarden.static_analysis.typed_settings import DECLARING, Declared, typed_settings

ALIASES: Final[Mapping[str, tuple[str, str]]] = {
    "rlhf": ("rloo", "rlhf selects rloo: TRL no longer has PPO, and RLOO also learns from a reward model or function"),
    "ppo": ("rloo", "ppo selects rloo: TRL 1.16 removed PPO; RLOO and the similar GRPO need no value model"),
    "lora": ("sft", "lora selects sft, which trains LoRA adapters by default: see lora_rank"),
    "qlora": ("sft", "qlora selects sft with quantize=4bit"),
    "embedding": ("sentence_embedding", "embedding is called sentence_embedding here"),
    "detection": ("object_detection", "detection is called object_detection here"),
    "classification": ("image_classification", "classification is called image_classification here"),
    "gguf": ("merge_and_gguf", "gguf is called merge_and_gguf here"),
}  # fmt: skip
"""Aliases, each with the trainer's name and an explanation."""


@dataclass(frozen=True)
class Trainer:
    """One bundled trainer. `wanted` lists the column sets that it can read, in order of preference.

    `source` is the text of its file, and `text` is the script that is submitted: the file with the package `gputrain`.
    """

    name: str
    source: str
    text: str
    about: str
    wanted: tuple[tuple[str, ...], ...]
    options: Mapping[str, Declared]
    required: tuple[str, ...]

    @property
    def title(self) -> str:
        """Return a one-line description."""
        return self.about.partition("\n")[0]

    @property
    def sha256(self) -> str:
        """Return the digest of the submitted script."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def nearest(self, name: str) -> str:
        """Return the setting whose name is closest to a wrong name, or an empty string if none is close."""
        return next(iter(difflib.get_close_matches(name, self.options, 1)), "")


@lru_cache(maxsize=1)
def trainer_names() -> tuple[str, ...]:
    """Return the names of all bundled trainers."""
    files = (data_dir("skills") / FOLDER).glob("*.py")
    return tuple(sorted(file.stem for file in files if IMPORTS.search(file.read_text("utf-8"))))


@cache
def shipped_scripts() -> frozenset[str]:
    """Return the texts of the scripts that are submitted for the bundled trainers."""
    return frozenset(map(_script, trainer_names()))


@cache
def _script(name: str) -> str:
    source = trainer_file(name).read_text("utf-8")
    return bundled(source, ast.parse(source), shipped_package())


def trainer(name: str) -> Trainer:
    """Return a trainer by its name or an alias. Raises NotFound."""
    key = name.strip().lower().replace("-", "_").removesuffix(".py")
    key = ALIASES[key][0] if key in ALIASES else key
    if key not in trainer_names():
        near = difflib.get_close_matches(key, [*trainer_names(), *ALIASES], 1)
        hint = f"Did you mean {near[0]}?" if near else f"Choose one of {', '.join(trainer_names())}."
        raise NotFound(f"unknown template {name!r}", hint)
    return _read(key)


def trainer_file(name: str) -> Path:
    """Return the path of a trainer's bundled file."""
    return data_dir("skills") / FOLDER / f"{name}.py"


@lru_cache(maxsize=32)
def _read(name: str) -> Trainer:
    text = _script(name)
    bundle, script, _ = parse_bundle(text)
    tree = with_package(script, bundle)
    # Only the settings are analyzed: analyzing a complete trainer takes half a second, and a listing needs all
    # trainers.
    kept = (ast.ClassDef, ast.Assign)
    parts: list[ast.stmt] = [
        n for n in tree.body if isinstance(n, kept) or (isinstance(n, ast.FunctionDef) and n.name in DECLARING)
    ]
    typed = typed_settings(Program(ast.Module(parts, [])))
    assert typed is not None, name
    wanted = [
        ast.literal_eval(n.value) for n in parts if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "WANTED"
    ]
    return Trainer(
        name=name,
        source=bundle.script,
        text=text,
        about=ast.get_docstring(script) or "",
        wanted=wanted[0] if wanted else (),
        options=typed.declared,
        required=tuple(n for n in typed.declared if n in typed.required),
    )
