# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "transformers>=5.2",
#   "datasets>=4.7",
#   "accelerate>=1.10",
#   "evaluate>=0.4",
#   "scikit-learn>=1.5",
#   "numpy>=2",
# ]
# ///
import numpy as np
import evaluate
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

MODEL = "google-bert/bert-base-uncased"
raw = load_dataset("stanfordnlp/imdb", split="train").train_test_split(0.1)
tok = AutoTokenizer.from_pretrained(MODEL)


def encode(batch):
    return tok(batch["review"], truncation=True, max_length=256)


data = raw.map(encode, batched=True)
accuracy = evaluate.load("accuracy")


def metrics(pred):
    logits, labels = pred
    return accuracy.compute(predictions=np.argmax(logits, axis=-1), references=labels)


model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=2)
args = TrainingArguments(
    output_dir="out",
    eval_strategy="epoch",
    save_strategy="epoch",
    per_device_train_batch_size=16,
    num_train_epochs=2,
    load_best_model_at_end=True,
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=tok,
    data_collator=DataCollatorWithPadding(tok),
    compute_metrics=metrics,
)
trainer.train()
trainer.save_model("out/final")
