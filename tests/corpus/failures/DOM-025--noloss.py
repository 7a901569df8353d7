from _model import *

Trainer(
    model=model, args=TrainingArguments("o", **ARGS), train_dataset=Dataset.from_dict({"input_ids": [[1, 2]] * 8})
).train()
