"""DeepSpeed folders: every rank's part is present, all belong to one save, and the shards make up the model.

The layout is DeepSpeed 0.19's on two ranks; `test_libraries.py` uses DeepSpeed itself if it is installed.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.checkpoints import examine
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.evidence import Cause
from gpuwarden.core.models import Level, Report, Verdict
from real_parts import need
from wording import Wording


def want(*modules: str) -> None:
    for name in modules:
        need(name, importlib.util.find_spec(name) is not None)


def seen(report: Report) -> str:
    return "\n".join(report.reasons)


@pytest.fixture
def zero(tmp_path: Path) -> Path:
    want("torch")
    import torch

    step = tmp_path / "global_step10"
    step.mkdir()
    torch.save({"module": {"w": torch.ones(4)}}, step / "mp_rank_00_model_states.pt")
    for rank in range(3):
        part = {"optimizer_state_dict": {"fp32": torch.ones(2)}, "ds_version": "0.18"}
        torch.save(part, step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (tmp_path / "latest").write_text("global_step10")
    return tmp_path


def test_a_missing_rank_file_is_reported(zero: Path, wording: Wording) -> None:
    report = verify(zero, Level.CONTENT)
    assert report.verdict is Verdict.PROVEN, seen(report)
    (zero / "global_step10/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    wording(seen(verify(zero, Level.STRUCTURE)), "mp_rank 00: 1")


def test_a_latest_file_naming_a_missing_step_is_reported(zero: Path, wording: Wording) -> None:
    (zero / "latest").write_text("global_step20")
    wording(seen(verify(zero, Level.STRUCTURE)), "global_step20")


SHAPES: dict[str, tuple[int, ...]] = {"0.weight": (8, 3), "0.bias": (8,), "1.weight": (5, 8), "1.bias": (5,)}
STATES = "zero_pp_rank_{}_mp_rank_00_{}_states.pt"


@dataclass
class Zero:
    """A save in DeepSpeed 0.19's layout; a test can change any part before writing it."""

    stage: int = 3
    world: int = 3
    step: int = 7
    head: dict[str, Any] = field(default_factory=dict)
    share: int | None = None
    moments: dict[str, Any] = field(default_factory=dict)
    counter: int | None = None

    def write(self, root: Path, only: int | None = None) -> Path:
        import torch

        folder = root / f"global_step{self.step}"
        folder.mkdir(parents=True, exist_ok=True)
        sizes = [torch.Size(s).numel() for s in SHAPES.values()]
        part = sum(-(-n // self.world) for n in sizes) if self.stage == 3 else -(-sum(sizes) // self.world)
        module = {n: torch.ones(s if self.stage < 3 else 0) for n, s in SHAPES.items()}
        head = {
            "module": module, "optimizer": None, "param_shapes": [{n: torch.Size(s) for n, s in SHAPES.items()}],
            "skipped_steps": 0, "global_steps": self.step, "global_samples": 42, "dp_world_size": self.world,
            "mp_world_size": 1, "ds_config": {"zero_optimization": {"stage": self.stage}}, "ds_version": "0.19.8",
        } | self.head  # fmt: skip
        if self.stage < 3:
            torch.save(head, folder / "mp_rank_00_model_states.pt")
        for rank in range(self.world) if only is None else [only]:
            if self.stage == 3:
                torch.save(head, folder / STATES.format(rank, "model"))
            torch.save(self._optimizer(self.share or part), folder / STATES.format(rank, "optim"))
        (root / "latest").write_text(folder.name)
        return folder

    def _optimizer(self, share: int) -> dict[str, Any]:
        import torch

        step = torch.tensor(float(self.step if self.counter is None else self.counter))
        flat = torch.linspace(0, 1, share)
        if self.stage == 3:
            flat.ds_id = "0_3"  # type: ignore[attr-defined]  # a tensor with an attribute is pickled in another way
        state = {"step": step, "exp_avg": torch.ones(share), "exp_avg_sq": torch.ones(share), **self.moments}
        torch_state = {"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        names = ("optimizer_state_dict", "fp32_flat_groups")
        key, groups = names if self.stage == 3 else ("base_optimizer_state", "single_partition_of_fp32_groups")
        return {"optimizer_state_dict": {key: torch_state, groups: [flat]}, "ds_version": "0.19.8"}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "world"), [(1, 2), (2, 1), (2, 5), (3, 1), (3, 3)])
def test_a_complete_zero_folder_can_be_resumed(tmp_path: Path, stage: int, world: int, wording: Wording) -> None:
    want("torch")
    Zero(stage, world).write(tmp_path)
    report = verify(tmp_path, Level.RESUME)
    assert report.verdict is Verdict.PROVEN and report.step == 7, seen(report)
    wording("\n".join(report.checkpoints[0].proved), 77)


def test_zero_3_weights_in_optimizer_files_are_checked(tmp_path: Path) -> None:
    want("torch")
    import torch

    folder = Zero().write(tmp_path)
    place = folder / STATES.format(1, "optim")
    part = torch.load(place, weights_only=True)
    part["optimizer_state_dict"]["fp32_flat_groups"][0][3] = float("nan")
    torch.save(part, place)
    report = verify(tmp_path, Level.CONTENT)
    assert Cause.NOT_FINITE in report.causes and "optimizer_state_dict.fp32_flat_groups.0" in seen(report)


BENT: dict[str, tuple[Zero, Zero | None, tuple[str, ...]]] = {
    "other shares": (Zero(share=20), None, ("0, 1, 2", "77")),
    "other shares of ZeRO 2": (Zero(2, share=20), None, ("77",)),
    "other steps": (Zero(), Zero(head={"global_steps": 6}), ("6, 7",)),
    "other numbers of ranks": (Zero(), Zero(head={"dp_world_size": 4}), ("3, 4",)),
    "other steps of optimizers": (Zero(), Zero(counter=6), ("6, 7",)),
    "another step than the folder": (Zero(head={"global_steps": 8}), None, ("global_step7", "8")),
    "another part of the model": (Zero(head={"mp_world_size": 2}), None, ("1",)),
    "too many ranks": (Zero(head={"dp_world_size": 2}), None, ("mp_rank 00", "3", "2")),
    "other shapes": (Zero(), Zero(head={"param_shapes": [{"w": (3,)}]}), ()),
}


@pytest.mark.parametrize(("save", "other", "numbers"), BENT.values(), ids=BENT)
def test_mismatched_ranks_are_refuted(
    tmp_path: Path, save: Zero, other: Zero | None, numbers: tuple[str, ...], wording: Wording
) -> None:
    """`other` is a save whose rank 1 is written over this one's, like a file that a rank left in the folder earlier."""
    want("torch")
    save.write(tmp_path)
    if other:
        other.write(tmp_path, only=1)
    report = verify(tmp_path, Level.STRUCTURE)
    assert report.verdict is Verdict.REFUTED, seen(report)
    wording(seen(report), *numbers)


@pytest.mark.parametrize(("kind", "rank"), [("optim", 2), ("model", 2), ("optim", 0)])
def test_a_missing_rank_is_reported_even_if_it_is_the_last(
    tmp_path: Path, kind: str, rank: int, wording: Wording
) -> None:
    want("torch")
    (Zero().write(tmp_path) / STATES.format(rank, kind)).unlink()
    wording(seen(verify(tmp_path, Level.STRUCTURE)), kind, f"mp_rank 00: {rank}")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_missing_zero_optimizer_files_are_reported(tmp_path: Path, stage: int, wording: Wording) -> None:
    want("torch")
    for place in Zero(stage).write(tmp_path).glob("*optim_states.pt"):
        place.unlink()
    report = verify(tmp_path, Level.STRUCTURE)
    if stage == 3:
        wording(seen(report))
    else:
        assert report.verdict is Verdict.PROVEN, seen(report)
        wording(seen(verify(tmp_path, Level.RESUME)))


@pytest.mark.slow
def test_an_inconsistent_optimizer_is_reported_only_at_level_resume(tmp_path: Path, wording: Wording) -> None:
    want("torch")
    import torch

    for bent, numbers in ((Zero(counter=9), [9]), (Zero(moments={"exp_avg": torch.ones(3)}), [])):
        bent.write(tmp_path)
        assert verify(tmp_path, Level.STRUCTURE).verdict is Verdict.PROVEN
        wording(seen(verify(tmp_path, Level.RESUME)), *numbers)


@pytest.mark.slow
def test_a_trainer_checkpoint_reports_resume_problems_of_its_ranks(tmp_path: Path, wording: Wording) -> None:
    """The Trainer puts DeepSpeed's folder inside its own, so obstacles to a resume are reported for the checkpoint."""
    want("torch")
    import torch

    folder = tmp_path / "checkpoint-7"
    Zero(counter=9).write(folder)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 7, "epoch": 1.0}))
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    report = verify(tmp_path, Level.RESUME)
    assert report.newest == "checkpoint-7"
    wording(seen(report), "checkpoint-7", 9)


def test_a_stale_latest_file_is_a_warning(tmp_path: Path, wording: Wording) -> None:
    want("torch")
    Zero(step=9).write(tmp_path)
    Zero(step=7).write(tmp_path)
    report = verify(tmp_path, Level.STRUCTURE)
    assert report.verdict is Verdict.PROVEN
    wording("\n".join(report.warnings), "global_step7", "global_step9")


NONSENSE: list[dict[str, Any]] = [
    {"dp_world_size": -1}, {"dp_world_size": 10**30}, {"dp_world_size": True}, {"dp_world_size": "3"},
    {"mp_world_size": 999_999_999}, {"global_steps": None}, {"global_steps": [7]}, {"ds_config": {}}, {"ds_config": 7},
    {"ds_config": {"zero_optimization": {"stage": "3"}}}, {"param_shapes": 5}, {"param_shapes": [{"w": "x"}]},
    {"param_shapes": [{"w": (2**59,) * 60}]},
]  # fmt: skip


@pytest.mark.parametrize("head", NONSENSE, ids=lambda head: next(iter(head)))
def test_malformed_headers_neither_stop_the_check_nor_prove_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: dict[str, Any], wording: Wording
) -> None:
    want("torch")
    monkeypatch.setattr(examine, "GAVE_UP", ())  # let exceptions in a layout propagate
    Zero(head=head).write(tmp_path)
    report = verify(tmp_path, Level.STRUCTURE)
    if "param_shapes" in head or "ds_config" in head:
        wording("\n".join(line for found in report.checkpoints for line in found.proved))


@pytest.mark.slow
def test_a_tensor_with_attributes_is_proven_and_loads(tmp_path: Path, wording: Wording) -> None:
    want("torch")
    import torch

    for name, value in (("plain.pt", torch.linspace(0, 1, 7)), ("parameter.pt", torch.nn.Parameter(torch.ones(3, 2)))):
        value.ds_id = "0_1"  # type: ignore[attr-defined]
        torch.save({"w": value}, tmp_path / name)
    report = verify(tmp_path, Level.LOAD)
    assert report.verdict is Verdict.PROVEN, seen(report)
    for file in report.files:
        wording("\n".join(file.proved))
