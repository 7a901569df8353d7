# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.13,<2.16",  # tensors, GPU support
#   "torchvision>=0.28,<0.31",  # imported by vision models; each version requires one version of torch
#   "transformers>=5.23,<6",  # model, processor and Trainer
#   "datasets>=5.2,<6",  # reads Hub datasets, folders and parquet
#   "accelerate>=1.15,<2",  # required by the Trainer; multi-GPU training
#   "timm>=1.0.20,<2",  # backbones; transformers imports it when needed
#   "albumentations>=2.0.8,<2.1",  # augments pictures together with their boxes
#   "numpy>=2,<3",  # pictures as arrays
#   "pillow>=11,<14",  # reads pictures
#   "safetensors>=0.5,<1",  # the format of the weights
#   "huggingface_hub>=2.4,<3",  # upload to the Hub
#   "PyYAML>=6.0.2,<7",  # reads settings from a file
#   "tensorboard>=2.20,<3",  # writes training curves to a folder
#   "trackio>=0.20,<1",  # shows training curves in a browser
# ]
# ///
"""Fine-tune an image-classification model.

Rows: `image` (pictures, or paths relative to the folder of the file) + `label` (numbers or names). A folder with one
subfolder for each class also works.

    uv run image_classification.py --model google/vit-base-patch16-224 --dataset pictures --epochs 3

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
from gputrain.pictures import (
    Epoch,
    Pictures,
    PictureSettings,
    augmentation,
    check_pictures,
    class_names,
    load_head,
    load_processor,
    need_rows,
    with_pictures,
)
from gputrain.rows import Data, load
from gputrain.settings import option
from gputrain.smoke import smoke_pictures, write_classifier
from gputrain.training import arguments, run

# Sets of columns that the method can read.
WANTED = (("image", "label"),)


@dataclass
class ClassificationSettings(PictureSettings):
    """Image classification."""

    objective: str = option("eval_accuracy", "metric for ranking checkpoints, also written to result.json")
    greater_is_better: bool = option(True, "a higher objective is better")


def accuracy(prediction: Any) -> dict[str, float]:
    """Return the accuracy, and the mean of the per-class accuracies."""
    import numpy as np

    predicted, true = prediction.predictions.argmax(-1), prediction.label_ids
    shares = [float((predicted[true == c] == c).mean()) for c in np.unique(true)]
    return {"accuracy": float((predicted == true).mean()), "balanced_accuracy": float(np.mean(shares))}


def read(settings: ClassificationSettings) -> Data:
    """Read the rows. For another format, pass `convert` to `load`: it returns one row with the columns of WANTED."""
    return load(settings, WANTED, (), check_pictures)


def build(settings: ClassificationSettings, plan: Plan, data: Data) -> Any:
    """Return the trainer."""
    need_rows(data, settings.batch_size)
    train = with_pictures(data.train, settings.dataset)
    held_out = with_pictures(data.held_out, settings.eval_dataset or settings.dataset) if data.held_out else None
    values = [*train["label"], *(held_out["label"] if held_out else [])]
    names = class_names(settings, train.features["label"], values, settings.dataset)
    processor = load_processor(settings)
    import numpy as np
    import torch
    from transformers import AutoModelForImageClassification, Trainer, TrainingArguments

    def read(row: dict[str, Any], augment: Any | None, index: int) -> dict[str, Any]:
        picture = np.array(row["image"].convert("RGB"))
        if augment is not None:
            picture = augment(image=picture)["image"]
        label = names.index(row["label"]) if isinstance(row["label"], str) else row["label"]
        return {"pixel_values": processor(picture, return_tensors="pt")["pixel_values"][0], "labels": label}

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        labels = torch.tensor([row["labels"] for row in rows])
        return {"pixel_values": torch.stack([row["pixel_values"] for row in rows]), "labels": labels}

    epoch = Epoch()
    return Trainer(
        model=load_head(settings, AutoModelForImageClassification, names),
        args=TrainingArguments(**arguments(settings, plan, data), remove_unused_columns=False),
        data_collator=collate,
        train_dataset=Pictures(train, read, augmentation(settings), epoch, settings.seed),
        eval_dataset=Pictures(held_out, read, None, epoch, settings.seed) if held_out else None,
        processing_class=processor,
        compute_metrics=accuracy,
        callbacks=[epoch],
    )


def example(picture: str, color: str, box: list[int]) -> dict[str, Any]:
    """Return a row for a smoke run, in the format that `read` expects."""
    return {"image": picture, "label": color}


if __name__ == "__main__":
    sys.exit(
        run(
            ClassificationSettings,
            "image_classification",
            read,
            build,
            smoke_pictures(example, write_classifier),
        )
    )
