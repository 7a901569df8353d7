# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "trl>=1.16",
#   "peft>=0.21",
#   "datasets>=5",
#   "transformers>=5.23",
#   "torch>=2.13",
# ]
# ///
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("lab/chat", split="train")
split = dataset.train_test_split(test_size=0.1, seed=42)

config = SFTConfig(
    output_dir="out",
    push_to_hub=True,
    hub_model_id="rehearsal/TARGET",
    max_steps=8,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=2e-4,
    max_length=128,
    warmup_steps=1,
    logging_steps=1,
    save_strategy="steps",
    save_steps=2,
    save_total_limit=2,
    eval_strategy="steps",
    eval_steps=4,
    report_to="none",
    use_cpu=True,
    bf16=False,
    seed=42,
)

trainer = SFTTrainer(
    model="lab/tiny-chat",
    args=config,
    train_dataset=split["train"],
    eval_dataset=split["test"],
    peft_config=LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    ),
)
trainer.train()
trainer.save_model("out/final")
trainer.push_to_hub()
print("Training complete")
