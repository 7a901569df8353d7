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
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("lab/questions", split="train")


def reward_length(completions, **kwargs):
    return [-abs(20 - len(str(completion))) / 20 for completion in completions]


training_args = GRPOConfig(
    output_dir="out",
    push_to_hub=True,
    hub_model_id="rehearsal/TARGET",
    max_steps=8,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    num_generations=2,
    max_completion_length=8,
    learning_rate=1e-5,
    logging_steps=1,
    save_strategy="steps",
    save_steps=2,
    save_total_limit=2,
    report_to="none",
    use_cpu=True,
    bf16=False,
)

trainer = GRPOTrainer(
    model="lab/tiny-chat",
    reward_funcs=reward_length,
    args=training_args,
    train_dataset=dataset,
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.push_to_hub()
