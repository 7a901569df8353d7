from _model import *

from transformers import DataCollatorWithPadding

Trainer(
    model=model,
    processing_class=tok,
    data_collator=DataCollatorWithPadding(tok),
    args=TrainingArguments("o", **ARGS, remove_unused_columns=False),
    train_dataset=Dataset.from_dict({"input_ids": [[1, 2]] * 8, "text": ["a"] * 8}),
).train()
