# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "trl>=1.16",
#   "datasets>=4.7",
#   "transformers>=5.2",
# ]
# ///
# Reward model on pairs whose columns have other names.
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

name = "Qwen/Qwen2.5-0.5B-Instruct"
pairs = load_dataset("rehearsal/pairs-other-names", split="train")
tok = AutoTokenizer.from_pretrained(name)
model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1)
trainer = RewardTrainer(
    model=model,
    processing_class=tok,
    args=RewardConfig(output_dir="out", per_device_train_batch_size=4, num_train_epochs=1),
    train_dataset=pairs,
)
trainer.train()
trainer.save_model("out")
