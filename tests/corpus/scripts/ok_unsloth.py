# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "unsloth>=2026.1",
#   "trl>=1.15",
#   "datasets>=4.7",
# ]
# ///
from unsloth import FastLanguageModel

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

max_seq_length = 2048
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="Qwen/Qwen2.5-1.5B", max_seq_length=max_seq_length, load_in_4bit=True
)
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16, target_modules=["q_proj", "v_proj"])


def to_text(batch):
    return {"text": [tokenizer.apply_chat_template(m, tokenize=False) for m in batch["messages"]]}


data = load_dataset("trl-lib/Capybara", split="train").map(to_text, batched=True)
trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=data,
    args=SFTConfig(output_dir="out", max_steps=60, per_device_train_batch_size=2, optim="adamw_8bit", logging_steps=1),
)
trainer.train()
model.save_pretrained("out/lora")
tokenizer.save_pretrained("out/lora")
