"""Estimates are intervals that contain the known values and state how they were made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.core.hardware import GPUS
from gpuwarden.static_analysis.estimate.memory import memory, vram
from gpuwarden.static_analysis.estimate.parts import parts_of
from gpuwarden.static_analysis.estimate.setup import Method, Run, optimizer_of, run_of
from gpuwarden.static_analysis.estimate.shape import shape_like, shape_of
from gpuwarden.static_analysis.estimate.time import duration
from gpuwarden.static_analysis.pace import Pace, remaining
from gpuwarden.static_analysis.script import read_script
from wording import Wording

# Parameters in billions, method, GPU memory in GB, and whether the run is known to fit with batch size 1 and
# checkpointing. From the training facts' sizing table: setups that people run, and setups that fail.
FITS: list[tuple[float, Method, int, bool]] = [
    (0.5, "full", 16, True),
    (1.0, "full", 24, True),
    (3.0, "qlora", 16, True),
    (8.0, "qlora", 24, True),
    (4.0, "full", 80, True),
    (70.0, "qlora", 80, True),
    (14.0, "lora", 80, True),
    (7.0, "full", 24, False),
    (13.0, "full", 80, False),
    (70.0, "lora", 80, False),
    (3.0, "full", 24, False),
]


@pytest.mark.parametrize(("billions", "method", "gb", "fits"), FITS)
def test_memory_estimates_agree_with_known_fits(billions: float, method: Method, gb: int, fits: bool) -> None:
    need = vram(Run(params=int(billions * 1e9), method=method, batch=1, length=1024, checkpointing=True))
    assert need.low < need.high
    if fits:
        assert need.low <= gb
    else:
        assert need.high > gb
    assert method in need.how


def test_memory_follows_the_training_settings() -> None:
    base = Run(params=1_000_000_000, batch=2, length=1024, checkpointing=True, weights="float32")

    def high(**change: object) -> float:
        return vram(base.model_copy(update=change)).high

    assert high(batch=8) > high()
    assert high(length=4096) > high()
    assert high(batch=16, checkpointing=False) > high(batch=16)
    assert high(method="lora") < high()
    assert high(method="qlora") <= high(method="lora")
    assert high(weights="half") < high()
    assert high(task="dpo") > high()
    assert high(optimizer="adamw_8bit") < high()
    assert high(optimizer="adafactor") < high(optimizer="adamw_8bit")
    assert high(length=64, layerwise=True) < high(length=64)
    assert high(batch=16, loss="fused") < high(batch=16, loss="chunked") < high(batch=16)
    assert high(fused=True) < high(fused=False) == high()
    offloaded = {"batch": 16, "offload": frozenset({"activations"}), "loss": "fused"}
    assert high(**offloaded) < high(batch=16, loss="fused")
    assert high(gpus=4, zero=3) < high() and high(gpus=4, zero=1) < high()
    assert high(method="lora", rank=64) > high(method="lora", rank=8)


def test_full_sharding_casts_activations_and_gathers_layer_gradients() -> None:
    base = Run(params=8_000_000_000, batch=4, length=2048, checkpointing=True, weights="float32", gpus=8)
    plain, sharded = parts_of(base), parts_of(base.model_copy(update={"zero": 3}))
    assert sharded.activations == plain.activations / 2, "bfloat16 instead of the 32 bits that autocast leaves"
    wide = base.model_copy(update={"compute": "float32"})
    more = parts_of(wide.model_copy(update={"zero": 3})).layer - parts_of(wide).layer
    assert more == 6 * base.form.layer_weights, "a gradient, and its sum in 32 bits"
    adapters = base.model_copy(update={"zero": 3, "method": "lora"})
    assert parts_of(adapters).layer < sharded.layer


def test_optimizer_temporaries_depend_on_the_step_variant() -> None:
    base = Run(params=1_000_000_000, batch=1, length=128, checkpointing=True, weights="half")
    steps = {step: parts_of(base.model_copy(update={"fused": step})).step for step in (True, False)}
    assert steps == {True: 0.0, False: 2e9}, "a list of all square roots, in the type of the weights"
    table = base.form.vocabulary * base.form.width * 2
    assert parts_of(base.model_copy(update={"optimizer": "adamw_8bit"})).step <= 2 * table
    layerwise = parts_of(base.model_copy(update={"layerwise": True}))
    assert layerwise.gradients == table + 2 * base.form.layer_weights, "the token table's waits for both of its uses"


def test_the_low_end_of_an_encoder_decoder_counts_only_the_encoder() -> None:
    """An encoder-decoder pair's low end counts only its encoder, since a source gives the length of the input."""
    config = {"model_type": "t5", "d_model": 1024, "num_layers": 24, "num_heads": 32, "d_kv": 128, "d_ff": 16384}
    shape = shape_of({**config, "vocab_size": 32128})
    assert shape is not None and shape.kind == "pair"
    run = Run(params=round(shape.parameters), shape=shape, batch=64, length=512, checkpointing=False, weights="half")
    low, high = memory(run.model_copy(update={"padded": False}), "allocated")
    assert low < 0.7 * high


def test_data_parallel_copies_need_gradient_buckets() -> None:
    base = Run(params=1_000_000_000, batch=1, length=128, checkpointing=True, weights="half")
    several = base.model_copy(update={"gpus": 2})
    assert vram(several, ()).high - vram(base, ()).high > 2.0 and vram(several, ()).low == vram(base, ()).low


@pytest.mark.parametrize(("family", "billions"), [("apertus", 8.05), ("arcee", 7.0), ("llama", 10.9)])
def test_families_without_a_gate_have_two_matrices(family: str, billions: float) -> None:
    config = {
        "model_type": family, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 21504, "vocab_size": 131072, "tie_word_embeddings": False,
    }  # fmt: skip
    shape = shape_of({**config, "intermediate_size": 17_500} if family == "arcee" else config)
    assert shape is not None and shape.parameters == pytest.approx(billions * 1e9, rel=0.01)


def test_duration_depends_on_the_gpu_and_the_task() -> None:
    run = Run(params=500_000_000, batch=2, accumulate=8, length=1024, max_steps=1000)
    time = duration(run, GPUS["a10g"])
    assert time is not None
    assert 60 < time.low < time.high
    fast = duration(run, GPUS["h100"])
    assert fast is not None
    assert fast.high < time.high
    assert duration(run.model_copy(update={"task": "detection"}), GPUS["a10g"]) is None
    assert duration(run.model_copy(update={"max_steps": None}), GPUS["a10g"]) is None


def test_a_run_is_read_from_a_script() -> None:
    script = """
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
BitsAndBytesConfig(load_in_4bit=True)
SFTTrainer(model="a/b", peft_config=LoraConfig(), args=SFTConfig(
    per_device_train_batch_size=3, gradient_accumulation_steps=5, max_length=700, max_steps=11, optim="adamw_8bit"))
"""
    run = run_of(read_script(script).uses, 10, 100, 2)
    assert (run.method, run.task, run.batch, run.accumulate, run.length) == ("qlora", "sft", 3, 5, 700)
    assert (run.max_steps, run.gpus, run.optimizer, run.checkpointing) == (11, 2, "adamw_8bit", True)
    assert (run.rank, run.targets, run.weights) == (8, frozenset("qv"), "float32"), (
        "peft's rank and modules, trl's own type"
    )


@pytest.mark.parametrize(("asked", "batch"), [("", 32), ("mini_batch_size=16", 16), ("mini_batch_size=f()", None)])
def test_a_gradient_caching_loss_uses_its_mini_batch(asked: str, batch: int | None) -> None:
    script = (
        "from sentence_transformers import SentenceTransformerTrainingArguments as A\n"
        "from sentence_transformers.losses import CachedMultipleNegativesRankingLoss as Loss\n"
        f"A(per_device_train_batch_size=512)\nLoss(model, {asked})\n"
    )
    assert run_of(read_script(script).uses, 10, 100, 1).batch == batch


def test_unknown_settings_do_not_break_the_estimate() -> None:
    script = "from trl import SFTConfig, SFTTrainer\nSFTTrainer(model=m, args=SFTConfig(**cfg, max_steps=n, optim=o, max_length=l))"  # noqa: E501
    run = run_of(read_script(script).uses, 1_000_000, None, 1)
    assert vram(run).high > 0
    assert duration(run, GPUS["t4"]) is None


@pytest.mark.parametrize(
    ("name", "family", "layerwise"),
    [
        (None, "adamw", False),
        ("adamw_torch_fused", "adamw", False),
        ("adamw_bnb_8bit", "adamw_8bit", False),
        ("paged_adamw_32bit", "paged_adamw", False),
        ("paged_adamw_8bit", "paged_adamw_8bit", False),
        ("adafactor", "adafactor", False),
        ("galore_adamw_8bit_layerwise", "galore", True),
        ("lomo", "lomo", True),
    ],
)
def test_an_optimizer_is_known_by_its_name(name: str | None, family: str, layerwise: bool) -> None:
    assert optimizer_of(name) == (family, layerwise)


# Parameter counts from the model cards.
SHAPES: list[tuple[dict[str, object], float]] = [
    ({"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
      "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}, 8.03e9),
    ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}, 0.124e9),
    ({"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
      "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8}, 46.7e9),
    ({"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
      "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
      "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936}, 30.5e9),
    ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "head_dim": 256,
      "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 10240,
      "vocab_size": 262208, "tie_word_embeddings": True}}, 3.88e9),
]  # fmt: skip


@pytest.mark.parametrize(("config", "parameters"), SHAPES)
def test_parameters_are_counted_from_a_config(config: dict[str, object], parameters: float) -> None:
    shape = shape_of(config)
    assert shape is not None and shape.parameters == pytest.approx(parameters, rel=0.02)
    assert shape.active <= shape.parameters


ODD: tuple[object, ...] = (None, True, -1, 0, 7, "x", "auto", [], [1], {}, {"bits": 4}, {"hidden_size": 8})
KEYS = ("hidden_size", "num_hidden_layers", "vocab_size", "model_type", "n_head", "quantization_config", "text_config")


@given(st.dictionaries(st.sampled_from(KEYS), st.sampled_from(ODD)))
def test_odd_configs_never_break_the_reader(config: dict[str, object]) -> None:
    shape = shape_of(config)
    assert shape is None or shape.parameters > 0


def test_only_some_experts_are_active_per_token() -> None:
    shape = shape_of(SHAPES[3][0])
    assert shape is not None and 3e9 < shape.active < 3.6e9


def test_a_typical_shape_has_the_requested_size() -> None:
    for size in (30_000_000, 500_000_000, 7_000_000_000, 70_000_000_000):
        assert shape_like(size).parameters == pytest.approx(size, rel=0.1)


def test_settled_steps_narrow_the_time(wording: Wording) -> None:
    own = Pace(seconds=2.0, steps=100, elapsed_s=300)
    left = remaining(900, own, prior=(0.1, 90.0))
    assert left is not None
    wording(left.basis)
    assert left.low < 1_800 < left.high < 4 * left.low


def test_first_steps_are_bounded_by_earlier_runs_and_by_the_estimate(wording: Wording) -> None:
    own, before = Pace(seconds=9.0, steps=2, elapsed_s=18), Pace(seconds=5.0, steps=1000, elapsed_s=5_000)
    alone, both = remaining(998, own), remaining(998, own, [before])
    assert alone is not None and both is not None
    assert alone.low <= both.low < 5_000 < both.high < alone.high
    wording(both.basis)
    odd = remaining(998, own, [Pace(seconds=500.0, steps=10, elapsed_s=5_000)])
    assert odd is not None and odd.low < 998 * 9 < odd.high, "what contradicts the run itself is left out"
    assert remaining(10, None) is None and remaining(-1, own) is None
    assert remaining(10, Pace(seconds=1.0, steps=0, elapsed_s=9)) is None


def test_a_tied_output_layer_stored_twice_is_counted_once() -> None:
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
    }
    tied, untied = (shape_of(config | {"tie_word_embeddings": value}) for value in (True, False))
    assert tied is not None and untied is not None
    assert tied.held(751_632_384) == 596_049_920  # Qwen/Qwen3-0.6B
    assert tied.held(596_049_920) == 596_049_920
    assert untied.held(751_632_384) == 751_632_384
    assert tied.held(1_000_000_000) == 1_000_000_000  # with a part that the shape doesn't describe
