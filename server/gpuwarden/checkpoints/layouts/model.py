"""Check a transformers model: config.json, the tensors and the tokenizer must match."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from gpuwarden.checkpoints import architectures
from gpuwarden.checkpoints.file_model import Tensor, some
from gpuwarden.checkpoints.findings import Findings, Judgement, temporary
from gpuwarden.checkpoints.tree import Folder

NAME = "model"
CONFIG = "config.json"
_WEIGHTS = re.compile(r"(?:model|pytorch_model)(?:-\d{1,9}-of-\d{1,9})?\.(?:safetensors|bin)")
_EXPERT = re.compile(r"(?P<layer>.*\bexperts\.)(?P<number>\d{1,6})\.(?P<rest>.+)")
# Only save_pretrained writes this file, always together with a config.
_BESIDE = ("generation_config.json",)


def claims(folder: Folder) -> bool:
    """Return true for a folder that contains weight files named as transformers names them."""
    return bool(weights(folder)) and not temporary(folder.rel)


def weights(folder: Folder) -> list[str]:
    """Return the names of the weight files. The .bin files are omitted if safetensors files exist."""
    names = sorted(n for n in folder.files if _WEIGHTS.fullmatch(n))
    return [n for n in names if n.endswith(".safetensors")] or names


def held(folder: Folder, found: Findings) -> dict[str, Tensor]:
    """Return the model's tensors by name; empty if one of their files is damaged or unreadable."""
    names = [folder.join(n) for n in weights(folder)]
    whole = all((e := found[n]) and e.anatomy and e.anatomy.tensors and not e.problems for n in names)
    return found.tensors(names) if whole else {}


def judge(folder: Folder, found: Findings) -> Judgement:
    """Compare the config with the tensors, using the architecture table, and the tokenizer with the embeddings."""
    judgement = Judgement(NAME, folder.rel)
    tensors = held(folder, found)
    entries = [found[folder.join(n)] for n in weights(folder)]
    if not tensors and all(e and e.anatomy and not (e.problems or e.doubts) for e in entries):
        judgement.problems.append("the weights contain no tensors")
    if CONFIG not in folder.files:
        # A config is optional. It counts as missing only if a companion file exists or sibling models have one.
        beside = [n for n in _BESIDE if n in folder.files]
        others = found.tree.beside(folder) if found.tree else []
        configs = {f.rel: found.parsed(f.join(CONFIG)) for f in others if claims(f)}
        have = [rel for rel, config in configs.items() if isinstance(config, dict) and config.get("model_type")]
        if beside:
            judgement.problems.append(f"has {beside[0]} but lacks {CONFIG}, so the model can't be built")
        elif have:
            judgement.problems.append(f"lacks {CONFIG}, unlike {some(have)}, so the model can't be built")
    else:
        config = found.parsed(folder.join(CONFIG))
        if isinstance(config, dict) and tensors and config.get("model_type"):
            made = architectures.agree(config, tensors)
            judgement.proved += made.proved
            judgement.problems += made.problems
            judgement.doubts += made.doubts
            judgement.unproved += made.unproved
    _experts(tensors, found.parsed(folder.join(CONFIG)), judgement)
    _tokenizer(folder, found, tensors, judgement)
    return judgement


def _experts(tensors: dict[str, Tensor], config: Any, judgement: Judgement) -> None:
    """Check that each layer has as many experts as the config specifies, and that all have the same tensors.

    transformers 5 merges the experts when it loads a model, so `build_child.py` can't check the experts' tensor names.
    """
    layers: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for match in map(_EXPERT.fullmatch, tensors):
        if match:
            layers[match["layer"]][match["rest"]].add(match["number"])
    many = architectures.experts(config)
    for layer, parts in layers.items():
        most = max(many, *(len(numbers) for numbers in parts.values()))
        few = [f"{layer}*.{rest}" for rest, numbers in parts.items() if len(numbers) != most]
        if few:
            judgement.problems.append(f"some experts lack a tensor: {some(few)}")
            return


def _tokenizer(folder: Folder, found: Findings, tensors: dict[str, Tensor], judgement: Judgement) -> None:
    """Check that every token has an embedding."""
    count = architectures.tokens(found.parsed(folder.join("tokenizer.json")))
    rows = architectures.embedded(tensors)
    if count is None or rows is None:
        return
    if count > rows:
        judgement.problems.append(
            f"the tokenizer has {count:,} tokens, but the model has embeddings only for the first {rows:,}"
        )
    else:
        judgement.proved.append(f"all {count:,} tokens in the tokenizer have embeddings")
