"""Compare a GGUF file's tensors and tokenizer with its source model.

The gguf library's table maps the names. Some rows of each tensor are dequantized and compared with the source; the
error limit depends on the quantization type. Converters reorder the rows of Llama's query and key matrices, because
llama.cpp implements rotary embeddings differently, and add one to Gemma's norms.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gpuwarden.checkpoints.file_model import Tensor, some
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.core.installing import install_command

_ROWS = 8
_WHOLE = 4 << 20  # A source tensor of at most this many bytes is compared in full.
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_HEADS = re.compile(r"\.(q|k)_proj\.(weight|bias)$")
# Maps a source's model type to the architecture name that the converter writes.
_ALIASES = {
    "mistral": "llama", "mixtral": "llama", "smollm": "llama", "gpt_neox": "gptneox", "phi": "phi2",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "cohere": "command-r", "stablelm": "stablelm", "gpt_bigcode": "starcoder", "phi3": "phi3",
}  # fmt: skip
# Architectures whose conversion is fully known, so any mismatch is a problem.
_UNDERSTOOD = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
_PERMUTED = ("llama", "granite", "minicpm")
# Allowed relative errors for types that the library can't quantize to: twice the error of normally distributed weights.
_ERRORS = {"Q2": 0.6, "Q3": 0.35, "Q4": 0.2, "Q5": 0.1, "Q6": 0.05, "IQ1": 0.9, "IQ2": 0.7, "IQ3": 0.45, "IQ4": 0.2}
_FLOOR = 1e-6
_MORE = 1.6  # allowed multiple of the library's quantization error; weighted quantization has a larger error
_MADE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight", "output.weight")


def without_shared(new: Mapping[str, Stored], old: Mapping[str, Stored], config: Mapping[str, Any]) -> set[str]:
    """Return the name of the source's output layer if the converter omitted it because it equals the embeddings."""
    head = next((n for n in old if n.endswith("lm_head.weight")), "")
    table = next((old[n] for n in old if n.endswith(("embed_tokens.weight", "wte.weight"))), None)
    if not head or "output.weight" in new or table is None:
        return set()
    shared = config.get("tie_word_embeddings") is True or old[head].same_bytes(table)
    return {head} if shared else set()


class Stored(Protocol):
    """A tensor, its file, and the function that opens the file."""

    @property
    def path(self) -> Path: ...  # noqa: D102
    @property
    def tensor(self) -> Tensor: ...  # noqa: D102
    @property
    def open(self) -> Callable[[Path, str], Source]: ...  # noqa: D102
    def same_bytes(self, other: Any, /) -> bool: ...  # noqa: D102


@dataclass
class Converted:
    """The result of comparing a GGUF file with its source."""

    proved: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


def architecture(meta: Mapping[str, Any], config: Mapping[str, Any]) -> Converted:
    """Compare the GGUF file's architecture with the source's model type."""
    converted = Converted()
    ours, theirs = str(meta.get("general.architecture", "")), config.get("model_type")
    if not isinstance(theirs, str):
        return converted
    if ours == _ALIASES.get(theirs, theirs):
        converted.proved.append(f"architecture: {ours}, converted from {theirs}")
    elif theirs in _UNDERSTOOD or theirs in _ALIASES:
        converted.problems.append(f"architecture: {ours} here, {theirs} in the source's config.json")
    else:
        converted.warnings.append(f"architecture: {ours} here, {theirs} in the source's config.json")
    return converted


def tokenizer(meta: Mapping[str, Any], content: Any) -> Converted:
    """Compare the GGUF file's first tokens and number of merges with the source's tokenizer.json."""
    converted = Converted()
    model = content.get("model") if isinstance(content, dict) else None
    tokens = meta.get("tokenizer.ggml.tokens")
    if not isinstance(model, dict) or not isinstance(tokens, dict):
        return converted
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        theirs = {number: token for token, number in vocab.items() if type(number) is int}
    elif isinstance(vocab, list):
        theirs = {i: row[0] for i, row in enumerate(vocab) if isinstance(row, list) and row}
    else:
        return converted
    for added in content.get("added_tokens") or []:
        if isinstance(added, dict) and type(added.get("id")) is int:
            theirs[added["id"]] = added.get("content")
    # Skip token ids that the source does not use, because a converter adds placeholders for them.
    both = [(i, mine, theirs[i]) for i, mine in enumerate(tokens["first"]) if i in theirs]
    other = [f"{i} is {mine!r}, not {his!r}" for i, mine, his in both if mine != his]
    if other:
        converted.problems.append(f"has {len(other):,} tokens that differ from the source's tokenizer: {some(other)}")
    elif both:
        converted.proved.append(f"its first {len(both):,} tokens equal those of the source's tokenizer")
    merges, own = meta.get("tokenizer.ggml.merges"), model.get("merges")
    if isinstance(merges, dict) and isinstance(own, list) and merges["count"] != len(own):
        converted.problems.append(f"has {merges['count']:,} merges; the source's tokenizer has {len(own):,}")
    return converted


def tensors(
    meta: Mapping[str, Any], config: Mapping[str, Any], new: Mapping[str, Stored], old: Mapping[str, Stored]
) -> Converted:
    """Compare tensor names and values. If at least half of the names are unknown, only add a warning."""
    converted = Converted()
    if any(importlib.util.find_spec(name) is None for name in ("gguf", "numpy")):
        converted.warnings.append(
            f"the values were not compared, because gguf is not installed: {install_command('gguf', 'gguf')}"
        )
        return converted
    kind = str(meta.get("general.architecture", ""))
    work = _Comparison(kind, config, new, converted)
    blocks = meta.get(f"{kind}.block_count")
    named = work.names(old, blocks if isinstance(blocks, int) else 0)
    if 2 * len(named) <= len(old):
        converted.warnings.append(
            f"the values were not compared: the source's tensor names don't belong to a known {kind or 'model'} layout"
        )
        return converted
    strange = [name for name in old if name not in named]
    if strange:
        converted.doubts.append(f"{len(strange):,} source tensors have no known GGUF name: {some(strange)}")
    lost = [n for n, (to, _) in named.items() if to not in new]
    if lost:
        converted.problems.append(f"lacks {len(lost):,} source tensors: {some(lost)}")
    extra = [n for n in new if n not in {to for to, _ in named.values()} and n not in _MADE]
    if extra:
        converted.warnings.append(f"has {len(extra):,} tensors that the source lacks: {some(extra)}")
    for name, (to, expert) in named.items():
        if to in new:
            work.compare(name, old[name], to, expert)
    work.conclude()
    return converted


class _Comparison:
    """Compare the values in one GGUF file with those in its source."""

    def __init__(self, kind: str, config: Mapping[str, Any], new: Mapping[str, Stored], converted: Converted) -> None:
        import gguf
        import numpy as np

        self.gguf, self.numpy = gguf, np
        self.kind, self.config, self.new, self.converted = kind, config, new, converted
        self.worst: dict[str, float] = {}
        self.count = 0
        self.wrong: list[str] = []
        self.unsure: list[str] = []
        self.unturned: list[str] = []

    def names(self, old: Mapping[str, Stored], blocks: int) -> dict[str, tuple[str, int]]:
        """Map each source tensor with a known name to its GGUF name and expert number."""
        kinds = {name: arch for arch, name in self.gguf.MODEL_ARCH_NAMES.items()}
        if self.kind not in kinds or not 0 < blocks < 10_000:
            return {}
        table = self.gguf.get_tensor_name_map(kinds[self.kind], blocks)
        found = {}
        for name in old:
            expert = _EXPERT.search(name)
            to = table.get_name(_EXPERT.sub(".experts.", name), try_suffixes=(".weight", ".bias"))
            if to is not None:
                found[name] = (to, int(expert.group(1)) if expert else 0)
        return found

    def compare(self, name: str, theirs: Stored, to: str, expert: int) -> None:
        """Compare some rows of a tensor with the source, or all rows if the tensor is small."""
        np, ours = self.numpy, self.new[to]
        shape, mine = _matrix(theirs.tensor), _matrix(ours.tensor)
        turned = mine != shape and mine == shape[::-1]
        if theirs.tensor.stride is not None or theirs.tensor.start < 0 or (mine[1] != shape[1] and not turned):
            self.unsure.append(name)
            return
        whole = theirs.tensor.extent <= _WHOLE
        if turned and not whole:
            self.unsure.append(name)
            return
        count = shape[1] if turned else shape[0]
        rows = np.arange(count) if whole else np.unique(np.linspace(0, count - 1, _ROWS).astype(int))
        try:
            got = self.dequantised(ours, rows + expert * count)
            kind = self.gguf.GGMLQuantizationType[ours.tensor.dtype]
        except (NotImplementedError, KeyError, ValueError):
            self.unsure.append(name)
            return
        sources = self.candidates(name, theirs, rows, turned=turned)
        errors = {label: self.error(got, source, kind) for label, source in sources.items()}
        self.settle(name, ours.tensor.dtype, errors)

    def settle(self, name: str, dtype: str, errors: dict[str, tuple[float, float]]) -> None:
        """Record whether the tensor matches the source in the expected form, in another form, or not at all."""
        fits = {label for label, (error, most) in errors.items() if error <= most}
        expected = "turned" if "turned" in errors and self.kind in _PERMUTED else "plain"
        if expected in fits or (fits and self.kind not in _UNDERSTOOD) or fits == {"plus one"}:
            self.count += 1
            best = min(error for label, (error, _) in errors.items() if label in fits)
            self.worst[dtype] = max(self.worst.get(dtype, 0.0), best)
        elif fits:
            self.unturned.append(name)
        elif self.kind in _UNDERSTOOD:
            self.wrong.append(f"{name} (error {errors[expected][0]:.1%}, limit {errors[expected][1]:.1%} for {dtype})")
        else:
            self.unsure.append(name)

    def candidates(self, name: str, theirs: Stored, rows: Any, *, turned: bool) -> dict[str, Any]:
        """Return the values that a converter may write for these source rows, by conversion name."""
        np = self.numpy
        if turned:
            return {"plain": np.ascontiguousarray(self.rows(theirs, np.arange(theirs.tensor.shape[0]))[:, rows].T)}
        found = {"plain": self.rows(theirs, rows)}
        match = _HEADS.search(name)
        if match:
            heads = self.config.get("num_attention_heads")
            if match.group(1) == "k":
                heads = self.config.get("num_key_value_heads") or heads
            length = theirs.tensor.shape[0]
            if isinstance(heads, int) and heads > 0 and length % (2 * heads) == 0:
                size = length // heads
                if match.group(2) == "bias":
                    elements = np.arange(length)
                    order = elements // size * size + elements % size % 2 * (size // 2) + elements % size // 2
                    found["turned"] = found["plain"].reshape(-1)[order].reshape(1, -1)
                else:
                    found["turned"] = self.rows(
                        theirs, rows // size * size + rows % size % 2 * (size // 2) + rows % size // 2
                    )
        if "norm" in name and self.kind.startswith("gemma"):
            found["plus one"] = found["plain"] + 1
        return found

    def rows(self, held: Stored, rows: Any) -> Any:
        """Return rows of an unquantized tensor as 32-bit floats."""
        np, t = self.numpy, held.tensor
        count, width = _matrix(t)
        codes = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2"}
        if t.dtype not in codes:
            return np.full((len(rows), width), np.nan, "f4")
        size = t.extent // max(count, 1)
        with held.open(held.path, "") as source:
            raw = b"".join(source.at(t.start + int(r) * size, size) for r in rows)
        values = np.frombuffer(raw, codes[t.dtype]).reshape(len(rows), -1)
        return (values.astype("u4") << 16).view("f4") if t.dtype == "BF16" else values.astype("f4")

    def dequantised(self, held: Stored, rows: Any) -> Any:
        """Return dequantized rows of a tensor in the GGUF file."""
        np, t = self.numpy, held.tensor
        size = t.extent // max(_matrix(t)[0], 1)
        with held.open(held.path, "") as source:
            raw = b"".join(source.at(t.start + int(r) * size, size) for r in rows)
        return self.gguf.quants.dequantize(
            np.frombuffer(raw, np.uint8).reshape(len(rows), size), self.gguf.GGMLQuantizationType[t.dtype]
        ).reshape(len(rows), -1)

    def error(self, got: Any, source: Any, kind: Any) -> tuple[float, float]:
        """Return the relative error of `got`, and the largest error that quantization to `kind` can explain."""
        np, quants = self.numpy, self.gguf.quants
        if got.shape != source.shape:
            return float("inf"), 0.0
        size = float(np.sqrt(np.mean(np.square(source, dtype="f8")))) or 1.0

        def off(values: Any) -> float:
            return float(np.sqrt(np.mean(np.square(values.astype("f8") - source)))) / size

        try:
            own = quants.dequantize(quants.quantize(source, kind), kind).reshape(source.shape)
            most = _MORE * off(own) + _FLOOR
        except (NotImplementedError, ValueError):
            most = next((e for prefix, e in _ERRORS.items() if kind.name.startswith(prefix)), 0.3)
        error = off(got)
        return (error if error == error else float("inf")), most

    def conclude(self) -> None:
        """Add the results for all tensors to `converted`."""
        if self.wrong:
            self.converted.problems.append(
                f"the values of {len(self.wrong):,} tensors differ from the source: {some(self.wrong)}"
            )
        if self.unturned:
            self.converted.problems.append(
                f"{len(self.unturned):,} tensors have attention rows in a different order than {self.kind} requires: "
                f"{some(self.unturned)}"
            )
        if self.unsure:
            self.converted.doubts.append(
                f"{len(self.unsure):,} tensors could not be compared with the source: {some(self.unsure)}"
            )
        if self.count:
            errors = ", ".join(f"{kind} {error:.2%}" for kind, error in sorted(self.worst.items()))
            self.converted.proved.append(f"{self.count:,} tensors match the source; the largest errors are {errors}")


def _matrix(t: Tensor) -> tuple[int, int]:
    """Return the number of rows and columns. A vector is one row; dimensions of size one are ignored."""
    shape = [d for d in t.shape if d != 1]
    width = shape[-1] if shape else 1
    return t.numel // max(width, 1), width
