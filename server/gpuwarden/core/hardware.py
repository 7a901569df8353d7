"""GPU models with their memory and capabilities, and the many names that platforms use for them."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU model: gigabytes of memory, compute capability, dense 16-bit TFLOPS, and memory bandwidth in GB/s.

    Source: the vendor's data sheets. The T4 and V100 have no bf16 units; their figure is for fp16.
    """

    name: str
    gb: int
    capability: int
    tflops: float
    gbps: int


GPUS: dict[str, Gpu] = {
    g.name: g
    for g in (
        Gpu("t4", 16, 75, 65, 320),
        Gpu("v100", 16, 70, 125, 900),
        Gpu("p100", 16, 60, 19, 732),
        Gpu("rtx2080ti", 11, 75, 54, 616),
        Gpu("rtx3090", 24, 86, 71, 936),
        Gpu("rtx4090", 24, 89, 165, 1008),
        Gpu("rtx5090", 32, 120, 210, 1792),
        Gpu("l4", 24, 89, 121, 300),
        Gpu("a10g", 24, 86, 70, 600),
        Gpu("a10", 24, 86, 125, 600),
        Gpu("a40", 48, 86, 150, 696),
        Gpu("a6000", 48, 86, 155, 768),
        Gpu("l40", 48, 89, 181, 864),
        Gpu("l40s", 48, 89, 362, 864),
        Gpu("rtx6000ada", 48, 89, 182, 960),
        Gpu("a100", 80, 80, 312, 2039),
        Gpu("a100-40gb", 40, 80, 312, 1555),
        Gpu("h100", 80, 90, 989, 3350),
        Gpu("h200", 141, 90, 989, 4800),
        Gpu("b200", 180, 100, 2250, 8000),
        Gpu("rtxpro6000", 96, 120, 500, 1792),
    )
}
_ALIASES = {"rtxa6000": "a6000", "6000ada": "rtx6000ada", "ada6000": "rtx6000ada", "rtxpro6000blackwell": "rtxpro6000"}
_ALIASES |= {name.removeprefix("rtx"): name for name in GPUS if name.startswith("rtx")}


def gpu_of(name: str | None) -> tuple[Gpu, int] | None:
    """Return the GPU model and the number of GPUs that a platform's name denotes; None for an unknown name.

    Supports forms such as `a100x4`, `8xH100`, `gpu_1x_a10`, `NVIDIA A100-SXM4-80GB`, `RTX_4090` and `t4-small`.
    """
    words = re.findall(r"[a-z0-9]+", (name or "").lower())
    number = 1
    for n, word in enumerate(words):
        if found := re.fullmatch(r"(\d+)x|x(\d+)", word):
            number, words[n] = int(found[1] or found[2]), ""
        elif found := re.fullmatch(r"(\d+)x([a-z].*)", word):
            number, words[n] = int(found[1]), found[2]
        elif found := re.fullmatch(r"((?:[a-z]+\d+[a-z]*|large|small|medium|6000))x(\d+)", word):
            number, words[n] = int(found[2]), found[1]
    words = [w for w in words if w]
    runs = sorted((words[a:b] for a in range(len(words)) for b in range(a + 1, len(words) + 1)), key=len, reverse=True)
    key = next((k for k in map("".join, runs) if k in GPUS or k in _ALIASES), None)
    if key is None:
        return None
    gpu = GPUS[_ALIASES.get(key, key)]
    small = gpu.name == "a100" and bool({"40gb", "40g", "40"} & set(words))
    return (GPUS["a100-40gb"] if small else gpu), number
