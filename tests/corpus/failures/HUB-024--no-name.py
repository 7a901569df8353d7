from _model import *
from trl import DPOConfig, DPOTrainer

rows = {"prompt": ["a"] * 16, "chosen": [" b c"] * 16, "rejected": [" d"] * 16}
DPOTrainer(
    model=model,
    processing_class=tok,
    args=DPOConfig("o", use_cpu=True, bf16=False, report_to="none", max_steps=4, logging_steps=1),
    train_dataset=Dataset.from_dict(rows),
).train()
