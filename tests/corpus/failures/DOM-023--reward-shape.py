from _model import *
from trl import GRPOConfig, GRPOTrainer

GRPOTrainer(
    model=model,
    processing_class=tok,
    reward_funcs=lambda completions, **k: [0.0] * (len(completions) - 1),
    args=GRPOConfig(
        "o",
        use_cpu=True,
        bf16=False,
        report_to="none",
        max_steps=1,
        num_generations=2,
        per_device_train_batch_size=2,
        max_completion_length=4,
    ),
    train_dataset=Dataset.from_dict({"prompt": ["a"] * 8}),
).train()
