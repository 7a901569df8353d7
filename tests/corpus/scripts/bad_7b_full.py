# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "trl>=1.16",
#   "accelerate>=1.10",
#   "datasets>=4.7",
#   "transformers>=5.2",
#   "torch>=2.8",
# ]
# ///
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

CONFIG = {
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "data": "HuggingFaceH4/ultrachat_200k",
    "out": "out",
}
model = AutoModelForCausalLM.from_pretrained(CONFIG["model"])
tok = AutoTokenizer.from_pretrained(CONFIG["model"])
ds = load_dataset(CONFIG["data"], split="train[:5000]").select_columns(["messages"])
args = SFTConfig(
    output_dir=CONFIG["out"],
    per_device_train_batch_size=1,
    gradient_accumulation_steps=16,
    gradient_checkpointing=True,
    optim="adamw_torch",
    learning_rate=2e-4,
    max_length=1024,
    num_train_epochs=1,
    save_steps=50,
)
trainer = SFTTrainer(
    model=model,
    args=args,
    train_dataset=ds,
    processing_class=tok,
)
trainer.train()
trainer.save_model()
