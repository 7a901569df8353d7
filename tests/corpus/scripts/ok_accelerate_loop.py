# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "transformers>=5.2",
#   "datasets>=4.7",
#   "accelerate>=1.10",
#   "torch>=2.8",
# ]
# ///
"""Continued pre-training with accelerate and a hand-written loop."""

import math

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

NAME = "HuggingFaceTB/SmolLM2-135M"


def main():
    accelerator = Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
    tok = AutoTokenizer.from_pretrained(NAME)
    tok.pad_token = tok.eos_token
    ds = load_dataset("Salesforce/wikitext", split="train")

    def encode(rows):
        out = tok(rows["text"], truncation=True, max_length=512, padding="max_length")
        out["labels"] = out["input_ids"]
        return out

    ds = ds.map(encode, batched=True, remove_columns=ds.column_names).with_format("torch")
    loader = DataLoader(ds, batch_size=4, shuffle=True, num_workers=2)
    model = AutoModelForCausalLM.from_pretrained(NAME)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sched = get_scheduler("cosine", opt, num_warmup_steps=50, num_training_steps=math.ceil(len(loader) / 4))
    model, opt, loader, sched = accelerator.prepare(model, opt, loader, sched)
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            opt.step()
            sched.step()
            opt.zero_grad()
        if step % 200 == 0:
            accelerator.print(step, loss.item())
            accelerator.save_state("out/state")
    accelerator.unwrap_model(model).save_pretrained("out/model")


main()
