"""Slow proofs: real trainers' checkpoints, kills in the middle of a save, and tens of thousands of mutants."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counting import counted_lines
from forked import own_progress_locks
from gpuwarden.checkpoints import examine
from gpuwarden.checkpoints.examine import examine_file, reader
from gpuwarden.checkpoints.file_model import Limits
from gpuwarden.checkpoints.findings import ExamineOptions
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.evidence import Cause
from gpuwarden.core.models import Level, Report, Verdict
from real_parts import amount, need
from waiting import eventually
from wording import Wording

pytestmark = [pytest.mark.prove, pytest.mark.filterwarnings("ignore")]


def want(*modules: str) -> None:
    for name in modules:
        need(name, importlib.util.find_spec(name) is not None)


def seen(report: Report) -> str:
    found = [*report.problems, *report.doubts]
    for part in (*report.files, *report.checkpoints):
        found += [f"{part.path}: {line}" for line in (*part.problems, *part.doubts)]
    return "\n".join(found)


# -------------------------------------------------------------------------------------------------------- trainers


def trainer(out: Path, *, lora: bool = False, steps: int = 6, every: int = 3, **more: Any) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

    torch.set_num_threads(1)
    size = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**size, num_attention_heads=2, num_key_value_heads=1))
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))
    rows = [{k: torch.randint(0, 512, (16,)) for k in ("input_ids", "labels")} for _ in range(32)]
    args = TrainingArguments(
        output_dir=str(out), max_steps=steps, save_steps=every, per_device_train_batch_size=2, report_to=[],
        use_cpu=True, disable_tqdm=True, **more,
    )  # fmt: skip
    return Trainer(model=model, args=args, train_dataset=rows)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    want("torch", "transformers", "peft")
    root = tmp_path_factory.mktemp("trained")
    for name, lora in (("full", False), ("lora", True)):
        made = trainer(root / name, lora=lora)
        made.train()
        made.save_model(str(root / name / "final"))
    return root


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_trainers_output_can_be_resumed(trained: Path, kind: str) -> None:
    report = verify(trained / kind, Level.RESUME)
    assert report.verdict is Verdict.PROVEN, seen(report)
    assert (report.newest, report.step) == ("checkpoint-6", 6)
    assert not any(c.warnings for c in report.checkpoints)


@pytest.mark.parametrize("gone", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_missing_resume_files_are_refuted_at_level_resume(trained: Path, tmp_path: Path, gone: str) -> None:
    shutil.copytree(trained / "full/checkpoint-6", tmp_path / "checkpoint-6")
    (tmp_path / "checkpoint-6" / gone).unlink()
    assert verify(tmp_path, Level.CONTENT).verdict is Verdict.PROVEN
    report = verify(tmp_path, Level.RESUME)
    assert report.verdict is Verdict.REFUTED
    assert gone.split(".")[0] in seen(report)


def test_another_models_optimizer_prevents_a_resume(trained: Path, tmp_path: Path, wording: Wording) -> None:
    shutil.copytree(trained / "lora/checkpoint-6", tmp_path / "checkpoint-6")
    shutil.copy(trained / "full/checkpoint-6/optimizer.pt", tmp_path / "checkpoint-6/optimizer.pt")
    report = verify(tmp_path, Level.RESUME)
    assert Cause.NO_RESUME in report.causes
    wording(seen(report))


def test_later_weights_have_moved(trained: Path, wording: Wording) -> None:
    report = verify(trained / "full/checkpoint-6", Level.CONTENT, against=trained / "full/checkpoint-3")
    assert report.verdict is Verdict.PROVEN, seen(report)
    wording("\n".join(report.proved))


def test_a_sharded_transformers_model_is_proven(trained: Path, tmp_path: Path, wording: Wording) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(trained / "full/final")
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    report = verify(tmp_path, Level.LOAD)
    assert report.verdict is Verdict.PROVEN, seen(report)
    (agree,) = (line for line in report.proved if "model.safetensors.index.json" in line)
    wording(agree)


# ------------------------------------------------------------------------------------- files that torch itself reads


def test_our_reader_agrees_with_torch(tmp_path: Path) -> None:
    want("torch")
    import torch

    base = torch.randn(40, 60)
    kinds = [getattr(torch, n) for n in ("float64", "float32", "float16", "bfloat16", "int64", "uint8", "bool")]
    state: dict[str, Any] = {f"k{i}": torch.ones(3, 5).to(k) for i, k in enumerate(kinds)}
    state |= {
        "t": base.t(),
        "step": base[::2, 1::3],
        "tail": base[7:],
        "one": torch.tensor(2.5),
        "none": torch.empty(0),
    }
    state |= {"tied": base, "parameter": torch.nn.Parameter(torch.randn(4, 4))}
    for new in (True, False):
        torch.save({"a": state, "list": [torch.arange(6)]}, tmp_path / "x.pt", _use_new_zipfile_serialization=new)
        with Source(tmp_path / "x.pt") as source:
            found = {t.name: t for t in reader("x.pt", source.head()).read(source, Limits()).tensors}  # type: ignore[union-attr]
            loaded = torch.load(tmp_path / "x.pt", weights_only=True)
            theirs = {f"a.{k}": v for k, v in loaded["a"].items()} | {"list.0": loaded["list"][0]}
            assert set(found) == set(theirs)
            for name, value in theirs.items():
                ours = found[name]
                assert ours.shape == tuple(value.shape), name
                assert ours.stride is None or ours.stride == value.stride(), name
                if ours.stride is None and value.numel():
                    raw = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                    assert source.at(ours.start, ours.extent) == raw, name


# ------------------------------------------------------------------------------------------------ kills during a save


def in_child(work: Callable[[], object], root: Path, moment: float) -> None:
    """Run `work` in a fork and kill it `moment` seconds after the first checkpoint appears, which falls in a save."""
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            own_progress_locks()
            work()
        finally:
            os._exit(1)
    try:
        eventually(lambda: any(root.glob("*checkpoint-*")), within=300, every=0.002)  # building a real model takes time
        time.sleep(moment)  # the kill has to come at this moment
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def judged(root: Path, loads: Callable[[Path], object]) -> tuple[int, int]:
    """Check every checkpoint with the real loader; return how many are proven and how many are not."""
    report = verify(root, Level.CONTENT)
    good = [c for c in report.checkpoints if c.verdict is Verdict.PROVEN]
    for c in good:
        loads(root / c.path)
    steps = [c.step or 0 for c in good]
    assert report.step == max(steps, default=None)
    return len(good), len(report.checkpoints) - len(good)


def savers() -> dict[str, tuple[Callable[[Path, int], object], Callable[[Path], object]]]:
    import torch
    from safetensors.torch import load_file, save_file

    from gpuwarden.checkpoints.sealing import save_helper

    weights = {f"w{i}": torch.randn(256, 512) for i in range(8)}

    def plain(folder: Path, step: int) -> None:
        folder.mkdir()
        torch.save({"model": weights, "step": step}, folder / "state.pt")

    def legacy(folder: Path, step: int) -> None:
        folder.mkdir()
        torch.save({"model": weights}, folder / "state.pt", _use_new_zipfile_serialization=False)

    def tensors(folder: Path, step: int) -> None:
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")

    def helper(folder: Path, step: int) -> None:
        save_helper.save(folder.parent, step, {"model": weights, "optimizer": {}})

    def load(folder: Path) -> object:
        return torch.load(folder / "state.pt", weights_only=True)

    return {
        "torch.save": (plain, load),
        "torch.save legacy": (legacy, load),
        "safetensors": (tensors, lambda f: load_file(f / "model.safetensors")),
        "savelib": (helper, load),
    }


@pytest.mark.endurance
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("kind", ["torch.save", "torch.save legacy", "safetensors", "savelib"])
def test_kills_during_saves_tear_no_save_helper_checkpoint(tmp_path: Path, kind: str) -> None:
    want("torch")
    save, loads = savers()[kind]
    dice, torn, whole = random.Random(3), 0, 0
    for trial in range(amount(25, 100)):
        root = tmp_path / str(trial)
        root.mkdir()

        def work(root: Path = root) -> None:
            for step in range(1, 10_000):
                save(root / f"checkpoint-{step}", step)

        in_child(work, root, dice.uniform(0.0, 0.15))
        good, bad = judged(root, loads)
        whole, torn = whole + good, torn + bad
        shutil.rmtree(root)
    assert whole
    assert (torn == 0) == (kind == "savelib"), (whole, torn)


@pytest.mark.long
@pytest.mark.endurance
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_proven_checkpoints_load_after_kills_during_training(tmp_path: Path) -> None:
    want("torch", "transformers")
    from safetensors.torch import load_file

    def resumed(folder: Path) -> None:
        assert json.loads((folder / "trainer_state.json").read_text())["global_step"]
        load_file(folder / "model.safetensors")

    dice, whole = random.Random(4), 0
    for trial in range(amount(20, 100)):
        root = tmp_path / str(trial)
        made = trainer(root, steps=1000, every=1, save_total_limit=3)  # built here, so that the child starts at once
        in_child(made.train, root, dice.uniform(0.0, 0.4))
        if root.exists():
            whole += judged(root, resumed)[0]
            shutil.rmtree(root)
    assert whole


# ------------------------------------------------------------------------------------------------------------ fuzz


def originals(folder: Path) -> list[Path]:
    """Write a small real file in every format that can be written here."""
    import onnx
    import torch
    from safetensors.numpy import save_file

    arrays = {"a": np.random.default_rng(0).normal(size=(8, 8)).astype("f4"), "b": np.arange(6, dtype="i8")}
    save_file(arrays, folder / "m.safetensors")
    np.savez(folder / "m.npz", **arrays)
    np.savez_compressed(folder / "c.npz", **arrays)
    np.save(folder / "m.npy", arrays["a"])
    state = {"model": {k: torch.from_numpy(v) for k, v in arrays.items()}, "rng": np.random.get_state(), "n": 3}
    torch.save(state, folder / "zip.pt")
    torch.save(state, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    tensor = onnx.numpy_helper.from_array(arrays["a"], "w")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["w"], ["y"])], "g", [], [], [tensor])
    onnx.save(onnx.helper.make_model(graph), folder / "m.onnx")
    import gguf

    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("w", arrays["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    pieces = b"".join(b"\n" + bytes([len(p) + 2]) + b"\n" + bytes([len(p)]) + p for p in (b"<unk>", b"a", b"bc"))
    (folder / "tokenizer.model").write_bytes(pieces)
    (folder / "m.json").write_text(json.dumps({"a": [1, 2, {"b": None}]}))
    (folder / "m.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    return sorted(folder.iterdir())


def mutate(data: bytes, dice: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 8))):
        at = dice.randrange(len(made) or 1)
        match dice.randrange(6):
            case 0:
                made[at : at + 1] = bytes([dice.randrange(256)])
            case 1:
                made[at : at + dice.randrange(1, 9)] = dice.choice((b"\xff", b"\0", b"\x7f")) * dice.randrange(1, 9)
            case 2:
                del made[at : at + dice.randrange(1, 64)]
            case 3:
                made[at:at] = made[: dice.randrange(1, 64)]
            case 4:
                del made[at:]
            case _:
                made[at : at + 1] = bytes([made[at] ^ (1 << dice.randrange(8))]) if made else b""
    return bytes(made)


MOST_LINES = 500_000
"""Maximum lines of Python to run for one mutant."""


@pytest.mark.long
@pytest.mark.endurance
def test_mutants_neither_escape_nor_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want("torch", "onnx", "gguf")
    monkeypatch.setattr(examine, "GAVE_UP", ())  # let unexpected exceptions in a reader propagate
    dice, dearest = random.Random(5), 0
    (tmp_path / "in").mkdir()
    files = [(p, p.read_bytes()) for p in originals(tmp_path / "in")]
    for _ in range(amount(300, 1_200)):
        for path, data in files:
            target = tmp_path / path.name
            target.write_bytes(mutate(data, dice))
            with counted_lines() as lines:
                entry = examine_file(target, target.name, ExamineOptions(limits=Limits()))
            dearest = max(dearest, lines())
            lines = " ".join((*entry.problems, *entry.doubts))
            assert entry.verdict == "proven" or lines
            assert len(lines) < 5_000
    assert dearest < MOST_LINES, f"one file took {dearest:,} lines of Python"
