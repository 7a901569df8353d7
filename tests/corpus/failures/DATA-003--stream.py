from _model import *

Trainer(
    model=model,
    args=TrainingArguments("o", use_cpu=True, report_to="none"),
    train_dataset=Dataset.from_dict({"input_ids": [[1, 2]] * 8, "labels": [[1, 2]] * 8}).to_iterable_dataset(),
).train()
