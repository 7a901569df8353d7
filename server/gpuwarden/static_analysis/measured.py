"""Read the runs measured on GPUs, which are used to correct the estimates.

`references/measured-gpus.jsonl`, which `tools/measure_gpu.py` writes, has one run per line: a bundled trainer on one
GPU. A run outside an estimate widens that estimate; a run inside it changes nothing. Estimates for GPUs and trainers
without a run do not change.
"""

from __future__ import annotations

from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError, field_validator

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.hardware import GPUS
from gpuwarden.core.models import Frozen
from gpuwarden.core.sanitize import line
from gpuwarden.data import data_dir

FILE: Final = "measured-gpus.jsonl"
CPU: Final = "cpu"
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Measured(Frozen):
    """One run of a bundled trainer. `gpu` is a name in the GPU table; `peak_gb` is the peak memory allocated by
    PyTorch.
    """

    date: date
    card: str = Field(min_length=1)
    gpu: str
    card_gb: Annotated[float, Field(ge=0)]
    trainer: str = Field(min_length=1)
    model: str = Field(min_length=1)
    parameters: Annotated[int, Field(gt=0)]
    method: Literal["full", "lora", "qlora"]
    task: str
    micro_batch: Annotated[int, Field(gt=0)]
    max_length: Annotated[int, Field(gt=0)] | None = None
    recomputes: bool
    precision: Literal["bf16", "fp16", "fp32"]
    fast: bool = False
    steps: Annotated[int, Field(gt=0)]
    peak_gb: Positive
    tokens_per_second: Positive | None = None
    rows_per_second: Positive
    versions: dict[str, str]

    @field_validator("gpu")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in GPUS and name != CPU:
            raise ValueError(f"{name} is not in the GPU table")
        return name


def measured_file() -> Path:
    """Return the path of the file that lists the measured runs."""
    return data_dir("references") / FILE


def read_measured(file: Path) -> tuple[Measured, ...]:
    """Return the runs in a file, in the order of its lines. Raises BadRequest with the invalid line's number."""
    found = []
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines() if file.exists() else (), 1):
        try:
            found.append(Measured.model_validate_json(text))
        except ValidationError as error:
            message = f"{file.name}, line {number}, is not a measured run: {line(error.errors()[0]['msg'], 120)}"
            raise BadRequest(message, "Correct or remove the line.") from error
    return tuple(found)


@lru_cache(maxsize=1)
def measured_runs() -> tuple[Measured, ...]:
    """Return the runs bundled with gpuwarden, except those on a CPU, which do not apply to a GPU."""
    return tuple(run for run in read_measured(measured_file()) if run.gpu != CPU)
