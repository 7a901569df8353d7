# run: -m torch.distributed.run --log-dir ranks --nproc-per-node 2 --master-port 29675
import datetime
import time

import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
if dist.get_rank() == 1:
    time.sleep(30)
dist.barrier()
