# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.13,<2.16",  # tensors, GPU support
#   "torchvision>=0.28,<0.31",  # imported by vision models; each version requires one version of torch
#   "transformers>=5.23,<6",  # model, processor and Trainer
#   "datasets>=5.2,<6",  # reads Hub datasets, folders and parquet
#   "accelerate>=1.15,<2",  # required by the Trainer; multi-GPU training
#   "timm>=1.0.20,<2",  # backbones; transformers imports it when needed
#   "albumentations>=2.0.8,<2.1",  # augmentation of pictures together with their boxes
#   "safetensors>=0.5,<1",  # the format of the weights
#   "huggingface_hub>=2.4,<3",  # upload to the Hub
#   "PyYAML>=6.0.2,<7",  # reads settings from a file
#   "tensorboard>=2.20,<3",  # training curves in a folder
#   "trackio>=0.20,<1",  # training curves in a browser
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

Exit codes: 0 done, 2 invalid settings, 3 invalid data, 4 out of memory, 5 diverged, 6 machine or access problem,
7 push failed, 75 interrupted (the same command resumes the run). `--help` lists the settings. Each setting is also a
key of `--config FILE` and an environment variable TRAIN_NAME.
"""

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gputrain.hardware import Plan
from gputrain.outcome import Exit, Stop
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
from gputrain.smoke_pictures import SHAPE, SIDE, smoke_pictures
from gputrain.training import arguments, run

WANTED = (("image", "objects"),)
SLACK = 1.0
MOST = 100


@dataclass
class DetectionSettings(PictureSettings):
    """Object detection."""

    objective: str = option("eval_map", "metric for ranking checkpoints, also written to result.json")
    greater_is_better: bool = option(True, "a higher objective is better")
    boxes: str = option("refuse", "boxes that extend beyond their picture", choices=("refuse", "clip"))


def categories(rows: Any) -> list[Any]:
    """Return the category of every object. The field is named `category` or `categories`."""
    first = rows[0]["objects"]
    name = "category" if "category" in first else "categories" if "categories" in first else ""
    if "bbox" not in first or not name:
        message = f"objects has the fields {', '.join(first)}; bbox and category are needed"
        raise Stop(Exit.DATA, message, "rename them before training")
    return [value for objects in rows["objects"] for value in objects[name]]


def check_boxes(settings: DetectionSettings, rows: Any, source: str) -> None:
    """Raise Stop at the first box that is empty or extends beyond its picture."""
    for index in range(min(len(rows), 500)):
        row = rows[index]
        width, height = row["image"].size
        for box in row["objects"]["bbox"]:
            if len(box) != 4:
                message = f"{source}, row {index + 1}: the box {box} does not have four numbers"
                raise Stop(Exit.DATA, message, "correct the box: x, y, width, height in pixels")
            x, y, w, h = box
            if w <= 0 or h <= 0:
                raise Stop(Exit.DATA, f"{source}, row {index + 1}: the box {[x, y, w, h]} is empty", "remove it")
            outside = x < -SLACK or y < -SLACK or x + w > width + SLACK or y + h > height + SLACK
            if outside and settings.boxes == "refuse":
                message = f"{source}, row {index + 1}: the box {[x, y, w, h]} exceeds the picture of {width} x {height}"
                raise Stop(Exit.DATA, message, "correct the box (x, y, width, height), or pass --boxes clip")


def precision(truth: list[dict[str, Any]], found: list[dict[str, Any]], names: list[str]) -> dict[str, float]:
    """Return COCO's mean average precision and recall.

    `truth` and `found` contain an entry for each object: image_id, category_id, bbox and, in `found`, a score.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    images = sorted({t["image_id"] for t in truth} | {f["image_id"] for f in found})
    known = COCO()
    known.dataset = {
        "info": {},
        "images": [{"id": i} for i in images],
        "categories": [{"id": n, "name": name} for n, name in enumerate(names)],
        "annotations": [
            t | {"id": n + 1, "iscrowd": 0, "area": t["bbox"][2] * t["bbox"][3]} for n, t in enumerate(truth)
        ],
    }
    if not found or not truth:
        return {"map": 0.0, "map_50": 0.0, "mar_100": 0.0}
    with contextlib.redirect_stdout(io.StringIO()):
        known.createIndex()
        judge = COCOeval(known, known.loadRes(found), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return {"map": float(judge.stats[0]), "map_50": float(judge.stats[1]), "mar_100": float(judge.stats[8])}


def objects_of(logits: Any, boxes: Any, sizes: list[tuple[int, int]], first: int) -> list[dict[str, Any]]:
    """Return the objects that a model found in the pictures of a batch: at most 100 per picture, the best first.

    logits: (pictures, queries, classes or classes + 1). boxes: center x, center y, width and height, relative to the
    picture's size.
    """
    found = []
    for number, (scores, shares, (height, width)) in enumerate(zip(logits, boxes, sizes, strict=True)):
        best = sorted(((float(s), q, c) for q, row in enumerate(scores) for c, s in enumerate(row)), reverse=True)
        for score, query, kind in best[:MOST]:
            x, y, w, h = (float(v) for v in shares[query])
            box = [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height]
            found.append({"image_id": first + number, "category_id": kind, "bbox": box, "score": score})
    return found


def judge(
    prediction: Any, truth: list[dict[str, Any]], sizes: list[tuple[int, int]], names: list[str]
) -> dict[str, float]:
    """Return the precision of an evaluation. Its batches are in the order of the rows.

    The labels in `prediction` are not used, because accelerate truncates their tensors to the size of the last batch if
    that batch is smaller.
    """
    import torch

    found: list[dict[str, Any]] = []
    first = 0
    for logits, boxes in prediction.predictions:
        values = torch.tensor(logits)
        with_nothing = values.shape[-1] == len(names) + 1
        scores = values.softmax(-1)[..., :-1] if with_nothing else values.sigmoid()
        found += objects_of(scores.numpy(), boxes, sizes[first : first + len(boxes)], first)
        first += len(boxes)
    return precision(truth, found, names)


def true_objects(rows: Any, names: list[str], field: str) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """Return every object in the rows, and the height and width of each picture."""
    truth, sizes = [], []
    for number, row in enumerate(rows):
        width, height = row["image"].size
        sizes.append((height, width))
        for (x, y, w, h), kind in zip(row["objects"]["bbox"], row["objects"][field], strict=True):
            left, top = max(0, x), max(0, y)
            box = [left, top, min(width, x + w) - left, min(height, y + h) - top]
            number_of = names.index(kind) if isinstance(kind, str) else kind
            truth.append({"image_id": number, "category_id": number_of, "bbox": box})
    return truth, sizes


def outputs(values: Any, labels: Any) -> Any:
    """Return the logits and the boxes from the outputs of a detection model."""
    tensors = [v for v in values if getattr(v, "ndim", 0) == 3]
    boxes = next(n for n, v in enumerate(tensors) if v.shape[-1] == 4 and n)
    return tensors[boxes - 1], tensors[boxes]


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
    check_boxes(settings, train, settings.dataset)
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


def write_model(folder: Path) -> None:
    """Save a random model with its processor, for a smoke run."""
    import torch
    from transformers import YolosConfig, YolosForObjectDetection, YolosImageProcessorPil

    torch.manual_seed(0)
    YolosForObjectDetection(
        YolosConfig(image_size=[SIDE, SIDE], num_detection_tokens=6, patch_size=8, **SHAPE)
    ).save_pretrained(folder)
    YolosImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_pad=False).save_pretrained(folder)


def example(picture: str, color: str, box: list[int]) -> dict[str, Any]:
    """Return a row for a smoke run."""
    return {"image": picture, "objects": {"bbox": [box], "category": [color]}}


if __name__ == "__main__":
    sys.exit(
        run(
            DetectionSettings,
            "object_detection",
            lambda s: load(s, WANTED, (), check_pictures),
            build,
            smoke_pictures(example, write_model),
        )
    )
