import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29672")
    dist.init_process_group("gloo")
    if rank == 1:
        os._exit(0)
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
