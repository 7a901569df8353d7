# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "transformers>=5.2",
#   "accelerate>=1.10",
#   "albumentations>=1.4.16",
#   "timm>=1.0",
#   "datasets>=4.7",
#   "torchmetrics>=1.6",
#   "scipy>=1.14",
#   "pillow>=11",
#   "trackio>=0.40",
#   "huggingface_hub>=2.0",
#   "numpy>=2",
#   "torch>=2.8",
# ]
# ///
import os

import albumentations as A
import numpy as np
from datasets import load_dataset
from huggingface_hub import login
from torchmetrics.detection.mean_ap import MeanAveragePrecision
from transformers import AutoImageProcessor, AutoModelForObjectDetection, Trainer, TrainingArguments

CHECKPOINT = "PekingU/rtdetr_v2_r18vd"
token = os.environ.get("HF_TOKEN")
if not token:
    raise SystemExit("HF_TOKEN is not set")
login(token=token)

data = load_dataset("rishitdagli/cppe-5", split="train").train_test_split(0.15, seed=1)
processor = AutoImageProcessor.from_pretrained(CHECKPOINT)
augment = A.Compose(
    [A.HorizontalFlip(p=0.5)], bbox_params=A.BboxParams(format="coco", label_fields=["category"], clip=True)
)
metric = MeanAveragePrecision(box_format="xyxy")


def transform(batch):
    images, targets = [], []
    for image, objects in zip(batch["image"], batch["objects"]):
        out = augment(image=np.array(image.convert("RGB")), bboxes=objects["bbox"], category=objects["category"])
        images.append(out["image"])
        targets.append(
            {
                "image_id": 0,
                "annotations": [
                    {"bbox": b, "category_id": c, "area": b[2] * b[3], "iscrowd": 0}
                    for b, c in zip(out["bboxes"], out["category"])
                ],
            }
        )
    return processor(images=images, annotations=targets, return_tensors="pt")


def collate(rows):
    import torch

    return {"pixel_values": torch.stack([r["pixel_values"] for r in rows]), "labels": [r["labels"] for r in rows]}


model = AutoModelForObjectDetection.from_pretrained(CHECKPOINT, ignore_mismatched_sizes=True, num_labels=5)
args = TrainingArguments(
    output_dir="out",
    num_train_epochs=30,
    per_device_train_batch_size=8,
    learning_rate=5e-5,
    eval_strategy="epoch",
    save_strategy="epoch",
    eval_do_concat_batches=False,
    remove_unused_columns=False,
    dataloader_num_workers=4,
    fp16=True,
    push_to_hub=True,
    hub_model_id="rehearsal/cppe-rtdetr",
    report_to="trackio",
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=data["train"].with_transform(transform),
    eval_dataset=data["test"].with_transform(transform),
    data_collator=collate,
    processing_class=processor,
)
trainer.train()
trainer.push_to_hub()
