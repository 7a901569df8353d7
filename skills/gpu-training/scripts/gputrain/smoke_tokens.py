"""Inputs for a smoke run on text: rows and a byte tokenizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gputrain.smoke import DATA, MODEL, SHORT, Smoke, sentences, write_rows

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ENDS = {"pad_token": "<|pad|>", "eos_token": "<|end|>", "unk_token": None}
ROLES = ("<|user|>", "<|assistant|>", "<|system|>")


def write_tokenizer(folder: Path) -> None:
    """Save a tokenizer whose tokens are bytes."""
    from transformers import Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = ["<|pad|>", "<|end|>", *ROLES, *bytes_to_unicode().values()]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], additional_special_tokens=list(ROLES), **ENDS)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def smoke_rows(row: Callable[[int, str], dict[str, Any]], model: Callable[[Path, int], None], *flags: str) -> Smoke:
    """Return the inputs for a text method: its rows, a model, and a second model as the teacher."""

    def make(folder: Path) -> None:
        model(folder / MODEL, 0)
        model(folder / "teacher", 1)
        write_rows(folder / DATA, [row(index, text) for index, text in enumerate(sentences())])

    return Smoke(make, ("--model", f"{{}}/{MODEL}", "--dataset", f"{{}}/{DATA}", "--max-length", "128", *SHORT, *flags))
