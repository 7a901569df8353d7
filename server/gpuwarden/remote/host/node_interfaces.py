"""Choose the interface that ranks on different nodes connect over, and predict NCCL's choice. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Network

from gpuwarden.remote.host.node_facts import GroupFacts, Interface


def candidates(facts: GroupFacts) -> dict[str, list[Interface]]:
    """Return the interfaces that ranks can use on each node, except those whose address also occurs on another node.

    A node that did not report its interfaces is left out.
    """
    known = {name: node.interfaces for name, node in facts.nodes.items() if node.interfaces is not None}
    distinct = {facts.nodes[name].identity or name: found for name, found in known.items()}
    owners = Counter(a for found in distinct.values() for a in {i.address for i in found if i.address})
    return {
        name: [i for i in found if i.usable and i.address and owners[i.address] == 1] for name, found in known.items()
    }


def chosen(facts: GroupFacts) -> dict[str, Interface]:
    """Return each node's best interface for the group; nodes without a suitable interface are left out.

    The fastest network that all nodes share is preferred. If they share none, each node's default interface is used.
    """
    usable = candidates(facts)
    networks = {name: {net: i for i in found if (net := i.network)} for name, found in usable.items()}
    shared = set[IPv4Network].intersection(*(set(found) for found in networks.values())) if networks else set()
    if shared:
        # Networks are compared by their slowest node: first by its speed, then by its packet size.
        worth = {net: [(found[net].mbit or 0, found[net].mtu or 0) for found in networks.values()] for net in shared}
        best = max(sorted(shared), key=lambda net: min(worth[net]))
        return {name: found[best] for name, found in networks.items()}
    ways_out = {name: found if len(found) == 1 else [i for i in found if i.default] for name, found in usable.items()}
    return {name: found[0] for name, found in ways_out.items() if found}


def variable_for(best: Mapping[str, Interface], facts: GroupFacts) -> str:
    """Return the NCCL_SOCKET_IFNAME value that selects exactly these interfaces on every node; "" if none are given.

    NCCL treats a name as a prefix, unless the list starts with `=`.
    """
    names = sorted({i.name for i in best.values()})
    text = ",".join(names)
    others = {i.name for node in facts.nodes.values() for i in node.interfaces or () if i.name not in names}
    return f"={text}" if names and any(other.startswith(tuple(names)) for other in others) else text


def default_interfaces(found: Sequence[Interface]) -> list[str]:
    """Return the interfaces that NCCL uses by default: all `ib` interfaces, or else all but Docker's and loopback."""
    there = [i for i in found if i.up and i.address and i.kind != "loopback"]
    fast = [i.name for i in there if i.name.startswith("ib")]
    return fast or [i.name for i in there if not i.name.startswith("docker")] or [i.name for i in there]
