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
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

model_name = "lab/tiny-chat"
model = AutoModelForCausalLM.from_pretrained(model_name)
tokenizer = AutoTokenizer.from_pretrained(model_name)
dataset = load_dataset("lab/pairs", split="train")

training_args = DPOConfig(
    output_dir="out",
    push_to_hub=True,
    hub_model_id="rehearsal/TARGET",
    max_steps=8,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=5e-5,
    beta=0.1,
    max_length=128,
    logging_steps=1,
    save_strategy="steps",
    save_steps=2,
    save_total_limit=2,
    report_to="none",
    use_cpu=True,
    bf16=False,
)

trainer = DPOTrainer(
    model=model,
    args=training_args,
    train_dataset=dataset,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.push_to_hub()
print("Done")
