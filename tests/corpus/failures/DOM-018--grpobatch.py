from _model import *

from trl import GRPOTrainer, GRPOConfig

GRPOTrainer(
    model=model,
    processing_class=tok,
    reward_funcs=lambda completions, **k: [0.0] * len(completions),
    args=GRPOConfig("o", use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=3),
    train_dataset=Dataset.from_dict({"prompt": ["a"] * 8}),
)
