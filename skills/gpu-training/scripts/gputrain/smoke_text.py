"""A smoke run's language model: two layers with random weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gputrain.smoke import Smoke
from gputrain.smoke_tokens import smoke_rows, write_tokenizer


def turn(role: str, content: str) -> list[dict[str, str]]:
    """Return one message, as a list."""
    return [{"role": role, "content": content}]


def write_language_model(folder: Path, seed: int = 0, hidden: int = 64) -> None:
    """Save a random Qwen2 with its tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    write_tokenizer(folder)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=512, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
        bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)


def smoke_text(row: Callable[[int, str], dict[str, Any]], *flags: str) -> Smoke:
    """Return the inputs of a method that trains a language model."""
    return smoke_rows(row, write_language_model, *flags)
