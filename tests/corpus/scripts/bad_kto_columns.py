# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "trl>=1.16",
#   "datasets>=4.7",
#   "transformers>=5.2",
#   "torch>=2.8",
# ]
# ///
from dataclasses import dataclass

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import KTOConfig, KTOTrainer


@dataclass
class Settings:
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    data: str = "tatsu-lab/alpaca"
    out: str = "out"


s = Settings()
model = AutoModelForCausalLM.from_pretrained(s.model, dtype=torch.bfloat16)
tok = AutoTokenizer.from_pretrained(s.model)
train = load_dataset(s.data, split="train")
args = KTOConfig(output_dir=s.out, per_device_train_batch_size=4, num_train_epochs=1, learning_rate=5e-7)
trainer = KTOTrainer(model=model, args=args, train_dataset=train, processing_class=tok)
trainer.train()
trainer.save_model(s.out)
