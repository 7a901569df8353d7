"""Level resume: the optimizer state belongs to this model and step, and the position in the data is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.evidence import Cause
from gpuwarden.core.models import CheckpointEvidence, Level, Report, Verdict
from resume_kit import OPTIMIZERS, saved, torch
from wording import Wording


def said(report: Report) -> str:
    return "\n".join(report.reasons)


def resumes(folder: Path) -> CheckpointEvidence:
    """Return the evidence about resuming, which every level reports without loading anything."""
    report = verify(folder, Level.STRUCTURE)
    assert report.verdict is Verdict.PROVEN, said(report)
    return report.checkpoints[0]


@pytest.mark.slow
def test_resume_level_refutes_a_missing_optimizer(tmp_path: Path, wording: Wording) -> None:
    folder = saved(tmp_path)
    assert verify(folder, Level.RESUME).verdict is Verdict.PROVEN
    (folder / "optimizer.pt").unlink()
    assert verify(folder, Level.CONTENT).verdict is Verdict.PROVEN
    report = verify(folder, Level.RESUME)
    assert report.verdict is Verdict.REFUTED and report.causes == (Cause.NO_RESUME,)
    wording(said(report), "optimizer.pt")


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_intact_checkpoint_with_any_optimizer_of_torch_can_be_resumed(tmp_path: Path, kind: str) -> None:
    found = resumes(saved(tmp_path, kind))
    assert not found.resume and not found.warnings
    assert any("0.5" in line for line in found.proved), "the epoch"


def drop_moment(state: dict[str, Any]) -> None:
    del state["state"][2]["exp_avg_sq"]


def other_shape(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"][:-1].clone()


def other_model(state: dict[str, Any]) -> None:
    for key in ("exp_avg", "exp_avg_sq"):
        state["state"][0][key] = state["state"][0][key][:, :-1].clone()


def stranger(state: dict[str, Any]) -> None:
    state["state"][99] = state["state"][0]


def later(state: dict[str, Any]) -> None:
    for entry in state["state"].values():
        entry["step"] += 5


def twice(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"].append(0)


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], list[object]]] = {
    "a moment is gone": (drop_moment, []),
    "moments of two shapes": (other_shape, []),
    "moments of another model": (other_model, []),
    "state of nobody": (stranger, [99]),
    "of a later step": (later, [8, 3]),
    "a parameter twice": (twice, []),
    "no state": (lambda s: s["state"].clear(), []),
    "no groups": (lambda s: s.pop("param_groups"), ["param_groups"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mismatched_optimizer_is_reported(tmp_path: Path, fault: str, wording: Wording) -> None:
    edit, values = FAULTS[fault]
    wording("\n".join(resumes(saved(tmp_path, edit=edit)).resume), *values)


def test_a_parameter_without_state_is_a_warning(tmp_path: Path, wording: Wording) -> None:
    found = resumes(saved(tmp_path, edit=lambda s: s["state"].pop(1)))
    assert not found.resume, "a layer that was never used has none"
    wording(found.warnings[0], 6)


def test_an_adapter_is_covered_by_its_optimizer(tmp_path: Path, wording: Wording) -> None:
    t = torch()
    from safetensors.torch import save_file

    folder = saved(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()
    stem = "base_model.model.q.lora_"
    tensors = {f"{stem}A.weight": t.ones(4, 16), f"{stem}B.weight": t.ones(8, 4)}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "target_modules": ["q"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))

    def write(*shapes: tuple[int, ...]) -> Report:
        state = {
            i: {"step": t.tensor(3.0), "exp_avg": t.ones(s), "exp_avg_sq": t.ones(s)} for i, s in enumerate(shapes)
        }
        groups = [{"params": list(range(len(shapes))), "betas": (0.9, 0.99)}]
        t.save({"state": state, "param_groups": groups}, folder / "optimizer.pt")
        return resumes(folder)

    assert not write((4, 16), (8, 4)).resume
    wording(write((4, 16)).resume[0])


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (lambda f: (f / "trainer_state.json").write_text('{"global_step": 3, "epoch": NaN}'), "epoch"),
        (lambda f: (f / "trainer_state.json").write_text('{"global_step": 3, "epoch": true}'), "epoch"),
        (lambda f: (f / "rng_state.pth").unlink(), "rng_state"),
        (lambda f: (f / "rng_state.pth").rename(f / "rng_state_1.pth"), "rng_state"),
        (lambda f: (f / "scheduler.pt").unlink(), "scheduler.pt"),
    ],
    ids=["epoch that is no number", "epoch that is true", "no seed", "no seed of rank 0", "no scheduler"],
)
def test_other_missing_resume_state_is_reported(
    tmp_path: Path, change: Callable[[Path], object], value: str, wording: Wording
) -> None:
    folder = saved(tmp_path)
    change(folder)
    wording("\n".join(resumes(folder).resume), value)


def test_a_save_helpers_state_without_a_sampler_is_a_warning(tmp_path: Path, wording: Wording) -> None:
    t = torch()
    from gpuwarden.checkpoints.sealing import save_helper

    save_helper.save(tmp_path, 1, {"model": {"w": t.ones(2)}, "optimizer": {}})
    save_helper.save(tmp_path, 2, {"model": {"w": t.ones(2)}, "optimizer": {}, "sampler": {"at": 7}})
    one, two = sorted(verify(tmp_path, Level.CONTENT).checkpoints, key=lambda c: c.path)
    assert not two.warnings
    wording("\n".join(one.warnings))


def test_a_fused_expert_tensor_matches_separately_saved_experts(tmp_path: Path, wording: Wording) -> None:
    """For example, a mixture of experts in transformers, which saves each expert separately."""
    from gpuwarden.checkpoints.pickles.nodes import Call, Global, Persistent
    from gpuwarden.checkpoints.values.optimizer import judge

    def moment(*shape: int) -> Call:
        stored = Persistent(("storage", Global("torch", "FloatStorage"), "0", "cpu", 1))
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), (stored, 0, shape, shape, False, None))

    experts = [(8, 4)] * 6 + [(4, 4)]
    state = {0: {"exp_avg": moment(3, 16, 4)}, 1: {"exp_avg": moment(4, 4)}}
    root = {"param_groups": [{"params": [0, 1]}], "state": state}
    assert judge(root, experts, [], "optimizer.pt").resume == []
    larger = judge({**root, "state": {**state, 0: {"exp_avg": moment(3, 32, 4)}}}, experts, [], "optimizer.pt")
    wording("\n".join(larger.resume), "(3, 32, 4)")
