from engine_facts import cluster
from rule_kit import submit

FIRES = [cluster(asked={"nodes": 2}), submit(command=("torchrun", "--nnodes", "4", "train.py"))]
SILENT = [submit(), cluster(), submit(command=("torchrun", "--nnodes=1", "train.py"))]
