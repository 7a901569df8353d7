# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch>=2.8",
#   "numpy>=2",
#   "tqdm>=4.66",
# ]
# ///
"""A character model in plain PyTorch, resumable."""

import json
import math
import pathlib
import time

import numpy as np
import torch
from tqdm import tqdm

OUT = pathlib.Path("out")
OUT.mkdir(exist_ok=True)


class Block(torch.nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.ln1, self.ln2 = torch.nn.LayerNorm(d), torch.nn.LayerNorm(d)
        self.att = torch.nn.MultiheadAttention(d, h, batch_first=True)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(d, 4 * d), torch.nn.GELU(), torch.nn.Linear(4 * d, d))

    def forward(self, x, mask):
        y = self.ln1(x)
        x = x + self.att(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


text = np.frombuffer(("to be or not to be, " * 5000).encode(), dtype=np.uint8).copy()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
emb = torch.nn.Embedding(256, 128).to(device)
blocks = torch.nn.ModuleList(Block(128, 4) for _ in range(4)).to(device)
head = torch.nn.Linear(128, 256).to(device)
params = [*emb.parameters(), *blocks.parameters(), *head.parameters()]
opt = torch.optim.AdamW(params, lr=3e-4)
start = 0
if (OUT / "ckpt.pt").exists():
    state = torch.load(OUT / "ckpt.pt", map_location=device)
    start = state["step"]
    opt.load_state_dict(state["opt"])
mask = torch.triu(torch.full((64, 64), -math.inf, device=device), 1)
for step in tqdm(range(start, 1000)):
    ix = torch.randint(len(text) - 65, (16,))
    batch = torch.stack([torch.from_numpy(text[i : i + 65]) for i in ix]).long().to(device)
    x = emb(batch[:, :-1])
    for block in blocks:
        x = block(x, mask)
    loss = torch.nn.functional.cross_entropy(head(x).flatten(0, 1), batch[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 100 == 0:
        torch.save({"step": step, "opt": opt.state_dict(), "blocks": blocks.state_dict()}, OUT / "ckpt.pt")
        with open(OUT / "metrics.jsonl", "a") as f:
            f.write(json.dumps({"step": step, "loss": loss.item(), "t": time.time()}) + "\n")
