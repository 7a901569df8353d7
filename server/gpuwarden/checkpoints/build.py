"""Build the architecture that a config describes, without weights, and compare it with the folder's tensors.

The child process runs `build_child.py`. It receives the parsed config and the tensors' names and shapes, but no path.
If the child process can't build an architecture, the report lists this check as not made.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from typing import Any

from gpuwarden.checkpoints import architectures
from gpuwarden.checkpoints.budget import Budget
from gpuwarden.checkpoints.file_model import short, some
from gpuwarden.checkpoints.findings import Findings, Judgement
from gpuwarden.checkpoints.layouts import model
from gpuwarden.checkpoints.load import run_child

CHILD = (sys.executable, "-P", "-m", "gpuwarden.checkpoints.build_child")
_MEMORY = 16 << 30  # bytes of address space; a model on the meta device needs little memory
_START_S = 90.0
_EACH_S = 15.0
_MOST = 200


def build(founds: Sequence[Findings], budget: Budget | None = None) -> None:
    """Check whether transformers can build each model from its tensors, and add the result to the model's findings."""
    tasks: dict[str, list[Judgement]] = {}
    for found in founds:
        _tasks(found, tasks)
    if not tasks or not (importlib.util.find_spec("transformers") and importlib.util.find_spec("torch")):
        return
    texts = list(tasks)
    models = ",".join(texts)
    seconds = _START_S + _EACH_S * len(texts)
    answers, why = run_child(
        f'{{"memory": {_MEMORY}, "models": [{models}]}}', min(seconds, budget.left_s) if budget else seconds, CHILD
    )
    answers += [{"unable": why}] * (len(texts) - len(answers))
    for text, answer in zip(texts, answers):  # noqa: B905  (Python 3.8)
        for judgement in tasks[text]:
            _settle(judgement, answer)


def _tasks(found: Findings, tasks: dict[str, list[Judgement]]) -> None:
    """Collect the models to build in the child process. Models with equal configs and tensors share one task."""
    folders = {f.rel: f for f in found.tree.folders} if found.tree else {}
    for judgement in found.judgements:
        folder = folders.get(judgement.path)
        if judgement.layout != model.NAME or judgement.problems or folder is None:
            continue
        config = found.parsed(folder.join(model.CONFIG))
        tensors = model.held(folder, found)
        if not isinstance(config, dict) or not tensors or not config.get("architectures"):
            continue
        if architectures.quantized(config):
            continue
        text = json.dumps({"config": config, "tensors": [[n, t.shape] for n, t in sorted(tensors.items())]})
        if text in tasks or len(tasks) < _MOST:
            tasks.setdefault(text, []).append(judgement)


def _settle(judgement: Judgement, answer: dict[str, Any]) -> None:
    """Add the child's result for one model to the model's findings."""
    if "unable" in answer:
        judgement.unproved.append(f"whether its architecture accepts the tensors: {short(answer['unable'], 160)}")
        return
    # transformers has now made the checks that the architecture table could not make.
    judgement.unproved.clear()
    for what, sentence in (
        ("missing", "tensors that the architecture requires are missing"),
        ("wrong", "tensors do not have the shapes that the architecture requires"),
        ("beyond", "tensors belong to layers that the architecture does not have"),
    ):
        if answer[what]:
            judgement.problems.append(f"{answer[f'{what}_count']:,} {sentence}: {some(answer[what])}")
    if answer["unexpected"]:
        judgement.warnings.append(
            f"{answer['unexpected_count']:,} tensors are not in the architecture: {some(answer['unexpected'])}"
        )
    if not judgement.problems:
        judgement.proved.append(f"{answer['by']} can build its architecture from these tensors")
