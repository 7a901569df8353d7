from engine_facts import cluster
from rule_kit import submit


def with_interface(value: str, nodes: int = 2) -> object:
    return cluster(asked={"nodes": nodes}, spec={"env": {"NCCL_SOCKET_IFNAME": value}})


FIRES = [with_interface("docker0"), with_interface("=lo,docker0"), with_interface("br-12ab")]
SILENT = [submit(), with_interface("^docker0,lo"), with_interface("eth0"), with_interface("docker0", nodes=1)]
