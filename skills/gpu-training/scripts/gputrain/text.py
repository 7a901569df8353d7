"""Language models: check the tokenizer and the row lengths, and load the model."""

import json
from dataclasses import dataclass
from typing import Any

from gputrain.hardware import AMPERE, Plan
from gputrain.outcome import Exit, Stop, say, why_not_loaded
from gputrain.rows import Data, sample
from gputrain.settings import Settings, option


@dataclass
class TextSettings(Settings):
    """Settings that all methods for training a language model share."""

    max_length: int = option(2048, "maximum tokens per row", least=8)
    too_long: str = option("refuse", "treatment of rows longer than max_length", choices=("refuse", "truncate", "drop"))
    chat_template_from: str = option("", "model whose chat template replaces the model's own")
    pad_token: str = option("", "padding token, if the tokenizer has none")
    lora_rank: int = option(16, "LoRA rank; 0 for full fine-tuning", least=0, most=1024)
    lora_alpha: int = option(32, "scale of LoRA", least=1)
    lora_dropout: float = option(0.05, "dropout of LoRA", least=0, most=0.9)
    quantize: str = option("none", "quantization of the frozen base weights with LoRA", choices=("none", "4bit"))

    def check(self) -> None:
        """Raise Stop if settings contradict each other."""
        super().check()
        if self.quantize != "none" and not self.lora_rank:
            raise Stop(Exit.CONFIG, "quantize 4bit needs LoRA", "set lora_rank, or pass --quantize none")
        if self.quantize != "none" and self.cpu:
            raise Stop(Exit.CONFIG, "quantize 4bit needs a GPU", "pass --quantize none")


def load_tokenizer(settings: TextSettings, data: Data) -> Any:
    """Return the model's tokenizer.

    Raises:
        Stop: the tokenizer can't be loaded, has no padding token, or lacks the chat template that conversations need.

    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.model, revision=settings.revision)
        if settings.chat_template_from:
            tokenizer.chat_template = AutoTokenizer.from_pretrained(settings.chat_template_from).chat_template
    except Exception as error:
        raise why_not_loaded(settings.model, error) from error
    if settings.pad_token:
        if settings.pad_token not in tokenizer.get_vocab():
            raise Stop(
                Exit.CONFIG, f"pad_token {settings.pad_token!r} is not in the vocabulary", "choose a known token"
            )
        tokenizer.pad_token = settings.pad_token
    if tokenizer.pad_token is None:
        special = [t for t in tokenizer.get_added_vocab() if "pad" in t.lower() or "reserved" in t.lower()]
        fix = f"pass --pad-token {special[0] if special else tokenizer.eos_token!r}"
        raise Stop(Exit.DATA, f"the tokenizer of {settings.model} has no padding token", fix)
    first = {n: v for n, v in data.train[0].items() if n != "tools"}
    conversations = [n for n, v in first.items() if isinstance(v, list) and v and isinstance(v[0], dict)]
    if conversations and tokenizer.chat_template is None:
        message = (
            f"rows are conversations ({conversations[0]}), but the tokenizer of {settings.model} has no chat template"
        )
        raise Stop(Exit.DATA, message, "pass --chat-template-from INSTRUCT_MODEL, or use the instruct model")
    return tokenizer


def length(tokenizer: Any, row: dict[str, Any]) -> int:
    """Return the number of tokens in a row's longest text, with each answer appended to its prompt."""
    prompt = row.get("prompt")
    whole = [row[name] for name in ("text", "messages") if row.get(name) is not None]
    for name in ("completion", "chosen", "rejected"):
        value = row.get(name)
        if value is not None:
            whole.append(prompt + value if type(prompt) is type(value) else value)
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    return max(tokens(tokenizer, value, tools) for value in whole or [prompt])


def tokens(tokenizer: Any, value: Any, tools: list[Any] | None = None) -> int:
    """Return the number of tokens in a text, or in a conversation with its tools."""
    if isinstance(value, list):
        value = tokenizer.apply_chat_template(value, tools=tools, tokenize=False)
    return len(tokenizer(value or "", add_special_tokens=True)["input_ids"])


def check_lengths(settings: TextSettings, tokenizer: Any, data: Data) -> None:
    """Refuse or drop rows that are longer than max_length, or leave them for the trainer to truncate."""
    looked = [length(tokenizer, data.train[i]) for i in sample(data.train)]
    over, most = sum(n > settings.max_length for n in looked), max(looked)
    say(f"lengths: {most} tokens at most among {len(looked)} rows; {over} are longer than {settings.max_length}")
    if not over:
        return
    if settings.too_long == "refuse":
        message = f"{over} of {len(looked)} rows are longer than max_length {settings.max_length}: up to {most} tokens"
        raise Stop(Exit.DATA, message, f"pass --max-length {most}, or --too-long truncate or drop")
    if settings.too_long == "drop":
        data.train = data.train.filter(lambda row: length(tokenizer, row) <= settings.max_length)
        if not len(data.train):
            raise Stop(Exit.DATA, f"every row is longer than max_length {settings.max_length}", "raise --max-length")
        if data.held_out is not None:
            shorter = data.held_out.filter(lambda row: length(tokenizer, row) <= settings.max_length)
            data.held_out = shorter if len(shorter) else None


def dtype_of(plan: Plan, *, trained: bool) -> Any:
    """Return the data type for loading weights: float32 if they are trained, the GPU's 16-bit type if frozen."""
    import torch

    if trained or plan.precision == "fp32":
        return torch.float32
    return torch.bfloat16 if plan.precision == "bf16" else torch.float16


def load_model(settings: TextSettings, plan: Plan, kind: Any, **more: Any) -> Any:
    """Return the model with its weights, quantized if the settings ask for it."""
    from transformers import BitsAndBytesConfig

    dtype = dtype_of(plan, trained=not settings.lora_rank)
    if settings.quantize == "4bit":
        more["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True
        )
    try:
        return kind.from_pretrained(settings.model, revision=settings.revision, dtype=dtype, **more)
    except Exception as error:
        raise why_not_loaded(settings.model, error) from error


def lora(settings: TextSettings, task: str = "CAUSAL_LM") -> Any:
    """Return the LoRA configuration; None for full fine-tuning."""
    if not settings.lora_rank:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules="all-linear",
        modules_to_save=["score"] if task == "SEQ_CLS" else None,
        task_type=task,
    )


def has_flash_attention(plan: Plan) -> bool:
    """Return whether this machine can use FlashAttention, which keeps packed rows separate."""
    from importlib.util import find_spec

    return plan.capability >= AMPERE and find_spec("flash_attn") is not None
