"""Code that is imported but not read: its arguments decide whether it can save a model."""

from __future__ import annotations

import pytest

from gpuwarden.static_analysis.script import read_script
from gpuwarden.static_analysis.static_eval import UNKNOWN

TRAINS = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, get_cosine_schedule_with_warmup
{}
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
arguments = TrainingArguments(output_dir="out", save_strategy="no")
{}
trainer.train()
"""
PLAIN = "trainer = Trainer(model=model, args=arguments, train_dataset={})"


def savers(imports: str, body: str) -> tuple[str, ...]:
    return read_script(TRAINS.format(imports, body)).uses.savers


@pytest.mark.parametrize(
    ("imports", "body"),
    [
        ("from mine import get_rows", PLAIN.format("get_rows('train.json')")),
        ("import mine", "rows = mine.jload('train.json')\n" + PLAIN.format("[r for r in rows]")),
        ("from .consts import PROMPT, ROWS", PLAIN.format("[PROMPT.format(r) for r in ROWS]")),
        ("from mine import Options, Rows", "options = Options()\n" + PLAIN.format("Rows(options, arguments)")),
        ("from mine import get_model", "model = get_model(arguments)\nmodel.train()\n" + PLAIN.format("[]")),
        ("from mine import reward", "def score(row):\n    return reward(row)\n" + PLAIN.format("list(map(score, []))")),
        ("from swanlab.integration.huggingface import SwanLabCallback", PLAIN.format("[]")),
        ("import unused", PLAIN.format("[]")),
    ],
)
def test_code_without_access_to_the_model_never_saves_it(imports: str, body: str) -> None:
    assert savers(imports, body) == ()


@pytest.mark.parametrize(
    ("imports", "body"),
    [
        ("from mine import export", PLAIN.format("[]") + "\nexport(model)"),
        ("from mine import finish_up", PLAIN.format("[]") + "\nfinish_up()"),
        ("import mine", PLAIN.format("[]") + "\nmine.keep_it(trainer)"),
        ("import mine", "helper = mine.Helper(model)\n" + PLAIN.format("[]") + "\nhelper.go()"),
        ("from mine import Keeper", PLAIN.format("[], callbacks=[Keeper()]")),
        ("from mine import get_callbacks", PLAIN.format("[], callbacks=get_callbacks(arguments)")),
        ("from mine import Keeper", PLAIN.format("[]") + "\ntrainer.add_callback(Keeper)"),
        ("from mine import MyTrainer", "trainer = MyTrainer(model=model)"),
        ("from mine import Base", "class T(Base):\n    pass\ntrainer = T(model=model)"),
        ("from mine import patched", "Trainer.train = patched\n" + PLAIN.format("[]")),
        ("from mine import run_all", PLAIN.format("[]") + "\nrun_all(arguments)"),
        ("from mine import give", "def after(it):\n    it.give(trainer)\n" + PLAIN.format("[]") + "\nafter(give)"),
        ("import mine", "def after():\n    return mine.Box()\n" + PLAIN.format("[]") + "\nafter().put(model=model)"),
        ("from functools import partial\nfrom mine import f", PLAIN.format("[]") + "\ng = partial(f, model)\ng()"),
        ("from mine import *", PLAIN.format("[]")),
        ("import mine", PLAIN.format("[]") + "\nmine.everything(**locals())"),
    ],
)
def test_code_with_access_to_the_model_or_a_hook_may_save_it(imports: str, body: str) -> None:
    assert savers(imports, body)


def test_unseen_training_code_may_save() -> None:
    assert read_script("from mine import build\nengine = build('config.json')\nengine.train()").uses.savers


def test_a_module_that_only_makes_rows_counts_only_as_unseen() -> None:
    text = TRAINS.format("from mine import get_rows", PLAIN.format("get_rows()"))
    assert read_script(text).uses.unseen == ("the module mine",), "it may still write other files"


ELSEWHERE = """
from transformers import AutoModelForCausalLM, Trainer
{}
def train(arguments):
    trainer = Trainer(model=AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B"), {})
    trainer.train()
"""


@pytest.mark.parametrize(
    ("imports", "given"),
    [("", "args=arguments"), ("from optimum.habana.trl import GaudiSFTConfig as C", "args=C(output_dir='out')")],
)
def test_a_configuration_that_is_not_read_may_save_and_push_anywhere(imports: str, given: str) -> None:
    uses = read_script(ELSEWHERE.format(imports, given)).uses
    assert [w.path for w in uses.writes] == [None]
    assert [(p.target, p.maybe) for p in uses.pushes] == [("?", True)]
    assert uses.setting("hub_model_id") is UNKNOWN


def test_a_trainer_without_a_configuration_saves_to_its_default_folder() -> None:
    uses = read_script(ELSEWHERE.format("", "train_dataset=[]")).uses
    assert [w.path for w in uses.writes] == ["trainer_output"]
    assert not uses.pushes


def test_a_trainers_private_save_method_counts() -> None:
    text = TRAINS.format("", PLAIN.format("[]")) + "trainer._save('best', state_dict={})"
    assert [w.path for w in read_script(text).uses.writes] == ["best"]


def test_deep_and_long_code_is_still_answered() -> None:
    deep = "import mine\nx = mine.y" + " + 1" * 3000 + "\ny = mine" + ".z()" * 800
    assert savers(deep, PLAIN.format("x")) == ()
    chain = "\n".join(f"a{n} = a{n + 1}" for n in range(60)) + "\na60 = mine.rows()"
    assert savers("import mine\n" + chain, PLAIN.format("a0")) == ("the module mine",), "not followed to the end"
