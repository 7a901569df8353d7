"""A PEFT adapter: the config says what is adapted, the weights must have a fitting pair for each."""

from __future__ import annotations

import re

from gpuwarden.checkpoints.file_model import Tensor, short, some
from gpuwarden.checkpoints.findings import Findings, Judgement
from gpuwarden.checkpoints.tree import Folder

NAME = "adapter"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PAIR = re.compile(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.\w+)?(?:\.weight)?")


def claims(folder: Folder) -> bool:
    """Return true for a folder with this layout's files."""
    return "adapter_config.json" in folder.files or any(n in folder.files for n in _WEIGHTS)


def judge(folder: Folder, found: Findings) -> Judgement:
    """Check that config and weights are both there, every A has its B, ranks fit, every target is adapted."""
    said = Judgement(NAME, folder.rel)
    present = [n for n in _WEIGHTS if n in folder.files]
    if not present:
        said.problems.append("has a config but no adapter weights")
    if "adapter_config.json" not in folder.files:
        said.problems.append("has adapter weights but no adapter_config.json; nothing can apply them")
        return said
    entry = found[folder.join("adapter_config.json")]
    config = entry.anatomy.content if entry and entry.anatomy else None
    tensors = found.tensors(folder.join(n) for n in present)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA" or not tensors:
        return said
    modules = pairs(tensors)
    half = [m for m, ab in modules.items() if set(ab) != {"A", "B"}]
    if half:
        said.problems.append(f"modules with only one of the two matrices: {some(half)}")
    plain = not config.get("rank_pattern") and type(config.get("r")) is int
    odd = [m for m, ab in modules.items() if plain and not all(config["r"] in t.shape for t in ab.values())]
    if odd:
        said.problems.append(f"the config says rank {config['r']}, but not so: {some(odd)}")
    targets = config.get("target_modules")
    if isinstance(targets, list):
        bare = [t for t in targets if not any(m == t or m.endswith("." + str(t)) for m in modules)]
        if bare:
            said.problems.append(f"modules that the config adapts but the weights lack: {some(map(short, bare))}")
    if modules and not said.problems:
        said.proved.append(f"{len(modules):,} modules have both matrices, of the rank that the config says")
    return said


def pairs(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return module -> its A and B matrices."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, t in tensors.items():
        match = _PAIR.fullmatch(name)
        if match:
            found.setdefault(match.group(1), {})[match.group(2)] = t
    return found
