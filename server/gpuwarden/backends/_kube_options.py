"""A Kubernetes job's options, and its request to the cluster."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field, field_validator

from gpuwarden.core.engine import EngineRequest, Image, engine_options
from gpuwarden.core.models import Frozen, JobSpec

IMAGE: Final = "python:3.12-slim"
"""The image of the file access pod, unless the claim specifies another image."""
ANY_GPU: Final = frozenset({"gpu", "any"})
ROOM_S: Final = 240
"""Seconds by which the pod's time limit exceeds the job's, to allow time for starting and saving."""

_Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
_Resource = Annotated[str, Field(pattern=r"^[a-z0-9.-]{1,200}/[A-Za-z0-9._-]{1,63}$")]
_Pair = Annotated[str, Field(pattern=r"^[A-Za-z0-9./_-]{1,253}=[A-Za-z0-9._-]{0,63}$")]
_Taint = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9./_-]{1,253}(=[A-Za-z0-9._-]{0,63})?:(NoSchedule|PreferNoSchedule|NoExecute)$")
]


class KubernetesOptions(Frozen):
    """Kubernetes' own options. Only `image` is required."""

    image: Image
    cpus: int | None = Field(default=None, ge=1, le=1_000)
    memory_gb: int | None = Field(default=None, ge=1, le=100_000)
    shm_gb: int | None = Field(default=None, ge=1, le=10_000)
    gpu_resource: _Resource = "nvidia.com/gpu"
    node_selector: tuple[_Pair, ...] = Field(default=(), max_length=32)
    tolerations: tuple[_Taint, ...] = Field(default=(), max_length=32)
    queue: _Name | None = None
    priority_class: _Name | None = None
    service_account: _Name | None = None
    pull_secret: _Name | None = None

    @field_validator("node_selector", "tolerations", mode="before")
    @classmethod
    def _one(cls, words: object) -> object:
        return (words,) if isinstance(words, str) else words


def read_options(spec: JobSpec) -> KubernetesOptions:
    """Return a spec's options. Raises BadRequest if one is invalid; the fix lists the valid options."""
    return engine_options(KubernetesOptions, spec.options, "Kubernetes")


def engine_request(spec: JobSpec, namespace: str) -> EngineRequest:
    """Return the resources to request. The queue is the Kueue queue if one is set, otherwise the namespace."""
    options = read_options(spec)
    any_type = spec.gpu is None or spec.gpu.lower() in ANY_GPU
    return EngineRequest(
        queue=options.queue or namespace,
        walltime_s=spec.timeout_s + ROOM_S if spec.timeout_s else None,
        cpus=options.cpus,
        memory_mb=options.memory_gb * 1024 if options.memory_gb else None,
        gpu="" if any_type else str(spec.gpu),
        gpus=spec.gpu_count if spec.gpu else 0,
    )
