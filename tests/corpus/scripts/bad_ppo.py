# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "trl>=1.16",
#   "datasets>=4.7",
#   "transformers>=5.2",
# ]
# ///
import re
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

ds = load_dataset("trl-lib/DeepMath-103K", split="train[:2000]")


def brevity(completions, **kwargs):
    texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    return [1.0 / (1 + len(re.findall(r"\w+", t))) for t in texts]


cfg = GRPOConfig(
    output_dir="out/grpo",
    num_generations=4,
    per_device_train_batch_size=4,
    max_completion_length=256,
    max_steps=200,
    save_steps=50,
)
GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=brevity, args=cfg, train_dataset=ds).train()
# ///

from datasets import load_dataset
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

config = PPOConfig(learning_rate=1.4e-5, batch_size=16)
model = AutoModelForCausalLMWithValueHead.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct")
tok = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct")
data = load_dataset("trl-lib/tldr", split="train")
trainer = PPOTrainer(config, model, None, tok, dataset=data)
for batch in trainer.dataloader:
    out = trainer.generate(batch["input_ids"])
    trainer.step(batch["input_ids"], out, [1.0] * len(out))
trainer.save_pretrained("out")
