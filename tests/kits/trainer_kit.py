"""Valid inputs for the trainers: tiny random models, a tokenizer trained here, and small handwritten data."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from gpuwarden.data import data_dir
from gpuwarden.static_analysis.shipped_trainers import trainer
from paths import KITS

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NOUNS = ("cat", "dog", "tree", "sun", "answer", "one", "two", "three", "four", "five", "six")
WORDS = ("how", "much", "is", "plus", "times", "red", "green", "blue", "the", "of", "a", "and", "what", *NOUNS)
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def texts(count: int = 48) -> list[str]:
    """Return distinct sentences."""
    size = len(WORDS)
    return [" ".join(WORDS[(i * 7 + j * (i % 5 + 1)) % size] for j in range(6 + i % 5)) for i in range(count)]


def tokenizer(folder: Path, *, template: str | None = TEMPLATE, pad: str | None = "<|pad|>") -> None:
    """Train a byte-level tokenizer on the sentences and save it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts(200), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token=pad)
    fast.chat_template = template
    fast.save_pretrained(folder)


def language_model(folder: Path, *, hidden: int = 64, seed: int = 0, **more: Any) -> Path:
    """Save a random two-layer Qwen2 with its tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer(folder, **more)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=512, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
        bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def encoder(folder: Path, *, pad: str | None = "<|pad|>") -> Path:
    """Save a random two-layer BERT with its tokenizer."""
    import torch
    from transformers import BertConfig, BertModel

    tokenizer(folder, template=None, pad=pad)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=512, max_position_embeddings=128, pad_token_id=0, **shape)).save_pretrained(folder)
    return folder


def turn(role: str, content: str) -> dict[str, str]:
    """Return one message."""
    return {"role": role, "content": content}


def rows_of(method: str, count: int = 48) -> list[dict[str, Any]]:
    """Return rows in the format that a method reads."""
    made = []
    for index, text in enumerate(texts(count)):
        prompt, other = [turn("user", text)], [turn("assistant", text[:12] or "a")]
        answer = [turn("assistant", text[::-1])]
        made.append({
            "sft": {"messages": prompt + answer},
            "cpt": {"text": text},
            "dpo": {"prompt": prompt, "chosen": answer, "rejected": other},
            "orpo": {"prompt": prompt, "chosen": answer, "rejected": other},
            "reward": {"chosen": prompt + answer, "rejected": prompt + other},
            "kto": {"prompt": prompt, "completion": answer, "label": index % 2 == 0},
            "grpo": {"prompt": prompt, "answer": text[0]},
            "rloo": {"prompt": prompt, "answer": text[0]},
            "distill": {"prompt": prompt},
            "sentence_embedding": {"anchor": text, "positive": text[::2], "negative": texts(90)[-index - 1]},
        }[method])  # fmt: skip
    return made


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# -------------------------------------------------------------------------------------------------------- pictures

SIDE = 32


def picture_model(folder: Path, kind: str) -> Path:
    """Save a random ViT or YOLOS for images of 32 x 32 pixels, with its processor."""
    import torch
    import transformers as t

    torch.manual_seed(0)
    size = {"height": SIDE, "width": SIDE}
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    if kind == "image_classification":
        t.ViTForImageClassification(t.ViTConfig(image_size=SIDE, patch_size=8, **shape)).save_pretrained(folder)
        t.ViTImageProcessorPil(size=size).save_pretrained(folder)
    else:
        config = t.YolosConfig(image_size=[SIDE, SIDE], patch_size=8, num_detection_tokens=6, **shape)
        t.YolosForObjectDetection(config).save_pretrained(folder)
        t.YolosImageProcessorPil(size=size, do_pad=False).save_pretrained(folder)
    return folder


def pictures(folder: Path, count: int = 24) -> list[dict[str, Any]]:
    """Write images of one red or green square each; return rows with the square's class and box."""
    from PIL import Image, ImageDraw

    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(count):
        x, y, side = 2 + index % 9, 3 + index % 7, 8 + index % 5
        made = Image.new("RGB", (SIDE, SIDE), (20, 20, 90))
        color = "green" if index % 2 else "red"
        ImageDraw.Draw(made).rectangle((x, y, x + side, y + side), fill=color)
        made.save(folder / f"{index}.png")
        rows.append({"image": f"{folder.name}/{index}.png", "label": color, "box": [x, y, side, side]})
    return rows


def picture_rows(method: str, folder: Path) -> list[dict[str, Any]]:
    """Return rows in the format that an image method reads."""
    made = pictures(folder)
    if method == "image_classification":
        return [{"image": row["image"], "label": row["label"]} for row in made]
    return [{"image": r["image"], "objects": {"bbox": [r["box"]], "category": [r["label"]]}} for r in made]


# --------------------------------------------------------------------------------------------------------- running

SCRIPTS = data_dir("skills") / "gpu-training" / "scripts"
FAULTS = KITS / "trainer_faults.py"


def shipped(name: str) -> str:
    """Return a trainer's source as it is submitted."""
    return trainer(name).text


MORE = {
    "grpo": ["--reward", "answer", "--generations", "2", "--max-completion-length", "8"],
    "rloo": ["--reward", "answer", "--generations", "2", "--max-completion-length", "8"],
    "distill": ["--teacher", "teacher", "--max-completion-length", "8"],
}
PICTURES = ("image_classification", "object_detection")
NEEDS = {
    "image_classification": ("albumentations",),
    "object_detection": ("albumentations", "pycocotools", "scipy"),
    "sentence_embedding": ("sentence_transformers",),
}
TEXTS = ("sft", "cpt", "dpo", "orpo", "kto", "reward", "grpo", "rloo", "distill")
METHODS = (*TEXTS, *NEEDS)


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a run. A negative code is the signal that ended it."""

    code: int
    log: str


class Forking:
    """A process that has imported the libraries, and runs each job in a forked child."""

    def __init__(self, program: list[str], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
        )
        assert self._line() == "ready"

    def exit_code(self, job: dict[str, Any]) -> int:
        """Run a job to its end; return its exit code."""
        assert self.process.stdin is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return int(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        """End the process that forks."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class Trainers(Forking):
    """Trainer runs in one folder, forked from a process that has imported the libraries."""

    def __init__(self, folder: Path) -> None:
        self.home = self.folder = folder
        self.model = folder / "model"
        env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "hf"),
                            "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}  # fmt: skip
        for name in ("HF_TOKEN", "GPUWARDEN_METRICS"):
            env.pop(name, None)
        super().__init__([sys.executable, str(KITS / "trainer_zygote.py")], env)
        language_model(self.model)
        language_model(folder / "teacher", seed=1)

    def at(self, folder: Path) -> Trainers:
        """Switch to another folder: each attempt of a test has a separate one."""
        self.folder = folder
        (folder / "teacher").symlink_to(self.home / "teacher")
        return self

    def data(self, method: str, rows: list[dict[str, Any]] | None = None) -> Path:
        """Return a file with rows for a method."""
        number = next(_NUMBERS)
        if rows is None:
            rows = picture_rows(method, self.folder / f"pictures-{number}") if method in PICTURES else rows_of(method)
        return jsonl(self.folder / f"data-{number}.jsonl", rows)

    def run(self, method: str, out: str, *words: str, fault: str = "", step: int = 0, **env: str) -> Ended:
        """Run one trainer to its end."""
        log = self.folder / f"log-{next(_NUMBERS)}.txt"
        flags = [*words]
        if fault:
            flags += ["--callback", f"{FAULTS}:{fault}"]
            env["FAULT_STEP"] = str(step)
        argv = [str(SCRIPTS / f"{method}.py"), *flags, "--out", out]
        job = {"argv": argv, "cwd": str(self.folder), "env": env, "log": str(log)}
        return Ended(self.exit_code(job), log.read_text())

    def small(self, method: str, data: Path, steps: int = 8, every: int = 2) -> list[str]:
        """Return the arguments for a run that takes seconds."""
        words = f"--steps {steps} --save-steps {every} --batch-size 4 --micro-batch 2 --logging-steps 1".split()
        words += ["--eval-fraction", "0.2"] if method in PICTURES else ["--max-length", "128"]
        return ["--model", str(self.model_of(method)), "--dataset", str(data), "--cpu", *words, *MORE.get(method, [])]

    def model_of(self, method: str) -> Path:
        """Return a tiny model for a method, created on first use."""
        if method in TEXTS:
            return self.model
        folder = self.home / f"model-{method}"
        if not folder.exists():
            picture_model(folder, method) if method in PICTURES else encoder(folder)
        return folder


def refused(ended: Ended, code: int, *words: str) -> None:
    """Check that a run ended with one ERROR line and one FIX line."""
    assert ended.code == code, ended.log
    [error] = [line for line in ended.log.splitlines() if line.startswith("ERROR")]
    [fix] = [line for line in ended.log.splitlines() if line.startswith("FIX")]
    for word in words:
        assert word in error + fix, error + fix
    assert "Traceback" not in ended.log


_NUMBERS = count()
_EXACT = ("loss", "grad_norm", "learning_rate", "eval_loss")


def curve(out: Path) -> list[tuple[int, str, float]]:
    """Return the exact values of every step, from the newest checkpoint's state."""
    newest = max(out.glob("checkpoint-*"), key=lambda p: int(p.name[11:]))
    log = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [(entry["step"], name, entry[name]) for entry in log for name in _EXACT if name in entry and entry["step"]]


def weights(folder: Path) -> dict[str, str]:
    """Return the digest of each weights file."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("*.safetensors"))}
