"""Check each node and the network paths between nodes: fabric, interfaces, ports, packets and clocks.

All functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.core.guidance import Scalar
from gpuwarden.remote.host.node_codes import Answer, Area, NodeCode, Problem
from gpuwarden.remote.host.node_facts import Fabric, GroupFacts, NetworkPath, Node
from gpuwarden.remote.host.node_interfaces import candidates, chosen, default_interfaces
from gpuwarden.remote.runner.group import CLOCK_S, selected
from gpuwarden.static_analysis.group_launch import GroupLaunch

# ------------------------------------------------------------------------------------------------------------ each node


def identity(facts: GroupFacts) -> Iterator[Problem]:
    """Find nodes that did not answer, and names that refer to the same machine."""
    area = Area.IDENTITY
    for name, why in facts.silent.items():
        yield Problem(area, Answer.UNKNOWN, NodeCode.SILENT, name, message=why)
    seen: dict[tuple[str, str], str] = {}
    for name, node in facts.nodes.items():
        if node.identity is None:
            yield Problem(area, Answer.UNKNOWN, NodeCode.IDENTITY_UNSEEN, name)
        elif (first := seen.setdefault(node.identity, name)) != name:
            yield Problem(area, Answer.NO, NodeCode.SAME_NODE, name, {"other": first})


def fabric(facts: GroupFacts) -> Iterator[Problem]:
    """Check every node's fabric manager."""
    for name, node in facts.nodes.items():
        for answer, code, parameters in of_fabric(node.fabric):
            yield Problem(Area.FABRIC, answer, code, name, parameters)
    yield from unseen(facts, Area.FABRIC, NodeCode.FABRIC_UNSEEN)


def of_fabric(fabric: Fabric) -> Iterator[tuple[Answer, NodeCode, dict[str, Scalar]]]:
    """Check one node's fabric manager. If the service can't be queried, use the state that the GPUs report."""
    unfinished = [s for s in fabric.states or () if s not in ("Completed", "N/A")]
    finished = "Completed" in (fabric.states or ())
    if unfinished:
        yield Answer.NO, NodeCode.FABRIC_STATE, {"state": unfinished[0]}
    if fabric.switches == 0 or (fabric.switches is None and fabric.gpus == 0 and fabric.driver is None):
        yield Answer.NOTE, NodeCode.NO_FABRIC, {}
        return
    if fabric.service in ("inactive", "failed", "activating", "deactivating", "unknown"):
        if not finished:
            yield Answer.NO, NodeCode.FABRIC_DOWN, {"state": fabric.service}
    elif fabric.service != "active" and not finished and not unfinished:
        yield Answer.UNKNOWN, NodeCode.FABRIC_UNSEEN, {}
    if fabric.version and fabric.driver and fabric.version != fabric.driver:
        yield Answer.NO, NodeCode.FABRIC_VERSION, {"version": fabric.version, "driver": fabric.driver}
    elif fabric.service == "active" and not (fabric.version and fabric.driver) and not finished:
        yield Answer.UNKNOWN, NodeCode.FABRIC_UNSEEN, {}


def unseen(facts: GroupFacts, area: Area, code: NodeCode) -> Iterator[Problem]:
    """Yield a problem with the result UNKNOWN for each node that did not answer."""
    for name in facts.silent:
        yield Problem(area, Answer.UNKNOWN, code, name)


def interface(facts: GroupFacts, launch: GroupLaunch) -> Iterator[Problem]:
    """Check the interfaces that ranks will connect over, and whether all nodes have the same NCCL settings."""
    area, best, there = Area.INTERFACE, chosen(facts), candidates(facts)
    yield from unseen(facts, area, NodeCode.INTERFACES_UNSEEN)
    for name, node in facts.nodes.items():
        if node.interfaces is None:
            yield Problem(area, Answer.UNKNOWN, NodeCode.INTERFACES_UNSEEN, name)
        elif name not in best:
            several = len(there.get(name, ())) > 1
            code = NodeCode.INTERFACE_OPEN if several else NodeCode.NO_INTERFACE
            yield Problem(area, Answer.NO, code, name, {"names": ", ".join(i.name for i in there.get(name, ()))})
        else:
            yield from of_interface(name, node, best[name].name, launch)
    for variable in sorted({k for n in facts.nodes.values() for k in n.env if k.startswith("NCCL_")} - set(launch.env)):
        values = {name: node.env.get(variable, "") for name, node in facts.nodes.items()}
        if len(set(values.values())) > 1 and variable != "NCCL_SOCKET_IFNAME":
            odd = next(name for name, value in values.items() if value != values[next(iter(values))])
            yield Problem(area, Answer.NO, NodeCode.VARIABLE_DIFFERS, odd, {"variable": variable})


def of_interface(name: str, node: Node, best: str, launch: GroupLaunch) -> Iterator[Problem]:
    """Compare the interfaces that NCCL and gloo will use on one node with the best interface for the group."""
    interfaces = [i for i in node.interfaces or () if i.up and i.address]
    env = {**node.env, **launch.env}
    value = env.get("NCCL_SOCKET_IFNAME", "")
    taken = selected(value, [i.name for i in interfaces]) if value else default_interfaces(interfaces)
    if value and best not in taken[:1]:
        given: dict[str, Scalar] = {"variable": "NCCL_SOCKET_IFNAME", "taken": ", ".join(taken) or "none", "best": best}
        yield Problem(Area.INTERFACE, Answer.NO, NodeCode.INTERFACE_WRONG, name, given, message=value)
    elif not value and taken != [best]:
        yield Problem(Area.INTERFACE, Answer.NO, NodeCode.INTERFACE_OPEN, name, {"names": ", ".join(taken)})
    gloo = env.get("GLOO_SOCKET_IFNAME", "")
    if gloo and best not in gloo.split(","):
        given = {"variable": "GLOO_SOCKET_IFNAME", "taken": gloo, "best": best}
        yield Problem(Area.INTERFACE, Answer.NO, NodeCode.INTERFACE_WRONG, name, given, message=gloo)


# --------------------------------------------------------------------------------------------------------- between them


def rendezvous(facts: GroupFacts) -> Iterator[Problem]:
    """Check whether every node can connect to the other nodes, in particular to the head node."""
    area = Area.RENDEZVOUS
    if facts.port_error == "EADDRINUSE":
        yield Problem(area, Answer.NO, NodeCode.PORT_IN_USE, facts.head, {"port": facts.port})
    elif facts.port_error:
        yield Problem(area, Answer.UNKNOWN, NodeCode.NOT_LISTENING, facts.head, {"why": facts.port_error})
    asked = set()
    for way in facts.ways:
        asked.add((way.source, way.target))
        given: dict[str, Scalar] = {"target": way.target, "error": way.error}
        if way.reached is False:
            code = NodeCode.OTHER_ADDRESS if way.error == "OTHER_ADDRESS" else NodeCode.NOT_REACHED
            yield Problem(area, Answer.NO, code, way.source, given)
        elif way.reached is None:
            yield Problem(area, Answer.UNKNOWN, NodeCode.WAY_UNSEEN, way.source, given)
    for name in facts.names[1:]:
        if (name, facts.head) not in asked:
            yield Problem(area, Answer.UNKNOWN, NodeCode.WAY_UNSEEN, name, {"target": facts.head})


def packets(facts: GroupFacts) -> Iterator[Problem]:
    """Check whether large packets arrive on every network path."""
    area = Area.MTU
    for way in facts.ways:
        yield from check_path(way)
    seen = {(way.source, way.target) for way in facts.ways}
    for name in facts.names[1:]:
        if (name, facts.head) not in seen:
            yield Problem(area, Answer.UNKNOWN, NodeCode.MTU_UNSEEN, name, {"target": facts.head})
    sizes = {name: i.mtu for name, i in chosen(facts).items() if i.mtu is not None}
    if len(set(sizes.values())) > 1:
        text = ", ".join(f"{name} {size}" for name, size in sizes.items())
        yield Problem(area, Answer.NOTE, NodeCode.MTU_DIFFERS, "", {"sizes": text})


def check_path(way: NetworkPath) -> Iterator[Problem]:
    """Check the packets on one path. If large packets are lost, ranks hang, unless a router reports the limit."""
    given: dict[str, Scalar] = {"target": way.target, "mtu": way.mtu or 0, "passes": way.passes or 0}
    if way.passes is None or way.mtu is None:
        yield Problem(Area.MTU, Answer.UNKNOWN, NodeCode.MTU_UNSEEN, way.source, {"target": way.target})
    elif way.passes < way.mtu and way.limit is not None:
        yield Problem(Area.MTU, Answer.NOTE, NodeCode.PACKETS_CUT, way.source, {**given, "limit": way.limit})
    elif way.passes < way.mtu:
        yield Problem(Area.MTU, Answer.NO, NodeCode.PACKETS_LOST, way.source, given)


def clocks(facts: GroupFacts) -> Iterator[Problem]:
    """Compare every node's clock with the head node's clock."""
    first = facts.offsets.get(facts.head)
    for name in facts.names[1:]:
        one = facts.offsets.get(name)
        if one is None or first is None:
            yield Problem(Area.CLOCK, Answer.UNKNOWN, NodeCode.CLOCK_UNSEEN, name)
            continue
        apart, unsure = one.seconds - first.seconds, one.uncertainty + first.uncertainty
        given: dict[str, Scalar] = {"seconds": round(apart, 2), "unsure": round(unsure, 2), "head": facts.head}
        if abs(apart) - unsure > CLOCK_S:
            yield Problem(Area.CLOCK, Answer.NO, NodeCode.CLOCK_OFF, name, given)
        elif abs(apart) + unsure > CLOCK_S:
            yield Problem(Area.CLOCK, Answer.UNKNOWN, NodeCode.CLOCK_UNSEEN, name)
