from _model import *

for p in model.parameters():
    p.data.fill_(float("nan"))
Trainer(
    model=model,
    args=TrainingArguments(
        "o",
        use_cpu=True,
        report_to="none",
        max_steps=5,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
    ),
    train_dataset=Dataset.from_dict({"input_ids": [[1, 2]] * 80, "labels": [[1, 2]] * 80}),
).train()
sys.exit(3)
