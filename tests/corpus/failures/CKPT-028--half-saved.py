from _model import *
from pathlib import Path

half = Path("o/checkpoint-2")
half.mkdir(parents=True)
model.save_pretrained(half)
Trainer(
    model=model,
    args=TrainingArguments("o", use_cpu=True, report_to="none", max_steps=4),
    train_dataset=Dataset.from_dict({"input_ids": [[1, 2]] * 8, "labels": [[1, 2]] * 8}),
).train(resume_from_checkpoint=str(half))
