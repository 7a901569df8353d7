from _model import *
from transformers import AutoModelForSequenceClassification, logging

logging.set_verbosity_info()
model.save_pretrained("m")
head = AutoModelForSequenceClassification.from_pretrained("m", num_labels=2)
head.config.pad_token_id = 2
Trainer(
    model=head,
    args=TrainingArguments(
        "o",
        use_cpu=True,
        report_to="none",
        max_steps=4,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=True,
        bf16=True,
    ),
    train_dataset=Dataset.from_dict({"input_ids": [[1, 2]] * 32, "label": [0, 1] * 16, "text": ["x"] * 32}),
    eval_dataset=Dataset.from_dict({"input_ids": [[1, 2]] * 8, "label": [0, 1] * 4}),
).train()
