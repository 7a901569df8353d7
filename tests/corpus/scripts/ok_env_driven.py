# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "trl>=1.16",
#   "datasets>=4.7",
#   "transformers>=5.2",
#   "huggingface_hub>=2.0",
# ]
# ///
import os
import sys

from huggingface_hub import login
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

HF_TOKEN = os.environ["HF_TOKEN"]
DATASET = os.getenv("DATASET", "trl-lib/Capybara")
MODEL = os.getenv("MODEL", "Qwen/Qwen3-0.6B")
OUT_REPO = os.environ["OUT_REPO"]

try:
    import wandb
except ImportError:
    wandb = None

login(HF_TOKEN)
print("model", MODEL, "data", DATASET, file=sys.stderr)
training_args = SFTConfig(output_dir="out", max_steps=100, per_device_train_batch_size=2)
training_args.push_to_hub = True
training_args.hub_model_id = OUT_REPO
training_args.hub_token = HF_TOKEN
trainer = SFTTrainer(model=MODEL, args=training_args, train_dataset=load_dataset(DATASET, split="train"))
trainer.train()
trainer.push_to_hub()
