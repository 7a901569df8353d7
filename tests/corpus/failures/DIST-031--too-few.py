import datetime

import torch.distributed as dist

dist.init_process_group(
    "gloo", init_method="tcp://127.0.0.1:29673", rank=0, world_size=2, timeout=datetime.timedelta(seconds=3)
)
