# run: -m torch.distributed.run --log-dir ranks --nproc-per-node 2 --master-port 29676
import torch
from accelerate import Accelerator


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


accelerator = Accelerator(cpu=True)
model = accelerator.prepare(Model())
for _ in range(3):
    accelerator.backward(model(torch.ones(1, 2)).sum())
