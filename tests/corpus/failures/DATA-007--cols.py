from _model import *

Trainer(
    model=model, args=TrainingArguments("o", **ARGS), train_dataset=Dataset.from_dict({"text": ["a b"] * 8})
).train()
