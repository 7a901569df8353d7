"""Column types of public datasets, as the dataset viewer lists them, checked against the methods that read them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import anyio
import pytest

import trainer_kit
from gpuwarden.core.models import JobSpec
from gpuwarden.core.policy import Policy
from gpuwarden.core.repos import Column, Config, Repo, Split, Structure
from gpuwarden.core.rules import Finding, Severity, run_rules
from gpuwarden.core.sanitize import clip
from gpuwarden.hub.client import HubConfig
from gpuwarden.hub.facts import HubFacts, RepoFact
from gpuwarden.hub.viewer import short_type
from gpuwarden.lifecycle.submission.facts import read_spec
from gpuwarden.profiles import load_profile
from gpuwarden.rules.catalog import rules_of
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.row_layouts import reads
from wording import Wording

TEXT, WHOLE, YES = ({"_type": "Value", "dtype": kind} for kind in ("string", "int64", "bool"))
PICTURE = {"_type": "Image"}
TURNS = [{"content": TEXT, "role": TEXT}]
TALK = {"_type": "List", "feature": {"content": TEXT, "role": TEXT}}
SHARED = {"_type": "List", "feature": {"from": TEXT, "value": TEXT}}
TEXTS = {"_type": "List", "feature": TEXT}
NUMBERS = {"_type": "List", "feature": {"_type": "Value", "dtype": "int32"}}
SIDES = {"_type": "Sequence", "feature": {"_type": "Value", "dtype": "float32"}, "length": 4}
KINDS = {"_type": "ClassLabel", "names": ["Coverall", "Face_Shield"]}
BOXES = {"_type": "Sequence", "feature": {"id": WHOLE, "area": WHOLE, "bbox": SIDES, "category": KINDS}}
MASK_LIST = {"_type": "List", "feature": PICTURE}
# Only the first 160 characters of a type are shown, and `role` comes after them.
LONG = {"_type": "List", "feature": {**{f"field_of_the_record_number_{n}": TEXT for n in range(6)}, "role": TEXT}}


def labels(*names: str) -> dict[str, Any]:
    return {"_type": "ClassLabel", "names": list(names)}


class Data(NamedTuple):
    """A dataset, a method, the dataset's features, the column that the rule names, and the setting `columns`."""

    dataset: str
    method: str
    features: dict[str, Any]
    wrong: str = ""
    columns: str = ""


FIT = [
    Data("trl-lib/Capybara", "sft", {"source": TEXT, "messages": TURNS, "num_turns": WHOLE}),
    Data("HuggingFaceH4/ultrachat_200k", "sft", {"prompt": TEXT, "prompt_id": TEXT, "messages": TALK}),
    Data("roneneldan/TinyStories", "cpt", {"text": TEXT}),
    Data("argilla/dpo-mix-7k", "dpo", {"dataset": TEXT, "chosen": TALK, "rejected": TALK}),
    Data("Anthropic/hh-rlhf", "reward", {"chosen": TEXT, "rejected": TEXT}),
    Data("trl-lib/kto-mix-14k", "kto", {"prompt": TALK, "completion": TALK, "label": YES}),
    Data("openai/gsm8k", "grpo", {"question": TEXT, "answer": TEXT}, columns="question=prompt"),
    Data("ethz/food101", "image_classification", {"image": PICTURE, "label": labels("apple_pie", "baklava")}),
    Data(
        "uoft-cs/cifar10",
        "image_classification",
        {"img": PICTURE, "label": labels("airplane", "automobile")},
        columns="img=image",
    ),
    Data("rishitdagli/cppe-5", "object_detection", {"image_id": WHOLE, "image": PICTURE, "objects": BOXES}),
    Data("sentence-transformers/all-nli", "sentence_embedding", {"anchor": TEXT, "positive": TEXT, "negative": TEXT}),
]
WRONG = [
    Data("burtenshaw/image-search-queries", "image_classification", {"image": TEXT, "label": WHOLE}, "image"),
    Data(
        "jonathan-roberts1/MultiScene",
        "image_classification",
        {"image": PICTURE, "label": {"_type": "List", "feature": labels("apron", "baseball field")}},
        "label",
    ),
    Data("roneneldan/TinyStories-tokenized", "sft", {"messages": NUMBERS}, "messages"),
    Data("li2017dailydialog/daily_dialog", "sft", {"dialog": TEXTS, "act": NUMBERS}, "messages", "dialog=messages"),
    Data("eriktks/conll2003", "cpt", {"id": TEXT, "tokens": TEXTS, "ner_tags": NUMBERS}, "text", "tokens=text"),
    Data("lmarena-ai/arena-human-preference-55k", "kto", {"prompt": TEXT, "completion": TEXT, "label": TEXT}, "label"),
    Data("openbmb/UltraFeedback", "dpo", {"chosen": WHOLE, "rejected": WHOLE, "prompt": TEXT}, "chosen"),
    Data("rafaelpadilla/coco2017", "object_detection", {"image": PICTURE, "objects": WHOLE}, "objects"),
    Data("mteb/stsb", "sentence_embedding", {"sentence1": TEXT, "sentence2": TEXT, "score": TEXT}, "score"),
    Data("philschmid/guanaco-sharegpt-style", "sft", {"conversations": SHARED}, "conversations"),
]
UNTOLD = [
    Data("nobody/rows-without-values", "sft", {"messages": {"_type": "Value", "dtype": "null"}}, "messages"),
    Data("nobody/mixed-turns", "sft", {"messages": {"_type": "Json"}}, "messages"),
    Data("nobody/new-feature", "cpt", {"text": 7}, "text"),
    Data("nobody/wide-turns", "sft", {"messages": LONG}, "messages"),
]
SCRIPT = """# /// script
# dependencies = ["trl>=1.16,<2", "transformers>=5,<6", "datasets>=5,<6", "torch>=2.13,<3"]
# ///
from datasets import Image, load_dataset
from trl import SFTConfig, SFTTrainer
ds = load_dataset("a/b", split="train"){more}
SFTTrainer(model="Qwen/Qwen2.5-0.5B", train_dataset=ds, args=SFTConfig(output_dir="out"{args})).train()
"""


@cache
def job(script: str, words: tuple[str, ...]) -> SubmitFacts:
    """Return the facts about a job that trains on an unknown dataset."""
    spec = JobSpec(name="t", platform="local", script=script, args=words)
    read, script_url = anyio.run(read_spec, spec, lambda: HubConfig("http://127.0.0.1:9", "http://127.0.0.1:9", None))
    profile = load_profile("local", None)
    return SubmitFacts(spec, Policy(), profile, ("local",), read, script_url=script_url)


def found(script: str, dataset: str, features: dict[str, Any], *words: str) -> list[Finding]:
    """Return the rule's findings for a dataset with these features, without asking a Hub."""
    facts = job(script, words)
    columns = tuple(Column(name=name, type=clip(short_type(f), 160, keep="start")) for name, f in features.items())
    structure = Structure(configs=(Config(name="default", splits=(Split(name="train"),), columns=columns),))
    repo = Repo(id=dataset, type="dataset", status="ok", structure=structure)
    uses = [use for use in facts.uses.repos if use.role == "data"]
    assert uses
    facts = replace(facts, hub=HubFacts(repos=tuple(RepoFact(use, repo) for use in uses)))
    return run_rules([rule for rule in rules_of("submit") if rule.id == "PF-DATA-002"], facts)


def shipped(data: Data) -> list[Finding]:
    """Return the findings for a bundled trainer. Reading it takes most of the time, so datasets share the result."""
    words = ["--model", "Qwen/Qwen2.5-0.5B", "--dataset", "a/b"]
    words += ["--columns", data.columns] if data.columns else []
    text = trainer_kit.shipped(data.method)
    return found(text, data.dataset, data.features, *words)


@pytest.mark.prove
@pytest.mark.parametrize("data", FIT, ids=lambda d: d.dataset)
def test_a_public_dataset_with_correct_types_passes(data: Data) -> None:
    assert shipped(data) == []


@pytest.mark.slow
@pytest.mark.parametrize("data", WRONG, ids=lambda d: d.dataset)
def test_a_correctly_named_column_of_the_wrong_type_is_an_error(data: Data) -> None:
    (finding,) = shipped(data)
    assert finding.severity is Severity.ERROR
    assert finding.fix
    assert data.wrong in finding.message


@pytest.mark.slow
@pytest.mark.parametrize("data", UNTOLD, ids=lambda d: d.dataset)
def test_an_unknown_column_type_is_a_warning(data: Data) -> None:
    (finding,) = shipped(data)
    assert finding.severity is Severity.WARNING
    assert data.wrong in finding.message


@pytest.mark.parametrize(
    ("features", "args", "more", "wrong"),
    [
        ({"messages": TALK}, "", "", ""),
        ({"messages": NUMBERS}, "", "", "messages"),
        ({"messages": NUMBERS, "text": TEXT}, "", "", ""),  # training uses the columns that fit
        ({"body": TEXT}, ', dataset_text_field="body"', "", ""),
        ({"body": PICTURE}, ', dataset_text_field="body"', "", "body"),
        ({"input_ids": NUMBERS}, "", "", ""),
        ({"input_ids": TEXT}, "", "", "input_ids"),
        ({"text": WHOLE}, "", '.rename_column("text", "label")', None),
        ({"body": WHOLE}, "", '.rename_column("body", "text")', "text"),
        ({"text": PICTURE}, "", '.cast_column("text", Image())', ""),
        ({"text": WHOLE}, "", '.map(lambda row: {"text": str(row["text"])})', ""),
    ],
    ids=[
        "talk",
        "numbers as talk",
        "text beside it",
        "another name",
        "a picture",
        "tokens",
        "text as tokens",
        "renamed away",
        "renamed to text",
        "cast",
        "mapped",
    ],
)
def test_column_types_read_by_a_users_script_are_checked(
    features: dict[str, Any], args: str, more: str, wrong: str | None, wording: Wording
) -> None:
    findings = found(SCRIPT.format(args=args, more=more), "a/b", features)
    if wrong is None:
        assert findings
        wording("\n".join(f"{f.rule} {f.severity}: {f.message}" for f in findings), "sft")
    elif wrong:
        (finding,) = findings
        assert finding.severity is Severity.ERROR
        wording(finding.message, wrong)
    else:
        assert findings == []


def test_a_mask_column_must_be_an_image_and_a_label_column_must_not() -> None:
    assert reads("mask", "image", {"image", "mask"}) is True
    assert reads("mask", short_type(MASK_LIST), {"image", "mask"}) is False
    assert reads("label", "image", {"image", "label"}) is False
    assert reads("label", "", {"image", "label"}) is None
