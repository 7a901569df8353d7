# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "transformers>=5.23",
#   "accelerate>=1.15",
#   "datasets>=5",
#   "torch>=2.13",
# ]
# ///
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

MODEL = "lab/tiny-chat"
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL)

dataset = load_dataset("lab/texts", split="train")


def tokenize(batch):
    return tokenizer(batch["text"], truncation=True, max_length=128)


tokenized = dataset.map(tokenize, batched=True, remove_columns=dataset.column_names)

args = TrainingArguments(
    output_dir="out",
    push_to_hub=True,
    hub_model_id="rehearsal/TARGET",
    max_steps=8,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=2e-5,
    logging_steps=1,
    save_strategy="steps",
    save_steps=2,
    save_total_limit=2,
    report_to="none",
    use_cpu=True,
)

trainer = Trainer(
    model=model,
    args=args,
    train_dataset=tokenized,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    processing_class=tokenizer,
)
trainer.train()
trainer.push_to_hub()
