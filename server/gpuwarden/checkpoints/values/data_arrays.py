"""Distinguish numpy data arrays from weights. In data, NaN means a missing value; in weights, it is an error."""

from __future__ import annotations

import re

from gpuwarden.checkpoints.file_model import PARAMETER, some
from gpuwarden.checkpoints.findings import Findings
from gpuwarden.core.evidence import Cause

_MODEL = re.compile(
    r"(?:^|[._-])(?:model|net|network|weights?|params?|parameters|state|checkpoint|ckpt|adapter|optim\w*|best|last)(?:[._-]|$)"
)
_WEIGHT = re.compile(r"(?:.*[./])?(?:[wb]\d*|weights?\w*|biases)", re.IGNORECASE)


def judge(found: Findings) -> None:
    """Report NaN or infinity in numpy files: as a problem if the file or folder contains a model, else as a warning."""
    beside = {
        path.rpartition("/")[0]
        for path, entry in found.entries.items()
        if (entry.format != "numpy" and entry.anatomy and entry.anatomy.tensors)
        or path.rpartition("/")[2] == "config.json"
    }
    for path, entry in found.entries.items():
        strange = entry.anatomy.not_finite if entry.anatomy else []
        if not strange:
            continue
        folder, _, name = path.rpartition("/")
        names = [t.name for t in entry.anatomy.tensors] if entry.anatomy else []
        weights = any(PARAMETER.fullmatch(n) or _WEIGHT.fullmatch(n) for n in names)
        if weights or folder in beside or _MODEL.search(name.lower().rpartition(".")[0]):
            entry.refute(f"not finite: {some(strange)}", Cause.NOT_FINITE)
        else:
            entry.warnings.append(f"has values that are not finite, but its folder contains no model: {some(strange)}")
