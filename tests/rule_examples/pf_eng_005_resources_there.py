from engine_facts import cluster
from rule_kit import submit

FIRES = [
    cluster(asked={"gpus": 8}),
    cluster(asked={"gpus": 1, "gpu": "h100"}),
    cluster(asked={"gpus": 5, "gpu": "A100"}),
    cluster({"gpus": {}}, {"gpus": 1}),
    cluster(asked={"cpus": 128}),
    cluster(asked={"memory_mb": 600_000}),
    cluster(asked={"nodes": 9}),
    cluster({"max_nodes": 2}, {"nodes": 3}),
]
SILENT = [
    submit(),
    cluster(),
    cluster(asked={"gpus": 4, "gpu": "A100"}),
    cluster(asked={"gpus": 4, "cpus": 64, "memory_mb": 512_000, "nodes": 8}),
    cluster(
        {"gpus": None, "cpus": None, "memory_mb": None, "nodes": None, "max_nodes": None},
        {"gpus": 64, "cpus": 999, "memory_mb": 10**9, "nodes": 999},
    ),
]
