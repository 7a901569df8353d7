"""Facts about a job on a cluster with one queue, for the examples of the engine rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpuwarden.core.engine import UNLIMITED, EngineLimits, EngineRequest, Queue
from gpuwarden.core.models import Known
from gpuwarden.profiles import load_profile
from gpuwarden.rules.facts import SubmitFacts
from rule_kit import submit

NONE: Final[Mapping[str, Any]] = {}
QUEUE = Queue(name="gpu", default=True, open=True, state="UP", max_s=86_400, nodes=8, max_nodes=UNLIMITED, cpus=64,
              memory_mb=512_000, gpus={"a100": 4}, preempts="no")  # fmt: skip


def cluster(
    queue: Mapping[str, Any] = NONE, asked: Mapping[str, Any] = NONE, spec: Mapping[str, Any] = NONE, **more: Any
) -> SubmitFacts:
    """Return the facts about a job on a cluster with one queue."""
    limits = EngineLimits(
        engine="slurm", version="24.05.3", request=EngineRequest(**asked),
        queues=(QUEUE.model_copy(update=queue),), **more,
    )  # fmt: skip
    return submit(load_profile("slurm"), platform="slurm/box", quote=None, engine=Known(limits), **spec)
