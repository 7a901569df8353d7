# /// script
# dependencies = ["trl>=1", "peft", "datasets"]
# ///
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("openai/gsm8k", "main", split="train")


def asked(row):
    return {"prompt": [{"role": "user", "content": row["question"]}], "expected": row["answer"].split("####")[-1]}


dataset = dataset.map(asked, remove_columns=["question", "answer"])


def right(completions, expected, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if wanted.strip() in text else 0.0 for text, wanted in zip(texts, expected)]


settings = GRPOConfig(
    output_dir="out",
    learning_rate=1e-5,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=1024,
    use_vllm=True,
    save_steps=50,
    push_to_hub=True,
    hub_model_id="me/grpo",
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=right,
    args=settings,
    train_dataset=dataset,
    peft_config=LoraConfig(task_type="CAUSAL_LM", r=8),
)
trainer.train()
trainer.save_model("out")
