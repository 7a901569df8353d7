# /// script
# dependencies = ["trl>=1", "peft", "datasets"]
# ///
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("trl-lib/Capybara", split="train[:1000]")


def joined(row):
    return {"text": "\n".join(m["content"] for m in row["messages"])}


dataset = dataset.map(joined, remove_columns=dataset.column_names).select(range(500))
settings = SFTConfig(
    output_dir="out",
    learning_rate=2e-5,
    num_train_epochs=1,
    save_steps=100,
    bf16=True,
    report_to="wandb",
    gradient_checkpointing=True,
)
lora = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=dataset, args=settings, peft_config=lora)
trainer.train()
trainer.save_model("out/final")
