"""Two ranks that train; with --fail-once one fails on the first attempt, and the launcher starts them again."""

import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if "--fail-once" in sys.argv and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise RuntimeError("a passing fault of the first attempt")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
for step in range(12):
    loss = net(torch.ones(1, 2)).pow(2).sum()
    loss.backward()
    print(f"[rank{dist.get_rank()}] step {step}/12 loss {loss.item():.3f}", flush=True)
    dist.barrier()
dist.destroy_process_group()
