# run: -m torch.distributed.run --log-dir ranks --nproc-per-node 2 --master-port 29671
import os

import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    os.kill(os.getpid(), 9)
dist.barrier()
