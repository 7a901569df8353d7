# /// script
# dependencies = ["transformers>=5", "datasets", "accelerate", "numpy"]
# ///
import argparse

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="google-bert/bert-base-uncased")
parser.add_argument("--learning-rate", type=float, default=5e-5)
given = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(given.model)
model = AutoModelForSequenceClassification.from_pretrained(given.model, num_labels=2)
data = load_dataset("nyu-mll/glue", "mrpc")


def encoded(rows):
    return tokenizer(rows["sentence1"], rows["sentence2"], truncation=True, max_length=128)


data = data.map(encoded, batched=True)


def measured(found):
    return {"accuracy": float((np.argmax(found.predictions, axis=-1) == found.label_ids).mean())}


settings = TrainingArguments(
    output_dir="out",
    learning_rate=given.learning_rate,
    per_device_train_batch_size=16,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    fp16=True,
)
trainer = Trainer(
    model=model,
    args=settings,
    train_dataset=data["train"],
    eval_dataset=data["validation"],
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=measured,
)
trainer.train()
trainer.save_model("out/best")
