# run: -m torch.distributed.run --log-dir ranks --nproc-per-node 2 --master-port 29681
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), find_unused_parameters=True)
for step in range(3):
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)
if dist.get_rank() == 0:
    dist.destroy_process_group()
