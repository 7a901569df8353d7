"""Intact checkpoints that common training libraries write at test time never raise a false alarm.

Each is then damaged in one place, and the damage is detected at the level that promises it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuwarden.checkpoints.examine import reader
from gpuwarden.checkpoints.file_model import Limits
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.sealing import manifest
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.models import Level, Manifest, Report, Verdict
from real_parts import need
from wording import Wording

pytestmark = [pytest.mark.prove, pytest.mark.filterwarnings("ignore")]

TINY = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip


def want(*modules: str) -> None:
    for name in modules:
        need(name, importlib.util.find_spec(name) is not None)


def seen(report: Report) -> str:
    return "\n".join(report.reasons)


def inside(path: Path) -> int:
    """Return the offset of a byte in the middle of one of the file's tensors."""
    with Source(path) as source:
        plugin = reader(path.name, source.head())
        assert plugin is not None
        tensors = [t for t in plugin.read(source, Limits()).tensors if t.extent >= 256 and t.start >= 0]
    return tensors[0].start + tensors[0].extent // 2


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def no_alarm(root: Path, level: Level = Level.LOAD) -> Report:
    report = verify(root, level)
    assert report.verdict is Verdict.PROVEN, seen(report)
    return report


def alarms(root: Path, path: Path, *, own_crc: bool) -> None:
    """Check that a flipped bit, a cut, and a missing file are detected; without a CRC, only a seal reveals the bit."""
    listing = Manifest.model_validate(manifest.take(root))
    at, size, data = inside(path), path.stat().st_size, path.read_bytes()
    flip(path, at)
    assert verify(root, Level.STRUCTURE).verdict is Verdict.PROVEN
    assert not own_crc or verify(root, Level.CONTENT).verdict is Verdict.REFUTED
    assert verify(root, Level.CONTENT, manifest=listing).verdict is Verdict.REFUTED
    flip(path, at)
    for cut in (size - 1, size // 2, 0):
        os.truncate(path, cut)
        assert verify(root, Level.STRUCTURE).verdict is Verdict.REFUTED, cut
        path.write_bytes(data)
    path.unlink()
    assert verify(root, Level.STRUCTURE, manifest=listing).verdict is Verdict.REFUTED
    path.write_bytes(data)
    assert verify(root, Level.CONTENT, manifest=listing).verdict is Verdict.PROVEN


# gloo's threads sometimes abort a process during shutdown. By then the save is complete, so exit without one.
LEAVE = """
import os, torch.distributed
torch.distributed.barrier()
sys.stdout.flush()
os._exit(0)
"""


def run_ranks(tmp_path: Path, text: str, ranks: int = 2) -> None:
    """Run a script once per rank, on the CPU with gloo, as torchrun would."""
    script = tmp_path / "ranks.py"
    script.write_text(text + LEAVE)
    argv = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-port=0",
            "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
            f"--log-dir={tmp_path.with_name(f'{tmp_path.name}-log')}", str(script), str(tmp_path)]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-3000:]


# ------------------------------------------------------------------------------------------- torch, several processes

DCP = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard, Replicate
from torch.distributed.checkpoint.state_dict import get_state_dict
dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2,))
state = {"model": {"w": distribute_tensor(torch.randn(64, 32), mesh, [Shard(0)]),
                   "odd": distribute_tensor(torch.randn(33, 8), mesh, [Shard(0)]),
                   "b": distribute_tensor(torch.randn(32), mesh, [Replicate()])}, "step": 7, "lr": 0.1, "names": ["a"]}
dcp.save(state, checkpoint_id=sys.argv[1] + "/dcp")
"""


def test_torch_distributed_checkpoint_of_two_ranks(tmp_path: Path) -> None:
    want("torch")
    run_ranks(tmp_path, DCP)
    root = tmp_path / "dcp"
    assert len(list(root.glob("*.distcp"))) == 2
    no_alarm(root)
    alarms(root, max(root.glob("*.distcp"), key=lambda p: p.stat().st_size), own_crc=True)
    data = (root / ".metadata").read_bytes()
    (root / ".metadata").write_bytes(data[: len(data) // 2])
    assert verify(root, Level.STRUCTURE).verdict is Verdict.REFUTED


# accelerate uses FSDP only on accelerators. On the CPU, torch shards the model and accelerate saves it.
FSDP = """
import sys, torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
accelerator = Accelerator(cpu=True)
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=%r)
accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(4):
    model(torch.randn(2, 16)).square().sum().backward(); optimizer.step(); optimizer.zero_grad()
out = sys.argv[1] + "/checkpoint-4"
save_fsdp_model(plugin, accelerator, model, out)
save_fsdp_optimizer(plugin, accelerator, optimizer, model, out)
"""


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_accelerate_fsdp_of_two_ranks(tmp_path: Path, kind: str) -> None:
    want("torch", "accelerate")
    run_ranks(tmp_path, FSDP % kind)
    root = tmp_path / "checkpoint-4"
    report = no_alarm(root)
    assert report.step == 4
    assert not report.checkpoints[0].resume, report.checkpoints
    weights = [*root.rglob("*.distcp"), *root.glob("pytorch_model_fsdp*.bin")]
    alarms(root, min(weights), own_crc=True)


def test_accelerate_save_state_of_one_process(tmp_path: Path) -> None:
    want("torch", "accelerate")
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader([torch.randn(64) for _ in range(8)], batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        accelerator.backward(model(x).square().sum())
        optimizer.step()
    root = tmp_path / "checkpoint_4"
    accelerator.save_state(str(root))
    report = no_alarm(root)
    assert report.step == 4 and not report.checkpoints[0].resume
    alarms(root, root / "model.safetensors", own_crc=False)


# ------------------------------------------------------------------------------------------------------ TRL and PEFT


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    learn = trainers.BpeTrainer(vocab_size=256, special_tokens=["<unk>", "<eos>"])
    made.train_from_iterator(["the cat sat on the mat"] * 10, learn)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>")


def tiny() -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**TINY))


@pytest.mark.parametrize("lora", [False, True])
def test_trl_dpo(tmp_path: Path, lora: bool) -> None:
    want("torch", "transformers", "trl", "peft", "datasets")
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    rows = [{"prompt": "the cat", "chosen": " sat on", "rejected": " the mat"}] * 8
    args = DPOConfig(
        output_dir=str(tmp_path / "run"), max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=[],
        use_cpu=True, disable_tqdm=True, max_length=32, bf16=False,
    )  # fmt: skip
    peft = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]) if lora else None
    tiny().save_pretrained(tmp_path / "base")
    data = Dataset.from_list(rows)
    made = DPOTrainer(
        str(tmp_path / "base"), args=args, train_dataset=data, processing_class=tokenizer(), peft_config=peft
    )
    made.train()
    report = no_alarm(tmp_path / "run", Level.RESUME)
    assert (report.newest, report.step) == ("checkpoint-4", 4)
    assert not any(c.warnings or c.resume for c in report.checkpoints), report.checkpoints
    root = tmp_path / "run/checkpoint-4"
    moved = verify(root, Level.STRUCTURE, against=tmp_path / "run/checkpoint-2")
    assert moved.verdict is Verdict.PROVEN, seen(moved)
    alarms(root, root / ("adapter_model.safetensors" if lora else "model.safetensors"), own_crc=False)
    alarms(root, root / "optimizer.pt", own_crc=True)


@pytest.mark.parametrize("kind", ["LoraConfig", "IA3Config", "PromptTuningConfig", "LoHaConfig", "AdaLoraConfig"])
def test_peft_adapters_and_their_base(tmp_path: Path, kind: str, wording: Wording) -> None:
    want("torch", "transformers", "peft")
    import peft

    base = tiny()
    base.save_pretrained(tmp_path / "base")
    more: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
    if kind == "PromptTuningConfig":
        more = {"num_virtual_tokens": 4}
    elif kind == "IA3Config":
        more |= {"feedforward_modules": []}
    elif kind == "AdaLoraConfig":
        more |= {"total_step": 10}
    made = peft.get_peft_model(base, getattr(peft, kind)(task_type="CAUSAL_LM", **more))
    made.save_pretrained(tmp_path / "adapter")
    no_alarm(tmp_path / "adapter")
    if kind == "LoraConfig":
        report = verify(tmp_path / "adapter", Level.STRUCTURE, against=tmp_path / "base")
        assert report.verdict is Verdict.PROVEN, seen(report)
        wording(report.proved[0])


# -------------------------------------------------------------------------------------------------------------- gguf


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_a_transformers_model_converted_to_gguf(tmp_path: Path, kind: str) -> None:
    """Uses gguf's writer, name map, and quantization as llama.cpp's converter does, which is on no package index."""
    want("torch", "transformers", "gguf")
    import gguf
    from safetensors.numpy import load_file

    base = tiny()
    base.save_pretrained(tmp_path / "base")
    arrays = load_file(tmp_path / "base/model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    target = tmp_path / "model.gguf"

    def convert(skip: str = "", vocab: int = 256) -> Report:
        writer = gguf.GGUFWriter(target, "qwen2")
        writer.add_block_count(2)
        writer.add_embedding_length(32)
        writer.add_head_count(2)
        writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(vocab)])
        for name, array in arrays.items():
            new = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert new is not None, name
            kept = kind if array.ndim > 1 and array.shape[-1] % 32 == 0 else "F32"
            data = gguf.quants.quantize(array.astype("f4"), gguf.GGMLQuantizationType[kept])
            if new != skip:
                writer.add_tensor(new, data, raw_dtype=gguf.GGMLQuantizationType[kept])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return verify(target, Level.CONTENT, against=tmp_path / "base")

    report = convert()
    assert report.verdict is Verdict.PROVEN, seen(report)
    assert any(f"{len(arrays):,}" in line for line in report.proved)
    listing = Manifest.model_validate(manifest.take(target))
    flip(target, inside(target))
    assert verify(target, Level.CONTENT, manifest=listing).verdict is Verdict.REFUTED
    for lost, name in (
        ("blk.1.ffn_up.weight", "mlp.up_proj.weight"),
        ("blk.0.attn_norm.weight", "input_layernorm.weight"),
    ):
        report = convert(skip=lost)
        assert report.verdict is Verdict.REFUTED and name in seen(report)
    report = convert(vocab=255)
    assert report.verdict is Verdict.REFUTED and "255" in seen(report) and "256" in seen(report)


# ------------------------------------------------------------------------------------------------------------- orbax


def test_orbax_of_a_flax_like_state(tmp_path: Path) -> None:
    want("orbax")
    import orbax.checkpoint as ocp

    state = {"params": {"w": np.random.default_rng(0).normal(size=(256, 256)).astype("f4")}, "step": 7}
    with ocp.CheckpointManager(tmp_path / "out", options=ocp.CheckpointManagerOptions(max_to_keep=3)) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    listing = Manifest.model_validate(manifest.take(tmp_path / "out"))
    report = verify(tmp_path / "out", Level.CONTENT, manifest=listing)
    assert (report.verdict, report.step) == (Verdict.PROVEN, 2), seen(report)
    data = [p for p in (tmp_path / "out").rglob("*") if p.is_file() and "/d/" in p.as_posix()]
    big = max(data, key=lambda p: p.stat().st_size)
    flip(big, big.stat().st_size // 2)
    assert verify(tmp_path / "out", Level.CONTENT, manifest=listing).verdict is Verdict.REFUTED


# --------------------------------------------------------------------------------------------------------- deepspeed

DEEPSPEED = """
import sys, torch, deepspeed
config = {"train_batch_size": 4, "zero_optimization": {"stage": %d}, "bf16": {"enabled": %s},
          "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}}
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 8))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(3):
    x = torch.randn(2, 16, dtype=next(engine.parameters()).dtype)
    engine.backward(engine(x).square().sum()); engine.step()
engine.save_checkpoint(sys.argv[1] + "/ds", tag="global_step3")
"""


@pytest.mark.parametrize(("stage", "bf16"), [(2, True), (3, False)])
def test_deepspeed_zero_of_two_ranks(tmp_path: Path, stage: int, bf16: bool) -> None:
    want("torch")
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed here; its layout is tested in tests/checkpoints/test_layouts.py")
    run_ranks(tmp_path, DEEPSPEED % (stage, bf16))
    root = tmp_path / "ds"
    report = verify(root, Level.CONTENT)
    assert report.verdict is Verdict.PROVEN, seen(report)
    part = min(root.glob("global_step3/*zero_pp_rank_1*optim_states.pt"))
    alarms(root, part, own_crc=True)
    resume = verify(root, Level.RESUME)
    assert resume.verdict is Verdict.PROVEN and resume.step == 3, seen(resume)
    assert any("1,608" in line for line in resume.checkpoints[0].proved), "the parameters of the model"
    last = part.read_bytes()
    part.unlink()
    assert "mp_rank 00: 1" in seen(verify(root, Level.STRUCTURE)), "it was the last one"
    part.write_bytes(last)
    (root / "latest").write_text("global_step9")
    assert "global_step9" in seen(verify(root, Level.STRUCTURE))
