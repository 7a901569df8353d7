# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "trl>=1.16",
#   "datasets>=4.7",
#   "transformers>=5.2",
#   "peft>=0.21",
# ]
# ///
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

# Intel's pairs hold plain columns; build the conversational form by hand.
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
tok = AutoTokenizer.from_pretrained(MODEL)
raw = load_dataset("argilla/distilabel-intel-orca-dpo-pairs", split="train")


def pair(row):
    return {
        "prompt": [{"role": "user", "content": row["input"]}],
        "chosen": [{"role": "assistant", "content": row["chosen"]}],
        "rejected": [{"role": "assistant", "content": row["rejected"]}],
    }


data = raw.filter(lambda r: r["chosen"] != r["rejected"]).map(pair, remove_columns=raw.column_names)
trainer = DPOTrainer(
    model=MODEL,
    args=DPOConfig(output_dir="out", max_length=1024, per_device_train_batch_size=1, num_train_epochs=1),
    train_dataset=data,
    processing_class=tok,
    peft_config=LoraConfig(r=8, target_modules="all-linear"),
)
trainer.train()
trainer.save_model("out/final")
