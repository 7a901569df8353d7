import re
from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.sanitize import line
from gpuwarden.rules.facts import SubmitFacts

_NOWHERE = re.compile(r"(lo|docker\d*|br-\w*|virbr\d*|veth\w*|cni\d*)")


@rule(
    "PF-NODE-003",
    gate="submit",
    severity=Severity.ERROR,
    fix="Specify the interface that reaches the other nodes, or omit the variable.",
)
def interface_leads_out(facts: SubmitFacts) -> Iterator[Found]:
    """If the ranks run on several nodes, their network interface reaches the other nodes.

    Why: ranks on different nodes can't connect over the loopback interface or a container bridge. The job hangs when it
    starts, while all nodes are billed.

    Example:
        submit_job(platform="slurm/cluster", options={"nodes": 2}, env={"NCCL_SOCKET_IFNAME": "docker0"})

    Instead:
        submit_job(platform="slurm/cluster", options={"nodes": 2}, env={"NCCL_SOCKET_IFNAME": "^docker0,lo"})

    """
    if facts.nodes < 2:
        return
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = facts.spec.env.get(name, "")
        words = [] if value.startswith("^") else [word for word in value.lstrip("=").split(",") if word]
        if words and all(_NOWHERE.fullmatch(word) for word in words):
            yield Found(f"{name} is {line(value, 60)}, which does not reach other nodes")
