# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.13,<2.16",  # tensors, GPU support
#   "sentence-transformers>=6.2,<7",  # training method
#   "transformers>=5.23,<6",  # model, tokenizer and Trainer
#   "datasets>=5.2,<6",  # reads jsonl, csv, parquet and Hub datasets
#   "accelerate>=1.15,<2",  # required by the Trainer; multi-GPU training
#   "safetensors>=0.5,<1",  # the format of the weights
#   "huggingface_hub>=2.4,<3",  # upload to the Hub
#   "PyYAML>=6.0.2,<7",  # reads settings from a file
#   "sentencepiece>=0.2,<1",  # tokenizers of T5 and XLM-R; transformers imports it when needed
#   "protobuf>=5,<8",  # needed by the same tokenizers
#   "tensorboard>=2.20,<3",  # writes training curves to a folder
#   "trackio>=0.20,<1",  # shows training curves in a browser
# ]
# ///
"""Fine-tune a sentence-embedding model for search and comparison.

Rows: `anchor` + `positive`, with or without `negative`; or `sentence1` + `sentence2` + `score` (from 0 to 1). With
pairs, the other rows of the micro-batch serve as negatives, so a larger micro_batch improves training.

    uv run sentence_embedding.py --model sentence-transformers/all-MiniLM-L6-v2 --dataset pairs.jsonl --steps 500

The folder `gputrain` next to this script has the code that all trainers share.

Exit codes: 0 done, 2 invalid settings, 3 invalid data, 4 out of memory, 5 diverged, 6 machine or access problem, 7 push
failed, 75 interrupted (the same command resumes the run). `--help` lists the settings. Each setting is also a key of
`--config FILE` and an environment variable TRAIN_NAME. In this file, `option` defines a setting's default, help text
and allowed values.
"""

import sys
from dataclasses import dataclass
from typing import Any

from gputrain.hardware import Plan
from gputrain.outcome import Exit, Stop, say, why_not_loaded
from gputrain.rows import Data, load, sample
from gputrain.settings import Settings, option
from gputrain.smoke import smoke_rows, write_encoder
from gputrain.training import arguments, run

# Sets of columns that the method can read.
WANTED = (("anchor", "positive", "negative"), ("anchor", "positive"), ("sentence1", "sentence2", "score"))


@dataclass
class EmbeddingSettings(Settings):
    """Training of sentence embeddings."""

    learning_rate: float = option(2e-5, "peak learning rate", least=0, most=1)
    batch_size: int = option(64, "effective batch: rows per optimizer step over all GPUs", least=1)
    micro_batch: int = option(64, "rows on one GPU at a time; 0: depends on the GPU's memory", least=0)
    max_length: int = option(256, "maximum tokens per text", least=8)
    too_long: str = option("refuse", "treatment of texts longer than max_length", choices=("refuse", "truncate"))


def check(rows: Any, source: str, names: set[str]) -> None:
    """Raise Stop at the first sampled row with an empty value, a value that isn't text, or a score outside 0 to 1."""
    for index in sample(rows):
        for name in names:
            value = rows[index][name]
            right = (
                isinstance(value, (int, float)) and 0 <= value <= 1
                if name == "score"
                else bool(value) and isinstance(value, str)
            )
            if not right:
                wanted = "a number from 0 to 1" if name == "score" else "text"
                problem = "empty" if value in (None, "") else f"{str(value)[:60]!r} is not {wanted}"
                message = f"{source}, row {index + 1}, column {name}: {problem}"
                raise Stop(Exit.DATA, message, "correct or remove such rows")


def check_lengths(settings: EmbeddingSettings, tokenizer: Any, data: Data) -> None:
    """Raise Stop if a text is longer than max_length, unless too_long is truncate."""
    names = [n for n in data.train.column_names if n != "score"]
    rows = [data.train[i] for i in sample(data.train)]
    most = max(len(tokenizer(row[name])["input_ids"]) for row in rows for name in names)
    say(f"lengths: {most} tokens at most among {len(rows)} rows")
    if most > settings.max_length and settings.too_long == "refuse":
        message = f"a text has {most} tokens, but max_length is {settings.max_length}"
        raise Stop(Exit.DATA, message, f"pass --max-length {most}, or --too-long truncate")


def read(settings: EmbeddingSettings) -> Data:
    """Read the rows. For another format, pass `convert` to `load`: it returns one row with the columns of WANTED."""
    return load(settings, WANTED, (), check)


def build(settings: EmbeddingSettings, plan: Plan, data: Data) -> Any:
    """Return the trainer."""
    scored = "score" in data.train.column_names
    if plan.micro < 2 and not scored:
        raise Stop(Exit.CONFIG, "pairs are compared within micro_batch, which is 1", "pass --micro-batch 2 or more")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.model, revision=settings.revision)
        if tokenizer.pad_token is None:
            fix = "use a model that has one, or set pad_token in its tokenizer_config.json"
            raise Stop(Exit.DATA, f"the tokenizer of {settings.model} has no padding token", fix)
        check_lengths(settings, tokenizer, data)
        from sentence_transformers import (
            SentenceTransformer,
            SentenceTransformerTrainer,
            SentenceTransformerTrainingArguments,
        )
        from sentence_transformers.sentence_transformer.losses import CoSENTLoss, MultipleNegativesRankingLoss

        device = "cuda" if plan.cuda else "cpu"
        model = SentenceTransformer(settings.model, revision=settings.revision, device=device)
    except Stop:
        raise
    except OSError as error:
        raise why_not_loaded(settings.model, error) from error
    model.max_seq_length = settings.max_length
    order = [n for group in WANTED for n in group if n in data.train.column_names]
    order = list(dict.fromkeys(order))
    return SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(**arguments(settings, plan, data)),
        train_dataset=data.train.select_columns(order),
        eval_dataset=data.held_out.select_columns(order) if data.held_out else None,
        loss=CoSENTLoss(model) if scored else MultipleNegativesRankingLoss(model),
    )


def example(index: int, text: str) -> dict[str, Any]:
    """Return a row for a smoke run, in the format that `read` expects."""
    return {"anchor": text, "positive": text[::2]}


if __name__ == "__main__":
    sys.exit(
        run(
            EmbeddingSettings,
            "sentence_embedding",
            read,
            build,
            smoke_rows(example, write_encoder),
        )
    )
