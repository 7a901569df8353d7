"""Signatures of released libraries: tables, choosing a release, inheritance, history, and the wheel reader."""

from __future__ import annotations

import inspect
import re
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.core.guidance import manual_text
from gpuwarden.core.rules import Finding, Severity, run_rules
from gpuwarden.data import data_dir
from gpuwarden.rules.catalog import rules_of
from gpuwarden.static_analysis.script import read_script
from gpuwarden.static_analysis.signatures.advice import ARGUMENTS
from gpuwarden.static_analysis.signatures.history import History, history
from gpuwarden.static_analysis.signatures.releases import choose, conflicts
from gpuwarden.static_analysis.signatures.resolve import Existence, Installed, _merge
from gpuwarden.static_analysis.signatures.tables import packages, table
from paths import ROOT
from rule_kit import script
from wording import Wording

TOOLS = ROOT / "tools"
RULES = [r for r in rules_of("submit") if r.id in {f"PF-API-00{n}" for n in (1, 2, 6, 7, 8)}]


def releases(*requirements: str) -> dict[str, tuple[str, ...]]:
    return {package: chosen.releases for package, chosen in choose(requirements).items()}


def installed(*requirements: str) -> Installed:
    return Installed({package: chosen.places[-1] for package, chosen in choose(requirements).items()})


def found(text: str, *requirements: str) -> list[Finding]:
    listed = ", ".join(f'"{r}"' for r in requirements)
    header = f"# /// script\n# dependencies = [{listed}]\n# ///\n" if requirements else ""
    return run_rules(RULES, script(header + text))


# ------------------------------------------------------------------------------------------------------- releases


def test_the_newest_release_allowed_by_the_requirements_is_used() -> None:
    assert releases("trl==0.17.0")["trl"] == ("0.17.0",)
    assert releases("trl<0.16")["trl"] == ("0.15.2",)
    assert releases("transformers~=4.46.0")["transformers"] == ("4.46.3",)
    newest = table("trl").releases[-1]  # type: ignore[union-attr]
    assert releases("trl")["trl"] == releases("trl>=0.9")["trl"] == (newest,)


def test_a_release_between_two_table_entries_is_judged_by_both() -> None:
    assert releases("transformers==4.46.1")["transformers"] == ("4.45.2", "4.46.3")
    assert not found(
        "from transformers import Trainer\nTrainer(tokenizer=1, processing_class=2)", "transformers==4.46.1"
    )


def test_a_release_outside_the_tables_is_not_judged() -> None:
    text = "from trl import SFTConfig, Nothing\nSFTConfig(nothing=1)"
    assert not found(text, "trl>=99")
    assert not found(text, "trl @ git+https://github.com/huggingface/trl")
    assert not found(text, "trl==0.0.1")


def test_unpinned_packages_follow_pinned_packages() -> None:
    chosen = releases("transformers==4.46.3", "trl")
    assert chosen["trl"] != releases("trl")["trl"]
    assert releases("sentence-transformers==3.0.1")["transformers"][0].startswith("4.")


def test_a_package_whose_limits_are_unknown_leaves_the_others_unjudged() -> None:
    assert "transformers" not in releases("vllm", "transformers")
    assert releases("vllm", "transformers==5.0.0")["transformers"] == ("5.0.0",)


# ----------------------------------------------------------------------------------------------- names, arguments


@pytest.mark.parametrize(
    ("package", "name", "parameter", "expected"),
    [
        ("transformers", "TrainingArguments", "evaluation_strategy", ("4.50.3", "eval_strategy")),
        ("transformers", "Trainer", "tokenizer", ("4.57.6", "processing_class")),
        ("trl", "SFTConfig", "max_seq_length", ("0.19.1", "max_length")),
        ("trl", "SFTTrainer", "tokenizer", ("0.15.2", "processing_class")),
        ("trl", "trl.PPOTrainer", None, ("0.28.0", "")),
        ("lightning", "pytorch_lightning.Trainer", "gpus", ("1.9.5", "")),
    ],
)
def test_a_name_has_its_last_release_and_new_name(
    package: str, name: str, parameter: str | None, expected: tuple[str, str]
) -> None:
    past = history(package, name, parameter)
    assert (past.until, past.renamed_to) == expected


def test_an_unknown_name_has_an_empty_history() -> None:
    assert history("trl", "SFTConfig", "lerning_rate") == History("trl")
    assert history("numpy", "array") == History("numpy")


def test_a_configuration_inherits_arguments_across_packages() -> None:
    old, new = (
        installed(*pins).signature("trl.SFTConfig") for pins in (("trl==0.17.0", "transformers==4.46.3"), ("trl",))
    )
    assert old is not None and new is not None
    assert {"max_seq_length", "eval_strategy", "warmup_ratio"} <= old.parameters.keys()
    assert {"max_length", "eval_strategy"} <= new.parameters.keys()
    assert new.lacks("max_seq_length") and not old.lacks("max_seq_length")


@given(st.text(st.characters(codec="ascii", categories=("Ll", "Lu")), min_size=1), st.sampled_from(sorted(packages())))
def test_unknown_names_are_never_absent(name: str, package: str) -> None:
    module = package.replace("-", "_")
    assert Installed({}).exists(f"{module}.{name}") is Existence.UNKNOWN
    assert Installed({}).signature(f"{module}.{name}") is None
    assert not found(f"import {module}.{name}\n{module}.{name}(a=1)", f"{package}>=99")


@given(st.lists(st.lists(st.integers(0, 5), max_size=3, unique=True), min_size=1, max_size=7))
def test_bases_follow_pythons_resolution_order(parents: list[list[int]]) -> None:
    classes: list[type] = []
    for number, wanted in enumerate(parents):
        bases = [classes[p] for p in wanted if p < len(classes)]
        lines = [[c.__name__ for c in base.__mro__[:-1]] for base in bases]
        try:
            made = type(f"c{number}", tuple(bases), {})
        except TypeError:
            assert _merge([*lines, [b.__name__ for b in bases]]) is None
            return
        assert _merge([*lines, [b.__name__ for b in bases]]) == [c.__name__ for c in made.__mro__[1:-1]]
        classes.append(made)


# -------------------------------------------------------------------------------------------------------- scripts


def test_a_renamed_argument_is_reported_with_its_new_name_and_release(wording: Wording) -> None:
    (finding,) = found("from trl import SFTConfig\nSFTConfig(max_seq_length=9)", "trl==0.22.2", "transformers==4.56.2")
    assert finding.rule == "PF-API-001"
    wording(finding.message, "max_seq_length", "trl 0.20", "0.22.2")
    wording(manual_text(finding.fix), "max_length")


def test_a_deprecation_names_the_package_that_announces_it(wording: Wording) -> None:
    text = "from trl import SFTConfig\nSFTConfig(evaluation_strategy='no')"
    (told,) = found(text, "trl==0.11.4", "transformers==4.45.2")
    wording(told.message, "transformers 4.45.2")
    assert not found(text, "trl==0.11.4", "transformers==4.40.2")  # the only name in this release


@pytest.mark.parametrize("version", ["5.3.0", "5.4.1", "6.2.0"])
def test_a_former_path_still_served_by_a_library_can_be_imported(version: str) -> None:
    there = installed(f"sentence-transformers=={version}")
    for name in ("losses", "evaluation", "training_args", "models.Pooling", "losses.MultipleNegativesRankingLoss"):
        assert there.exists(f"sentence_transformers.{name}") is Existence.PRESENT
    assert there.exists("sentence_transformers.losses.NoSuchLoss") is Existence.ABSENT
    known = there.signature("sentence_transformers.losses.MultipleNegativesRankingLoss")
    assert known is not None and "scale" in known.parameters and known.lacks("margin")


def test_a_name_in_some_release_is_a_warning_without_requirements(wording: Wording) -> None:
    (old,) = found("from trl import PPOTrainer")
    (never,) = found("from trl import SFTTrayner")
    assert (old.severity, never.severity) == (Severity.WARNING, Severity.ERROR)
    wording(old.message, "PPOTrainer")


@pytest.mark.parametrize(
    "text",
    [
        "from transformers import AutoConfig\nAutoConfig.from_pretrained('m', anything=1)",
        "import unsloth\nfrom trl import SFTTrainer\nSFTTrainer(anything=1)",
        "from trl import SFTConfig\nSFTConfig = wrapped(SFTConfig)\nSFTConfig(anything=1)",
        "from trl import SFTTrainer\nclass Mine(SFTTrainer):\n    def __init__(self, **k): ...\nMine(anything=1)",
        "from trl import SFTConfig\ntry:\n    SFTConfig(anything=1)\nexcept TypeError:\n    SFTConfig()",
        "import trl\nfrom trl import SFTConfig\nif trl.__version__ < '1':\n    SFTConfig(anything=1)",
        "from trl import SFTConfig\nSFTConfig(**unknown)",
        "try:\n    from trl import Anything\nexcept ImportError:\n    Anything = None",
    ],
)
def test_code_that_is_not_judgeable_passes(text: str) -> None:
    assert not found(text, "trl==0.17.0", "transformers==4.51.3", "unsloth" if "unsloth" in text else "torch")


def test_a_transformers_tokenizer_name_with_suffix_fast_is_accepted() -> None:
    names = "from transformers import Qwen2TokenizerFast, T5TokenizerFast"
    assert not found(f"{names}\nQwen2TokenizerFast, T5TokenizerFast", "transformers==5.23.0")
    assert found("from transformers import NoSuchTokenizerFast", "transformers==5.23.0")[0].blocks


@pytest.mark.parametrize(
    ("arguments", "pin"),
    [
        ("warmup_ratio=0.06, logging_dir='out/logs'", "transformers>=5.0,<5.15"),
        ("warmup_ratio=0.1", "transformers==5.14.1"),
        ("group_by_length=True", "transformers==5.0.0"),
        ("group_by_length=True", "transformers==5.1.0"),
    ],
)
def test_an_argument_passes_up_to_its_last_release_and_not_after(arguments: str, pin: str) -> None:
    text = f"from transformers import TrainingArguments\nTrainingArguments(output_dir='out', {arguments})"
    assert not [f for f in found(text, pin) if f.blocks]
    assert [f for f in found(text, "transformers==5.15.1") if f.blocks]


@pytest.mark.slow
def test_the_advised_replacement_exists_once_the_argument_is_removed() -> None:
    """Checks every trainer and configuration that had the argument, in the first release without it."""
    looked = 0
    for package in ("transformers", "trl"):
        known = table(package)
        assert known is not None
        places = range(len(known.releases))
        names = {n for place in places for n in known.names(package, place)}
        for name in sorted(n for n in names if n.endswith(("Trainer", "TrainingArguments", "Config"))):
            for argument, advice in ARGUMENTS.items():
                instead = (re.match(r"\w+_\w+", advice) or [""])[0]
                past = history(package, name, argument) if instead else History(package)
                if past.until is None:
                    continue
                looked += 1
                gone = Installed({package: known.releases.index(past.until) + 1}).signature(f"{package}.{name}")
                if gone is not None and not gone.open and past.renamed_to not in gone.parameters:
                    assert instead in gone.parameters or "args" in gone.parameters, (name, argument, instead)
    assert looked


def test_an_argument_moved_to_the_configuration_is_not_a_rename(wording: Wording) -> None:
    (told,) = found("from trl import SFTTrainer\nSFTTrainer(max_seq_length=9)", "trl==0.13.0", "transformers==4.47.1")
    assert told.blocks
    wording(manual_text(told.fix))


@pytest.mark.parametrize(("pin", "refused"), [("4.52.4", False), ("4.53.3", True)])
def test_a_from_pretrained_argument_is_refused_once_removed(pin: str, refused: bool) -> None:
    text = 'from transformers import AutoModel\nAutoModel.from_pretrained("a/b", use_flash_attention_2=True)'
    assert bool(found(text, f"transformers=={pin}")) is refused


def test_a_from_pretrained_argument_is_refused_only_with_a_known_release() -> None:
    text = 'from transformers import AutoModel\nAutoModel.from_pretrained("a/b", load_in_8bit=True)'
    assert found(text, "transformers>=5")[0].blocks
    assert [f.severity for f in found(text)] == [Severity.WARNING]


@pytest.mark.parametrize("requirement", ["trl==0.22.2", "trl>=99", "unsloth"])
def test_a_misspelt_argument_is_refused_for_every_release(requirement: str) -> None:
    text = "import unsloth\nfrom trl import SFTConfig\nSFTConfig({}=1)"
    (refused,) = found(text.format("per__device_train_batch_size"), requirement)
    assert refused.blocks and "per_device_train_batch_size" in str(refused.fix)
    for known in ("max_seq_length", "evaluation_strategy", "unsloth_num_chunks", "embedding_learning_rate"):
        assert not found(text.format(known), requirement)


def test_a_removed_dataclass_keeps_the_flags_of_its_releases() -> None:
    text = """# /// script
# dependencies = ["trl>=1.16"]
# ///
from transformers import HfArgumentParser
from trl.experimental.bco import BCOConfig
parser = HfArgumentParser(BCOConfig)
(config,) = parser.parse_args_into_dataclasses()
"""

    def flags(*args: str) -> list[str]:
        facts = replace(script(text), script=read_script(text, args=args))
        return [f.message for f in run_rules(RULES, facts) if f.rule == "PF-API-006"]

    assert not flags("--learning_rate", "1", "--prompt_sample_size", "9")
    assert flags("--lerning_rate", "1")


@pytest.mark.parametrize(
    ("beside", "sure"),
    [
        ("", False),
        ("eval_strategy='no'", False),  # some releases have both
        ("project='p'", True),  # new in transformers 5, which has no evaluation_strategy
        ("misspelt_x='p'", False),  # an argument in no release is no evidence about the release
    ],
)
def test_arguments_that_no_release_combines_are_refused(beside: str, sure: bool) -> None:
    text = f"from transformers import TrainingArguments\nTrainingArguments(evaluation_strategy='steps', {beside})"
    (finding,) = (f for f in found(text) if "evaluation_strategy" in f.message)
    assert (finding.severity is Severity.ERROR) is sure


def test_requirements_of_other_packages_narrow_the_possible_releases() -> None:
    text = "from trl import GRPOConfig\nGRPOConfig(evaluation_strategy='steps'{})"
    (old,) = found(text.format(""))
    (new,) = found(text.format(", max_tool_calling_iterations=3"))  # its trl requires transformers>=4.56
    assert (old.severity, new.severity) == (Severity.WARNING, Severity.ERROR)


@pytest.mark.parametrize(
    ("name", "sure"),
    [
        ("transformers import AutoTokenizerr", True),  # a typo, whatever the release
        ("transformers.file_utils import torch_required", False),  # in releases before the table
        ("transformers.modeling_flax_outputs import FlaxBaseModelOutput", False),  # the table doesn't know its names
        ("transformers import Gemma3ForConditionalGeneration, ThingThatNeverWas", True),  # the first is recent
    ],
)
def test_an_unlisted_name_is_refused_only_if_no_release_can_have_the_name(name: str, sure: bool) -> None:
    (finding,) = found(f"from {name}")
    assert (finding.severity is Severity.ERROR) is sure


def test_a_value_from_an_older_release_is_a_warning_without_a_release() -> None:
    text = "from transformers import TrainingArguments\nTrainingArguments(optim={!r})"
    (old,), (never,) = found(text.format("adamw_hf")), found(text.format("adam_w_torch"))
    assert (old.severity, never.severity) == (Severity.WARNING, Severity.ERROR)


def test_a_guarded_import_does_not_determine_the_release() -> None:
    text = "try:\n    from trl.experimental.bco import BCOConfig\nexcept ImportError:\n    BCOConfig = None\n"
    text += "from trl import SFTConfig\nSFTConfig(evaluation_strategy='steps')"
    assert all(f.severity is Severity.WARNING for f in found(text))


@pytest.mark.parametrize(
    "text",
    [
        (
            "from mine import Settings\nfrom transformers import HfArgumentParser\n"
            "parser = HfArgumentParser(Settings)\nparser.parse_args_into_dataclasses()"
        ),
        (
            "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--learning_rate')\n"
            "more(parser)\nparser.parse_args()"
        ),
    ],
)
def test_a_near_miss_flag_is_a_warning_if_other_flags_are_unknown(text: str) -> None:
    def flags(*args: str) -> list[Finding]:
        facts = replace(script(text), script=read_script(text, args=args))
        return [f for f in run_rules(RULES, facts) if f.rule == "PF-API-006"]

    (finding,) = flags("--lerning_rate", "1")
    assert finding.severity is Severity.WARNING and "--learning_rate" in finding.message
    assert not flags("--learning_rate", "1") and not flags("--anything", "1")


@pytest.mark.parametrize(
    "text",
    [
        (
            "from transformers import HfArgumentParser, TrainingArguments\n"
            "(a,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()"
        ),
        (
            "from transformers import HfArgumentParser, TrainingArguments\n"
            "parser = HfArgumentParser(TrainingArguments)\n"
            "(a,) = parser.parse_args_into_dataclasses(look_for_args_file=False)"
        ),
    ],
)
def test_a_parser_used_at_once_or_without_files_is_judged(text: str) -> None:
    def refused(*args: str) -> bool:
        facts = replace(script(text), script=read_script(text, args=args))
        return any(f.rule == "PF-API-006" and f.blocks for f in run_rules(RULES, facts))

    assert refused("--output_dir", "out", "--lerning_rate", "1")
    assert not refused("--output_dir", "out", "--learning_rate", "1")


def test_conflicting_releases_are_found() -> None:
    assert [c.package for c in conflicts(["trl==1.16.0", "transformers==4.46.3"])] == ["trl"]
    assert not list(conflicts(["trl>=0.7", "transformers==4.46.3"]))
    assert not list(conflicts(["trl==1.16.0", "transformers>=4.40", "not a requirement!"]))


def test_a_subclass_without_a_constructor_uses_its_bases_arguments() -> None:
    text = "from transformers import Trainer\nclass Mine(Trainer):\n    pass\nMine(model=1, traindataset=2)"
    (finding,) = found(text, "transformers==4.51.3")
    assert "traindataset" in finding.message and "train_dataset" in manual_text(finding.fix)


# ----------------------------------------------------------------------------------------------------- the wheels


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    for name in [n for n in sys.modules if n.partition(".")[0] in {"signature_tables", "build_signatures"}]:
        monkeypatch.delitem(sys.modules, name)
    import build_signatures  # type: ignore[import-not-found]

    return build_signatures  # type: ignore[no-any-return]


MODULE = """
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Optional

@dataclass
class Base:
    a: int
    b: str = "x"
    shared: ClassVar[int] = 3
    hidden: int = field(default=0, init=False)

    def __post_init__(self):
        if self.b is not None:
            warnings.warn("`b` is deprecated, use `a` instead.")

@dataclass
class Config(Base):
    c: Optional[Literal["one", "two"]] = None

class Trainer:
    def __init__(self, model, *args, config: Optional[Config] = None, **kwargs): ...

def load(path, /, *, split="train"): ...
"""


def test_a_wheel_is_read_as_python_reads_its_modules(tool: ModuleType, tmp_path: Path) -> None:
    for version in ("1.0", "1.1"):
        with zipfile.ZipFile(tmp_path / f"peft-{version}-py3-none-any.whl", "w") as archive:
            archive.writestr("peft/__init__.py", "from .config import Config, Trainer, load\n" * (version == "1.1"))
            archive.writestr("peft/config.py", MODULE)
            archive.writestr("peft-1.dist-info/METADATA", "Requires-Dist: transformers>=4,<5\nRequires-Dist: torch\n")
    first = tool.build("peft", ["1.0", "1.1"], tmp_path)
    assert first == tool.build("peft", ["1.0", "1.1"], tmp_path)  # the first run's cache gives the same result

    import json
    import lzma

    from gpuwarden.static_analysis.signatures.tables import Table

    built = Table(json.loads(lzma.decompress(first)))
    assert built.presence("peft", "Config") == [(1, 1)] and built.presence("peft.config", "Config") == [(0, 1)]
    assert built.requires(0) == {"transformers": ">=4,<5"}
    space: dict[str, object] = {"__name__": __name__}
    exec(compile(MODULE, "made", "exec", dont_inherit=True), space)
    for name in ("Base", "Trainer", "load"):
        definition = built.definition(f"peft.config.{name}", 1)
        assert definition is not None
        kinds = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
        real = inspect.signature(space[name]).parameters.values()  # type: ignore[arg-type]
        assert [p.name for p in definition.parameters] == [p.name for p in real if p.kind not in kinds]
        assert definition.open == any(p.kind is inspect.Parameter.VAR_KEYWORD for p in real)
    base, config = (built.definition(f"peft.config.{name}", 1) for name in ("Base", "Config"))
    assert base is not None and config is not None and base.renames == (("b", "a"),)
    assert [(p.name, p.values) for p in config.parameters] == [("c", ("one", "two"))]


FINDER = """
import sys

MOVED = {"peft.old": "peft.new", "peft.old.part": "peft.new", "peft.gone": "peft.unread", "a": "peft.new", **{}}
"""


def test_former_paths_count_where_a_finder_serves_them(tool: ModuleType, tmp_path: Path) -> None:
    for version, finder in (("1.0", ""), ("1.1", "sys.meta_path.insert(0, Finder(MOVED))\n")):
        with zipfile.ZipFile(tmp_path / f"peft-{version}-py3-none-any.whl", "w") as archive:
            archive.writestr("peft/__init__.py", FINDER + finder)
            archive.writestr("peft/new.py", "def load(path): ...\n")
            archive.writestr("peft-1.dist-info/METADATA", "")

    import json
    import lzma

    from gpuwarden.static_analysis.signatures.tables import Table

    built = Table(json.loads(lzma.decompress(tool.build("peft", ["1.0", "1.1"], tmp_path))))
    assert [built.module(name, 0) for name in ("peft.old", "peft.gone", "a")] == [None, None, None]
    assert [built.module(name, 1) for name in ("peft.old", "peft.old.part", "peft.gone")] == [False, False, True]
    assert built.module("a", 1) is None
    assert built.target("peft.old", "load", 1) == "peft.new.load"


def test_the_tables_are_small() -> None:
    files = list((data_dir("references") / "signatures").iterdir())
    assert sum(f.stat().st_size for f in files) < 1_500_000
    assert {f.name.partition(".")[0] for f in files} >= {"transformers", "trl", "peft", "accelerate", "datasets"}
