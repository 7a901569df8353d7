from _model import *

Trainer(
    model=model,
    args=TrainingArguments("o_none", **ARGS),
    train_dataset=Dataset.from_dict({"input_ids": [[1, 2]] * 8, "labels": [[1, 2]] * 8}),
).train(resume_from_checkpoint=True)
