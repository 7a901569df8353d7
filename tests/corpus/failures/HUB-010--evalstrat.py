from _model import *

Trainer(
    model=model,
    args=TrainingArguments("o", use_cpu=True, report_to="none", eval_strategy="steps"),
    train_dataset=Dataset.from_dict({"text": ["a b"] * 8}),
)
