"""Unknown values are never treated as true, absent, or named; branches that never run are left out."""

from __future__ import annotations

import ast
import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.core.repos import Config, Repo, Split, Structure
from gpuwarden.core.rules import Finding, Severity, run_rules
from gpuwarden.hub.facts import HubFacts, RepoFact
from gpuwarden.rules.catalog import rules_of
from gpuwarden.static_analysis.estimate.memory import memory
from gpuwarden.static_analysis.estimate.setup import method_of, run_of
from gpuwarden.static_analysis.hub_references import RepoUse
from gpuwarden.static_analysis.newer_grammar import NEWEST
from gpuwarden.static_analysis.script import read_script
from gpuwarden.static_analysis.script_usage import Uses
from gpuwarden.static_analysis.static_eval import Program
from gpuwarden.static_analysis.survey import idle_lines
from gpuwarden.static_analysis.three_valued import (
    UNKNOWN,
    arithmetic,
    compared,
    decided,
    either,
    known,
    same,
    text_method,
    truth,
)
from paths import TESTS
from rule_kit import submit

VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)
MAYBE = st.one_of(VALUES, st.just(UNKNOWN))
HEADER = '# /// script\n# dependencies = ["transformers>=5", "accelerate", "torch", "trl>=1.16", "datasets"]\n# ///\n'


def seen(text: str, argv: tuple[str, ...] = ()) -> list[Any]:
    """Return the first argument of each call to `see` that can run."""
    return [c.args[0] for c in Program(ast.parse(text), {}, argv).calls if c.name == "see"]


def uses(text: str, *args: str) -> Uses:
    facts = read_script(text, args=args)
    assert facts.error is None
    return facts.uses


def found(text: str, *args: str) -> list[Finding]:
    """Return the submit gate's findings about a script."""
    return run_rules(rules_of("submit"), replace(submit(), script=read_script(HEADER + text, args=args)))


@pytest.mark.slow
@given(st.lists(MAYBE, min_size=1, max_size=4), st.booleans())
def test_a_known_outcome_holds_for_every_unknown_operand_value(values: list[Any], stops: bool) -> None:
    """Whatever the unknown operands turn out to be, a known outcome is the same as Python's."""
    outcome = decided([truth(v) for v in values], stops=stops)
    for guess in (True, False):
        real = [guess if v is UNKNOWN else v for v in values]
        assert outcome is None or outcome is (any(map(bool, real)) if stops else all(map(bool, real)))
    if known(values):
        assert truth(either(values, stops=stops)) is outcome


@given(
    VALUES, VALUES, st.sampled_from([ast.Add(), ast.Sub(), ast.Mult(), ast.Div(), ast.FloorDiv(), ast.Mod(), ast.Pow()])
)
def test_operators_never_fail_and_unknown_stays_unknown(left: Any, right: Any, op: ast.operator) -> None:
    arithmetic(op, left, right)
    assert arithmetic(op, UNKNOWN, right) is UNKNOWN
    assert arithmetic(op, left, UNKNOWN) is UNKNOWN


@given(MAYBE, MAYBE, st.sampled_from([ast.Eq(), ast.NotEq(), ast.Lt(), ast.GtE(), ast.Is(), ast.In(), ast.NotIn()]))
def test_comparisons_never_fail(left: Any, right: Any, op: ast.cmpop) -> None:
    result = compared(op, left, right)
    if not isinstance(op, ast.Is | ast.In | ast.NotIn) and not (known(left) and known(right)):
        assert result is UNKNOWN


@given(st.lists(MAYBE, max_size=4))
def test_differing_values_have_no_common_value(values: list[Any]) -> None:
    one = same(values)
    if one is not UNKNOWN and len(values) > 1:
        assert all(v == one for v in values)


@given(
    st.text(max_size=5),
    st.sampled_from(["strip", "split", "replace", "join", "format", "startswith"]),
    st.lists(MAYBE, max_size=2),
)
def test_string_methods_never_fail(text: str, name: str, args: list[Any]) -> None:
    text_method(text, name, args)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("if False:\n    see(1)\nelse:\n    see(2)", [2]),
        ("DO = False\nif DO:\n    see(1)", []),
        ("DO = False\nif not DO:\n    see(1)", [1]),
        ("DO = True\nif DO and x():\n    see(1)", [1]),
        ("if __name__ == '__main__':\n    see(1)", [1]),
        ("A = 'x'\nB = 2 if A == 'x' else 3\nsee(B)", [2]),
        ("while False:\n    see(1)", []),
        ("def f():\n    return 1\n    see(1)", []),
        ("import sys\nsys.exit()\nsee(1)", []),
        ("x = 1\nif unknown():\n    x = 2\nsee(x)", [UNKNOWN]),
        ("x = 1\nif False:\n    x = 2\nsee(x)", [1]),
        ("x = 1\ndef f():\n    global x\n    x = 2\nsee(x)", [UNKNOWN]),
        ("c = {'a': 1}\nc['a'] = 2\nsee(c['a'])", [UNKNOWN]),
        ("x = 1\nexec(open('c.py').read())\nsee(x)", [UNKNOWN]),
        ("see(unknown() or 'a')", [UNKNOWN]),
        ("see({**unknown(), 'a': 1})", [UNKNOWN]),
    ],
)
def test_branches_and_names_are_evaluated(text: str, values: list[Any]) -> None:
    assert seen(text) == values


def test_arguments_set_by_the_script_itself_are_unknown() -> None:
    text = (
        "import argparse, sys\nsys.argv += ['--go']\np = argparse.ArgumentParser()\np.add_argument('--go', default=1)\n"
    )
    assert seen(text + "args = p.parse_args()\nsee(args.go)", ("--go", "2")) == [UNKNOWN]
    assert seen(text.replace("sys.argv +=", "sys.path +=") + "args = p.parse_args()\nsee(args.go)", ("--go", "2")) == [
        2
    ]


def test_a_constant_of_a_class_does_not_depend_on_the_arguments() -> None:
    assert seen("import sys\nsys.argv = ['x']\nclass CFG:\n    data = 'a/b'\nsee(CFG.data)") == ["a/b"]


def test_the_scripts_own_name_is_not_an_argument() -> None:
    text = "import argparse, sys\nsys.argv[{}] = 'x'\np = argparse.ArgumentParser()\np.add_argument('--go', type=int)\n"
    text += "args = p.parse_args()\nsee(args.go)"
    assert seen(text.format(0), ("--go", "2")) == [2]
    assert seen(text.format(1), ("--go", "2")) == [UNKNOWN]


def test_arguments_decide_a_branch() -> None:
    text = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--go', action='store_true')\n"
    text += "args = p.parse_args()\nif args.go:\n    see(1)\n"
    assert seen(text) == []
    assert seen(text, ("--go",)) == [1]
    assert Program(ast.parse("if unknown():\n    see(1)")).calls[-1].maybe


def test_a_deepspeed_dictionary_is_not_an_internal_error() -> None:
    text = "from transformers import Trainer, TrainingArguments\nTrainer(args=TrainingArguments({}))\n"
    known_rules = {rule.id for rule in rules_of("submit")}
    for value in ("{'zero_optimization': {}}", "[1]", "1.5", "unknown()"):
        assert {f.rule for f in found(text.format(f"deepspeed={value}"))} <= known_rules  # and nothing is raised
    assert any(f.rule == "PF-DEP-003" and f.blocks for f in found(text.format("deepspeed={'a': 1}")))
    assert not any(f.rule == "PF-DEP-003" and f.blocks for f in found(text.format("deepspeed=unknown()")))


ODD = ("{}", "{'a': [1]}", "[[1], {}]", "({},)", "b''", "1e999", "-1", "lambda: 0")


def with_value(tree: ast.Module, number: int, value: str) -> str:
    """Return the script with one of its call arguments replaced by another value."""
    changed = copy.deepcopy(tree)
    calls = [node for node in ast.walk(changed) if isinstance(node, ast.Call)]
    places = [(call, place) for call in calls for place in range(len(call.args))]
    keywords = [keyword for call in calls for keyword in call.keywords if keyword.arg]
    new = ast.parse(value, mode="eval").body
    if number < len(places):
        call, place = places[number]
        call.args[place] = new
    else:
        keywords[number - len(places)].value = new
    return ast.unparse(ast.fix_missing_locations(changed))


def arguments(tree: ast.Module) -> int:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sum(len(call.args) + sum(k.arg is not None for k in call.keywords) for call in calls)


SCRIPTS = sorted(p for p in (TESTS / "corpus" / "scripts").glob("*.py") if p.stem != "bad_syntax")


@pytest.mark.prove
@pytest.mark.parametrize("path", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_a_literal_argument_never_causes_an_internal_error(path: Path) -> None:
    text = path.read_text("utf-8")
    tree, draw = ast.parse(text), random.Random(path.stem)
    count = arguments(tree)
    for number in draw.sample(range(count), min(count, 40)):
        found(with_value(tree, number, draw.choice(ODD)))


def test_a_literal_option_type_never_causes_an_internal_error() -> None:
    text = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--x', type={}, choices=['a'])\n"
    for value in ODD:
        found(text.format(value) + "p.parse_args()", "--x", "a")


def test_an_unrequested_peft_config_is_none() -> None:
    text = "from trl import *\nfrom trl import SFTTrainer, get_peft_config, TrlParser\nTrlParser(ModelConfig)\n"
    text += "SFTTrainer(model='a/b', peft_config=get_peft_config(model_args))\n"
    assert method_of(uses(text)) == "full"
    assert method_of(uses(text, "--use_peft")) == "lora"


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ("LoraConfig()", "lora"),
        ("None", "full"),
        ("unknown()", None),
        ("LoraConfig() if unknown() else None", None),
    ],
)
def test_an_unknown_peft_config_leaves_the_method_unsure(config: str, method: str | None) -> None:
    text = f"from trl import SFTTrainer\nfrom peft import LoraConfig\nSFTTrainer(model='a/b', peft_config={config})\n"
    assert method_of(uses(text)) == method
    run = run_of(uses(text), 7_000_000_000, None, 1)
    assert not run.own_loss and run_of(uses("loss.backward()"), 7_000_000_000, None, 1).own_loss
    assert run.unsure is (method is None)
    least, most = memory(run)
    assert (most > 3 * least) is (method is None), "either is counted where both are possible"


def test_a_batch_without_rows_is_unknown() -> None:
    text = "from transformers import Trainer, TrainingArguments\nTrainer(args=TrainingArguments({}))\n"
    for rows in ("0", "-1", "unknown()"):
        run = run_of(uses(text.format(f"per_device_train_batch_size={rows}")), 10**9, None, 1)
        assert run.batch is None
        assert memory(run)[0] == memory(run.model_copy(update={"batch": 1}))[0]


def test_a_flags_default_comes_from_the_scripts_dataclass() -> None:
    text = """
from dataclasses import dataclass
from trl import ScriptArguments, TrlParser
@dataclass
class Mine(ScriptArguments):
    dataset_config: str = "main"
parser = TrlParser((Mine,))
(mine,) = parser.parse_args_and_config()
"""
    (use,) = uses(text, "--dataset_name", "openai/gsm8k").repos
    assert use.config == "main"
    (use,) = uses(text, "--dataset_name", "openai/gsm8k", "--dataset_config", "socratic").repos
    assert use.config == "socratic"


def test_actions_of_the_first_process_are_certain() -> None:
    text = "from transformers import AutoModel\nif {}:\n    model.push_to_hub('me/model')\n"
    for test in ("accelerator.is_main_process", "rank == 0", "trainer.is_world_process_zero()"):
        assert [p.maybe for p in uses(text.format(test)).pushes] == [False]
    assert [p.maybe for p in uses(text.format("rank == 1")).pushes] == [True]


def test_the_syntax_of_a_later_python_is_a_warning() -> None:
    later = f"{NEWEST[0]}.{NEWEST[1] + 1}"  # its grammar isn't known yet
    text = '# /// script\n# requires-python = ">={}"\n# ///\nsyntax of tomorrow\n'
    facts = replace(submit(), script=read_script(text.format(later)))
    assert {f.rule: f.severity for f in run_rules(rules_of("submit"), facts)}["PF-SRC-001"] is Severity.WARNING
    facts = replace(submit(), script=read_script(text.format("3.8")))
    assert {f.rule: f.severity for f in run_rules(rules_of("submit"), facts)}["PF-SRC-001"] is Severity.ERROR


@pytest.mark.parametrize(
    ("use", "refused"),
    [
        (RepoUse("o/d", "dataset", 1, "data"), True),
        (RepoUse("o/d", "dataset", 1, "data", unknown=frozenset({"config"})), False),
        (RepoUse("o/d", "dataset", 1, "data", config="en", split="test", unknown=frozenset({"split"})), True),
        (RepoUse("o/d", "dataset", 1, "data", config="en"), False),
        (RepoUse("o/d", "dataset", 1, "data", config="fr", maybe=True), False),
    ],
)
def test_an_unknown_config_is_not_absent(use: RepoUse, refused: bool) -> None:
    configs = tuple(Config(name=n, splits=(Split(name="train"),)) for n in ("en", "de"))
    repo = Repo(id="o/d", type="dataset", status="ok", access=True, structure=Structure(configs=configs))
    for default, blocks in (("", refused), ("en", refused and bool(use.config))):
        fact = RepoFact(use, repo.model_copy(update={"default_config": default}))
        facts = replace(submit(), hub=HubFacts((fact,)))
        assert any(f.blocks and f.rule == "PF-DATA-001" for f in run_rules(rules_of("submit"), facts)) is blocks


def test_pushes_and_columns_in_untaken_branches_are_ignored() -> None:
    assert uses("if False:\n    model.push_to_hub('a/b')").pushes == ()
    row = "def f(row):\n    if 'q' in row:\n        return row['q']\n    return row['a']\ndata.map(f)\n"
    assert [name for name, _ in uses(row).reads] == ["a"]


def test_guarded_imports_and_script_classes_are_ignored() -> None:
    guarded = uses("from accelerate.utils import is_wandb_available\nif is_wandb_available():\n    import wandb\n")
    assert "wandb" not in {name for name, _ in guarded.imports}
    own = "class GPT:\n    @classmethod\n    def from_pretrained(cls, name):\n        return cls()\n"
    own += "GPT.from_pretrained('a/b')\n"
    assert uses(own).repos == ()
    (use,) = uses("from transformers import AutoModel\nAutoModel.from_pretrained('a/b', subfolder='unet')").repos
    assert use.inside == "unet"


SETTING = st.sampled_from(
    """deepspeed report_to optim eval_strategy save_strategy push_to_hub hub_model_id output_dir max_steps fp16 bf16
    use_vllm per_device_train_batch_size num_generations dataloader_num_workers attn_implementation device_map
    load_in_4bit peft_config formatting_func eval_dataset model dataset_text_field streaming torch_compile""".split()  # noqa: SIM905
)


@pytest.mark.slow
@given(st.lists(st.tuples(SETTING, MAYBE), max_size=5, unique_by=lambda pair: pair[0]))
@settings(max_examples=60, deadline=None)
def test_a_setting_of_any_type_never_causes_an_internal_error(given_settings: list[tuple[str, Any]]) -> None:
    words = ", ".join(f"{n}={'unknown()' if v is UNKNOWN else _source(v)}" for n, v in given_settings)
    text = "from trl import GRPOTrainer, GRPOConfig\nfrom transformers import AutoModel\n"
    text += f"AutoModel.from_pretrained('a/b'{', ' if words else ''}{words})\n"
    text += f"GRPOTrainer({words})\nGRPOConfig({words})\nfrom datasets import load_dataset\nload_dataset('a/b')\n"
    assert {f.rule for f in found(text)} <= {rule.id for rule in rules_of("submit")}  # and nothing is raised


def _source(value: Any) -> str:
    return repr(value).replace("<Unknowable.UNKNOWN: 'unknown'>", "unknown()").replace("inf", "1e999")


SAVING = "def keep():\n    torch.save(m.state_dict(), 'out/m.pt')\n"


@pytest.mark.parametrize(
    ("text", "maybe"),
    [
        (SAVING, True),
        (SAVING + "def main():\n    keep()\n", True),
        (SAVING + "def keep_more():\n    keep_more()\n", True),
        (SAVING + "keep()\n", False),
        (SAVING + "def main():\n    keep()\nmain()\n", False),
        (SAVING + "hooks = [keep]\n", False),
        (SAVING + "globals()['ke' + 'ep']()\n", False),
        (SAVING + "names = {'keep'}\n", False),
        ("@hook\n" + SAVING, False),
    ],
)
def test_a_save_in_an_unreferenced_function_is_uncertain(text: str, maybe: bool) -> None:
    uses = read_script("import torch\nloss.backward()\n" + text).uses
    assert [write.maybe for write in uses.writes] == [maybe]


@pytest.mark.slow
def test_a_long_chain_of_functions_is_read_in_one_pass() -> None:
    chain = "".join(f"def f{n}():\n    f{n + 1}()\n" for n in range(5_000))
    tree = ast.parse(chain + "def f5000():\n    f0\n" + "def g():\n    h\n")
    assert idle_lines(tree) == {10_003, 10_004}
    tree = ast.parse(chain)
    assert len(idle_lines(tree)) == 10_000
