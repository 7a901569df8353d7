# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "trl>=1.16",
#   "datasets>=4.7",
#   "transformers>=5.2",
# ]
# ///
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

# On a T4: half precision, no bf16, small and checkpointed.
data = load_dataset("trl-lib/tldr", split="train", streaming=True)
config = SFTConfig(
    output_dir="out",
    fp16=True,
    bf16=False,
    num_train_epochs=1,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=16,
    gradient_checkpointing=True,
    max_length=512,
    save_steps=100,
)
SFTTrainer(model="HuggingFaceTB/SmolLM2-135M", args=config, train_dataset=data).train()
