# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "transformers>=5.23",
#   "accelerate>=1.15",
#   "datasets>=5",
#   "torch>=2.13",
#   "pillow>=11",
#   "albumentations>=2.0.8",
#   "numpy>=2",
# ]
# ///
import albumentations
import numpy as np
import torch
from datasets import load_dataset
from transformers import AutoImageProcessor, AutoModelForImageClassification, Trainer, TrainingArguments

MODEL = "lab/tiny-vit"
dataset = load_dataset("lab/pictures", split="train")
labels = dataset.features["label"].names

processor = AutoImageProcessor.from_pretrained(MODEL, backend="pil")
model = AutoModelForImageClassification.from_pretrained(
    MODEL, num_labels=len(labels), id2label=dict(enumerate(labels)), ignore_mismatched_sizes=True
)
augment = albumentations.Compose([albumentations.HorizontalFlip(p=0.5)])


def transform(batch):
    images = [augment(image=np.array(image.convert("RGB")))["image"] for image in batch["image"]]
    inputs = processor(images, return_tensors="pt")
    inputs["labels"] = batch["label"]
    return inputs


def collate(examples):
    return {
        "pixel_values": torch.stack([example["pixel_values"] for example in examples]),
        "labels": torch.tensor([example["labels"] for example in examples]),
    }


trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out",
        push_to_hub=True,
        hub_model_id="rehearsal/TARGET",
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=5e-5,
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
        remove_unused_columns=False,
        report_to="none",
        use_cpu=True,
    ),
    data_collator=collate,
    train_dataset=dataset.with_transform(transform),
)
trainer.train()
trainer.push_to_hub()
