import os

import torch
import torch.distributed as dist

os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29655")
dist.init_process_group("gloo")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used = torch.nn.Linear(2, 2)
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


model = torch.nn.parallel.DistributedDataParallel(Model())
for _ in range(3):
    model(torch.zeros(1, 2)).sum().backward()
