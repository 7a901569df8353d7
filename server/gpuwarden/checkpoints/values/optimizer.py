"""Check that a torch optimizer's state matches the model in its folder: parameters, moments, shapes and step.

A resume silently accepts any state of the right length, even if its moments belong to other weights. Standard library
only.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gpuwarden.checkpoints.file_model import Broken, Doubtful, Tensor, some
from gpuwarden.checkpoints.findings import Entry, Findings
from gpuwarden.checkpoints.pickles.torch_objects import tensor
from gpuwarden.checkpoints.safe_file import Source

# Keys for moments that have the same shape as their parameter.
_MOMENTS = ("exp_avg", "momentum_buffer", "exp_avg_sq", "square_avg", "sum", "exp_inf", "max_exp_avg_sq", "prev")
_FORMATS = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}
_ASKED = 50
# Name suffixes of tensors that contain sums of squares.
_SQUARES = (".exp_avg_sq", ".max_exp_avg_sq", ".square_avg", ".exp_avg_sq_row", ".exp_avg_sq_col")
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_BELOW = re.compile(b"[\x81-\xff]")
_PIECE = 64 << 10
_READ = 64 << 20


@dataclass
class OptimizerFindings:
    """The findings about an optimizer: the problems that prevent a resume, the warnings, and the passed checks."""

    resume: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    proved: list[str] = field(default_factory=list)


def judge(root: Any, shapes: list[tuple[int, ...]], trained: list[tuple[int, ...]], file: str) -> OptimizerFindings:
    """Check an optimizer's state dict.

    `shapes` lists the shapes of the model's tensors. `trained` lists the shapes of tensors that are certainly trained,
    such as an adapter's. Empty lists mean that the weights are unknown.
    """
    findings = OptimizerFindings()
    groups, state = (root.get("param_groups"), root.get("state")) if isinstance(root, dict) else (None, None)
    if not isinstance(groups, list) or not isinstance(state, dict) or not all(isinstance(g, dict) for g in groups):
        findings.resume.append(f"{file} lacks param_groups or state")
        return findings
    params = [p for g in groups for p in (g.get("params") or [])]
    # SGD without momentum has no state.
    stateless = all(g.get("momentum") == 0 and "betas" not in g and "alpha" not in g for g in groups)
    if not state and params and not stateless:
        findings.resume.append(f"{file} has parameters but no state: it was saved before the first step")
    if len(set(map(str, params))) != len(params):
        findings.resume.append(f"{file} lists a parameter twice")
    _matched(params, state, file, findings)
    _moments(state, shapes, trained, len(params), file, findings)
    return findings


def _matched(params: list[Any], state: dict[Any, Any], file: str, findings: OptimizerFindings) -> None:
    """Check that every state belongs to a parameter, and that all parameters have states with the same keys."""
    known = set(map(str, params))
    strange = [k for k in state if str(k) not in known]
    if strange:
        findings.resume.append(f"{file} has states for parameters that are not in any group: {some(strange)}")
    bare = [p for p in params if p not in state]
    if bare and state:
        findings.warnings.append(
            f"{len(bare):,} of {len(params):,} parameters have no state in {file}: they never had a gradient, "
            "or their state was lost"
        )
    keys = Counter(k for s in state.values() if isinstance(s, dict) for k in s)
    usual = [k for k in ("step", "exp_avg", "exp_avg_sq") if keys[k] * 2 > len(state)]
    torn = [
        p
        for p, s in state.items()
        # For matrices, Adafactor stores row and column statistics instead of the moments.
        if not isinstance(s, dict) or ("exp_avg_sq_row" not in s and any(k not in s for k in usual))
    ]
    if torn:
        findings.resume.append(f"{len(torn):,} parameters have an incomplete state in {file}: {some(torn)}")


def _moments(
    state: dict[Any, Any],
    shapes: list[tuple[int, ...]],
    trained: list[tuple[int, ...]],
    params: int,
    file: str,
    findings: OptimizerFindings,
) -> None:
    first: list[tuple[int, ...]] = []
    for name, entry in state.items():
        values = (entry.get(k) for k in _MOMENTS) if isinstance(entry, dict) else ()
        found = [ref.shape for ref in map(tensor, values) if ref is not None and ref.shape != ()]
        if len(set(found)) > 1:
            findings.resume.append(f"the moments of parameter {some([name])} in {file} have different shapes")
        first += found[:1]
    if not first or not shapes:
        return
    strange, left = Counter(first) - Counter(shapes), Counter(shapes) - Counter(first)
    elements = [sum(math.prod(shape) * n for shape, n in some_of.items()) for some_of in (strange, left)]
    # transformers trains a layer's experts as one tensor, but saves each expert separately.
    stacked = all(len(shape) > 2 for shape in strange) and elements[0] <= elements[1]
    if strange and stacked:
        findings.proved.append(f"the optimizer's {len(first):,} moments have as many elements as the model's tensors")
        return
    if strange:
        findings.resume.append(f"the optimizer has moments whose shapes the model lacks: {some(strange)}")
        return
    lost = Counter(trained) - Counter(first)
    if sum(lost.values()) > max(0, params - len(state)):
        findings.resume.append(
            f"{sum(lost.values()):,} trained tensors have no moments in {file}; their shapes are {some(lost)}"
        )
        return
    findings.proved.append(f"the shapes of the optimizer's {len(first):,} moments match the model's tensors")


def steps(source: Source, tensors: list[Tensor], prefix: str = "") -> int | None:
    """Return the highest number of steps that the optimizer records for a parameter; None if it records none."""
    counters = [t for t in tensors if t.name.startswith(f"{prefix}state.") and t.name.endswith(".step") and not t.shape]
    found = []
    for t in counters[:_ASKED]:
        if t.dtype in _FORMATS and t.start >= 0:
            try:
                value = struct.unpack(_FORMATS[t.dtype], source.at(t.start, t.extent))[0]
            except (Broken, Doubtful, struct.error):
                return None
            found.append(int(value) if value == value and abs(value) < 1 << 53 else -1)
    return max(found, default=None)


def most_steps(entries: Iterable[Entry], found: Findings) -> int | None:
    """Return the highest number of steps that the optimizers in the files record; None if they record none."""
    made = []
    for entry in entries:
        tensors = entry.anatomy.tensors if entry.anatomy and not entry.problems else []
        # In a distributed checkpoint, the optimizer's name depends on the program that saved it.
        prefixes = {
            t.name[: t.name.index("state.")] for t in tensors if t.name.endswith(".step") and "state." in t.name
        }
        with found.open(found.place(entry.path), entry.path) as source:
            made += [n for prefix in prefixes if (n := steps(source, tensors, prefix)) is not None]
    return max(made, default=None)


def moved(source: Source, tensors: list[Tensor]) -> bool:
    """Return true if any moment is not zero, or if there are no moments with known names.

    If all moments are zero, every gradient was zero, so no weight has changed.
    """
    moments = [t for t in tensors if t.name.rpartition(".")[2] in _MOMENTS and t.start >= 0 and t.extent]
    pieces = ((t, at) for t in moments for at in range(0, t.extent, _PIECE))
    return not moments or any(source.at(t.start + at, min(_PIECE, t.extent - at)).strip(b"\0") for t, at in pieces)


def negative(source: Source, tensors: list[Tensor], big_endian: bool = False) -> list[str]:
    """Return the names of second moments that contain negative values, which a sum of squares can't contain.

    In a large file, only samples of each moment are read.
    """
    squares = [t for t in tensors if t.name.endswith(_SQUARES) and t.dtype in _WIDTHS and t.start >= 0 and t.extent]
    each = max(_PIECE, _READ // max(1, len(squares)))
    found = []
    for t in squares:
        width = _WIDTHS[t.dtype]
        top = 0 if big_endian else width - 1
        for at in range(0, t.extent, max(_PIECE, -(-t.extent // max(1, each // _PIECE)) // width * width)):
            data = source.at(t.start + at, min(_PIECE, t.extent - at))
            # The pattern matches bytes with the sign bit and an exponent bit. The sign bit alone is a negative zero.
            if _BELOW.search(data[top::width]):
                found.append(t.name)
                break
    return found
