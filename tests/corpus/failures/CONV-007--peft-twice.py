from _model import *
from peft import LoraConfig, get_peft_model
from trl import SFTConfig, SFTTrainer

config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
SFTTrainer(
    model=get_peft_model(model, config),
    processing_class=tok,
    peft_config=config,
    args=SFTConfig("o", use_cpu=True, bf16=False, report_to="none", max_steps=1),
    train_dataset=Dataset.from_dict({"text": ["a b"] * 8}),
)
