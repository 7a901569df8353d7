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
#   "safetensors>=0.5,<1",  # the format of the weights
#   "huggingface_hub>=2.4,<3",  # upload to the Hub
#   "PyYAML>=6.0.2,<7",  # reads settings from a file
#   "tensorboard>=2.20,<3",  # writes training curves to a folder
#   "trackio>=0.20,<1",  # shows training curves in a browser
#   "pillow>=11,<14",  # reads pictures
#   "pycocotools>=2.0.10,<3",  # computes mean average precision
#   "scipy>=1.15,<2",  # matching in DETR models
#   "numpy>=2,<3",  # boxes
# ]
# ///
"""Fine-tune an object-detection model.

Rows: `image` + `objects` with `bbox` (x, y, width, height in pixels) and `category` (numbers or names). A COCO folder,
with pictures next to one *annotations*.json, also works. Mean average precision is computed with pycocotools.

    uv run object_detection.py --model PekingU/rtdetr_v2_r18vd --dataset pictures --epochs 10

The folder `gputrain` next to this script has the code that all trainers share.

Exit codes: 0 done, 2 invalid settings, 3 invalid data, 4 out of memory, 5 diverged, 6 machine or access problem, 7 push
failed, 75 interrupted (the same command resumes the run). `--help` lists the settings. Each setting is also a key of
`--config FILE` and an environment variable TRAIN_NAME. In this file, `option` defines a setting's default, help text
and allowed values.
"""

import sys
from dataclasses import dataclass
from typing import Any

from gputrain.boxes import categories, check_boxes, judge, outputs, true_objects
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
from gputrain.smoke import smoke_pictures, write_detector
from gputrain.training import arguments, run

# Sets of columns that the method can read.
WANTED = (("image", "objects"),)


@dataclass
class DetectionSettings(PictureSettings):
    """Object detection."""

    objective: str = option("eval_map", "metric for ranking checkpoints, also written to result.json")
    greater_is_better: bool = option(True, "a higher objective is better")
    boxes: str = option("refuse", "treatment of boxes that extend beyond their picture", choices=("refuse", "clip"))


def read(settings: DetectionSettings) -> Data:
    """Read the rows. For another format, pass `convert` to `load`: it returns one row with the columns of WANTED."""
    return load(settings, WANTED, (), check_pictures)


def build(settings: DetectionSettings, plan: Plan, data: Data) -> Any:
    """Return the trainer."""
    need_rows(data, settings.batch_size)
    train = with_pictures(data.train, settings.dataset)
    held_out = with_pictures(data.held_out, settings.eval_dataset or settings.dataset) if data.held_out else None
    values = categories(train) + (categories(held_out) if held_out else [])
    field = "category" if "category" in train[0]["objects"] else "categories"
    inner = train.features["objects"]
    feature = inner[field] if isinstance(inner, dict) else inner.feature[field]
    names = class_names(settings, getattr(feature, "feature", feature), values, settings.dataset)
    check_boxes(train, settings.dataset, clip=settings.boxes == "clip")
    processor = load_processor(settings)
    import albumentations
    import numpy as np
    import torch
    from transformers import AutoModelForObjectDetection, Trainer, TrainingArguments

    boxes = albumentations.BboxParams(format="coco", label_fields=["kinds"], clip=True, min_area=1)
    plain = albumentations.Compose([albumentations.NoOp()], bbox_params=boxes)

    def read(row: dict[str, Any], augment: Any | None, index: int) -> dict[str, Any]:
        kinds = [names.index(k) if isinstance(k, str) else k for k in row["objects"][field]]
        picture = np.array(row["image"].convert("RGB"))
        changed = (augment or plain)(image=picture, bboxes=row["objects"]["bbox"], kinds=kinds)
        found = [
            {"bbox": list(b), "category_id": int(k), "area": b[2] * b[3], "iscrowd": 0}
            for b, k in zip(changed["bboxes"], changed["kinds"], strict=True)
        ]
        made = processor(changed["image"], annotations={"image_id": index, "annotations": found}, return_tensors="pt")
        return {"pixel_values": made["pixel_values"][0], "labels": made["labels"][0]}

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        padded = processor.pad([row["pixel_values"] for row in rows], return_tensors="pt")
        return {**padded, "labels": [row["labels"] for row in rows]}

    def collate_same(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"pixel_values": torch.stack([r["pixel_values"] for r in rows]), "labels": [r["labels"] for r in rows]}

    truth, sizes = true_objects(held_out or [], names, field)
    epoch = Epoch()
    args = TrainingArguments(
        **arguments(settings, plan, data),
        remove_unused_columns=False,
        eval_do_concat_batches=False,
        label_names=["labels"],
    )
    return Trainer(
        model=load_head(settings, AutoModelForObjectDetection, names),
        args=args,
        data_collator=collate if getattr(processor, "do_pad", False) else collate_same,
        train_dataset=Pictures(train, read, augmentation(settings, boxes), epoch, settings.seed),
        eval_dataset=Pictures(held_out, read, None, epoch, settings.seed) if held_out else None,
        processing_class=processor,
        compute_metrics=lambda prediction: judge(prediction, truth, sizes, names),
        preprocess_logits_for_metrics=outputs,
        callbacks=[epoch],
    )


def example(picture: str, color: str, box: list[int]) -> dict[str, Any]:
    """Return a row for a smoke run, in the format that `read` expects."""
    return {"image": picture, "objects": {"bbox": [box], "category": [color]}}


if __name__ == "__main__":
    sys.exit(run(DetectionSettings, "object_detection", read, build, smoke_pictures(example, write_detector)))
