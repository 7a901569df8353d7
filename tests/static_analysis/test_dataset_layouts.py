"""Columns of public datasets: the right settings are found, and the trainer itself accepts rows with such columns."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dataset_layouts import SEEN, UNSEEN, Layout
from gputrain.outcome import Stop
from gpuwarden.static_analysis.row_layouts import fit
from gpuwarden.static_analysis.shipped_trainers import trainer, trainer_file
from real_parts import need

ALL = [*SEEN, *UNSEEN]
TEXTS = [a for a in ALL if a.method not in {"image_classification", "object_detection"}]
TALK = [{"role": "user", "content": "two and three?"}, {"role": "assistant", "content": "five"}]
OTHER = [TALK[0], {"role": "assistant", "content": "six"}]


def named(layout: Layout) -> str:
    return f"{layout.dataset}-{layout.method}"


@pytest.mark.parametrize("layout", ALL, ids=named)
def test_the_settings_for_a_public_dataset_are_found(layout: Layout) -> None:
    found = fit(layout.columns, trainer(layout.method).wanted)
    assert (None if found.missing else found.option) == layout.renames


def value(column: str, kind: str, number: int) -> Any:
    """Return a value for a column of this type, like those in the datasets."""
    prompt = column == "prompt"
    if kind.startswith("list<{content"):
        return TALK[:1] if prompt else TALK[1:] if column == "completion" else OTHER if column == "rejected" else TALK
    if kind.startswith("list<{from"):
        return [{"from": "human", "value": "two and three?"}, {"from": "gpt", "value": "five"}]
    if kind.startswith("{from"):
        return {"from": ["human", "gpt"], "value": ["two and three?", "five"]}
    plain = {"string": f"{column} {number}", "int64": number, "bool": bool(number % 2), "float64": 0.5}
    return plain.get(kind, [f"{column} {number}"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", TEXTS, ids=named)
def test_the_trainer_agrees_with_the_layouts(layout: Layout, tmp_path: Path) -> None:
    """The trainer's own loader reads such rows, or fails if the dataset is expected to be unusable."""
    need("datasets", importlib.util.find_spec("datasets") is not None)
    spec = importlib.util.spec_from_file_location(layout.method, trainer_file(layout.method))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[layout.method] = module
    spec.loader.exec_module(module)
    file = tmp_path / "rows.jsonl"
    rows = [{n: value(n, k, i) for n, k in layout.columns.items()} for i in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind = [v for k, v in vars(module).items() if k.endswith("Settings")][-1]
    settings = kind(model="m", dataset=str(file), columns=layout.renames or "", eval_fraction=0.0)
    check = {"check": module.check} if layout.method == "sentence_embedding" else {}
    if layout.renames is None:
        with pytest.raises(Stop):  # stops with a one-line error before any weights are loaded
            module.load(settings, module.WANTED, getattr(module, "ALSO", ()), **check)
        return
    data = module.load(settings, module.WANTED, getattr(module, "ALSO", ()), **check)
    assert set(fit(layout.columns, module.WANTED).reads) <= set(data.train.column_names)
    row = data.train[0]
    if {"prompt", "chosen"} <= row.keys():
        assert type(row["prompt"]) is type(row["chosen"]), "TRL joins the two"
