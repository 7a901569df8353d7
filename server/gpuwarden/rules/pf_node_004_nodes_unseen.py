from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-NODE-004",
    gate="submit",
    severity=Severity.INFO,
    fix="Before a long run, test the nodes together in a similar allocation.",
)
def nodes_unseen(facts: SubmitFacts) -> Iterator[Found]:
    """The user is informed if a job will run on several nodes that have not been checked.

    Why: one node with a dead fabric manager, a different packet size or a different NCCL version hangs the whole group.
    An engine chooses the nodes after the job is submitted, so this gate can't check them. On Slurm, the job checks its
    own nodes at the start and ends before its command starts if they can't work together; this check does not include
    the network between them or an all-reduce.

    Example:
        submit_job(platform="slurm/cluster", options={"nodes": 8}, timeout_s=86400, script=train)

    Instead:
        submit_job(platform="slurm/cluster", options={"nodes": 8}, timeout_s=600, script=train)  # a short test first

    """
    if facts.nodes > 1:
        yield Found(f"it is not known yet which {facts.nodes} nodes the job gets, or whether they can work together")
