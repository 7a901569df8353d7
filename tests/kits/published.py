"""Read the published memory peaks and speeds with which the estimates are compared.

Each figure has its settings, source and date.

`tests/corpus/published-runs.json` contains the models' shapes, the sources and the runs. The constants were fitted to
the `home` sources. The `former` sources were `unseen` until 2026-11-23; since then, the wrong estimates for their runs
have been examined. The settings of an `unseen` source were written down before any of its runs was estimated.
"""

from __future__ import annotations

import json
from datetime import date
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias

from gpuwarden.core.models import Frozen
from gpuwarden.static_analysis.estimate.memory import Counted
from gpuwarden.static_analysis.estimate.setup import Run
from gpuwarden.static_analysis.estimate.shape import Shape, shape_of
from paths import CORPUS

FILE: Final = CORPUS / "published-runs.json"
_AS_GIVEN: Final = frozenset({
    "length", "checkpointing", "attention", "optimizer", "layerwise", "compiled", "master_weights", "trains_embeddings",
    "bits", "own_loss",
})  # fmt: skip
Split: TypeAlias = Literal["home", "former", "unseen"]
_TARGETS: Final = {
    "all": ("q", "k", "v", "o", "mlp"),
    "attention": ("q", "k", "v", "o"),
    "qv": ("q", "v"),
    "qkv": ("qkv",),
    "mlp": ("mlp",),
    "qv+mlp": ("q", "v", "mlp"),
}


class Source(Frozen):
    """The origin of published figures, and whether the estimates were fitted to these figures."""

    url: str
    date: date
    split: Split
    memory: Counted | Literal[""]
    note: str


class Published(Frozen):
    """One run with its settings, and the published peak in 10^9 bytes or the published speed of each GPU."""

    source: str
    split: Split
    counted: Counted | Literal[""]
    model: str
    config: dict[str, Any]
    run: Run
    gpu: str
    peak_gb: float | None = None
    tokens_per_second: float | None = None


class PublishedPace(Frozen):
    """A run's steps and seconds, in its first log lines and at its end."""

    source: str
    run: str
    seen: tuple[tuple[int, float], ...]
    steps: int
    total_s: float


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def published_sources() -> dict[str, Source]:
    """Return the sources, keyed by their short names."""
    return {name: Source.model_validate(found) for name, found in _table()["sources"].items()}


def published_paces() -> tuple[PublishedPace, ...]:
    """Return the runs whose first log lines and total time are published."""
    return tuple(PublishedPace.model_validate(entry) for entry in _table()["paces"])


@lru_cache(maxsize=1)
def published_runs() -> tuple[Published, ...]:
    """Return all published runs, in the order of the file."""
    text, sources = _table(), published_sources()
    shapes = {name: shape_of(config) for name, config in text["models"].items()}
    return tuple(_published(entry, sources[entry["source"]], text["models"], shapes) for entry in text["runs"])


def _published(
    entry: dict[str, Any], source: Source, configs: dict[str, dict[str, Any]], shapes: dict[str, Shape | None]
) -> Published:
    shape = shapes[entry["model"]]
    if shape is None:
        raise ValueError(f"the shape of {entry['model']} can't be read")
    given: dict[str, Any] = {name: value for name, value in entry.items() if name in _AS_GIVEN}
    foreach = entry.get("foreach", True)  # the default, because most trainers used foreach AdamW at that time
    run = Run(
        params=round(shape.parameters),
        shape=shape,
        method="qlora" if entry.get("bits") == 4 else entry["method"],
        task="sft" if shape.kind != "encoder" else "other",
        batch=entry["batch"],
        accumulate=entry.get("accumulate", 1),
        padded=entry.get("padded", False),
        weights="float32" if entry.get("weights") == "float32" else "half",
        compute="float32" if entry.get("compute") == "float32" else "half",
        rank=entry.get("rank", 16),
        targets=frozenset(_TARGETS[entry.get("targets", "all")]),
        loss=entry.get("loss", "plain"),
        fused=None if foreach is None else not foreach,
        zero=entry.get("zero", 0),
        gpus=entry.get("gpus", 1),
        offload=frozenset(kind for kind in ("weights", "activations") if entry.get(f"offload_{kind}")),
        **given,
    )
    return Published(
        source=entry["source"],
        split=source.split,
        counted=source.memory,
        model=entry["model"],
        config=configs[entry["model"]],
        run=run,
        gpu=entry["gpu"],
        peak_gb=entry.get("peak_gb"),
        tokens_per_second=entry.get("tokens_per_second"),
    )
