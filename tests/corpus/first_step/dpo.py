# /// script
# dependencies = ["trl>=1", "datasets"]
# ///
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

name = "Qwen/Qwen2.5-0.5B-Instruct"
model = AutoModelForCausalLM.from_pretrained(
    name, dtype=torch.bfloat16, attn_implementation="flash_attention_2", device_map="auto"
)
tokenizer = AutoTokenizer.from_pretrained(name)
data = load_dataset("trl-lib/ultrafeedback_binarized")
settings = DPOConfig(
    output_dir="out", beta=0.1, learning_rate=5e-7, per_device_train_batch_size=8, eval_strategy="steps", eval_steps=50
)
trainer = DPOTrainer(
    model=model,
    args=settings,
    train_dataset=data["train"],
    eval_dataset=data["test"].select(range(100)),
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model(settings.output_dir)
trainer.push_to_hub()
