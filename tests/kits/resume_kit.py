"""A checkpoint with all files that a resume needs."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from real_parts import need

STEPS = 3


def torch() -> Any:
    need("torch", importlib.util.find_spec("torch") is not None)
    import torch

    return torch


def model() -> Any:
    t = torch()
    t.manual_seed(0)
    return t.nn.Sequential(t.nn.Linear(16, 32), t.nn.LayerNorm(32), t.nn.Linear(32, 8))


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {}, "Adam": {"amsgrad": True}, "SGD": {}, "SGD ": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9},
    "RMSprop ": {}, "Adagrad": {}, "Adadelta": {}, "Adamax": {}, "NAdam": {}, "RAdam": {}, "ASGD": {}, "Rprop": {},
    "Adafactor": {}, "Muon": {},
}  # fmt: skip


def saved(root: Path, kind: str = "AdamW", edit: Callable[[dict[str, Any]], object] | None = None) -> Path:
    """Write a checkpoint folder in the Trainer's layout, with a torch optimizer after three steps."""
    t = torch()
    from safetensors.torch import save_file

    made, folder = model(), root / f"checkpoint-{STEPS}"
    if kind == "Muon":
        need("torch.optim.Muon", hasattr(t.optim, "Muon"))
        made = t.nn.Sequential(t.nn.Linear(16, 32, bias=False), t.nn.Linear(32, 8, bias=False))
    groups = [
        {"params": [p for p in made.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in made.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = getattr(t.optim, kind.strip())([g for g in groups if g["params"]], lr=0.01, **OPTIMIZERS[kind])
    for _ in range(STEPS):
        made(t.randn(4, 16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    folder.mkdir(parents=True)
    save_file(made.state_dict(), folder / "model.safetensors")
    state = optimizer.state_dict()
    if edit:
        edit(state)
    t.save(state, folder / "optimizer.pt")
    schedule = t.optim.lr_scheduler.LinearLR(optimizer)
    t.save(schedule.state_dict() | {"last_epoch": STEPS}, folder / "scheduler.pt")
    t.save({"cpu": t.get_rng_state()}, folder / "rng_state.pth")
    (folder / "config.json").write_text("{}")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": STEPS, "epoch": 0.5}))
    return folder
