from gpuwarden.core.models import Known
from gpuwarden.core.readiness import Readiness
from rule_kit import OWNED, submit

L4 = "NVIDIA L4"


def there(gpu: str | None, *names: str, count: int = 1) -> object:
    return submit(OWNED, gpu=gpu, gpu_count=count, readiness=Known(Readiness(gpus=names)))


FIRES = [
    there("H100"),
    there("H100", L4),
    there("L4", L4, count=2),
    there("L4x2", L4),
    there("mi300x", "NVIDIA L4"),
    submit(OWNED, gpu="L4", readiness=Known(Readiness(gpus_why="nvidia-smi is not there"))),
]
SILENT = [
    submit(OWNED, gpu="L4", readiness=Known(Readiness(where="on the login node"))),  # the engine counts its GPUs
    submit(),
    there(None),
    there("cpu-basic"),
    there("L4", L4),
    there("H100", "NVIDIA H100 80GB HBM3"),
    there("rtx4090", "NVIDIA GeForce RTX 4090"),
    there("a100", "NVIDIA A100-SXM4-40GB"),
    there("T4", "Tesla T4", "Tesla T4", count=2),
    there("mi300x", "AMD Instinct MI300X"),
]
