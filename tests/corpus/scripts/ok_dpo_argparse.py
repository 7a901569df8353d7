# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "trl>=1.16",
#   "peft>=0.21",
#   "datasets>=4.7",
#   "transformers>=5.2",
#   "trackio>=0.40",
# ]
# ///
import argparse

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--dataset", default="trl-lib/ultrafeedback_binarized")
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--output-dir", default="out")
    return parser.parse_args()


def main():
    args = parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    data = load_dataset(args.dataset, split="train").train_test_split(test_size=0.05, seed=7)
    config = DPOConfig(
        output_dir=args.output_dir,
        beta=args.beta,
        learning_rate=5e-6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        eval_strategy="steps",
        eval_steps=50,
        report_to="trackio",
        bf16=True,
    )
    trainer = DPOTrainer(
        model=model,
        args=config,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model(args.output_dir)


if __name__ == "__main__":
    main()
