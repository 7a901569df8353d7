# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "trl>=1.16",
#   "peft>=0.21",
#   "datasets>=4.7",
#   "transformers>=5.2",
#   "torch>=2.8",
# ]
# ///
import torch
from datasets import load_dataset
from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

CONFIG = {
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "data": "HuggingFaceH4/ultrachat_200k",
    "out": "out",
}
quant = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
model = AutoModelForCausalLM.from_pretrained(CONFIG["model"], quantization_config=quant, device_map={"": 0})
model = prepare_model_for_kbit_training(model)
tok = AutoTokenizer.from_pretrained(CONFIG["model"])
ds = load_dataset(CONFIG["data"], split="train[:5000]").select_columns(["messages"])
args = SFTConfig(
    output_dir=CONFIG["out"],
    per_device_train_batch_size=1,
    gradient_accumulation_steps=16,
    gradient_checkpointing=True,
    optim="paged_adamw_8bit",
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
    peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model()
