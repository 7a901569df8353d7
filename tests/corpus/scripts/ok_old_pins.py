# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "trl==0.11.4",
#   "transformers==4.40.2",
#   "datasets==2.21.0",
#   "torch==2.4.1",
#   "accelerate==0.34.2",
# ]
# ///
# Old versions pinned on purpose: their argument names are the right ones here.
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

tok = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
train = load_dataset("trl-lib/Capybara", split="train")
args = SFTConfig(output_dir="out", max_seq_length=1024, evaluation_strategy="no", warmup_ratio=0.03, bf16=True)
trainer = SFTTrainer(model=model, args=args, train_dataset=train, tokenizer=tok)
trainer.train()
trainer.save_model("out")
