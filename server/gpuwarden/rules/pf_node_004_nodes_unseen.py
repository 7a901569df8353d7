from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-NODE-004",
    gate="submit",
    severity=Severity.INFO,
    fix="Before a long run, look at such nodes together once, in an allocation like this one.",
)
def nodes_unseen(facts: SubmitFacts) -> Iterator[Found]:
    """It is said when a job goes to several nodes that nobody has looked at.

    Why: one node with a dead fabric manager, another packet size or another version of NCCL hangs the whole group. An
    engine chooses the nodes after the job was submitted, so this gate can't look at them. On Slurm the job looks at its
    own nodes when it starts, and ends before its command where they can't work together; the ways between them and an
    all-reduce are not part of that look.

    Example:
        submit_job(platform="slurm/cluster", options={"nodes": 8}, timeout_s=86400, script=train)

    Instead:
        submit_job(platform="slurm/cluster", options={"nodes": 8}, timeout_s=600, script=train)  # a rehearsal first

    """
    if facts.nodes > 1:
        yield Found(f"which {facts.nodes} nodes the job gets, and whether they can work together, is not known yet")
