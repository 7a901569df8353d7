"""Smoke runs: test the script and the machine with a tiny random model and made-up rows, without downloads."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gputrain.folder import put_in_place
from gputrain.outcome import Exit, Stop, say
from gputrain.settings import convert, values_given

ROWS = 48
NOUNS = ("cat", "dog", "tree", "sun", "one", "two", "three", "four", "five", "six")
WORDS = ("how", "much", "is", "plus", "times", "red", "green", "blue", "the", "of", "a", "and", "what", *NOUNS)
# A run with two checkpoints, which takes seconds on a CPU.
SHORT = ("--steps", "8", "--save-steps", "4", "--batch-size", "4", "--micro-batch", "2", "--logging-steps", "1")
MODEL, DATA = "model", "data.jsonl"
# Settings for other inputs and for the push. A smoke run overrides them, because it downloads and uploads nothing.
LEFT_OUT = {
    "dataset_config": "", "split": "train", "eval_dataset": "", "eval_split": "", "columns": "",
    "chat_template_from": "", "hub_model_id": "",
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ENDS = {"pad_token": "<|pad|>", "eos_token": "<|end|>", "unk_token": None}
ROLES = ("<|user|>", "<|assistant|>", "<|system|>")
SIDE = 32
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


@dataclass(frozen=True)
class Smoke:
    """Inputs for `--smoke`. `make` writes them into a folder; in `flags`, `{}` stands for that folder."""

    make: Callable[[Path], None]
    flags: tuple[str, ...]
    trains: bool = True


def sentences() -> list[str]:
    """Return short, distinct texts."""
    size = len(WORDS)
    return [" ".join(WORDS[(i * 7 + j * (i % 5 + 1)) % size] for j in range(3 + i % 4)) for i in range(ROWS)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def with_inputs(kind: type, words: list[str], smoke: Smoke) -> list[str]:
    """Write a smoke run's inputs and return its command line; return any other command line unchanged.

    The flags for these inputs come last and override earlier ones, so `--smoke` can be added to a complete command.
    """
    values = values_given(kind, words)
    if not convert("smoke", bool, values.get("smoke", False)):
        return words
    out = str(values.get("out", "smoke"))
    inputs = Path(out) / "inputs"
    try:
        write_inputs(inputs, smoke)
    except OSError as error:
        message = f"the smoke run's inputs can't be written to {inputs}: {error.strerror}"
        raise Stop(Exit.ENVIRONMENT, message, "choose another --out, or move that folder away") from None
    made = {f: v.format(inputs) for f, v in zip(smoke.flags, smoke.flags[1:], strict=False) if "{}" in v}
    fixed = made | {f"--{n.replace('_', '-')}": v for n, v in LEFT_OUT.items() if n in kind.__dataclass_fields__}
    unused = [n for n, v in values.items() if f"--{n.replace('_', '-')}" in fixed and v != LEFT_OUT.get(n)]
    say(f"smoke run on made-up inputs in {inputs}" + (f"; not used: {', '.join(sorted(unused))}" if unused else ""))
    last = [word for pair in fixed.items() for word in pair]
    return ["--out", out, *(["--cpu"] if smoke.trains and not has_gpu() else []), *smoke.flags, *words, *last]


def has_gpu() -> bool:
    """Return whether PyTorch finds a GPU."""
    import torch

    return torch.cuda.is_available()


def write_inputs(inputs: Path, smoke: Smoke) -> None:
    """Write a smoke run's inputs into a folder, unless an earlier run has written them."""
    if inputs.exists():
        return
    making = inputs.with_name(f".{inputs.name}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    smoke.make(making)
    put_in_place(making, inputs)


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
    """Return the smoke-run inputs for a text method: its rows, a model, and a second model as the teacher."""

    def make(folder: Path) -> None:
        model(folder / MODEL, 0)
        model(folder / "teacher", 1)
        write_rows(folder / DATA, [row(index, text) for index, text in enumerate(sentences())])

    return Smoke(make, ("--model", f"{{}}/{MODEL}", "--dataset", f"{{}}/{DATA}", "--max-length", "128", *SHORT, *flags))


def turn(role: str, content: str) -> list[dict[str, str]]:
    """Return a list with one message."""
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


def write_adapter(folder: Path) -> None:
    """Save a random model and an adapter for it, each with the tokenizer."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_language_model(folder / MODEL, hidden=256)
    adapter = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / MODEL), LoraConfig(task_type="CAUSAL_LM"))
    adapter.save_pretrained(folder / "adapter")
    AutoTokenizer.from_pretrained(folder / MODEL).save_pretrained(folder / "adapter")


def write_encoder(folder: Path, seed: int) -> None:
    """Save a random BERT with its tokenizer."""
    import torch
    from transformers import BertConfig, BertModel

    write_tokenizer(folder)
    torch.manual_seed(seed)
    BertModel(BertConfig(vocab_size=512, max_position_embeddings=128, pad_token_id=0, **SHAPE)).save_pretrained(folder)


def write_classifier(folder: Path) -> None:
    """Save a random ViT with its processor."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=SIDE, patch_size=8, **SHAPE)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)


def write_detector(folder: Path) -> None:
    """Save a random YOLOS with its processor."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.YolosConfig(image_size=[SIDE, SIDE], num_detection_tokens=6, patch_size=8, **SHAPE)
    transformers.YolosForObjectDetection(config).save_pretrained(folder)
    transformers.YolosImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_pad=False).save_pretrained(folder)


def smoke_text(row: Callable[[int, str], dict[str, Any]], *flags: str) -> Smoke:
    """Return the smoke-run inputs for a method that trains a language model."""
    return smoke_rows(row, write_language_model, *flags)


def write_pictures(folder: Path) -> list[tuple[str, str, list[int]]]:
    """Save pictures; return the name, the class and the box (x, y, width, height in pixels) of each."""
    import PIL.Image

    folder.mkdir()
    made = []
    for index in range(24):
        x, y, side = 2 + index % 9, 3 + index % 7, 8 + index % 5
        picture = PIL.Image.new("RGB", (SIDE, SIDE), (20, 20, 90))
        color = "green" if index % 2 else "red"
        picture.paste((0, 128, 0) if index % 2 else (255, 0, 0), (x, y, x + side, y + side))
        picture.save(folder / f"{index}.png")
        made.append((f"{folder.name}/{index}.png", color, [x, y, side, side]))
    return made


def smoke_pictures(row: Callable[[str, str, list[int]], dict[str, Any]], model: Callable[[Path], None]) -> Smoke:
    """Return the smoke-run inputs for a method that uses pictures: its rows and a model."""

    def make(folder: Path) -> None:
        model(folder / MODEL)
        write_rows(folder / DATA, [row(*picture) for picture in write_pictures(folder / "pictures")])

    flags = ("--model", f"{{}}/{MODEL}", "--dataset", f"{{}}/{DATA}", "--eval-fraction", "0.2", *SHORT)
    return Smoke(make, flags)
