"""A smoke run's language model: two layers with random weights, and a tokenizer of bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainers.common.smoke import DATA, MODEL, SHORT, Smoke, sentences, write_rows

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ENDS = {"pad_token": "<|pad|>", "eos_token": "<|end|>", "unk_token": None}
ROLES = ("<|user|>", "<|assistant|>", "<|system|>")


def turn(role: str, content: str) -> list[dict[str, str]]:
    """Return one message, as a list."""
    return [{"role": role, "content": content}]


def write_tokenizer(folder: Path) -> None:
    """Save a tokenizer whose tokens are bytes."""
    from transformers import Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = ["<|pad|>", "<|end|>", *ROLES, *bytes_to_unicode().values()]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], additional_special_tokens=list(ROLES), **ENDS)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


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


def smoke_text(
    row: Callable[[int, str], dict[str, Any]], *flags: str, model: Callable[[Path, int], None] = write_language_model
) -> Smoke:
    """Return the inputs of a method on texts: its rows, a model, and a second one for a teacher."""

    def make(folder: Path) -> None:
        model(folder / MODEL, 0)
        model(folder / "teacher", 1)
        write_rows(folder / DATA, [row(index, text) for index, text in enumerate(sentences())])

    return Smoke(make, ("--model", f"{{}}/{MODEL}", "--dataset", f"{{}}/{DATA}", "--max-length", "128", *SHORT, *flags))
