from _model import *

from trl import SFTTrainer, SFTConfig

SFTTrainer(
    model=model,
    processing_class=tok,
    args=SFTConfig("o", use_cpu=True, bf16=False, report_to="none", max_steps=1),
    train_dataset=Dataset.from_dict({"instruction": ["a"] * 8, "output": ["b"] * 8}),
).train()
