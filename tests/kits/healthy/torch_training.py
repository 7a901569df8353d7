"""Write optimizers, schedulers and the checkpoints of plain torch, accelerate, Lightning and distributed saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from healthy import configuration, family
from healthy.torch_files import torch

STEPS = 3
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {})
    for name in (
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
        "LBFGS",
        "SparseAdam",
    )
} | {
    "Adam amsgrad": ("Adam", {"amsgrad": True}),
    "SGD momentum": ("SGD", {"momentum": 0.9}),
    "RMSprop centered": ("RMSprop", {"centered": True, "momentum": 0.5}),
    "AdamW fused": ("AdamW", {"fused": True}),
    "AdamW capturable off, foreach": ("AdamW", {"foreach": True}),
}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "LinearLR": {},
    "StepLR": {"step_size": 1},
    "MultiStepLR": {"milestones": [1, 2]},
    "ConstantLR": {},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 10},
    "PolynomialLR": {},
    "CosineAnnealingWarmRestarts": {"T_0": 5},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 10},
    "CyclicLR": {"base_lr": 0.001, "max_lr": 0.1},
    "ReduceLROnPlateau": {},
}


def net(kind: str = "") -> Any:
    t = torch()
    if kind == "SparseAdam":
        return t.nn.Embedding(10, 4, sparse=True)
    if kind == "Muon":
        return t.nn.Sequential(t.nn.Linear(16, 32, bias=False), t.nn.Linear(32, 8, bias=False))
    return t.nn.Sequential(t.nn.Linear(16, 32), t.nn.LayerNorm(32), t.nn.Linear(32, 8))


def train(made: Any, optimizer: Any, schedule: Any = None) -> None:
    t = torch()

    def loss() -> Any:
        optimizer.zero_grad()
        x = t.randint(0, 10, (4,)) if isinstance(made, t.nn.Embedding) else t.randn(4, 16)
        out = made(x).square().mean()
        out.backward()
        return out

    for _ in range(STEPS):
        out = loss()
        optimizer.step(loss) if type(optimizer).__name__ == "LBFGS" else optimizer.step()
        if schedule is not None:
            schedule.step(out) if type(schedule).__name__ == "ReduceLROnPlateau" else schedule.step()


def trainer_folder(at: Path, made: Any, optimizer: Any, schedule: Any) -> None:
    """Write the checkpoint files of transformers' Trainer, with the given objects."""
    from safetensors.torch import save_file

    t = torch()
    folder = at / f"checkpoint-{STEPS}"
    folder.mkdir()
    save_file(made.state_dict(), folder / "model.safetensors")
    t.save(optimizer.state_dict(), folder / "optimizer.pt")
    t.save(schedule.state_dict(), folder / "scheduler.pt")
    t.save({"cpu": t.get_rng_state()}, folder / "rng_state.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": STEPS, "epoch": 0.5, "log_history": []}))


@family("optimizer", OPTIMIZERS, "torch", "safetensors", step=STEPS)
def optimizer_state(at: Path, how: tuple[str, dict[str, Any]]) -> None:
    kind, more = how
    t = torch()
    made = net(kind)
    optimizer = getattr(t.optim, kind)(made.parameters(), **({"lr": 0.01} | more))
    schedule = t.optim.lr_scheduler.LinearLR(optimizer)
    train(made, optimizer, schedule)
    trainer_folder(at, made, optimizer, schedule)


@family("scheduler", {n: (n, m) for n, m in SCHEDULERS.items()}, "torch", "safetensors", step=STEPS)
def scheduler_state(at: Path, how: tuple[str, dict[str, Any]]) -> None:
    t = torch()
    made = net()
    optimizer = t.optim.SGD(made.parameters(), lr=0.01, momentum=0.9)
    schedule = getattr(t.optim.lr_scheduler, how[0])(optimizer, **how[1])
    train(made, optimizer, schedule)
    trainer_folder(at, made, optimizer, schedule)


BNB = (
    "Adam8bit",
    "AdamW8bit",
    "Lion8bit",
    "SGD8bit",
    "RMSprop8bit",
    "AdamW",
    "PagedAdamW8bit",
    "LAMB8bit",
    "Adagrad8bit",
    "AdEMAMix8bit",
)


@family("bitsandbytes optimizer", BNB, "torch", "bitsandbytes", step=STEPS)
def bitsandbytes_state(at: Path, kind: str) -> None:
    """Train on the CPU, which bitsandbytes supports since 0.46."""
    import bitsandbytes as bnb

    t = torch()
    made = t.nn.Sequential(t.nn.Linear(64, 128), t.nn.Linear(128, 64))
    more = {"momentum": 0.9} if kind == "SGD8bit" else {}
    optimizer = getattr(bnb.optim, kind)(made.parameters(), lr=0.01, **more)
    schedule = t.optim.lr_scheduler.LinearLR(optimizer)
    for _ in range(STEPS):
        made(t.randn(4, 64)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    trainer_folder(at, made, optimizer, schedule)


def plain_state(step: int = STEPS) -> dict[str, Any]:
    t = torch()
    made = net()
    optimizer = t.optim.AdamW(made.parameters(), lr=0.01)
    schedule = t.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    train(made, optimizer, schedule)
    return {
        "step": step,
        "model": made.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": schedule.state_dict(),
    }


@configuration("plain torch.save of step, model and optimizer", "torch", step=STEPS)
def plain(at: Path) -> None:
    torch().save(plain_state(), at / "state.pt")


@configuration("plain torch.save in a folder of its own", "torch", step=STEPS)
def plain_folder(at: Path) -> None:
    (at / "checkpoint-3").mkdir()
    torch().save(plain_state(), at / "checkpoint-3/state.pt")


@configuration("plain torch.save of several steps", "torch", step=3)
def plain_several(at: Path) -> None:
    for step in (1, 2, 3):
        state = plain_state(step)
        # Match the optimizer's step count to the step.
        for s in state["optimizer"]["state"].values():
            s["step"] = torch().tensor(float(step))
        state["scheduler"]["last_epoch"] = step
        state["model"]["0.bias"] += step
        torch().save(state, at / f"ckpt_{step}.pt")


@configuration("ImageNet example", "torch", step=None)
def imagenet(at: Path) -> None:
    state = plain_state()
    made = {"epoch": 4, "arch": "resnet18", "best_acc1": torch().tensor(70.0), "state_dict": state["model"]}
    torch().save(made | {"optimizer": state["optimizer"], "scheduler": state["scheduler"]}, at / "checkpoint.pth.tar")


@configuration("nanoGPT", "torch", step=STEPS)
def nanogpt(at: Path) -> None:
    state = plain_state()
    args = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "bias": False, "vocab_size": None, "dropout": 0.0}
    config = {"out_dir": "out", "learning_rate": 6e-4, "compile": True, "dataset": "shakespeare"}
    torch().save(
        {
            "model": state["model"],
            "optimizer": state["optimizer"],
            "model_args": args,
            "iter_num": STEPS,
            "best_val_loss": torch().tensor(2.5),
            "config": config,
        },
        at / "ckpt.pt",
    )


@family("accelerate save_state", {"safetensors": True, "torch": False}, "torch", "accelerate", step=4)
def accelerate_state(at: Path, safe: bool) -> None:
    from accelerate import Accelerator

    t = torch()
    accelerator = Accelerator(cpu=True)
    made = t.nn.Linear(64, 64)
    optimizer = t.optim.AdamW(made.parameters())
    loader = t.utils.data.DataLoader([t.randn(64) for _ in range(8)], batch_size=2, shuffle=True)
    schedule = t.optim.lr_scheduler.LinearLR(optimizer)
    made, optimizer, loader, schedule = accelerator.prepare(made, optimizer, loader, schedule)
    for x in loader:
        accelerator.backward(made(x).square().sum())
        optimizer.step()
        schedule.step()
    accelerator.save_state(str(at / "step_4"), safe_serialization=safe)


@configuration("accelerate save_state with names of its own", "torch", "accelerate")
def accelerate_automatic(at: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    t = torch()
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(str(at), automatic_checkpoint_naming=True))
    made = t.nn.Sequential(t.nn.Linear(8, 8), t.nn.Linear(8, 8))
    optimizer = t.optim.SGD(made.parameters(), lr=0.1)
    made, optimizer = accelerator.prepare(made, optimizer)
    for _ in range(2):
        accelerator.backward(made(t.randn(2, 8)).square().sum())
        optimizer.step()
        accelerator.save_state()


@configuration("accelerate sharded model", "torch", "accelerate")
def accelerate_model(at: Path) -> None:
    from accelerate import Accelerator

    t = torch()
    made = t.nn.Sequential(*(t.nn.Linear(64, 64) for _ in range(4)))
    Accelerator(cpu=True).save_model(made, str(at / "model"), max_shard_size="20KB")


@configuration("distributed checkpoint of one process", "torch")
def dcp(at: Path) -> None:
    import torch.distributed.checkpoint as saver

    state = plain_state()
    saver.save({"model": state["model"], "optimizer": state["optimizer"], "step": 3}, checkpoint_id=str(at / "dcp"))


@configuration("Lightning: weights only", "torch", "pytorch_lightning")
def lightning_weights(at: Path) -> None:
    lightning(at, 3)


@family("Lightning", {"one": 1, "with last": 2}, "torch", "pytorch_lightning", step=4)
def lightning(at: Path, kind: int) -> None:
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint

    t = torch()

    class Net(pl.LightningModule):
        def __init__(self, width: int = 16) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = t.nn.Linear(width, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.layer(batch).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = t.optim.AdamW(self.parameters(), lr=0.01)
            return {"optimizer": optimizer, "lr_scheduler": t.optim.lr_scheduler.StepLR(optimizer, 1)}

    loader = t.utils.data.DataLoader(t.randn(8, 16), batch_size=2)
    keep = ModelCheckpoint(at, save_last=kind == 2, save_top_k=-1, save_weights_only=kind == 3, every_n_epochs=1)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=[keep],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=at,
    )
    trainer.fit(Net(), loader)


@configuration("DeepSpeed ZeRO-1 of one rank", "torch", step=STEPS)
def deepspeed(at: Path) -> None:
    """Write the files of DeepSpeed for one rank, without its package."""
    t = torch()
    state = plain_state()
    model, step = state["model"], STEPS
    total = sum(p.numel() for p in model.values())
    shapes = [{n: p.shape for n, p in model.items()}]
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 1}}
    folder = at / f"global_step{step}"
    folder.mkdir()
    t.save(
        {
            "module": model,
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": shapes,
            "lr_scheduler": None,
            "data_sampler": None,
            "random_ltd": None,
            "sparse_tensor_module_names": set(),
            "skipped_steps": 0,
            "global_steps": step,
            "global_samples": 12,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "ds_config": config,
            "ds_version": "0.17.0",
        },
        folder / "mp_rank_00_model_states.pt",
    )
    flat = t.cat([p.reshape(-1) for p in model.values()])
    padded = t.cat([flat, t.zeros(-total % 2)])
    adam = {"step": t.tensor(float(step)), "exp_avg": t.randn_like(padded) * 1e-3, "exp_avg_sq": t.rand_like(padded)}
    base = {"state": {0: adam}, "param_groups": [{"params": [0], "lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}]}
    t.save(
        {
            "optimizer_state_dict": {
                "loss_scaler": None,
                "dynamic_loss_scale": False,
                "overflow": False,
                "clip_grad": 0.0,
                "base_optimizer_state": base,
                "single_partition_of_fp32_groups": [padded],
                "zero_stage": 1,
                "group_paddings": [0],
                "partition_count": 1,
                "ds_version": "0.17.0",
            },
            "ds_config": config,
            "ds_version": "0.17.0",
        },
        folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    )
    (at / "latest").write_text(folder.name)
