# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "trl>=1.16",
#   "datasets>=4.7",
# ]
# ///

"""Supervised fine-tuning of a small Qwen on Capybara, pushed as it goes."""

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("trl-lib/Capybara", split="train_sft")

trainer = SFTTrainer(
    model="Qwen/Qwen2.5-0.5B",
    train_dataset=dataset,
    args=SFTConfig(
        output_dir="out",
        num_train_epochs=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        max_length=1024,
        logging_steps=10,
        save_strategy="steps",
        save_steps=100,
        push_to_hub=True,
        hub_model_id="rehearsal/qwen-capybara",
        hub_strategy="every_save",
    ),
)
trainer.train()
trainer.push_to_hub()
