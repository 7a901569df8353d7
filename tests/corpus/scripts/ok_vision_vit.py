# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "transformers>=5.2",
#   "accelerate>=1.10",
#   "datasets>=4.7",
#   "torchvision>=0.20",
#   "pillow>=11",
#   "torch>=2.8",
# ]
# ///
import torch
from datasets import load_dataset
from torchvision.transforms import Compose, Normalize, RandomResizedCrop, ToTensor
from transformers import AutoImageProcessor, AutoModelForImageClassification, Trainer, TrainingArguments

checkpoint = "google/vit-base-patch16-224"
food = load_dataset("ethz/food101", split="train[:5000]").train_test_split(test_size=0.2)
proc = AutoImageProcessor.from_pretrained(checkpoint)
tf = Compose([RandomResizedCrop(224), ToTensor(), Normalize(proc.image_mean, proc.image_std)])


def transforms(examples):
    examples["pixel_values"] = [tf(img.convert("RGB")) for img in examples["image"]]
    del examples["image"]
    return examples


food = food.with_transform(transforms)


def collate(rows):
    return {
        "pixel_values": torch.stack([r["pixel_values"] for r in rows]),
        "labels": torch.tensor([r["label"] for r in rows]),
    }


model = AutoModelForImageClassification.from_pretrained(checkpoint, num_labels=101, ignore_mismatched_sizes=True)
args = TrainingArguments(
    output_dir="out",
    remove_unused_columns=False,
    eval_strategy="epoch",
    save_strategy="epoch",
    learning_rate=5e-5,
    per_device_train_batch_size=32,
    num_train_epochs=3,
    dataloader_num_workers=2,
)
trainer = Trainer(model=model, args=args, data_collator=collate, train_dataset=food["train"], eval_dataset=food["test"])
trainer.train()
trainer.save_model()
