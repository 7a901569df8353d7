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
from trl import SFTConfig, SFTTrainer

DATA = "trl-lib/" + "math_shepherd"


def build():
    return SFTConfig(output_dir="out", num_train_epochs=1, per_device_train_batch_size=4, save_steps=200)


def main(model_id: str = "Qwen/Qwen2.5-0.5B-Instruct"):
    trainer = SFTTrainer(model=model_id, args=build(), train_dataset=load_dataset(DATA)["train"])
    trainer.train()


if __name__ == "__main__":
    main()
