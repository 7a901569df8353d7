from _model import *
from trl import SFTConfig, SFTTrainer

SFTTrainer(
    model=model,
    processing_class=tok,
    args=SFTConfig("o", use_cpu=True, bf16=False, report_to="none", max_steps=1, eos_token="<|im_end|>"),
    train_dataset=Dataset.from_dict({"text": ["a b"] * 8}),
)
