# /// script
# dependencies = ["transformers>=5", "datasets", "peft", "torch"]
# ///
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup

device = "cuda"
name = "facebook/opt-350m"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name).to(device)
model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))
data = load_dataset("tatsu-lab/alpaca", split="train")


def together(rows):
    texts = [row["instruction"] + "\n" + row["output"] for row in rows]
    batch = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=64)
    batch["labels"] = batch["input_ids"].clone()
    return batch


loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=together, num_workers=4, pin_memory=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
schedule = get_linear_schedule_with_warmup(optimizer, 10, len(loader) * 3)
for epoch in range(3):
    model.train()
    for step, batch in enumerate(loader):
        batch = {k: v.to(device) for k, v in batch.items()}
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
model.save_pretrained("out")
tokenizer.save_pretrained("out")
