"""Compare a checkpoint with an earlier one, an adapter with its base, or a GGUF file with its source.

Two checkpoints of one run must have the same tensors; the later one must have a higher step and different weights.
Tensors are not loaded: their bytes are compared up to the first difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuwarden.checkpoints import conversion, siblings
from gpuwarden.checkpoints.file_model import Doubtful, Tensor, some
from gpuwarden.checkpoints.findings import Findings
from gpuwarden.checkpoints.layouts.adapter import pairs
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.core.evidence import Cause, Evidence

_MODEL = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".gguf", ".distcp")
_NOT_MODEL = ("optim", "scheduler", "rng_state", "training_args", "scaler")
# Buffers that converters omit, because they are computed instead of learned.
_DROPPED = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", "inv_freq", "position_ids")


@dataclass
class Comparison(Evidence):
    """The result of `compare`."""

    proved: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)


@dataclass(frozen=True)
class _Held:
    """A tensor, its file, and the function that opens the file."""

    path: Path
    tensor: Tensor
    open: Callable[[Path, str], Source]

    def same_bytes(self, other: _Held) -> bool:
        """Return true if two tensors have equal bytes. Raises Doubtful if one of them is compressed."""
        if self.tensor.extent != other.tensor.extent:
            return False
        if self.tensor.start < 0 or other.tensor.start < 0:
            raise Doubtful("they are compressed")
        with self.open(self.path, "") as left, other.open(other.path, "") as right:
            return siblings.equal(left, self.tensor, right, other.tensor)


def compare(now: Findings, before: Findings) -> Comparison:
    """Compare `now` with `before`, which is another checkpoint, an adapter's base or a GGUF file's source."""
    compared = Comparison()
    new, old = _held(now), _held(before)
    if not new or not old:
        compared.doubts.append(
            "no tensors to compare" + ("" if new else " (this one has none)") + ("" if old else " (the other has none)")
        )
        return compared
    if any(h.path.suffix == ".gguf" for h in new.values()) and not any(h.path.suffix == ".gguf" for h in old.values()):
        _conversion(now, new, before, old, compared)
    elif _is_adapter(new) and not _is_adapter(old):
        _onto_base(new, old, compared)
    else:
        _same_run(now, new, before, old, compared)
    return compared


def comparable(found: Findings) -> bool:
    """Return true if the findings include a model's tensors."""
    return bool(_held(found))


def _held(found: Findings) -> dict[str, _Held]:
    """Return a model's tensors by name. If there are several checkpoints, return the tensors of the newest."""
    several = len({j.path for j in found.judgements if j.checkpoint and j.step is not None}) > 1
    last = found.newest() if several else None
    newest = last.path if last else ""
    held: dict[str, _Held] = {}
    for path, entry in found.entries.items():
        if newest and path != newest and not path.startswith(newest + "/"):
            continue
        name = path.rsplit("/", 1)[-1].lower()
        model = path.endswith(_MODEL) and not entry.temporary and not any(n in name for n in _NOT_MODEL)
        if model and entry.anatomy and not entry.problems:
            held.update((t.name, _Held(found.place(path), t, found.open)) for t in entry.anatomy.tensors)
    return held


def _is_adapter(held: dict[str, _Held]) -> bool:
    return any(".lora_" in name for name in held)


def _same_run(
    now: Findings, new: dict[str, _Held], before: Findings, old: dict[str, _Held], compared: Comparison
) -> None:
    """Compare with an earlier checkpoint of the run: require a higher step, the same tensors, and different weights."""
    step, last = (max((j.step for j in f.judgements if j.step is not None), default=None) for f in (now, before))
    if step is None or last is None:
        compared.doubts.append("the step of at least one of the two checkpoints is unknown")
    elif step <= last:
        compared.problems.append(f"is at step {step}, but the earlier checkpoint is at step {last}")
    else:
        compared.proved.append(f"the step went from {last} to {step}")
        _progress(now, before, compared)
    both = [(n, new[n].tensor, old[n].tensor) for n in new if n in old]
    differences = {
        "lacks tensors that are in the other checkpoint": [n for n in old if n not in new],
        "has tensors that are not in the other checkpoint": [n for n in new if n not in old],
        "has tensors with a different shape": [n for n, a, b in both if a.shape != b.shape],
        "has tensors with a different data type": [n for n, a, b in both if a.dtype != b.dtype],
    }
    if any(differences.values()):
        compared.problems += [f"{what}: {some(names)}" for what, names in differences.items() if names]
        return
    try:
        still = [n for n, h in new.items() if h.tensor.numel and h.same_bytes(old[n])]
    except Doubtful as why:
        compared.doubts.append(f"the bytes could not be compared: {why}")
        return
    if len(still) == len(new):
        compared.problems.append(f"all {len(new):,} tensors are the same as before, so training has changed no weights")
    else:
        compared.proved.append(f"{len(new) - len(still):,} of {len(new):,} tensors have changed")
        if still:
            compared.warnings.append(f"{len(still):,} tensors are unchanged; only frozen ones should be: {some(still)}")


def _progress(now: Findings, before: Findings, compared: Comparison) -> None:
    """Compare the steps that the optimizers and schedulers in the two checkpoints record."""
    places = []
    for found in (now, before):
        newest = found.newest()
        folder = next((f for f in found.tree.folders if newest and f.rel == newest.path), None) if found.tree else None
        if folder is None or newest is None or newest.step is None:
            return
        places.append(siblings.read(folder, newest.step, found))
    siblings.compare_progress(places[0], places[1], compared)


def _onto_base(new: dict[str, _Held], base: dict[str, _Held], compared: Comparison) -> None:
    """Check that the base model has every adapted module, with the dimensions that its A and B matrices require."""
    found = pairs({n: h.tensor for n, h in new.items()})
    for module, ab in sorted(found.items()):
        name = _without("base_model.model.", module) + ".weight"
        target = base.get(name) or base.get(_without("model.", name))
        if target is None:
            compared.problems.append(f"adapts {module}, which the base lacks")
        elif not all(t.shape for t in ab.values()):
            compared.problems.append(f"has a scalar instead of a matrix for {module}")
        elif set(ab) == {"A", "B"}:
            rows, columns = ab["B"].shape[0], ab["A"].shape[-1]
            if target.tensor.shape not in {(rows, columns), (columns, rows)}:  # Some layers are stored transposed.
                compared.problems.append(f"does not match {name}, which has the shape {target.tensor.shape}")
        if len(compared.problems) > 5:
            return
    if found and not compared.problems:
        compared.proved.append(f"all {len(found):,} adapted modules exist in the base and have matching dimensions")


def _without(prefix: str, name: str) -> str:
    """Return the name without the prefix. `str.removeprefix` needs Python 3.9."""
    return name[len(prefix) :] if name.startswith(prefix) else name  # noqa: FURB188


def _conversion(
    now: Findings, new: dict[str, _Held], before: Findings, old: dict[str, _Held], compared: Comparison
) -> None:
    """Compare a GGUF file's dimensions and tensors with those in its source.

    Shapes are compared without names, because converters rename tensors, transpose some, and stack experts.
    """
    meta: dict[str, Any] = next((e.anatomy.meta for e in now.entries.values() if e.format == "gguf" and e.anatomy), {})
    entry = before["config.json"]
    config = entry.anatomy.content if entry and entry.anatomy and isinstance(entry.anatomy.content, dict) else {}
    if not config:
        compared.doubts.append("the source has no config.json to compare with")
    kind, tokens = meta.get("general.architecture", ""), meta.get("tokenizer.ggml.tokens")
    for what, ours, theirs in (
        ("layers", meta.get(f"{kind}.block_count"), config.get("num_hidden_layers")),
        ("width", meta.get(f"{kind}.embedding_length"), config.get("hidden_size")),
        ("heads", meta.get(f"{kind}.attention.head_count"), config.get("num_attention_heads")),
        ("vocabulary", tokens.get("count") if isinstance(tokens, dict) else None, config.get("vocab_size")),
    ):
        if ours is not None and theirs is not None and ours != theirs:
            compared.problems.append(f"{what}: {ours} here, {theirs} in the source's config.json")
        elif ours is not None and theirs is not None:
            compared.proved.append(f"{what}: {ours}, as in the source")
    shared = conversion.without_shared(new, old, config)
    old = {n: h for n, h in old.items() if not n.endswith(_DROPPED) and n not in shared}
    tokenizer = before["tokenizer.json"]
    content = tokenizer.anatomy.content if tokenizer and tokenizer.anatomy else None
    values = conversion.tensors(meta, config, new, old)
    for part in (conversion.architecture(meta, config), conversion.tokenizer(meta, content), values):
        for name in ("proved", "warnings", "problems", "doubts"):
            getattr(compared, name).extend(getattr(part, name))
    shapes, source_shapes = (
        Counter(tuple(sorted(d for d in h.tensor.shape if d != 1)) or (1,) for h in held.values())
        for held in (new, old)
    )
    lost, extra = source_shapes - shapes, shapes - source_shapes
    if not lost:
        compared.proved.append(f"{sum(source_shapes.values()):,} tensors have the same shapes as in the source")
        if extra:
            compared.warnings.append(f"has tensors that the source lacks, with the shapes {some(extra)}")
    elif any(len(s) > 1 for s in lost) and _elements(new) >= _elements(old):
        compared.warnings.append(
            f"tensors have been merged or duplicated: the shapes {some(lost)} became {some(extra)}"
        )
    else:
        compared.problems.append(
            f"its shapes differ from the source's: missing {some(lost)}; new {some(extra) or 'none'}"
        )


def _elements(held: dict[str, _Held]) -> int:
    return sum(h.tensor.numel for h in held.values())
