"""Make torch use only the CPU: CUDA calls run on the CPU, and compilers and workers are disabled."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any, Dict

from gpuwarden.remote.first_step.child.record import Enough, Record

STEPS_WITHOUT_END = 200
_GPUS = ("cuda", "xpu", "npu", "hpu", "mps")


def patch_torch(record: Record, torch: ModuleType) -> None:
    """Patch `torch`: report an H100, and run everything on the CPU."""
    from torch.overrides import TorchFunctionMode

    def placed(value: Any) -> Any:
        kind = value if isinstance(value, str) else getattr(value, "type", None)
        if isinstance(kind, str) and kind.split(":")[0] in _GPUS and isinstance(value, (str, torch.device)):
            record.replaced("GPU", "the CPU")
            return torch.device("cpu")
        return value

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given: Dict[str, Any] = dict(kwargs or {})
            if "device" in given:
                given["device"] = "cpu" if isinstance(given["device"], int) else placed(given["device"])
            name = getattr(function, "__name__", "")
            if name in {"cuda", "pin_memory"} and args:
                return args[0]
            return function(*(placed(a) for a in args) if name == "to" else args, **given)

    mode: Any = OnCpu()
    mode.__enter__()
    module_to = torch.nn.Module.to

    def to(self: Any, *args: Any, **given: Any) -> Any:
        given = {k: placed(v) for k, v in given.items()}
        return module_to(self, *("cpu" if type(a) is int else placed(a) for a in args), **given)

    def compile(model: Any = None, **given: Any) -> Any:  # noqa: A001
        record.replaced("torch.compile", "nothing")
        return model if model is not None else lambda wrapped: wrapped

    def stepped(*args: Any) -> None:
        record.steps += 1
        record.at("step")
        if record.steps >= STEPS_WITHOUT_END:
            raise Enough

    torch.nn.Module.to = to
    torch.nn.Module.cuda = lambda self, *args, **given: self
    torch.nn.Module.compile = lambda self, *args, **given: None
    torch.compile = compile  # type: ignore[attr-defined]
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "ipc_collect"):
        setattr(torch.cuda, name, lambda *args, **given: None)
    if hasattr(torch, "accelerator"):
        torch.accelerator.current_accelerator = lambda *args, **given: torch.device("cpu")
    torch.cuda.get_device_capability = lambda *args, **given: (9, 0)
    torch.cuda.get_device_name = lambda *args, **given: "NVIDIA H100 80GB HBM3"
    torch.cuda.is_bf16_supported = lambda *args, **given: True
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 << 30, major=9, minor=0)
    torch.cuda.get_device_properties = lambda *args, **given: properties
    hooks = importlib.import_module("torch.optim.optimizer")  # `torch.optim` deletes its attribute `optimizer`
    hooks.register_optimizer_step_post_hook(stepped)


def patch_loader(record: Record, module: ModuleType) -> None:
    """Patch `DataLoader` to load data in this process, without workers."""
    original = module.DataLoader.__init__

    def init(self: Any, *args: Any, **given: Any) -> None:
        if given.get("num_workers"):
            record.replaced("DataLoader workers", "this process")
            given["num_workers"] = 0
            for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"):
                given.pop(name, None)
        given.pop("pin_memory", None)
        original(self, *args, **given)

    module.DataLoader.__init__ = init
