from engine_facts import cluster
from gpuwarden.core.engine import Ceiling
from rule_kit import submit

CPUS = Ceiling(owner="the QOS short", kind="job", most=4, resource="cpu")
GPUS = Ceiling(owner="your account nlp", kind="machine", most=2, resource="gres/gpu:a100")
BUDGET = Ceiling(owner="the account nlp", kind="minutes", most=6_000, used=5_800, resource="cpu")
WALL = Ceiling(owner="the QOS short", kind="minutes", most=600, used=570, resource="wall")
SPENT = Ceiling(owner="the account nlp", kind="minutes", most=600, used=600, resource="wall")
FIRES = [
    cluster(asked={"cpus": 3, "nodes": 2}, ceilings=(CPUS,)),
    cluster(asked={"nodes": 5}, ceilings=(CPUS,)),
    cluster(asked={"gpu": "A100", "gpus": 3}, ceilings=(GPUS,)),
    cluster(asked={"cpus": 4, "walltime_s": 3_600}, ceilings=(BUDGET,)),
    cluster(asked={"walltime_s": 1_860}, ceilings=(WALL,)),
    cluster(ceilings=(SPENT,)),
    cluster(ceilings=(SPENT.model_copy(update={"resource": "cpu"}),)),
]
SILENT = [
    submit(),
    cluster(),
    cluster(asked={"cpus": 2, "nodes": 2}, ceilings=(CPUS,)),
    cluster(asked={"gpu": "h100", "gpus": 3}, ceilings=(GPUS,)),
    cluster(asked={"gpu": "a100", "gpus": 2, "nodes": 4}, ceilings=(GPUS,)),
    cluster(asked={"cpus": 4, "walltime_s": 3_000}, ceilings=(BUDGET,)),
    cluster(asked={"cpus": 64, "nodes": 4, "walltime_s": 1_800}, ceilings=(WALL,)),
    cluster(ceilings=(WALL,)),
    cluster(ceilings=(CPUS.model_copy(update={"resource": "mem"}),)),
]
