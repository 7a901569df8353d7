"""Check several nodes before a job runs on them. All functions are pure and return codes, not sentences.

The result of a check is yes, no or unknown: no if a problem was detected, and unknown if a fact could not be
determined. Unknown never counts as passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuwarden.remote.host.node_checks import clocks, fabric, identity, interface, packets, rendezvous
from gpuwarden.remote.host.node_codes import Answer, Area, Problem
from gpuwarden.remote.host.node_facts import GroupFacts
from gpuwarden.remote.host.node_interfaces import chosen, variable_for
from gpuwarden.remote.host.node_software import judge_launch, reduction, torches, versions
from gpuwarden.static_analysis.group_launch import GroupLaunch


@dataclass(frozen=True)
class Verdict:
    """The results of the requested checks, the detected problems, and the variables for every rank."""

    answers: Mapping[Area, Answer]
    problems: tuple[Problem, ...]
    environment: Mapping[str, str]
    meeting_place: str = ""


def judge_nodes(facts: GroupFacts, launch: GroupLaunch) -> Verdict:
    """Check a group of nodes and its planned launch."""
    found = (
        *identity(facts), *fabric(facts), *interface(facts, launch), *rendezvous(facts), *packets(facts),
        *clocks(facts), *versions(facts), *judge_launch(launch, torches(facts)), *reduction(facts),
    )  # fmt: skip
    unasked = {Area.RESTART: not launch.launcher, Area.REDUCE: not facts.sum.wanted}
    answers = {}
    for area in (area for area in Area if not unasked.get(area)):
        seen = {p.answer for p in found if p.area is area}
        answers[area] = next((worst for worst in (Answer.NO, Answer.UNKNOWN) if worst in seen), Answer.YES)
    head = chosen(facts).get(facts.head)
    return Verdict(
        answers=answers,
        problems=found,
        environment=environment(facts),
        meeting_place=f"{head.address}:{facts.port}" if head and facts.port else "",
    )


def environment(facts: GroupFacts) -> dict[str, str]:
    """Return the environment variables that make every rank connect over the chosen interface."""
    best = chosen(facts)
    if set(best) != set(facts.names):
        return {}
    names = {i.name for i in best.values()}
    adapters = [a for node in facts.nodes.values() for a in node.infiniband]
    return {
        "NCCL_SOCKET_IFNAME": variable_for(best, facts),
        **({"GLOO_SOCKET_IFNAME": names.pop()} if len(names) == 1 else {}),
        **({} if adapters else {"NCCL_IB_DISABLE": "1"}),
    }
