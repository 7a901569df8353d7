"""Check that a PEFT adapter's weights contain all tensors that its config requires and that none of them is empty."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from typing import Any, Dict, Set, Tuple  # noqa: UP035  (Python 3.8)

from gpuwarden.checkpoints.file_model import Tensor, role, short, some
from gpuwarden.checkpoints.findings import Findings, Judgement
from gpuwarden.checkpoints.tree import Folder

NAME = "adapter"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PAIR = re.compile(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.\w+)?(?:\.weight)?")
# PEFT uses the first number in a module's name as its layer number.
_LAYER = re.compile(r"(?P<stem>.*?\.)(?P<number>\d{1,6})\.(?P<rest>.+)")
_LITERAL = re.compile(r"[\w.-]+")
# For classification, PEFT adds both usual names of the last layer to `modules_to_save`; a model has only one of them.
_HEADS = frozenset({"classifier", "score"})
_CLASSIFIES = ("SEQ_CLS", "TOKEN_CLS")

# Maximum number of modules that are compared pairwise; no legitimate adapter has more.
_MOST_ROLES = 1_000
_DEEPEST = 24

_Layers = Dict[Tuple[str, str], Set[int]]  # noqa: UP006


def claims(folder: Folder) -> bool:
    """Return true for a folder that contains this layout's files."""
    return "adapter_config.json" in folder.files or any(n in folder.files for n in _WEIGHTS)


def judge(folder: Folder, found: Findings) -> Judgement:
    """Check that the config and the weights exist, and that the weights contain every tensor the config requires."""
    judgement = Judgement(NAME, folder.rel)
    present = [n for n in _WEIGHTS if n in folder.files]
    if not present:
        judgement.problems.append("has a config but no adapter weights")
    if "adapter_config.json" not in folder.files:
        judgement.problems.append("has adapter weights but no adapter_config.json, so they can't be applied")
        return judgement
    config = found.parsed(folder.join("adapter_config.json"))
    entries = [e for n in present if (e := found[folder.join(n)])]
    if not isinstance(config, dict) or not entries or any(e.problems or e.doubts for e in entries):
        return judgement
    tensors = found.tensors(e.path for e in entries)
    modules = _modules(config, tensors)
    empty = [n for n, t in tensors.items() if not t.numel]
    if empty:
        judgement.problems.append(f"{len(empty):,} tensors have no elements: {some(empty)}")
    elif not tensors:
        judgement.problems.append("the weights contain no tensors")
    _targets(config, modules, judgement)
    _completeness(modules, judgement)
    biases = [n[: -len(".bias")] for n in tensors if n.endswith(".bias")] if config.get("bias") == "all" else []
    _layers(config, [*modules, *biases], judgement)
    if config.get("peft_type") == "LORA":
        _ranks(config, tensors, modules, judgement)
    _saved(config, tensors, judgement)
    _tokens(config, tensors, judgement)
    if modules and not judgement.problems:
        judgement.proved.append(f"{len(modules):,} modules have all tensors that the config requires")
    return judgement


def pairs(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Map each module to its A and B matrices."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, t in tensors.items():
        match = _PAIR.fullmatch(name)
        if match:
            found.setdefault(match.group(1), {})[match.group(2)] = t
    return found


def _names(value: Any) -> list[str]:
    """Return the non-empty strings in a config list."""
    return [v for v in value if isinstance(v, str) and v] if isinstance(value, list) else []


def _ends(module: str) -> list[str]:
    """Return the names by which a config can refer to a module, as PEFT compares them."""
    parts = module.split(".")[-_DEEPEST:]
    return [".".join(parts[n:]) for n in range(len(parts))]


def _modules(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, set[str]]:
    """Map each adapted module to the names of its tensors, without the module's name.

    `target_modules` lists the adapted modules, or is a regular expression. An expression is not evaluated, because a
    malicious one could take forever to match; in that case, only modules with LoRA matrices are found.
    """
    known = set(pairs(tensors))
    targets = set(_names(config.get("target_modules")))
    found: dict[str, set[str]] = defaultdict(set)
    for name in tensors:
        parts = name.split(".")
        for n in range(min(len(parts), _DEEPEST) - 1, 0, -1):
            module = ".".join(parts[:n])
            if module in known or not targets.isdisjoint(_ends(module)):
                found[module].add(".".join(parts[n:]))
                break
    return found


def _targets(config: dict[str, Any], modules: Collection[str], judgement: Judgement) -> None:
    """Report modules that the config adapts but the weights lack. Ignore modules that are excluded or saved in full."""
    apart = {*_names(config.get("exclude_modules")), *_names(config.get("modules_to_save"))}
    met = {end for module in (*modules, *apart) for end in _ends(module)}
    bare = [t for t in _names(config.get("target_modules")) if t not in met and apart.isdisjoint(_ends(t))]
    lora = config.get("peft_type") == "LORA"  # in some other adapter types, modules share all tensors
    if lora and not modules and not config.get("trainable_token_indices"):
        judgement.problems.append("none of its tensors adapts a module")
    elif bare and modules and not isinstance(config.get("exclude_modules"), str):
        judgement.problems.append(f"the weights lack modules that the config adapts: {some(map(short, bare))}")


def _completeness(modules: dict[str, set[str]], judgement: Judgement) -> None:
    """Report modules that lack a tensor that the same module has in another layer."""
    roles: dict[str, set[str]] = defaultdict(set)
    for module, rest in modules.items():
        roles[role(module)] |= rest
    half = [m for m, rest in modules.items() if rest != roles[role(m)]]
    for module, rest in modules.items():
        matrices = {match[2] for r in rest if (match := _PAIR.fullmatch("m." + r))}
        if len(matrices) == 1:  # LoRA needs A and B
            half.append(module)
    if half:
        judgement.problems.append(f"some modules lack a tensor: {some(dict.fromkeys(half))}")


def _layers(config: dict[str, Any], modules: Collection[str], judgement: Judgement) -> None:
    """Report layers that lack a module that is adapted in the other layers."""
    by_role: _Layers = defaultdict(set)
    for module in modules:
        match = _LAYER.fullmatch(module)
        if match:
            by_role[match["stem"], role(match["rest"])].add(int(match["number"]))
    wanted = config.get("layers_to_transform")
    asked = {n for n in (wanted if isinstance(wanted, list) else [wanted]) if type(n) is int}
    if asked and not any(asked <= layers for layers in by_role.values()):
        judgement.problems.append(
            f"the config adapts the layers {some(sorted(asked))}, but the weights lack some of them"
        )
    if len(by_role) > _MOST_ROLES:
        judgement.doubts.append(f"has {len(by_role):,} different modules, too many to compare the layers")
        return
    for (stem, name), layers in by_role.items():
        beside = [v for (s, _), v in by_role.items() if s == stem]
        every = set().union(*beside)
        lacking, ordered = sorted(every - layers), sorted(every)
        if not lacking:
            continue
        # A model may mix layers that have different modules, such as attention or convolutions. The first layers in a
        # model with experts are often dense.
        other_kind = "experts" in name or any(v >= every - layers and not v & layers for v in beside)
        line = f"{short(stem + name)}: missing in layer {some(lacking)}, but not in the other layers"
        if other_kind or config.get("exclude_modules") or len(lacking) > max(1, len(ordered) // 8) or _even(lacking):
            judgement.unproved.append(f"{line}; to check this, compare the adapter with the base model")
        elif lacking in (ordered[: len(lacking)], ordered[-len(lacking) :]):
            judgement.doubts.append(line)  # in some architectures, the first or last layers differ
        else:
            judgement.problems.append(line)


def _even(numbers: list[int]) -> bool:
    """Return true for two or more evenly spaced numbers, for example if every fourth layer differs."""
    return len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1, numbers[1] - numbers[0]))


def _ranks(
    config: dict[str, Any], tensors: dict[str, Tensor], modules: dict[str, set[str]], judgement: Judgement
) -> None:
    """Check the rank of each pair of matrices, and the additional tensors for DoRA and biases."""
    found = pairs(tensors)
    odd = [m for m, ab in found.items() if not _fits(_rank(config, m), ab, bool(config.get("target_parameters")))]
    if odd:
        judgement.problems.append(f"has matrices whose rank differs from the config: {some(odd)}")
    for setting, part in (("use_dora", "lora_magnitude_vector"), ("lora_bias", "lora_B.bias")):
        if config.get(setting) is not True:
            continue
        lacking = [m for m in found if not any(rest.startswith(part) for rest in modules.get(m, ()))]
        if lacking:
            judgement.problems.append(f"{setting} is set, but {part} is missing: {some(lacking)}")


def _rank(config: dict[str, Any], module: str) -> int | None:
    """Return the rank that the config specifies for a module; None if it depends on a regular expression."""
    given: Any = config.get("rank_pattern")
    if isinstance(given, dict) and len(given) > _MOST_ROLES:
        return None
    for key, rank in given.items() if isinstance(given, dict) else ():
        if not _LITERAL.fullmatch(str(key)):
            return None
        if str(key) in _ends(module):
            return rank if type(rank) is int else None
    rank = config.get("r")
    return rank if type(rank) is int else None


def _fits(rank: int | None, pair: dict[str, Tensor], stacked: bool) -> bool:
    """Return true if both matrices have this rank. If `stacked` is set or the rank is None, equal ranks suffice."""
    if any(len(t.shape) < 2 for t in pair.values()):
        return False
    sizes = [t.shape[0 if half == "A" else 1] for half, t in pair.items()]
    if rank is None or stacked:
        return len(set(sizes)) == 1 and sizes[0] > 0
    return all(size == rank for size in sizes)


def _saved(config: dict[str, Any], tensors: Collection[str], judgement: Judgement) -> None:
    """Report the modules in the config's `modules_to_save` that the weights lack."""
    names = [n for n in _names(config.get("modules_to_save")) if _LITERAL.fullmatch(n)]
    if len(names) > _MOST_ROLES:
        judgement.doubts.append(f"modules_to_save has {len(names):,} names, too many to check")
        return
    held = "\n".join(f".{t}." for t in tensors)
    lacking = [n for n in names if f".{n}." not in held]
    if config.get("task_type") in _CLASSIFIES and _HEADS & (set(names) - set(lacking)):
        lacking = [n for n in lacking if n not in _HEADS]
    if config.get("peft_type") == "VERA" and config.get("save_projection") is True:
        lacking += [n for n in ("vera_A", "vera_B") if not any(f".{n}" in t for t in tensors)]
    if lacking:
        judgement.problems.append(f"the weights lack modules in modules_to_save: {some(map(short, lacking))}")


def _tokens(config: dict[str, Any], tensors: dict[str, Tensor], judgement: Judgement) -> None:
    """Check that the tensors of individually trained tokens have one row per token."""
    given = config.get("trainable_token_indices") or config.get("token_indices")
    lists = list(given.values()) if isinstance(given, dict) else [given] if given else []
    wanted = sorted(len(tokens) for tokens in lists if isinstance(tokens, list))
    held = sorted(t.shape[0] for n, t in tensors.items() if "trainable_tokens_delta" in n and t.shape)
    if wanted and (len(held) < len(wanted) or not set(held) <= set(wanted)):
        judgement.problems.append(
            f"has {some(held) or 'no'} rows of trained tokens, but the config lists {some(wanted)}"
        )
