from dataclasses import replace

from engine_facts import cluster
from gpuwarden.static_analysis.script import read_script
from rule_kit import submit

GROUP = ("torchrun", "--nnodes=2", "train.py")
HOURS = """
from datetime import timedelta
import torch.distributed as dist
dist.init_process_group("nccl", timeout=timedelta(hours=2))
"""
TRAINER = "from transformers import Trainer\nTrainer(None).train()\n"
FIRES = [
    submit(command=(*GROUP, "--ddp_timeout", "7200")),
    submit(command=GROUP, env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}),
    replace(submit(command=GROUP), script=read_script(HOURS)),
    replace(submit(command=GROUP), script=read_script(TRAINER)),
    cluster(asked={"nodes": 2}, spec={"env": {"NCCL_ASYNC_ERROR_HANDLING": "0"}}),
]
SILENT = [
    submit(command=GROUP),
    submit(command=("torchrun", "train.py", "--ddp_timeout", "7200")),
    submit(command=(*GROUP, "--ddp_timeout=600")),
    replace(submit(command=GROUP), script=read_script(HOURS.replace("hours=2", "minutes=10"))),
]
