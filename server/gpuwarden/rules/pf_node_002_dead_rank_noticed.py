from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts

MASKS_S = 1800.0


@rule(
    "PF-NODE-002",
    gate="submit",
    severity=Severity.WARNING,
    fix="Set a timeout of a few minutes, longer than the slowest save takes, and leave asynchronous error handling on.",
)
def dead_rank_noticed(facts: SubmitFacts) -> Iterator[Found]:
    """A multi-node job detects a dead rank within minutes.

    Why: the other ranks wait for a dead rank in a collective operation while all nodes are billed. After half an hour,
    the log reports "timeout", even if the real cause was something else, such as running out of memory.

    Example:
        submit_job(command=["torchrun", "--nnodes=2", "train.py", "--ddp_timeout", "7200"], inputs=["train.py"])

    Instead:
        submit_job(command=["torchrun", "--nnodes=2", "train.py", "--ddp_timeout", "600"], inputs=["train.py"])

    """
    if facts.nodes < 2:
        return
    wait = facts.launch.timeout_s
    if wait is not None and wait >= MASKS_S:
        yield Found(f"collectives wait {wait / 60:.0f} minutes for a dead rank")
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if facts.spec.env.get(name) == "0":
            yield Found(f"{name}=0 keeps the other ranks waiting when one rank dies")
