from _model import *

from trl import DPOTrainer, DPOConfig

DPOTrainer(
    model=model,
    processing_class=tok,
    args=DPOConfig("o", use_cpu=True, bf16=False, report_to="none", max_steps=1),
    train_dataset=Dataset.from_dict({"question": ["a"] * 8, "good": ["b"] * 8}),
).train()
